"""Suffix decoding on Model Runner V2, whose tokens are on the device and whose suffix trees are on the host.

With synchronous scheduling a step waits for its own tokens and drafts from them. With asynchronous scheduling it waits
for those of the step before only, which the device has done by then or is about to do, while this step's work is
already queued: the host predicts what comes after them, far enough to reach past this step's tokens, and the device
goes on from where these end (`kernels.drafts.continue_predictions`), if they are what was predicted.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.kernels.drafts import continue_predictions
from vllm_specplus.proposers.history import History
from vllm_specplus.proposers.hybrid import HybridDrafter
from vllm_specplus.proposers.suffix import SuffixMatcher

logger = init_logger("vllm.specplus")


@dataclass(frozen=True)
class _SlotHistory(History):
    """A history whose rows are picked from the mirror."""

    slots: np.ndarray  # [B] row of each request

    def tokens(self, i: int) -> np.ndarray:
        return self.token_ids[self.slots[i], : self.num_tokens[i]]


class HostTokens:
    """The tokens of every request on the host, by request state, as far as they have been copied.

    Memory is taken as rows are written. `keeps_last`: also those of the request that had a place before.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, keeps_last: bool = False):
        self.token_ids = np.zeros((max_num_reqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_reqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_reqs, np.int64)
        # Tells a request from the next one that has the same place.
        self.generation = np.zeros(max_num_reqs, np.int64)
        self._keeps_last = keeps_last
        self._before: dict[int, tuple[int, np.ndarray, int]] = {}

    def add(self, index: int, prompt_len: int, token_ids: list[int]) -> None:
        """A request begins, or goes on after it was preempted."""
        if self._keeps_last and self.generation[index]:
            self._before[index] = (int(self.generation[index]), *self._of(index))
        self.token_ids[index, : len(token_ids)] = token_ids
        self.num_tokens[index] = len(token_ids)
        self.num_prompt_tokens[index] = prompt_len
        self.generation[index] += 1

    def find(self, index: int, generation: int) -> tuple[np.ndarray, int] | None:
        """[n] int32 tokens of the request that has the place, or had it before, and how many are its prompt's."""
        if self.generation[index] == generation:
            return self._of(index)
        before, token_ids, prompt_len = self._before.get(index, (-1, np.empty(0, np.int32), 0))
        return (token_ids, prompt_len) if before == generation else None

    def _of(self, index: int) -> tuple[np.ndarray, int]:
        return self.token_ids[index, : self.num_tokens[index]].copy(), int(self.num_prompt_tokens[index])

    def extend(self, index: int, num_tokens: int, latest: np.ndarray) -> None:
        """The latest tokens of a request, and how many it has with them."""
        self.token_ids[index, num_tokens - len(latest) : num_tokens] = latest
        self.num_tokens[index] = num_tokens


@dataclass(frozen=True)
class _Arrival:
    """One step's tokens on their way to the host."""

    req_ids: list[str]  # B
    indices: np.ndarray  # [B] request states
    generation: np.ndarray  # [B]
    rows: torch.Tensor  # [B, 3 + K + num_steps] int32: length, limit, latest tokens (newest first), model's drafts
    done: Any  # event

    def wait(self) -> np.ndarray:
        self.done.synchronize()
        return self.rows.numpy()


class SuffixFiller:
    """Fills the window from suffix trees on the host."""

    needs_every_step = True

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any, is_async: bool):
        options: SpecPlusOptions = vllm_config.speculative_config.specplus
        self._options = options
        self._device = device
        self._req_states = req_states
        self._is_async = is_async
        self._width = vllm_config.speculative_config.num_speculative_tokens
        self._pins = device.type != "cpu"
        self._mirror = req_states.mirror = HostTokens(
            vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len, keeps_last=is_async
        )
        self._matcher = SuffixMatcher(**options.suffix_matcher)
        self._previous: _Arrival | None = None
        logger.info(
            "suffix trees are on the host: each step waits for the tokens of %s",
            "the step before it" if is_async else "its own",
        )

    def fill(
        self, input_batch: Any, drafts: torch.Tensor, num_steps: int, max_drafts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `kernels.ngram.fill_drafts`: drafts are changed in place; returns how many, and how many the model's."""
        arrival = self._send(input_batch, drafts, num_steps, max_drafts)
        due: _Arrival | None = arrival
        if self._is_async:
            due, self._previous = self._previous, arrival
        rows = None if due is None else self._take_in(due)
        self._matcher.retain(self._req_states.req_id_to_index)
        if drafts.shape[1] == 0:
            return max_drafts, max_drafts
        if self._is_async:
            return self._continue(input_batch, drafts, num_steps, max_drafts)
        assert rows is not None
        return self._draft(input_batch, drafts, rows, num_steps)

    def _send(self, input_batch: Any, drafts: torch.Tensor, num_steps: int, max_drafts: torch.Tensor) -> _Arrival:
        """Start the copy of what this step has made."""
        states, idx_mapping = self._req_states, input_batch.idx_mapping
        lengths = states.total_len.gpu[idx_mapping]
        # A request gets one token more than it has drafts, at most.
        back = torch.arange(self._width + 1, dtype=torch.int32, device=self._device)
        at = (lengths[:, None] - 1 - back).clamp_(min=0).long()
        latest = states.all_token_ids.gpu[idx_mapping[:, None], at]
        columns = (lengths[:, None], max_drafts[:, None], latest, drafts[:, :num_steps].to(torch.int32))
        on_device = torch.cat(columns, dim=1)
        rows = torch.empty(on_device.shape, dtype=torch.int32, pin_memory=self._pins)
        rows.copy_(on_device, non_blocking=True)
        # One that sleeps while it waits.
        done = torch.cuda.Event(blocking=True)
        done.record()
        indices = input_batch.idx_mapping_np
        return _Arrival(input_batch.req_ids, indices, self._mirror.generation[indices], rows, done)

    def _take_in(self, arrival: _Arrival) -> np.ndarray:
        """Wait for a step's tokens and write them into the mirror; returns what has arrived."""
        rows = arrival.wait()
        for i, req_id in enumerate(arrival.req_ids):
            if req_id not in self._req_states.req_id_to_index:
                self._feed_last(req_id, arrival.indices[i], arrival.generation[i], rows[i])
        mirror = self._mirror
        num_new = rows[:, 0] - mirror.num_tokens[arrival.indices]
        is_same = mirror.generation[arrival.indices] == arrival.generation
        for i in np.flatnonzero(is_same & (num_new > 0)).tolist():
            latest = rows[i, 2 : 2 + num_new[i]][::-1]
            mirror.extend(arrival.indices[i], int(rows[i, 0]), latest)
        return rows

    def _feed_last(self, req_id: str, index: int, generation: int, row: np.ndarray) -> None:
        """Give the matcher the last tokens of a request that has ended, which are part of its response."""
        found = self._mirror.find(index, generation)
        if found is None:
            return
        token_ids, prompt_len = found
        text = np.concatenate((token_ids, row[2 : 2 + row[0] - len(token_ids)][::-1]))
        history = History([req_id], text[None], np.array([len(text)]), np.array([prompt_len]))
        self._matcher.match(history, None, np.zeros(1, np.int32))

    def _history(self, input_batch: Any) -> _SlotHistory:
        indices, mirror = input_batch.idx_mapping_np, self._mirror
        return _SlotHistory(
            req_ids=input_batch.req_ids,
            token_ids=mirror.token_ids,
            num_tokens=mirror.num_tokens[indices],
            num_prompt_tokens=mirror.num_prompt_tokens[indices],
            slots=indices,
        )

    def _draft(
        self, input_batch: Any, drafts: torch.Tensor, rows: np.ndarray, num_steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft from tokens that are all there, the model's drafts among them."""
        history, limits = self._history(input_batch), rows[:, 1]
        if num_steps:
            drafter = HybridDrafter(
                self._matcher,
                num_model_steps=num_steps,
                num_speculative_tokens=drafts.shape[1],
                match_override_len=self._options.match_override_len,
            )
            made = drafter.draft(history, rows[:, rows.shape[1] - num_steps :], limits)
            lists, num_model = made.token_ids, made.num_model
        else:
            lists = self._matcher.match(history, None, limits).to_lists()
            num_model = np.zeros(len(lists), np.int32)
        window = np.full((len(lists), drafts.shape[1]), -1, np.int64)
        for i, row in enumerate(lists):
            window[i, : len(row)] = row
        drafts.copy_(self._to_device(window))
        counts = np.array([len(row) for row in lists], np.int32)
        return self._to_device(counts), self._to_device(num_model)

    def _continue(
        self, input_batch: Any, drafts: torch.Tensor, num_steps: int, max_drafts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict from the tokens of the step before, and let the device go on from this one's."""
        history = self._history(input_batch)
        reach = np.full(len(history.req_ids), 2 * self._width + 1, np.int32)
        match = self._matcher.match(history, None, reach)
        threshold = self._options.match_override_len
        replaces = (match.match_len >= threshold) & (threshold > 0)
        return continue_predictions(
            self._req_states.all_token_ids.gpu,
            self._req_states.total_len.gpu,
            input_batch.idx_mapping,
            drafts,
            self._to_device(match.token_ids),
            self._to_device(match.num_tokens),
            self._to_device(history.num_tokens.astype(np.int32)),
            self._to_device(replaces.astype(np.int32)),
            num_model_steps=num_steps,
            max_drafts=max_drafts,
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._pins:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)
