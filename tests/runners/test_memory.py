"""The bounds of docs/limits.md, each driven to where it holds."""

import pickle
import tracemalloc
import weakref

import numpy as np
import pytest
import torch

from tests.runners.test_live_requests import model_config, new_request, request_of
from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.proposers import reference_text
from vllm_specplus.proposers.history import History
from vllm_specplus.proposers.ngram import NgramMatcher
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.runners import request_counts
from vllm_specplus.runners.live_requests import LiveRequests
from vllm_specplus.runners.request_counts import RequestCounts

NUM_REQS, MAX_LEN = 6, 4096


def test_ngram_tables() -> None:
    """8 bytes for each n-gram size, token and request; none of a request that has gone."""
    rng = np.random.default_rng(0)
    matcher = NgramMatcher(NUM_REQS, MAX_LEN, min_ngram_size=2, max_ngram_size=5)
    token_ids = rng.integers(0, 50, (NUM_REQS, MAX_LEN)).astype(np.int32)
    names = [str(i) for i in range(NUM_REQS)]
    for length in (10, 700, 1500, 4000, MAX_LEN):
        lengths = np.full(NUM_REQS, length)
        matcher.match(History(names, token_ids, lengths, np.full(NUM_REQS, 5)), None, np.full(NUM_REQS, 4))
        assert matcher.num_table_bytes <= 8 * 4 * MAX_LEN * NUM_REQS
    assert matcher.num_table_bytes == 8 * 4 * MAX_LEN * NUM_REQS
    matcher.retain(names[:1])
    assert matcher.num_table_bytes == 8 * 4 * MAX_LEN
    matcher.retain([])
    assert matcher.num_table_bytes == 0


@pytest.mark.parametrize("edit", [False, True])
def test_a_reference(edit: bool) -> None:
    """28 bytes for each token of it, with the message that brought it, besides the edits that it remembers."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 5, MAX_LEN).astype(np.int32)
    output = text.copy()
    output[::3] = rng.integers(0, 5, len(output[::3]))
    options = SpecPlusOptions(method="ngram", num_speculative_tokens=4, min_ngram_size=1, max_ngram_size=4)
    requests = LiveRequests(options, model_config(MAX_LEN), warns=False)
    requests.begin([new_request("a few tokens, so that all is imported", text[:9], edit=edit)])
    message = [new_request("a", text, edit=edit)]
    tracemalloc.start()
    try:
        requests.begin(pickle.loads(pickle.dumps(message)))
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size <= 28 * MAX_LEN + 8192
    reference = request_of(requests, "a").reference
    assert reference is not None
    for length in range(1, MAX_LEN, 2):
        reference.draft(output[:length], 8)
    arrays = [value for value in vars(reference).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) <= 28 * MAX_LEN + 200
    assert len(reference._anchors) <= reference_text._NUM_ANCHORS


@pytest.mark.parametrize("num_inserted", [1, reference_text._MAX_EDIT])
def test_edits_that_a_reference_remembers(num_inserted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """768 bytes for each of the latest ones, short and long."""
    most, num_edits, num_kept = 64, 100, 4
    monkeypatch.setattr(reference_text, "_MAX_EDITS", most)
    # Rare tokens, so that few of them make an agreement that is no accident.
    text = np.arange(num_edits * num_kept, dtype=np.int32)
    new = len(text) + np.arange(num_edits * num_inserted, dtype=np.int32)
    output = np.concatenate((text.reshape(num_edits, -1), new.reshape(num_edits, -1)), axis=1).ravel()
    reference = ReferenceText(text, edit=True, min_ngram_size=2, max_ngram_size=5)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for length in range(0, len(output) + 1, num_kept + num_inserted):
            reference.draft(output[:length], 8)
            assert len(reference._edits) <= most
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(reference._edits) == most
    assert after - before <= 768 * most


def test_counts_that_nobody_collects() -> None:
    counts = RequestCounts()
    for i in range(3 * request_counts._MAX_FINISHED_KEYS):
        counts.begin(str(i))
        counts.add(str(i), np.ones(3, np.int64))
        counts.add_later(str(i), torch.ones(3, dtype=torch.int64))
        counts.finish(str(i))
        assert len(counts) <= request_counts._MAX_FINISHED_KEYS
    assert len(counts) == request_counts._MAX_FINISHED_KEYS


def test_counts_of_a_request_that_leaves_its_place_again_and_again() -> None:
    """A key has one tensor, however often its requests are preempted, and however many they are."""
    counts, num_parts = RequestCounts(), 5000
    for _ in range(3):
        counts.begin("a")
    parts = []
    for i in range(num_parts):
        part = torch.tensor([1, 2, i % 2])
        parts.append(weakref.ref(part))
        counts.add_later("a", part)
    del part
    assert sum(part() is not None for part in parts) == 1
    assert counts.collect("a") == {
        "num_requests": 3,
        "num_steps": num_parts,
        "accepted": num_parts // 2,
        "rejected": 2 * num_parts - num_parts // 2,
    }
