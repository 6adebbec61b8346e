"""What single requests ask for, and who drafted what, on vLLM's V1 model runner."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.distributed.parallel_state import get_tp_group

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.proposers.arbiter import Choice
from vllm_specplus.proposers.history import History
from vllm_specplus.proposers.hybrid import Drafts
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.runners.live_requests import LiveRequests, limits
from vllm_specplus.runners.request_counts import count_step
from vllm_specplus.runners.step_prices import StepPrices
from vllm_specplus.sources import NGRAM, REFERENCE, SOURCES, SUFFIX, UNFILLED, by_source


class RequestTracker:
    """Follows the requests of a runner from step to step; the drafter asks it, the worker tells it."""

    def __init__(self, runner: Any):
        options: SpecPlusOptions = runner.speculative_config.specplus
        width = max(options.num_speculative_tokens, 1)
        self.live_requests = LiveRequests(options, runner.model_config, warns=get_tp_group().rank_in_group == 0)
        self._history_source = SUFFIX if options.matches_suffixes else NGRAM
        self.prices = StepPrices() if options.adaptive else None
        self._counts = np.zeros((2, len(SOURCES), width), np.int64)
        # By request, of its last drafts: how many were the model's, and the source of the others.
        self._last_drafts: dict[str, tuple[int, int]] = {}
        # By request of the step that runs: the same two, and how many drafts are verified.
        self._drafts_in_step: dict[str, tuple[int, int, int]] = {}

    def limits(self, req_ids: Sequence[str], width: int) -> np.ndarray:
        """[B] int64: the drafts that each request allows in a step, at most `width`."""
        return limits(self.live_requests, req_ids, width)

    def references(self, req_ids: Sequence[str]) -> list[ReferenceText | None]:
        """[B] the reference that each request brought."""
        requests = map(self.live_requests.get, req_ids) if len(self.live_requests) else [None] * len(req_ids)
        return [None if request is None else request.reference for request in requests]

    def take_note(self, req_ids: Sequence[str], choice: Choice) -> None:
        """Take note of who made the drafts of each request, [B]."""
        made = zip(choice.num_model.tolist(), choice.sources.tolist(), strict=True)
        self._last_drafts.update(zip(req_ids, made, strict=True))

    def put_references_first(self, history: History, room: np.ndarray, drafts: Drafts) -> None:
        """Replace a request's drafts with those of its reference where the reference tells how the output goes on.

        Args:
            history: the batch of B requests.
            room: [B] int, the most drafts of each request.
            drafts: of the batch, changed in place.
        """
        for i, req_id in enumerate(history.req_ids):
            source = self._history_source
            request = self.live_requests.get(req_id)
            if request is not None and request.reference is not None and room[i] > 0:
                output = history.tokens(i)[history.num_prompt_tokens[i] :]
                found = request.reference.draft(output, int(room[i]))
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
        if self.prices is not None:
            self.prices.begin_step(scheduler_output)
        ended, new = scheduler_output.finished_req_ids, scheduler_output.scheduled_new_reqs
        self.live_requests.finish(ended)
        self.live_requests.begin(new)
        # A session goes on under its id without having ended.
        begun = {request.req_id for request in new}
        for req_id in ended | begun | (scheduler_output.preempted_req_ids or set()):
            self._last_drafts.pop(req_id, None)
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        # vLLM pads the first step of a request that has one token left to compute.
        padding = (0, UNFILLED)
        self._drafts_in_step = {
            req_id: (*self._last_drafts.get(req_id, padding), len(drafts) - invalid.get(req_id, 0))
            for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items()
        }

    def after_step(self, output: Any) -> None:
        """Count what became of a step's drafts.

        Args:
            output: vLLM's ``ModelRunnerOutput``.
        """
        nothing = (0, UNFILLED, 0)
        rows = [
            (*self._drafts_in_step.get(req_id, nothing), len(tokens) - 1, req_id)
            for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True)
            if tokens
        ]
        if not rows:
            return
        if self.prices is not None:
            self.prices.add_tokens(sum(map(len, output.sampled_token_ids)))
        *columns, req_ids = zip(*rows, strict=True)
        num_model, fill_source, drafted, accepted = np.array(columns)
        count_step(self._counts, num_model, fill_source, drafted, accepted)
        for i, req_id in enumerate(req_ids if len(self.live_requests) else ()):
            request = self.live_requests.get(req_id)
            if request is not None and request.key is not None:
                is_reference = fill_source[i] == REFERENCE
                part = np.array([1, drafted[i] * is_reference, accepted[i] * is_reference])
                self.live_requests.counts.add(request.key, part)

    def stats(self) -> dict[str, Any]:
        """Counts by source and position, and the number of entries."""
        return by_source(self._counts) | {"entries": self.live_requests.sizes()}

    def collect_request_stats(self, key: str) -> dict[str, int] | None:
        """Collect the counts of one key, once: see ``RequestCounts.collect``."""
        return self.live_requests.counts.collect(key)
