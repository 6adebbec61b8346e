"""What the running requests of a worker ask of the plugin, from their first step to their last."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.proposers.arbiter import MAX_STOPS
from vllm_specplus.proposers.reference_text import ReferenceText, load_compiled
from vllm_specplus.requests.options import RESOLVED_ENTRY, ResolvedOptions
from vllm_specplus.runners.faults import Faults, GuardedReference
from vllm_specplus.runners.request_counts import RequestCounts

logger = init_logger("vllm.specplus")


class LiveRequest:
    """What a running request asks for.

    Attributes:
        wire: the options as vLLM's message brought them; another value under the same request id is another request.
        resolved: the same, read.
        reference: the text that its output is expected to resemble; None = there is none, or nothing is drafted.
    """

    def __init__(self, req_id: str, wire: Any, resolved: ResolvedOptions, options: SpecPlusOptions, faults: Faults):
        self.wire = wire
        self.resolved = resolved
        self.reference: ReferenceText | None = None
        if resolved.token_ids is not None and resolved.max_drafts != 0:
            self.reference = GuardedReference(
                req_id,
                faults,
                resolved.token_ids,
                edit=resolved.edit,
                min_ngram_size=options.min_ngram_size,
                max_ngram_size=options.max_ngram_size,
            )

    @property
    def max_drafts(self) -> int | None:
        """The most drafts in a step; None = no limit."""
        return self.resolved.max_drafts

    @property
    def counts_key(self) -> str | None:
        """The name under which its counts are kept; None = they are not."""
        return self.resolved.counts_key


class LiveRequests:
    """A worker's running requests that ask something of the plugin, by request id.

    Args:
        options: the plugin's.
        model_config: vLLM's.
        warns: whether this worker logs warnings; one worker does, for all that have the same requests.

    Attributes:
        counts: of requests that asked for them.
        stop_token_ids: with `adaptive`, of every running request, tokens that end its text, end of sequence first; at
            most `MAX_STOPS`.
        faults: of the plugin's own code, and the requests that have no drafts because of one.
    """

    def __init__(self, options: SpecPlusOptions, model_config: Any, *, warns: bool):
        self._options = options
        self._vocab_size = model_config.get_vocab_size()
        self._max_model_len = model_config.max_model_len
        self._warns = self._warns_of_cuts = warns
        self._requests: dict[str, LiveRequest] = {}
        self.counts = RequestCounts()
        self.stop_token_ids: dict[str, list[int]] = {}
        self.faults = Faults(logs=warns)
        load_compiled()

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, req_id: str) -> LiveRequest | None:
        """What a request asks for; None if it asks nothing."""
        return self._requests.get(req_id)

    def max_drafts(self, req_ids: Sequence[str], width: int) -> list[int]:
        """[B] the drafts that each request allows in a step, at most `width`."""
        limits = [width] * len(req_ids)
        if self._requests:
            for i, request in enumerate(map(self._requests.get, req_ids)):
                if request is not None and request.max_drafts is not None:
                    limits[i] = min(request.max_drafts, width)
        for i in self.faults.rows_without_drafts(req_ids):
            limits[i] = 0
        return limits

    def accept_all_mask(self, req_ids: Sequence[str]) -> np.ndarray | None:
        """[B] bool: the requests whose drafts are all accepted; None: there is none."""
        if not self._requests:
            return None
        requests = map(self._requests.get, req_ids)
        chosen = [request is not None and request.resolved.accepts_all for request in requests]
        return np.array(chosen) if any(chosen) else None

    def begin(self, new_requests: Iterable[Any]) -> None:
        """Read the options of requests that are scheduled for the first time.

        A request that comes back after a preemption goes on; one whose options have changed begins anew.

        Args:
            new_requests: vLLM's ``NewRequestData``.
        """
        for new in new_requests:
            if self._options.adaptive and new.sampling_params is not None:
                self.stop_token_ids[new.req_id] = _stop_token_ids(new.sampling_params, self._vocab_size)
            wire = (getattr(new.sampling_params, "extra_args", None) or {}).get(RESOLVED_ENTRY)
            current = self._requests.get(new.req_id)
            if current is not None and current.wire == wire:
                continue
            self._end(new.req_id)
            if wire is not None:
                with self.faults.caught("requests"):
                    self._begin(new.req_id, wire)

    def _begin(self, req_id: str, wire: Any) -> None:
        resolved = ResolvedOptions.from_wire(wire)
        if resolved is None or not self._is_possible(resolved.token_ids):
            if self._warns:
                logger.warning_once("a request brings options that its check has not written: they are ignored")
            return
        self._requests[req_id] = LiveRequest(req_id, wire, resolved, self._options, self.faults)
        if resolved.counts_key is not None:
            self.counts.begin(resolved.counts_key)
        if resolved.num_cut and self._warns_of_cuts:
            # Once, so that no client fills the log. It chooses its request's id, with line breaks in it too.
            self._warns_of_cuts = False
            logger.warning(
                "request %.80r: its reference is longer than the model length: %d tokens or more are cut off; no other "
                "such request is logged",
                req_id,
                resolved.num_cut,
            )

    def _is_possible(self, token_ids: np.ndarray | None) -> bool:
        if token_ids is None or not len(token_ids):
            return True
        return len(token_ids) <= self._max_model_len and token_ids.min() >= 0 and token_ids.max() < self._vocab_size

    def without_drafts(self) -> list[str]:
        """The requests that allow no drafts, or have none because of a fault."""
        unwilling = [req_id for req_id, request in self._requests.items() if request.max_drafts == 0]
        return [*unwilling, *self.faults.without_drafts]

    def finish(self, req_ids: Collection[str]) -> None:
        """Remove requests that have ended; unknown ids are ignored."""
        for req_id in req_ids:
            self.stop_token_ids.pop(req_id, None)
            self._end(req_id)

    def _end(self, req_id: str) -> None:
        self.faults.finish([req_id])
        request = self._requests.pop(req_id, None)
        if request is not None and request.counts_key is not None:
            self.counts.finish(request.counts_key)

    def sizes(self) -> dict[str, int]:
        """Entries of each kind; all zero when nothing runs and all counts have been collected."""
        references = sum(request.reference is not None for request in self._requests.values())
        return {"requests": len(self._requests), "references": references, "request_counts": len(self.counts)}


def _stop_token_ids(sampling_params: Any, vocab_size: int) -> list[int]:
    """Tokens that end a request's text; that of the end of a sequence, if it does, is the first."""
    # None where a request ignores it. `all_stop_token_ids` has it all the same.
    end_of_sequence = sampling_params.eos_token_id
    named = [end_of_sequence] if end_of_sequence is not None else []
    named += sorted(set(sampling_params.stop_token_ids or ()).difference(named))
    # vLLM takes any number for a token.
    return [token_id for token_id in named if 0 <= token_id < vocab_size][:MAX_STOPS]


class OptionsTracker:
    """Follows what requests ask where vLLM drafts: whose drafts are all accepted."""

    def __init__(self, vllm_config: Any):
        options: SpecPlusOptions = vllm_config.speculative_config.specplus
        warns = get_tp_group().rank_in_group == 0
        self.live_requests = LiveRequests(options, vllm_config.model_config, warns=warns)

    def before_step(self, scheduler_output: Any) -> None:
        """Take note of the requests that begin and end with a step; takes vLLM's ``SchedulerOutput``."""
        self.live_requests.finish(scheduler_output.finished_req_ids)
        self.live_requests.begin(scheduler_output.scheduled_new_reqs)

    def after_step(self, output: Any) -> None:
        """Do nothing: nothing is counted."""

    def stats(self) -> dict[str, Any]:
        """The number of entries of each kind."""
        return {"entries": self.live_requests.sizes(), "faults": dict(self.live_requests.faults.counts)}

    def collect_request_stats(self, key: str) -> dict[str, int] | None:
        """None: nothing is counted."""
        return None
