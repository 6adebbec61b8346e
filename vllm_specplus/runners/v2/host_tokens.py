"""The requests' tokens on the host, on Model Runner V2, which has them on the device.

With synchronous scheduling a step waits for its own tokens. With asynchronous scheduling it waits only for those of the
step before. The device has made these by then or is about to, while this step's work is already queued.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_specplus.kernels.drafts import Limits, continue_forecasts, report_tokens
from vllm_specplus.runners.v2.reports import Report, Reports

if TYPE_CHECKING:
    from vllm_specplus.runners.v2.states import FollowedRequestState


def copy_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device without waiting, as from memory that is not pinned the host would."""
    tensor = torch.from_numpy(array)
    if device.type != "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class TokenMirror:
    """The host's copy of the requests' tokens, by request state, as far as they have come.

    The operating system gives memory only to rows that are written.

    Args:
        max_num_reqs: request states.
        max_model_len: the longest request, in tokens.
        keeps_last: whether to keep also the tokens of the request that had a place before.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, keeps_last: bool = False):
        self.token_ids = np.zeros((max_num_reqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_reqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_reqs, np.int64)
        # Tells a request from the next one in the same place.
        self.generation = np.zeros(max_num_reqs, np.int64)
        self.is_followed = np.zeros(max_num_reqs, bool)
        self._keeps_last = keeps_last
        self._before: dict[int, tuple[int, np.ndarray, int]] = {}

    def add(self, index: int, prompt_len: int, token_ids: list[int]) -> None:
        """Copy the tokens of a request that begins, or that goes on after it was preempted."""
        if self._keeps_last and self.generation[index]:
            self._before[index] = (int(self.generation[index]), *self._copy(index))
        self.token_ids[index, : len(token_ids)] = token_ids
        self.num_tokens[index] = len(token_ids)
        self.num_prompt_tokens[index] = prompt_len
        self.generation[index] += 1
        self.is_followed[index] = True

    def add_unfollowed(self, index: int) -> None:
        """Take note that a request begins whose tokens are not needed."""
        self.generation[index] += 1
        self.is_followed[index] = False

    def output(self, index: int) -> np.ndarray:
        """[n] int32, a view of the output tokens of the request that has the place."""
        return self.token_ids[index, self.num_prompt_tokens[index] : self.num_tokens[index]]

    def find(self, index: int, generation: int) -> tuple[np.ndarray, int] | None:
        """[n] int32 tokens of the request that has or had the place, and how many are its prompt's; None if unknown."""
        if self.generation[index] == generation:
            return self._copy(index)
        before, token_ids, prompt_len = self._before.get(index, (-1, np.empty(0, np.int32), 0))
        return (token_ids, prompt_len) if before == generation else None

    def _copy(self, index: int) -> tuple[np.ndarray, int]:
        return self.token_ids[index, : self.num_tokens[index]].copy(), int(self.num_prompt_tokens[index])

    def extend(self, index: int, num_tokens: int, latest: np.ndarray) -> None:
        """Add a request's latest tokens ([m] int32), with which it has `num_tokens`."""
        self.token_ids[index, num_tokens - len(latest) : num_tokens] = latest
        self.num_tokens[index] = num_tokens


@dataclass(frozen=True)
class Arrival:
    """One step's tokens on their way to the host."""

    req_ids: list[str]  # B
    indices: np.ndarray  # [B] request states
    generation: np.ndarray  # [B]
    report: Report
    num_columns: int

    @cached_property
    def rows(self) -> np.ndarray:
        """[B, 3 + K + num_steps] int32; waits for them.

        The columns: length, most drafts, the K + 1 latest tokens (newest first), the model's drafts.
        """
        return self.report.read(len(self.req_ids) * self.num_columns).reshape(-1, self.num_columns)


