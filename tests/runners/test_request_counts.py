"""Counts of drafts by source and position, and of single requests."""

import numpy as np
import pytest
import torch

from vllm_specplus.runners import request_counts
from vllm_specplus.runners.request_counts import RequestCounts, count_drafts
from vllm_specplus.sources import MODEL, NGRAM, REFERENCE, SOURCES, SUFFIX, UNFILLED, by_source

NOTHING = {"num_requests": 1, "num_steps": 0, "accepted": 0, "rejected": 0}


def new_counts(width: int = 4) -> np.ndarray:
    return np.zeros((2, len(SOURCES), width), np.int64)


def test_sources_have_their_places() -> None:
    assert [SOURCES[i] for i in (MODEL, NGRAM, SUFFIX, REFERENCE, UNFILLED)] == list(SOURCES)
    assert SOURCES == ("model", "ngram", "suffix", "reference", "unfilled")


@pytest.mark.parametrize(
    ("num_model", "drafted", "accepted", "expected"),
    [
        # By position: drafts of the model, other drafts, accepted tokens of the model, other accepted tokens.
        (0, 4, 2, ([0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0])),
        (2, 4, 3, ([1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 1, 0])),
        (2, 4, 1, ([1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0])),
        (3, 2, 2, ([1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0])),
        (4, 4, 4, ([1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0])),
        (2, 0, 0, ([0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0])),
    ],
)
def test_a_step_is_counted(num_model: int, drafted: int, accepted: int, expected: tuple[list[int], ...]) -> None:
    counts = new_counts()
    count_drafts(counts, *map(np.array, ([num_model], [SUFFIX], [drafted], [accepted])))
    assert counts[:, [MODEL, SUFFIX]].reshape(4, 4).tolist() == list(expected)
    assert counts.sum() == drafted + accepted


def test_steps_add_up_by_source_and_position() -> None:
    counts = new_counts(3)
    count_drafts(counts, *map(np.array, ([1, 0], [NGRAM, REFERENCE], [3, 2], [2, 2])))
    count_drafts(counts, *map(np.array, ([1], [NGRAM], [1], [0])))
    none = [0, 0, 0]
    assert by_source(counts) == {
        "drafted": {"model": [2, 0, 0], "ngram": [0, 1, 1], "suffix": none, "reference": [1, 1, 0], "unfilled": none},
        "accepted": {"model": [1, 0, 0], "ngram": [0, 1, 0], "suffix": none, "reference": [1, 1, 0], "unfilled": none},
    }


def test_a_requests_parts_are_summed_whatever_holds_them() -> None:
    counts = RequestCounts()
    counts.begin("a")
    counts.begin("b")
    tensor = torch.tensor([1, 4, 3])
    counts.add("a", np.array([1, 2, 0]))
    counts.add("a", np.array([0, 0, 0]))
    counts.add_later("a", tensor)
    counts.add("b", np.array([9, 9, 9]))
    tensor += 1  # Tensors are read when the counts are collected.
    running = (part for part in (torch.tensor([5, 1, 1]), np.array([1, 0, 0])))
    summed = counts.collect("a", running)
    assert summed == {"num_requests": 1, "num_steps": 9, "accepted": 5, "rejected": 3}
    assert all(type(value) is int for value in summed.values())


def test_no_parts_are_zeros() -> None:
    counts = RequestCounts()
    counts.begin("a")
    assert counts.collect("a") == NOTHING


def test_unknown_keys_are_neither_counted_nor_kept() -> None:
    counts = RequestCounts()
    counts.add("a", np.array([1, 1, 1]))
    counts.finish("a")
    assert counts.collect("a", [np.array([1, 1, 1])]) is None
    assert len(counts) == 0


def test_counts_collected_at_the_end_are_dropped() -> None:
    counts = RequestCounts()
    counts.begin("a")
    counts.finish("a")
    counts.add("a", np.array([2, 5, 3]))  # On V2 the last ones come when a request leaves its place.
    assert len(counts) == 1
    assert counts.collect("a") == {"num_requests": 1, "num_steps": 2, "accepted": 3, "rejected": 2}
    assert len(counts) == 0
    assert counts.collect("a") is None


def test_counts_collected_before_the_end_are_dropped_there() -> None:
    counts = RequestCounts()
    counts.begin("a")
    counts.add("a", np.array([1, 1, 0]))
    assert counts.collect("a") == {"num_requests": 1, "num_steps": 1, "accepted": 0, "rejected": 1}
    counts.add("a", np.array([1, 1, 1]))
    assert counts.collect("a") == {"num_requests": 1, "num_steps": 2, "accepted": 1, "rejected": 1}
    counts.finish("a")
    assert len(counts) == 0


def test_requests_share_a_key_until_the_last_has_ended() -> None:
    counts = RequestCounts()
    counts.begin("a")
    counts.begin("a")
    counts.add("a", np.array([1, 0, 0]))
    assert counts.collect("a") == NOTHING | {"num_requests": 2, "num_steps": 1}
    counts.finish("a")
    counts.add("a", np.array([1, 0, 0]))
    assert counts.collect("a") == NOTHING | {"num_requests": 2, "num_steps": 2}
    counts.finish("a")
    assert len(counts) == 0


def test_counts_that_nobody_collects_are_kept_for_the_last_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_counts, "_MAX_FINISHED_KEYS", 3)
    counts = RequestCounts()
    counts.begin("runs")
    for i in range(5):
        counts.begin(f"ended {i}")
        counts.finish(f"ended {i}")
    assert len(counts) == 4
    known = [key for key in ("runs", *(f"ended {i}" for i in range(5))) if counts.collect(key) is not None]
    assert known == ["runs", "ended 2", "ended 3", "ended 4"]


def test_the_last_to_end_is_the_last_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_counts, "_MAX_FINISHED_KEYS", 2)
    counts = RequestCounts()
    for key in "abc":
        counts.begin(key)
    for key in "bca":
        counts.finish(key)
    assert counts.collect("b") is None
    assert counts.collect("a") == counts.collect("c") == NOTHING
