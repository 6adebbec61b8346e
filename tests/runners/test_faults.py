"""Faults: what they cost, and what is logged of them."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_specplus.proposers.history import History
from vllm_specplus.proposers.ngram import NgramMatcher
from vllm_specplus.runners.faults import Faults, GuardedMatcher, GuardedReference


def history_of(*texts: list[int]) -> History:
    token_ids = np.zeros((len(texts), 32), np.int32)
    for i, text in enumerate(texts):
        token_ids[i, : len(text)] = text
    lengths = np.array([len(text) for text in texts])
    return History([f"request-{i}" for i in range(len(texts))], token_ids, lengths, lengths)


class FailingMatcher(NgramMatcher):
    """Fails at a text that begins with 13."""

    def match(self, history, model_drafts, max_drafts):
        if any(len(history.tokens(i)) and history.tokens(i)[0] == 13 for i in range(len(history.req_ids))):
            raise RuntimeError(str(history.token_ids))
        return super().match(history, model_drafts, max_drafts)


def test_a_matchers_fault_is_of_the_request_that_brings_it_about(log: pytest.LogCaptureFixture) -> None:
    faults = Faults(logs=True)
    matcher = GuardedMatcher(FailingMatcher(4, 32, min_ngram_size=1, max_ngram_size=3), faults)
    limits = np.full(2, 4)
    repeats = [1, 2, 3, 1, 2]
    assert matcher.match(history_of(repeats, repeats), None, limits).num_tokens.tolist() == [4, 4]
    assert matcher.match(history_of(repeats, [13, 13]), None, limits).num_tokens.tolist() == [0, 0]
    assert faults.without_drafts == {"request-1"}
    assert faults.rows_without_drafts(["request-1", "request-0"]) == [0]
    assert matcher.match(history_of(repeats, []), None, limits).num_tokens.tolist() == [4, 0]
    assert faults.counts == {"drafting": 1}
    assert "RuntimeError" in log.text
    assert "13 13" not in log.text
    faults.finish(["request-1", "unknown"])
    assert not faults.without_drafts


def test_no_placeholder_of_a_prompt_is_drafted() -> None:
    """A draft is read as text, and the embedding has no row for it."""
    matcher = GuardedMatcher(
        NgramMatcher(4, 32, min_ngram_size=1, max_ngram_size=3), Faults(logs=False), vocab_size=100
    )
    history = history_of([1, 2, 3, 100, 4, 1, 2], [5, 101, 5], [1, 2, 3, 99, 4, 1, 2])
    match = matcher.match(history, None, np.full(3, 4))
    assert match.to_lists() == [[3], [], [3, 99, 4, 1]]
    assert match.match_len.tolist() == [2, 0, 2]
    assert match.token_ids.tolist() == [[3, -1, -1, -1], [-1] * 4, [3, 99, 4, 1]]


def test_a_fault_that_no_request_has_alone_is_of_all() -> None:
    class FailsTogether(NgramMatcher):
        def match(self, history, model_drafts, max_drafts):
            if len(history.req_ids) > 1:
                raise RuntimeError
            return super().match(history, model_drafts, max_drafts)

    faults = Faults(logs=False)
    matcher = GuardedMatcher(FailsTogether(4, 32, min_ngram_size=1, max_ngram_size=3), faults)
    matcher.match(history_of([1], [2]), None, np.full(2, 4))
    assert faults.without_drafts == {"request-0", "request-1"}


def test_a_reference_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults(logs=False)
    reference = GuardedReference(
        "a", faults, np.arange(9, dtype=np.int32), edit=False, min_ngram_size=1, max_ngram_size=3
    )
    assert reference.draft(np.array([3], np.int32), 4).tolist() == [4, 5, 6, 7]
    # No array at all.
    assert reference.draft(None, 4).tolist() == []  # type: ignore[arg-type]
    assert reference.draft(np.array([3, 4], np.int32), 4).tolist() == []
    assert faults.without_drafts == {"a"}
    assert faults.counts == {"drafting": 1}


def test_faults_of_one_part_are_logged_once_and_by_one_worker(log: pytest.LogCaptureFixture) -> None:
    for logs in (False, True):
        faults = Faults(logs=logs)
        for _ in range(3):
            with faults.caught("counting", ["a"]):
                raise ValueError("secret")
        assert faults.counts == {"counting": 3}
    assert log.text.count("a fault in counting, ValueError") == 1


def test_a_schedulers_faults_are_logged_once_however_often_they_are_handed_over(
    log: pytest.LogCaptureFixture,
) -> None:
    scheduler, worker = Faults(logs=True), Faults(logs=True)
    for _ in range(3):
        output = SimpleNamespace()
        scheduler.hand_over(output)
        worker.take_over(output)
        with scheduler.caught("requests"):
            raise ValueError
    assert worker.counts == {"requests": 2}
    # The scheduler's own stack says nothing of the worker's fault.
    with worker.caught("requests"):
        raise KeyError
    assert worker.counts == {"requests": 3}
    assert log.text.count("a fault in requests, ValueError") == 1
    assert log.text.count("a fault in requests, KeyError") == 1


def test_what_ends_the_process_is_not_caught() -> None:
    with pytest.raises(KeyboardInterrupt), Faults(logs=False).caught("drafting"):
        raise KeyboardInterrupt


def test_an_interrupt_is_no_fault() -> None:
    faults = Faults(logs=False)
    with pytest.raises(KeyboardInterrupt), faults.caught("drafting", ["request-0"]):
        raise KeyboardInterrupt
    assert not faults.counts
    with faults.caught("drafting", ["request-0"]):
        raise ValueError
    assert (faults.counts, faults.without_drafts) == ({"drafting": 1}, {"request-0"})
