"""The n-gram kernels against the proposers, under Triton's interpreter (TRITON_INTERPRET=1)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.launches import Launches, OnlyTorch
from tests.proposers.reference import make_history
from vllm_specplus.kernels import ngram
from vllm_specplus.kernels.drafts import DraftCounts, Limits
from vllm_specplus.kernels.ngram import fill_drafts, split_text
from vllm_specplus.proposers import HybridDrafter, NgramMatcher
from vllm_specplus.testing.ahead_of_time import AheadOfTime, run_without_interpreter

pytestmark = pytest.mark.interpreter

SENTINEL = -99
MAX_LEN = 48


def fill(texts, model=None, *, width=4, max_len=MAX_LEN, pad=0, max_drafts=None, num_sampled=None, **options):
    """Drafts and number of model drafts of each request; None in `texts` is a place without a request.

    Rows are strided and stand in reverse order among rows of other requests. All other tokens are `pad`. Outputs hold
    a sentinel at first. By default no request is limited, and each got a token.
    """
    num_reqs = len(texts)
    model = [[] for _ in texts] if model is None else model
    num_steps = len(model[0])
    token_ids = torch.full((2 * num_reqs, max_len + 3), pad, dtype=torch.int32)[:, :max_len]
    num_tokens = torch.full((2 * num_reqs,), 1, dtype=torch.int32)
    idx_mapping = torch.tensor([2 * (num_reqs - i) - 1 for i in range(num_reqs)], dtype=torch.int32)
    drafts, model_drafts = torch.full((2, num_reqs, width + 2), SENTINEL)
    for i, text in enumerate(texts):
        model_drafts[i, :num_steps] = torch.tensor(model[i])
        if text is None:
            idx_mapping[i] = -1
        else:
            token_ids[idx_mapping[i], : len(text)] = torch.tensor(text)
            num_tokens[idx_mapping[i]] = len(text)

    most_splits = split_text(max_len)[1]
    by_state = DraftCounts(*(torch.full((2 * num_reqs,), SENTINEL, dtype=torch.int32) for _ in range(2)))
    before = token_ids.clone()
    limits = Limits(
        torch.tensor([width] * num_reqs if max_drafts is None else max_drafts, dtype=torch.int32),
        torch.tensor([1] * num_reqs if num_sampled is None else num_sampled, dtype=torch.int32),
    )
    counts = fill_drafts(
        token_ids,
        num_tokens,
        idx_mapping,
        drafts[:, :width],
        model_drafts[:, :num_steps],
        limits,
        by_state,
        # A huge key would win if it were read.
        scratch=torch.full((num_reqs + 1, most_splits, 2), 2**62),
        **options,
    )
    for noted, count in zip(by_state, counts, strict=True):
        there = idx_mapping >= 0
        assert torch.equal(noted[idx_mapping[there]], count[there])
        assert torch.sum(noted == SENTINEL) == len(noted) - torch.sum(there)
    assert torch.equal(token_ids, before)
    assert torch.all(drafts[:, width:] == SENTINEL)
    lists = []
    for row, count in zip(drafts[:, :width].tolist(), counts[0].tolist(), strict=True):
        assert count <= width
        assert row[count:] == [0] * (width - count)
        lists.append(row[:count])
    return lists, counts[1].tolist()


def expect(
    texts,
    model,
    *,
    width,
    max_len,
    max_drafts,
    num_sampled,
    min_ngram_size,
    max_ngram_size,
    match_override_len,
    takes_first,
):
    """The drafts of the proposers for the same requests."""
    requests = {str(i): text for i, text in enumerate(texts) if text is not None}
    lists, num_model = [[] for _ in texts], [0 for _ in texts]
    if not requests:
        return lists, num_model
    places = [int(i) for i in requests]
    limits = np.array([max_drafts[i] * bool(num_sampled[i]) for i in places])
    matcher = NgramMatcher(
        len(texts),
        max_len,
        min_ngram_size=min_ngram_size,
        max_ngram_size=max_ngram_size,
        match_order="first" if takes_first else "recent",
    )
    history = make_history(requests, max_len)
    if model[0]:
        drafter = HybridDrafter(
            matcher,
            num_model_steps=len(model[0]),
            num_speculative_tokens=width,
            match_override_len=match_override_len,
        )
        found = drafter.draft(history, np.array([model[i] for i in places]), limits)
        drafted, num_models = found.token_ids, found.num_model.tolist()
    else:
        drafted = matcher.match(history, None, np.minimum(limits, width)).to_lists()
        num_models = [0] * len(drafted)
    for i, tokens, count in zip(places, drafted, num_models, strict=True):
        lists[i], num_model[i] = tokens, count
    return lists, num_model


@st.composite
def batches(draw):
    """Arguments of `fill`: texts of few distinct tokens, so that matches abound, of all lengths."""
    values = [0, 1, 2**31 - 1][: draw(st.integers(1, 3))]
    tokens = st.sampled_from(values)
    num_reqs = draw(st.integers(1, 3))
    max_len = draw(st.integers(1, MAX_LEN))
    lengths = st.one_of(st.sampled_from([0, 1, 2, max_len]), st.integers(0, max_len)).map(lambda n: min(n, max_len))
    texts = []
    for _ in range(num_reqs):
        size = draw(lengths)
        is_request = draw(st.integers(0, 7)) > 0
        texts.append(draw(st.lists(tokens, min_size=size, max_size=size)) if is_request else None)
    width = draw(st.integers(1, 8))
    num_steps = draw(st.integers(0, min(3, width)))
    min_size = draw(st.integers(1, 3))
    limits = st.lists(st.integers(0, width + 2), min_size=num_reqs, max_size=num_reqs)
    return {
        "texts": texts,
        "model": [draw(st.lists(tokens, min_size=num_steps, max_size=num_steps)) for _ in texts],
        "width": width,
        "max_len": max_len,
        "max_drafts": draw(st.just([width] * num_reqs) | limits),
        "num_sampled": draw(st.lists(st.sampled_from([1, 1, 0, 4]), min_size=num_reqs, max_size=num_reqs)),
        "min_ngram_size": min_size,
        "max_ngram_size": min_size + draw(st.integers(0, 4)),
        "match_override_len": draw(st.sampled_from([0, 1, 2, 3, 5, 9, 64])),
        "takes_first": draw(st.booleans()),
    }


@settings(max_examples=400)
@given(batches(), st.sampled_from([4, 16]), st.integers(1, 3), st.none() | st.integers(0, 2 * MAX_LEN))
def test_equals_the_proposers(batch, block, max_splits, longest):
    with pytest.MonkeyPatch.context() as patch:
        # A text has several blocks, and a program takes several of them.
        patch.setattr(ngram, "_BLOCK", block)
        patch.setattr(ngram, "_MAX_SPLITS", max_splits)
        assert fill(**batch, longest=longest) == expect(**batch)


TEXT = [1, 2, 3, 4, 5, 1, 2, 9, 1, 2]
REPEAT = [7, 8, 7, 8, 7]


@pytest.mark.parametrize(
    ("text", "model", "options", "expected"),
    [
        pytest.param(TEXT, [], {}, ([9, 1, 2, 9], 0), id="most recent"),
        pytest.param(TEXT, [], {"takes_first": True}, ([3, 4, 5, 1], 0), id="first"),
        pytest.param(TEXT, [3], {}, ([3, 4, 5, 1], 1), id="goes on from the model's draft"),
        pytest.param([*TEXT, 5], [1, 2], {}, ([1, 2, 9, 1], 2), id="longest n-gram first"),
        pytest.param([1, 2, 3, 4, 5], [1], {"min_ngram_size": 1}, ([1, 2, 3, 4], 1), id="one token"),
        pytest.param([1, 2, 3, 4, 5], [1], {}, ([1], 1), id="too short a match"),
        pytest.param(REPEAT, [], {"width": 8}, ([8, 7, 8, 7, 8, 7, 8, 7], 0), id="runs on past the end"),
        pytest.param([5, 5, 5], [], {}, ([5, 5, 5, 5], 0), id="period 1"),
        pytest.param([], [6, 6, 6], {"width": 5}, ([6, 6, 6, 6, 6], 3), id="the model's drafts alone"),
        pytest.param([], [], {}, ([], 0), id="no text"),
        pytest.param([3], [], {"min_ngram_size": 1}, ([], 0), id="one token of text"),
        pytest.param([3], [3], {"min_ngram_size": 1}, ([3, 3, 3, 3], 1), id="one token of each"),
        pytest.param(TEXT, [3], {"max_drafts": [3]}, ([3, 4, 5], 1), id="limited"),
        pytest.param(TEXT, [3, 4], {"max_drafts": [1]}, ([3], 1), id="limited to some of the model's"),
        pytest.param(TEXT, [3], {"max_drafts": [0], "match_override_len": 1}, ([], 0), id="limited to none"),
        pytest.param(TEXT, [3], {"num_sampled": [0], "match_override_len": 1}, ([], 0), id="in its prompt"),
        pytest.param(TEXT, [3], {"max_drafts": [9]}, ([3, 4, 5, 1], 1), id="limited to more than the slots"),
        pytest.param(TEXT, [8], {"match_override_len": 2}, ([9, 1, 2, 9], 0), id="overridden"),
        pytest.param(TEXT, [8], {"match_override_len": 3}, ([8], 1), id="below the threshold"),
        pytest.param(
            TEXT, [8, 8, 8], {"match_override_len": 2, "max_drafts": [2]}, ([9, 1], 0), id="overridden, limited"
        ),
        # N-grams of two tokens find it; the match is seven tokens long.
        pytest.param([*range(1, 9), *range(1, 8)], [0], {"match_override_len": 7}, ([8, 1, 2, 3], 0), id="long match"),
        pytest.param([*range(1, 9), *range(1, 8)], [0], {"match_override_len": 8}, ([0], 1), id="not long enough"),
    ],
)
def test_expected_drafts(text, model, options, expected):
    sizes = {"min_ngram_size": 2, "max_ngram_size": 3}
    drafts, num_model = fill([text], [model], **(sizes | options))
    assert (drafts[0], num_model[0]) == expected


def test_a_match_that_ends_among_the_models_drafts():
    drafts, num_model = fill([[1]], [[4, 6, 4]], width=6, min_ngram_size=1, max_ngram_size=1)
    assert drafts == [[4, 6, 4, 6, 4, 6]]
    assert num_model == [3]


def test_tokens_behind_the_text_are_not_looked_at():
    """The tokens behind the text would match and continue."""
    drafts, _ = fill([[5, 6, 7], [7, 7]], [[7], [7]], pad=7, min_ngram_size=2, max_ngram_size=4)
    assert drafts == [[7], [7, 7, 7, 7]]


def test_batch_with_places_without_a_request():
    texts, model = [None, TEXT, None], [[1], [3], [2]]
    drafts, num_model = fill(texts, model, min_ngram_size=2, max_ngram_size=3, match_override_len=9)
    assert drafts == [[], [3, 4, 5, 1], []]
    assert num_model == [0, 1, 0]


@pytest.mark.parametrize(
    ("max_len", "longest", "expected"),
    [
        (131_072, None, (128, 128)),
        (131_072, 0, (1, 128)),
        (131_072, 1024, (1, 128)),
        (131_072, 1025, (2, 128)),
        (2**20, 2**20, (128, 128)),
        (3000, None, (3, 3)),
        # The device's texts may be longer than the host expects, or the bound lies beyond a row's end.
        (3000, 9000, (3, 3)),
        (0, None, (1, 1)),
    ],
)
def test_programs_share_texts_as_long_as_the_longest(max_len, longest, expected):
    assert split_text(max_len, longest) == (*expected, 1024)


def test_the_grid_follows_the_longest_text(monkeypatch):
    search = Launches()
    monkeypatch.setattr(ngram, "_search_kernel", search)
    monkeypatch.setattr(ngram, "_fill_kernel", Launches())
    for longest in (None, 100, 3000):
        fill_drafts(**arguments(3, 131_072, longest=longest))
    assert search.grids == [(3, 128), (3, 1), (3, 3)]


@pytest.mark.parametrize(("max_splits", "longest"), [(1, None), (2, None), (128, None), (128, 2000)])
@pytest.mark.parametrize("at", [1, 1022, 1023, 1024, 2500])
def test_several_blocks(monkeypatch, at, max_splits, longest):
    """A match of three tokens beats a later one of two in another block."""
    monkeypatch.setattr(ngram, "_MAX_SPLITS", max_splits)
    text = list(range(100, 3400))
    text[at : at + 3] = [1, 2, 3]
    text[3100:3102] = [2, 3]
    text[-2:] = [1, 2]
    drafts, _ = fill([text], [[3]], max_len=3300, min_ngram_size=1, max_ngram_size=4, longest=longest)
    assert drafts == [[3, *text[at + 3 : at + 6]]]
    text[at] = 0
    drafts, _ = fill([text], [[3]], max_len=3300, min_ngram_size=1, max_ngram_size=4, longest=longest)
    assert drafts == [[3, *text[3102:3105]]]


def test_more_tokens_than_a_row_holds():
    """A count past the row's end must not lead into the next row."""
    token_ids = torch.tensor([[1, 2, 1], [2, 2, 2]], dtype=torch.int32)
    drafts = torch.full((1, 2), SENTINEL)
    one = torch.ones(1, dtype=torch.int32)
    num_drafts, num_model = fill_drafts(
        token_ids,
        torch.tensor([5, 3], dtype=torch.int32),
        torch.tensor([0]),
        drafts,
        drafts[:, :0],
        Limits(2 * one, one),
        DraftCounts(*torch.zeros(2, 2, dtype=torch.int32)),
        min_ngram_size=1,
        max_ngram_size=2,
    )
    assert drafts.tolist() == [[2, 1]]
    assert (num_drafts.tolist(), num_model.tolist()) == ([2], [0])