class TokenCopier:
    """Copies each step's tokens to the host.

    Attributes:
        is_async: whether scheduling is asynchronous, so that tokens come one step later.
        mirror: the tokens that have come.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        req_states: "FollowedRequestState",
        *,
        is_async: bool,
        keeps_last: bool,
    ):
        self.is_async = is_async
        self.mirror = TokenMirror(
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.model_config.max_model_len,
            keeps_last=keeps_last,
        )
        self._device = device
        self._req_states = req_states
        self._width = vllm_config.speculative_config.num_speculative_tokens
        most = vllm_config.scheduler_config.max_num_seqs * (3 + 2 * self._width)
        self._reports = Reports(most, torch.int32, device, number=1 + is_async, sleeps=is_async)
        self._previous: Arrival | None = None

    def advance(self, input_batch: Any, model_drafts: torch.Tensor, limits: Limits) -> Arrival | None:
        """Send this step's tokens, wait for those that are due, and write them into the mirror.

        Args:
            input_batch: vLLM's.
            model_drafts: [B, num_steps] int64.
            limits: of each request's drafts.

        Returns:
            The tokens that were due: this step's, or those of the step before with asynchronous scheduling. Its first
            step has None.
        """
        due: Arrival | None = self._send(input_batch, model_drafts, limits)
        if self.is_async:
            due, self._previous = self._previous, due
        if due is not None:
            self._receive(due)
        return due

    def reset(self) -> None:
        """Forget the tokens that are on their way; no request runs."""
        self._previous = None

    @property
    def reach(self) -> int:
        """The length of a forecast, in tokens past those on the host: K drafts are left when a step's tokens come."""
        return 2 * self._width + 1 if self.is_async else self._width

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copy an array to the device without waiting."""
        return copy_to_device(array, self._device)

    def pack_to_device(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Copy arrays to the device as int32 tensors of their shapes, all in one copy, without waiting."""
        # Triton compiles a kernel anew for a pointer that is not a multiple of 16 bytes.
        *starts, size = np.cumsum([0, *(-(-array.size // 4) * 4 for array in arrays)]).tolist()
        packed = np.zeros(size, np.int32)
        for array, start in zip(arrays, starts, strict=True):
            packed[start : start + array.size] = array.ravel()
        on_device = self.to_device(packed)
        return [on_device[at : at + array.size].view(array.shape) for array, at in zip(arrays, starts, strict=True)]

    def continue_chains(
        self,
        input_batch: Any,
        token_ids: np.ndarray,
        num_tokens: np.ndarray,
        agreed: np.ndarray,
        limits: Limits,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take chains that go on from the tokens on the host, and let the device go on from the latest ones.

        Args:
            input_batch: vLLM's.
            token_ids: [B, reach] int32, what may follow.
            num_tokens: [B] int32, tokens of each chain.
            agreed: [B] int32, how many tokens before it agree, or `WHOLE_OUTPUT`.
            limits: of each request's drafts.

        Returns:
            [B, K] int64 tokens, [B] int32 their number, 0 where other tokens have come, and [B] int32 how many tokens
            before them agree.
        """
        states, idx_mapping = self._req_states, input_batch.idx_mapping
        base = self.mirror.num_tokens[input_batch.idx_mapping_np]
        forecast, num_forecast, agreed_on_device, base_len, replaces = self.pack_to_device(
            token_ids, num_tokens, agreed, base, np.zeros_like(base)
        )
        continued = torch.empty(len(idx_mapping), self._width, dtype=torch.int64, device=self._device)
        num_continued, _ = continue_forecasts(
            states.all_token_ids.gpu,
            states.total_len.gpu,
            idx_mapping,
            continued,
            forecast,
            num_forecast,
            base_len,
            replaces,
            model_drafts=None,
            limits=limits,
            agreed=agreed_on_device,
        )
        return continued, num_continued, agreed_on_device

    def _send(self, input_batch: Any, model_drafts: torch.Tensor, limits: Limits) -> Arrival:
        # A request gets at most one token more than it has drafts.
        states = self._req_states
        report = self._reports.take()
        num_columns = report_tokens(
            states.all_token_ids.gpu,
            states.total_len.gpu,
            input_batch.idx_mapping,
            limits,
            model_drafts,
            self._width,
            report.tensor,
        )
        report.send(len(model_drafts) * num_columns)
        indices = input_batch.idx_mapping_np
        generation = self.mirror.generation[indices]
        return Arrival(input_batch.req_ids, indices, generation, report, num_columns)

    def _receive(self, arrival: Arrival) -> None:
        rows, mirror, indices = arrival.rows, self.mirror, arrival.indices
        num_new = rows[:, 0] - mirror.num_tokens[indices]
        is_same = mirror.generation[indices] == arrival.generation
        is_new = (num_new > 0) & (num_new <= self._width + 1)
        for i in np.flatnonzero(is_same & mirror.is_followed[indices] & is_new).tolist():
            latest = rows[i, 2 : 2 + num_new[i]][::-1]
            mirror.extend(indices[i], int(rows[i, 0]), latest)
