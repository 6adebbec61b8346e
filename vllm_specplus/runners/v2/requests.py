"""What single requests ask for, and who drafted what, on Model Runner V2.

References are on the host, so a step waits as for suffix trees if one of its requests has a reference (see
`host_tokens`). Their drafts come in the same way: the host forecasts from the tokens that it has, the device continues.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.kernels.counts import Counted, count_drafts, count_steps, mark_padding
from vllm_specplus.kernels.drafts import DraftCounts, Limits, continue_forecasts, prefer_forecasts, report_tokens
from vllm_specplus.runners.live_requests import LiveRequest, LiveRequests
from vllm_specplus.runners.step_prices import StepPrices
from vllm_specplus.runners.suffix_scopes import SuffixScopes
from vllm_specplus.runners.v2.host_tokens import TokenCopier
from vllm_specplus.sources import NGRAM, REFERENCE, SOURCES, SUFFIX, by_source

if TYPE_CHECKING:
    from vllm_specplus.runners.v2.states import FollowedRequestState


class SavedAccount(NamedTuple):
    """The account of a request that was preempted: whether the draft model runs for it, and its credit."""

    is_awake: bool
    credits: torch.Tensor  # [1] int64, as in the arbiter's state


class RequestTracker:
    """Follows the requests of a runner from step to step; drafting and verification ask it, the worker tells it.

    Attributes:
        request_counts: [max_num_reqs, 3] int64 by request state: steps that gave tokens, drafts of the reference, those
            accepted. The rows of requests that ask for nothing are not read.
        fill_source: [max_num_reqs] int32 by request state, the source of drafts that are not the model's.

    Args:
        by_state: see `Drafting.counts`.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        req_states: "FollowedRequestState",
        copier: TokenCopier,
        by_state: DraftCounts,
    ):
        options: SpecPlusOptions = vllm_config.speculative_config.specplus
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self._width = vllm_config.speculative_config.num_speculative_tokens
        self._req_states = req_states
        self._copier = copier
        self._by_state = by_state
        self._history_source = SUFFIX if options.matches_suffixes else NGRAM
        self.live_requests = LiveRequests(options, vllm_config.model_config, warns=get_tp_group().rank_in_group == 0)
        self.scopes = SuffixScopes(options)
        self.prices = StepPrices(self.live_requests.faults) if options.adaptive else None
        self._requests_by_state: dict[int, LiveRequest] = {}
        self._ended_requests: Collection[str] = ()  # with this step
        self._saved_by_request: dict[str, SavedAccount] = {}
        # By the width of a step, so that no step has to make it.
        self._max_drafts = [
            torch.full((max_num_reqs,), width, dtype=torch.int32, device=device) for width in range(self._width + 1)
        ]
        self.fill_source = torch.full((max_num_reqs,), self._history_source, dtype=torch.int32, device=device)
        self._counts_later = options.adaptive
        # What is left to be counted, and the batch's `idx_mapping`.
        self._uncounted: tuple[Counted, torch.Tensor] | None = None
        self._counts = torch.zeros(2, len(SOURCES), self._width, dtype=torch.int64, device=device)
        self.request_counts = torch.zeros(max_num_reqs, 3, dtype=torch.int64, device=device)

    def before_step(self, scheduler_output: Any) -> None:
        """Take note of the requests that begin and end with a step.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput``.
        """
        self._ended_requests = scheduler_output.finished_req_ids
        for req_id in self._ended_requests:
            self._saved_by_request.pop(req_id, None)
        self.live_requests.finish(self._ended_requests)
        self.live_requests.begin(scheduler_output.scheduled_new_reqs)
        self.scopes.end(self._ended_requests)
        self.scopes.begin(scheduler_output.scheduled_new_reqs)
        # Last, since a fault of it must not hide what begins and ends.
        if self.prices is not None:
            self.prices.begin_step(scheduler_output)

    def after_step(self, output: Any) -> None:
        """Do nothing: the device counts."""

    def warm_up(self, drafts: torch.Tensor) -> None:
        """Launch once the kernels that only some requests need; no request runs.

        Args:
            drafts: [1, K] int64, overwritten.
        """
        none = torch.zeros(1, dtype=torch.int32, device=drafts.device)
        idx_mapping = torch.zeros(1, dtype=torch.int64, device=drafts.device)
        texts = self._req_states.all_token_ids.gpu, self._req_states.total_len.gpu, idx_mapping
        limits = Limits(none, none)
        report_tokens(*texts, limits, drafts[:, :0], self._width, none.new_zeros(3 + self._width))
        continue_forecasts(
            *texts,
            drafts,
            none.new_zeros(1, self._copier.reach),
            none,
            none,
            none,
            model_drafts=None,
            limits=limits,
            agreed=none.clone(),
        )
        sources = self.fill_source, REFERENCE, self._history_source
        prefer_forecasts(drafts, none, none, drafts, none, none, idx_mapping, *sources, self._by_state)
        count_steps(self.request_counts, none, idx_mapping)
        count_drafts(self.nothing_counted(is_masked=True), idx_mapping)
        mark_padding(none, idx_mapping, self._by_state.num_drafts_ptr, none.new_zeros(1, dtype=torch.bool))

    def reset(self) -> None:
        """Clear the counts by source and position, and what steps have cost; no request runs."""
        self._counts.zero_()
        self._uncounted = None
        if self.prices is not None:
            self.prices = StepPrices(self.live_requests.faults)

    def begin(self, req_id: str, index: int) -> None:
        """Take note of a request that takes a place among the request states."""
        request = self.live_requests.get(req_id)
        if request is not None:
            self._requests_by_state[index] = request
            self.request_counts[index].zero_()

    def end(self, index: int) -> None:
        """Take note of a request that leaves its place, at its end or because it is preempted."""
        request = self._requests_by_state.pop(index, None)
        if request is None:
            return
        self.fill_source[index].fill_(self._history_source)
        if request.counts_key is not None:
            self.live_requests.counts.add_later(request.counts_key, self.request_counts[index].clone())

    def has_ended(self, req_id: str) -> bool:
        """Whether a request that leaves its place in this step has ended; otherwise it may come back."""
        return req_id in self._ended_requests

    def keep(self, req_id: str, account: SavedAccount) -> None:
        """Keep the account of a request that leaves its place, until it comes back or ends."""
        self._saved_by_request[req_id] = account

    def take_back(self, req_id: str) -> SavedAccount | None:
        """Hand over what was kept of a request that comes back; None if nothing was."""
        return self._saved_by_request.pop(req_id, None)

    def allows_drafts(self, index: int) -> bool:
        """Whether the request of a place allows drafts."""
        request = self._requests_by_state.get(index)
        return request is None or request.max_drafts != 0

    def has_reference(self, index: int) -> bool:
        """Whether the request of a place has a reference."""
        return index in self._requests_by_state and self._requests_by_state[index].reference is not None

    def requests_with_reference(self, input_batch: Any) -> dict[int, LiveRequest]:
        """The requests of the batch that have a reference, by their row in the batch."""
        if not self._requests_by_state:
            return {}
        indices = input_batch.idx_mapping_np.tolist()
        return {i: self._requests_by_state[index] for i, index in enumerate(indices) if self.has_reference(index)}

    def limits_of(self, input_batch: Any, num_sampled: torch.Tensor, width: int) -> Limits:
        """What limits the drafts of each request.

        Args:
            input_batch: vLLM's.
            num_sampled: [>= B] int32 tokens that each request got.
            width: slots of a request in the next step, 0..K.
        """
        limits = Limits(self._max_drafts[width], num_sampled)
        if not self._requests_by_state and not self.live_requests.faults.without_drafts:
            return limits
        allowed = self.live_requests.max_drafts(input_batch.req_ids, width)
        if all(most == width for most in allowed):
            return limits
        return limits._replace(max_drafts_ptr=self._copier.to_device(np.array(allowed, np.int32)))

    def put_references_first(
        self, input_batch: Any, drafts: torch.Tensor, counts: DraftCounts, limits: Limits
    ) -> DraftCounts:
        """Replace a request's drafts with those of its reference where the reference tells how the output goes on.

        Args:
            input_batch: vLLM's.
            drafts: [B, K] int64, changed in place.
            counts: of the batch.
            limits: of each request's drafts.

        Returns:
            The new counts.
        """
        found = self.continue_references(input_batch, limits)
        if found is None:
            return counts
        return prefer_forecasts(
            drafts,
            *counts,
            *found,
            input_batch.idx_mapping,
            self.fill_source,
            REFERENCE,
            self._history_source,
            self._by_state,
        )

    def continue_references(
        self, input_batch: Any, limits: Limits
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """What the references say of how the outputs go on; see `TokenCopier.continue_chains`.

        Args:
            input_batch: vLLM's.
            limits: of each request's drafts.

        Returns:
            [B, K] int64 tokens, [B] int32 their number, and [B] int32 how many output tokens speak for them, or
            `WHOLE_OUTPUT` and some; None where no request of the batch has a reference.
        """
        requests = self.requests_with_reference(input_batch)
        if not requests:
            return None
        indices, mirror, reach = input_batch.idx_mapping_np, self._copier.mirror, self._copier.reach
        token_ids = np.full((len(indices), reach), -1, np.int32)
        num_tokens, agreed = np.zeros(len(indices), np.int32), np.zeros(len(indices), np.int32)
        for i, request in requests.items():
            assert request.reference is not None
            found = request.reference.draft(mirror.output(indices[i]), reach)
            token_ids[i, : len(found)] = found
            num_tokens[i], agreed[i] = len(found), request.reference.agreed
        return self._copier.continue_chains(input_batch, token_ids, num_tokens, agreed, limits)

    def count_steps(self, input_batch: Any, num_sampled: torch.Tensor) -> None:
        """Count a step for the requests that got tokens ([>= B] int32), where somebody is to see the counts."""
        if any(request.counts_key is not None for request in self._requests_by_state.values()):
            count_steps(self.request_counts, num_sampled, input_batch.idx_mapping)

    def count_drafts(self, input_batch: Any, num_sampled: torch.Tensor, invalid: torch.Tensor | None) -> None:
        """Count what became of a step's drafts, or leave it to the arbiter, which judges them in the same step.

        Args:
            input_batch: vLLM's.
            num_sampled: [B] int32 tokens that each request got.
            invalid: [num_rows] bool, rows whose draft a grammar forbids, or None.
        """
        with self.live_requests.faults.caught("counting"):
            self.count_rest()
            counted = self._counted(num_sampled, input_batch.cu_num_logits, invalid)
            if self._counts_later:
                self._uncounted = counted, input_batch.idx_mapping
            else:
                count_drafts(counted, input_batch.idx_mapping)

    def uncounted(self, input_batch: Any) -> Counted | None:
        """What is left to be counted of a batch's drafts; None: nothing."""
        if self._uncounted is None or self._uncounted[1] is not input_batch.idx_mapping:
            return None
        return self._uncounted[0]

    def forget_uncounted(self) -> None:
        """Take note that nothing is left to be counted."""
        self._uncounted = None

    def count_rest(self) -> None:
        """Count what is left, as after a fault, before the numbers of drafts change."""
        if self._uncounted is not None:
            count_drafts(*self._uncounted)
            self._uncounted = None

    def nothing_counted(self, is_masked: bool) -> Counted:
        """What counts nothing of a batch of one request, to compile kernels; with a mask or without."""
        none = torch.zeros(2, dtype=torch.int32, device=self.fill_source.device)
        return self._counted(none, none, none.bool() if is_masked else None)

    def _counted(self, num_sampled: torch.Tensor, cu_num_rows: torch.Tensor, invalid: torch.Tensor | None) -> Counted:
        counts = self._counts, self.request_counts
        return Counted(*counts, num_sampled, cu_num_rows, *self._by_state, self.fill_source, invalid)

    def stats(self) -> dict[str, Any]:
        """Counts by source and position, and the number of entries; waits for the device."""
        own = {"entries": self.live_requests.sizes(), "faults": dict(self.live_requests.faults.counts)}
        return by_source(self._counts.cpu().numpy()) | own

    def collect_request_stats(self, key: str) -> dict[str, int] | None:
        """Collect the counts of one key, once: see ``RequestCounts.collect``; waits for the device."""
        running = [self.request_counts[index] for index, r in self._requests_by_state.items() if r.counts_key == key]
        return self.live_requests.counts.collect(key, running)