def arguments(num_reqs=2, max_len=16, width=4, **changes):
    """Valid and complete arguments of `fill_drafts`, with `changes`."""
    counts = torch.full((num_reqs,), width, dtype=torch.int32)
    return {
        "token_ids": torch.zeros(num_reqs, max_len, dtype=torch.int32),
        "num_tokens": torch.full((num_reqs,), max_len, dtype=torch.int32),
        "idx_mapping": torch.arange(num_reqs, dtype=torch.int32),
        "drafts": torch.zeros(num_reqs, width, dtype=torch.int64),
        "model_drafts": torch.zeros(num_reqs, 2, dtype=torch.int64),
        "limits": Limits(counts, counts),
        "by_state": DraftCounts(counts.clone(), counts.clone()),
        "min_ngram_size": 1,
        "max_ngram_size": 3,
        "match_override_len": 5,
        "scratch": torch.zeros(num_reqs, split_text(max_len)[1], 2, dtype=torch.int64),
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_drafts": torch.zeros(2, 5, dtype=torch.int64)}, r"model_drafts must be \[2, <= 4\]"),
        ({"model_drafts": torch.zeros(3, 2, dtype=torch.int64)}, r"model_drafts must be \[2, <= 4\]"),
        ({"model_drafts": torch.zeros(2, 2)}, r"model_drafts must be torch\.int64"),
        ({name: torch.zeros(2, 0, dtype=torch.int64) for name in ("drafts", "model_drafts")}, r"\[2, <= 0\]"),
        ({"min_ngram_size": 4}, "max_ngram_size=3"),
        ({"min_ngram_size": 0}, "min_ngram_size=0"),
        ({"match_override_len": -1}, "match_override_len=-1"),
        ({"token_ids": torch.zeros(1, 1, dtype=torch.int32).expand(2, 2**31 - 1)}, "rows of 2147483647 tokens"),
        ({"token_ids": torch.zeros(2, 16)}, r"token_ids must be torch\.int32"),
        ({"token_ids": torch.zeros(16, 2, dtype=torch.int32).T}, "token_ids must .* contiguous rows"),
        ({"drafts": torch.zeros(2, 4, dtype=torch.int32)}, r"drafts must be torch\.int64"),
        ({"num_tokens": torch.zeros(3, dtype=torch.int32)}, "num_tokens must"),
        ({"idx_mapping": torch.zeros(2)}, r"idx_mapping must be torch\.int32 or torch\.int64"),
        ({"limits": Limits(torch.zeros(2), torch.zeros(2))}, "max_drafts must"),
        ({"scratch": torch.zeros(1, dtype=torch.int64)}, r"at least \(2, 1, 2\)"),
    ],
)
def test_arguments_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        fill_drafts(**arguments(**changes))


