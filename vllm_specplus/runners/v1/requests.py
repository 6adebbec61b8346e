"""What single requests ask for, and who drafted what, on vLLM's V1 model runner."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.distributed.parallel_state import get_tp_group

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.proposers.adaptive import AdaptiveDrafter
from vllm_specplus.proposers.arbiter import Choice
from vllm_specplus.proposers.history import History
from vllm_specplus.proposers.hybrid import Drafts
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.runners.live_requests import LiveRequests
from vllm_specplus.runners.request_counts import count_drafts
from vllm_specplus.runners.step_prices import StepPrices
from vllm_specplus.runners.suffix_scopes import SuffixScopes
from vllm_specplus.sources import NGRAM, REFERENCE, SOURCES, SUFFIX, UNFILLED, by_source

_MOST_UNCOUNTED = 4096


class RequestTracker:
    """Follows the requests of a runner from step to step; the drafter asks it, the worker tells it."""

    def __init__(self, runner: Any):
        options: SpecPlusOptions = runner.speculative_config.specplus
        width = max(options.num_speculative_tokens, 1)
        self.live_requests = LiveRequests(options, runner.model_config, warns=get_tp_group().rank_in_group == 0)
        self.scopes = SuffixScopes(options)
        self._history_source = SUFFIX if options.matches_suffixes else NGRAM
        self.prices = StepPrices(self.live_requests.faults) if options.adaptive else None
        self.drafter: AdaptiveDrafter | None = None  # is told of requests that begin
        self.has_ended = False  # whether a request has, since idle state was dropped
        self._counts = np.zeros((2, len(SOURCES), width), np.int64)
        # For each request and step whose drafts are not in the counts yet: how many were the model's, the source of the
        # others, how many were verified, how many accepted.
        self._uncounted_drafts: list[tuple[int, int, int, int]] = []
        # By request, of its last drafts: how many were the model's, and the source of the others.
        self._last_drafts: dict[str, tuple[int, int]] = {}
        # By request of the step that runs: the same two, and how many drafts are verified.
        self._drafts_in_step: dict[str, tuple[int, int, int]] = {}

    def references(self, req_ids: Sequence[str]) -> list[ReferenceText | None]:
        """[B] the reference that each request brought."""
        requests = map(self.live_requests.get, req_ids) if len(self.live_requests) else [None] * len(req_ids)
        return [None if request is None else request.reference for request in requests]

    def take_note(self, req_ids: Sequence[str], choice: Choice) -> None:
        """Take note of who made the drafts of each request, [B]."""
        self._last_drafts.update(zip(req_ids, choice.makers(), strict=True))

    def put_references_first(self, history: History, max_drafts: np.ndarray, drafts: Drafts) -> None:
        """Replace a request's drafts with those of its reference where the reference tells how the output goes on.

        Args:
            history: the batch of B requests.
            max_drafts: [B] int, the most drafts of each request.
            drafts: of the batch, changed in place.
        """
        for i, req_id in enumerate(history.req_ids):
            source = self._history_source
            request = self.live_requests.get(req_id)
            if request is not None and request.reference is not None and max_drafts[i] > 0:
                output = history.tokens(i)[history.num_prompt_tokens[i] :]
                found = request.reference.draft(output, int(max_drafts[i]))
                # A guess that no output token supports is used only if the request would have no drafts otherwise.
                if len(found) and not (request.reference.is_guess and drafts.token_ids[i]):
                    drafts.token_ids[i], drafts.num_model[i] = found.tolist(), 0
                    source = REFERENCE
            self._last_drafts[req_id] = int(drafts.num_model[i]), source

    def before_step(self, scheduler_output: Any) -> None:
        """Take note of the requests that begin and end with a step, and of the drafts that it verifies.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput``.
        """
        self._drafts_in_step = {}
        ended, new = scheduler_output.finished_req_ids, scheduler_output.scheduled_new_reqs
        self.has_ended = self.has_ended or bool(ended)
        self.live_requests.finish(ended)
        self.live_requests.begin(new)
        self.scopes.end(ended)
        self.scopes.begin(new)
        # A session goes on under its id without having ended.
        begun = {request.req_id for request in new}
        for req_id in ended | begun | (scheduler_output.preempted_req_ids or set()):
            self._last_drafts.pop(req_id, None)
        if self.drafter is not None:
            self.drafter.withdraw(begun)
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        # vLLM pads the first step of a request that has one token left to compute.
        padding = (0, UNFILLED)
        self._drafts_in_step = {
            req_id: (*self._last_drafts.get(req_id, padding), len(drafts) - invalid.get(req_id, 0))
            for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items()
        }
        # Last, since a fault of it must not hide what begins and ends.
        if self.prices is not None:
            self.prices.begin_step(scheduler_output)

    def after_step(self, output: Any) -> None:
        """Count what became of a step's drafts.

        Args:
            output: vLLM's ``ModelRunnerOutput``.
        """
        if self.prices is not None:
            self.prices.add_tokens(sum(map(len, output.sampled_token_ids)))
        nothing = (0, UNFILLED, 0)
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if not tokens:
                continue
            num_model, fill_source, drafted = self._drafts_in_step.get(req_id, nothing)
            accepted = len(tokens) - 1
            if drafted:
                self._uncounted_drafts.append((num_model, fill_source, drafted, accepted))
            request = self.live_requests.get(req_id)
            if request is not None and request.counts_key is not None:
                is_reference = fill_source == REFERENCE
                part = np.array([1, drafted * is_reference, accepted * is_reference])
                self.live_requests.counts.add(request.counts_key, part)
        if len(self._uncounted_drafts) > _MOST_UNCOUNTED:
            self._count()

    def _count(self) -> None:
        """Enter what is not in the counts yet: together this costs far less than step by step."""
        # Drafts that cannot be counted are dropped.
        uncounted, self._uncounted_drafts = self._uncounted_drafts, []
        if uncounted:
            count_drafts(self._counts, *np.array(uncounted).T)

    def stats(self) -> dict[str, Any]:
        """Counts by source and position, and the number of entries."""
        self._count()
        own = {"entries": self.live_requests.sizes(), "faults": dict(self.live_requests.faults.counts)}
        return by_source(self._counts) | own

    def collect_request_stats(self, key: str) -> dict[str, int] | None:
        """Collect the counts of one key, once: see ``RequestCounts.collect``."""
        return self.live_requests.counts.collect(key)
