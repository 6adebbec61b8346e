"""Faults of the plugin's own code. They cost a request its drafts or its counts, never its text or the engine."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import numpy as np
from vllm.logger import init_logger

from vllm_specplus.proposers.history import History, Match, Matcher
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.requests.faults import stack_of

logger = init_logger("vllm.specplus")

FaultyPart = Literal["drafting", "counting", "requests", "scheduling"]
_EFFECTS: dict[FaultyPart, str] = {
    "drafting": "the requests that it was for go on without drafts",
    "counting": "counts are incomplete",
    "requests": "what a request asked for may be ignored",
    "scheduling": "the scheduler cannot choose how many slots a step has, so each has all",
}


class Faults:
    """The faults of a worker or scheduler, and the requests that have no drafts any more because of one.

    Args:
        logs: whether its process logs them; one worker does, for all that have the same requests.

    Attributes:
        counts: by part.
    """

    def __init__(self, *, logs: bool) -> None:
        self.counts: Counter[FaultyPart] = Counter()
        self._logs = logs
        self._logged: set[FaultyPart] = set()
        self._without_drafts: set[str] = set()

    def caught(self, part: FaultyPart, req_ids: Iterable[str] = ()) -> "_Caught":
        """A context that catches an exception of its block.

        Args:
            part: what the block does.
            req_ids: the requests that have no drafts any more after a fault.
        """
        return _Caught(self, part, req_ids)

    def note(self, part: FaultyPart, error: Exception, req_ids: Iterable[str] = ()) -> None:
        """Count a fault, log the first one of its part, and take the drafts of some requests.

        The log has the exception's type and stack. Its message might hold a client's tokens.
        """
        self._without_drafts.update(req_ids)
        self.counts[part] += 1
        if self._logs and part not in self._logged:
            self._logged.add(part)
            logger.error("a fault in %s, %s: %s\n%s", part, type(error).__name__, _EFFECTS[part], stack_of(error))

    def hand_over(self, scheduler_output: Any) -> None:
        """Leave the counts of a scheduler to its workers, which are asked for counts; see `take_over`.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput`` of the next step.
        """
        if self.counts:
            scheduler_output.specplus_faults, self.counts = self.counts, Counter()

    def take_over(self, scheduler_output: Any) -> None:
        """Add the counts that the scheduler has left to this worker."""
        self.counts.update(getattr(scheduler_output, "specplus_faults", ()))

    def finish(self, req_ids: Iterable[str]) -> None:
        """Forget requests that have ended; unknown ids are ignored."""
        if self._without_drafts:
            self._without_drafts.difference_update(req_ids)

    @property
    def without_drafts(self) -> frozenset[str]:
        """The requests that have no drafts because of a fault."""
        return frozenset(self._without_drafts)

    def rows_without_drafts(self, req_ids: Sequence[str]) -> list[int]:
        """The rows in a batch of the requests that have no drafts because of a fault."""
        if not self._without_drafts:
            return []
        return [i for i, req_id in enumerate(req_ids) if req_id in self._without_drafts]


class _Caught:
    """See `Faults.caught`. Each step enters several, and a generator would take several times as long."""

    __slots__ = ("_faults", "_part", "_req_ids")

    def __init__(self, faults: Faults, part: FaultyPart, req_ids: Iterable[str]) -> None:
        self._faults, self._part, self._req_ids = faults, part, req_ids

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, stack: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._faults.note(self._part, error, self._req_ids)
        return True


class GuardedMatcher:
    """A matcher whose faults cost the request whose text they are in its drafts, and the others one step's.

    Such a request has to come without text from then on.

    Args:
        matcher: what matches.
        faults: notes the faults.
        vocab_size: drafts end before a token from here on: a prompt may have placeholders of images or sound that the
            model cannot read as text. None: no text has any.
    """

    def __init__(self, matcher: Matcher, faults: Faults, vocab_size: int | None = None) -> None:
        self._matcher = matcher
        self._faults = faults
        self._vocab_size = vocab_size

    @property
    def match_len_cap(self) -> int:
        """See `Matcher.match_len_cap`."""
        return self._matcher.match_len_cap

    def match(self, history: History, model_drafts: np.ndarray | None, max_drafts: np.ndarray) -> Match:
        """See `Matcher.match`; after a fault there are no drafts."""
        try:
            match = self._matcher.match(history, model_drafts, max_drafts)
            return match if self._vocab_size is None else match.before(self._vocab_size)
        except Exception as error:
            self._faults.note("drafting", error, self._find_faulty(history))
            num_reqs, nothing = len(history.req_ids), np.zeros(len(history.req_ids), np.int32)
            return Match(np.full((num_reqs, int(max(max_drafts, default=0))), -1, np.int32), nothing, nothing)

    def retain(self, req_ids: Collection[str]) -> None:
        """See `Matcher.retain`."""
        self._matcher.retain(req_ids)

    def _find_faulty(self, history: History) -> list[str]:
        """The requests whose match fails when each is alone, or all of them; the matcher forgets its requests."""
        faulty = []
        for i, req_id in enumerate(history.req_ids):
            try:
                self._matcher.retain(())
                self._matcher.match(history.only(i), None, np.ones(1, np.int64))
            except Exception:
                faulty.append(req_id)
        self._matcher.retain(())
        return faulty or list(history.req_ids)


class GuardedReference(ReferenceText):
    """A request's reference whose fault costs this request its drafts."""

    def __init__(
        self,
        req_id: str,
        faults: Faults,
        token_ids: np.ndarray,
        *,
        edit: bool,
        min_ngram_size: int,
        max_ngram_size: int,
    ) -> None:
        super().__init__(token_ids, edit=edit, min_ngram_size=min_ngram_size, max_ngram_size=max_ngram_size)
        self._req_id, self._faults = req_id, faults
        self._is_faulty = False

    def draft(self, output: np.ndarray, max_drafts: int) -> np.ndarray:
        """See `ReferenceText.draft`; from a fault on there are no drafts."""
        if not self._is_faulty:
            try:
                return super().draft(output, max_drafts)
            except Exception as error:
                self._is_faulty = True
                self._faults.note("drafting", error, [self._req_id])
        return np.empty(0, np.int32)