def test_no_requests():
    num_drafts, num_model = fill_drafts(**arguments(0, token_ids=torch.zeros(0, 16, dtype=torch.int32)))
    assert num_drafts.shape == num_model.shape == (0,)


def test_a_call_is_two_launches_whose_grids_depend_on_shapes_alone(monkeypatch):
    """A CUDA graph can capture the call, and it never waits."""
    search, finish = Launches(), Launches()
    monkeypatch.setattr(ngram, "_search_kernel", search)
    monkeypatch.setattr(ngram, "_fill_kernel", finish)
    calls = [arguments(3, 5000), arguments(3, 5000, num_tokens=torch.zeros(3, dtype=torch.int32))]
    with OnlyTorch(torch.ops.aten.empty, torch.ops.aten.slice):
        for call in calls:
            fill_drafts(**call)
    assert search.grids == [(3, 5)] * 2
    assert finish.grids == [(3,)] * 2


def compile_ahead_of_time():
    """Run in a process of its own: compile both kernels as `fill_drafts` launches them."""
    search, finish = AheadOfTime(ngram._search_kernel), AheadOfTime(ngram._fill_kernel)
    ngram._search_kernel, ngram._fill_kernel = search, finish
    fill_drafts(**arguments(max_len=200_000, longest=4096))
    fill_drafts(**arguments(match_override_len=0, idx_mapping=torch.arange(2)))
    fill_drafts(**arguments(model_drafts=torch.zeros(2, 0, dtype=torch.int64), max_ngram_size=1))
    print("compiled", len(search.compiled), len(finish.compiled))


def test_kernels_compile_for_a_gpu(tmp_path):
    code = "from tests.kernels import test_ngram; test_ngram.compile_ahead_of_time()"
    assert "compiled 3 3" in run_without_interpreter(code, tmp_path)
