"""The bounds of docs/limits.md, each driven to where it holds."""

import numpy as np
import pytest

from vllm_specplus.proposers.history import History
from vllm_specplus.proposers.ngram import NgramMatcher
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.runners import request_counts
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
    """28 bytes for each token of it, and for what it has learned of edits 16 bytes for each token of the output."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 5, MAX_LEN).astype(np.int32)
    output = text.copy()
    output[::3] = rng.integers(0, 5, len(output[::3]))
    reference = ReferenceText(text, edit=edit, min_ngram_size=1, max_ngram_size=4)
    for length in range(1, MAX_LEN, 2):
        reference.draft(output[:length], 8)
    arrays = [value for value in vars(reference).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) <= 28 * MAX_LEN + 200
    edits = sum(removed.nbytes + inserted.nbytes for removed, inserted in reference._edits.values())
    assert edits <= 16 * MAX_LEN
    assert len(reference._anchors) <= MAX_LEN


def test_counts_that_nobody_collects() -> None:
    counts = RequestCounts()
    for i in range(3 * request_counts._MAX_FINISHED_KEYS):
        counts.begin(str(i))
        counts.add(str(i), np.ones(3, np.int64))
        counts.finish(str(i))
        assert len(counts) <= request_counts._MAX_FINISHED_KEYS
    assert len(counts) == request_counts._MAX_FINISHED_KEYS
