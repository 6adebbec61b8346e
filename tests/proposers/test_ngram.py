import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.proposers.reference import make_history, slow_match
from vllm_specplus.proposers import History, NgramMatcher, ngram

MAX_LEN = 96


def match_one(matcher, tokens, drafts=None, max_drafts=4, req_id="a", num_prompt_tokens=1):
    """Drafts and match length of a batch of one request."""
    history = make_history({req_id: tokens}, matcher.max_model_len, num_prompt_tokens)
    model_drafts = None if drafts is None else np.array([drafts])
    match = matcher.match(history, model_drafts, np.array([max_drafts]))
    return match.to_lists()[0], int(match.match_len[0])


@st.composite
def conversations(draw):
    """N-gram sizes, and steps: {request: new tokens} in row order, model drafts, max_drafts."""
    tokens = st.integers(0, draw(st.integers(0, 3))).map(lambda k: [0, 1, 77, 2**31 - 1][k])
    min_size = draw(st.integers(1, 3))
    sizes = (min_size, min_size + draw(st.integers(0, 3)))
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        req_ids = draw(st.permutations("abcd"))[: draw(st.integers(1, 4))]
        num_model = draw(st.integers(0, 4))
        steps.append(
            [
                (
                    req_id,
                    draw(st.lists(tokens, max_size=9)),
                    draw(st.lists(tokens, min_size=num_model, max_size=num_model)),
                    draw(st.integers(0, 5)),
                )
                for req_id in req_ids
            ]
        )
    return sizes, steps


def make_tables_with_one_bit_tags(matcher, row, num_tokens, make_tables=NgramMatcher._make_tables):
    make_tables(matcher, row, num_tokens)
    matcher._state[row, matcher._index.POSITION_MASK] = 2**31 - 1


@settings(max_examples=300)
@given(conversations(), st.integers(1, 12), st.sampled_from(["recent", "first"]))
def test_equals_the_slow_reference(conversation, match_len_cap, order):
    """Growing, pausing and reordered requests; model drafts that are never accepted as such."""
    (min_size, max_size), steps = conversation
    with pytest.MonkeyPatch.context() as patch:
        # Tables for four tokens at first, so that they grow within the test. Tags of a single bit, so that n-grams are
        # told apart by their tokens.
        patch.setattr(ngram, "_MIN_CAPACITY", 4)
        patch.setattr(NgramMatcher, "_make_tables", make_tables_with_one_bit_tags)
        matcher = NgramMatcher(
            4,
            MAX_LEN,
            min_ngram_size=min_size,
            max_ngram_size=max_size,
            match_len_cap=match_len_cap,
            match_order=order,
        )
        texts: dict[str, list[int]] = {}
        for step in steps:
            for req_id, new_tokens, _, _ in step:
                texts[req_id] = texts.get(req_id, []) + new_tokens
            history = make_history({row[0]: texts[row[0]] for row in step}, MAX_LEN, 1)
            model_drafts = np.array([row[2] for row in step], np.int64).reshape(len(step), -1)
            max_drafts = np.array([row[3] for row in step])
            match = matcher.match(history, model_drafts, max_drafts)

            drafts = match.to_lists()
            assert match.token_ids.shape == (len(step), max_drafts.max())
            for i, (req_id, _, model, limit) in enumerate(step):
                expected, length = slow_match(
                    texts[req_id] + model, min_size, max_size, max(match_len_cap, max_size), limit, order
                )
                assert (drafts[i], match.match_len[i]) == (expected, length)
                assert np.all(match.token_ids[i, match.num_tokens[i] :] == -1)


@pytest.mark.parametrize("release", [True, False], ids=["released", "not released"])
def test_a_reused_id_is_indexed_anew(release):
    """Without the check for stale state, the second text's repetition would be missed."""
    matcher = NgramMatcher(1, MAX_LEN, min_ngram_size=2, max_ngram_size=3)
    match_one(matcher, list(range(40)))
    if release:
        matcher.retain([])
    second = [*range(50, 60), 5, 6, 7, *range(60, 90), 5, 6]
    assert match_one(matcher, second, max_drafts=2) == ([7, 60], 2)
    shorter = [*second[:12], 5, 6]
    assert match_one(matcher, shorter, max_drafts=1) == ([5], 2)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(([*range(60, 80), 5, 60, 61], 20), id="other last tokens"),
        pytest.param(([60, *range(1, 20), 5, 60], 21), id="other prompt length"),
    ],
)
def test_a_longer_text_under_a_reused_id_is_noticed(second):
    tokens, num_prompt_tokens = second
    matcher = NgramMatcher(1, MAX_LEN, min_ngram_size=1, max_ngram_size=3)
    match_one(matcher, list(range(20)), num_prompt_tokens=20)
    expected = slow_match(tokens, 1, 3, 64, 4)
    assert expected[0]
    assert match_one(matcher, tokens, num_prompt_tokens=num_prompt_tokens) == expected


def test_retained_requests_keep_their_index_and_memory_is_reused():
    matcher = NgramMatcher(2, MAX_LEN, min_ngram_size=2, max_ngram_size=3)
    texts = {"a": [1, 2, 3, 1, 2], "b": [4, 5, 6, 4, 5]}
    ones = np.array([1, 1])
    assert matcher.match(make_history(texts, MAX_LEN), None, ones).to_lists() == [[3], [6]]
    with pytest.raises(RuntimeError, match="max_num_reqs"):
        match_one(matcher, [1, 2], req_id="c")
    before = matcher.num_table_bytes
    matcher.retain({"b", "never seen"})
    assert matcher.num_table_bytes == before / 2
    texts = {"c": [1, 2, 8, 8, 1], "b": [4, 5, 6, 4, 5, 6]}
    assert matcher.match(make_history(texts, MAX_LEN), None, ones).to_lists() == [[], [4]]


def test_one_request_never_drafts_anothers_text():
    matcher = NgramMatcher(2, MAX_LEN, min_ngram_size=1, max_ngram_size=3)
    history = make_history({"a": [1, 2, 3, 4], "b": [5, 1, 2]}, MAX_LEN)
    assert matcher.match(history, None, np.array([3, 3])).to_lists() == [[], []]
    matcher.retain(["b"])
    assert match_one(matcher, [7, 1, 2], req_id="c") == ([], 0)


def test_drafts_of_the_model_are_not_remembered():
    matcher = NgramMatcher(1, MAX_LEN, min_ngram_size=2, max_ngram_size=3)
    text = [1, 2, 3]
    assert match_one(matcher, text, drafts=[1, 2, 9, 1, 2], max_drafts=2) == ([9, 1], 2)
    assert match_one(matcher, [*text, 1, 2], max_drafts=2) == ([3, 1], 2)


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_repetition_of_any_period_fills_all_slots(period):
    matcher = NgramMatcher(1, MAX_LEN, min_ngram_size=1, max_ngram_size=5)
    text = [k % period for k in range(3 * period + 1)]
    drafts, match_len = match_one(matcher, text, max_drafts=20)
    assert drafts == [(len(text) + k) % period for k in range(20)]
    assert match_len == 2 * period + 1


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3]])
def test_too_short_to_match(tokens):
    matcher = NgramMatcher(1, MAX_LEN, min_ngram_size=2, max_ngram_size=5)
    assert match_one(matcher, tokens) == ([], 0)


def test_a_prompt_as_long_as_the_model_allows():
    matcher = NgramMatcher(1, MAX_LEN, min_ngram_size=2, max_ngram_size=5)
    assert match_one(matcher, [3] * MAX_LEN, max_drafts=2) == ([3, 3], 64)
    assert match_one(matcher, [3] * MAX_LEN, max_drafts=0) == ([], 0)


def test_long_context_on_huge_pages():
    """Tables of several MiB, filled by one prompt and then by steps, with matches far apart."""
    max_len, size = 80_000, 70_000
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 200, max_len).astype(np.int32)
    tokens[size + 50 : size + 90] = tokens[100:140]
    matcher = NgramMatcher(1, max_len, min_ngram_size=2, max_ngram_size=5)
    for num_tokens in [size, size + 3, size + 60, size + 75, size + 76]:
        history = History(["a"], tokens[None], np.array([num_tokens]), np.array([size]))
        match = matcher.match(history, None, np.array([5]))
        expected, length = slow_match(tokens[:num_tokens].tolist(), 2, 5, 64, 5)
        assert (match.to_lists()[0], match.match_len[0]) == (expected, length)
    assert matcher.num_table_bytes > 2 << 20
    assert length == 26


def test_a_step_indexes_only_what_is_new():
    """With the entries of the prompt wiped, only the text of later steps is found."""
    matcher = NgramMatcher(1, MAX_LEN, min_ngram_size=2, max_ngram_size=3)
    text = [1, 2, 3, 4, 5, 6]
    match_one(matcher, text)
    matcher._tables[0][:] = 0
    text += [7, 8, 9, 1, 2]
    assert match_one(matcher, text) == ([], 0)
    text += [7, 8]
    assert match_one(matcher, text, max_drafts=2) == ([9, 1], 2)


def test_an_empty_batch():
    matcher = NgramMatcher(1, MAX_LEN, min_ngram_size=2, max_ngram_size=5)
    assert matcher.match(make_history({}, MAX_LEN), None, np.zeros(0, int)).to_lists() == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"min_ngram_size": 0}, "min_ngram_size=0"),
        ({"min_ngram_size": 4, "max_ngram_size": 3}, "max_ngram_size=3"),
        ({"max_num_reqs": 0}, "max_num_reqs=0"),
        ({"max_model_len": 2**31}, "below"),
    ],
)
def test_sizes_out_of_range(changed, message):
    sizes = {"max_num_reqs": 1, "max_model_len": 8, "min_ngram_size": 2, "max_ngram_size": 5}
    with pytest.raises(ValueError, match=message):
        NgramMatcher(**(sizes | changed))


def test_arrays_that_do_not_fit():
    matcher = NgramMatcher(1, 8, min_ngram_size=2, max_ngram_size=5)
    one = np.array([1])
    for token_ids in (np.zeros((1, 8), np.int64), np.zeros((1, 16), np.int32)[:, ::2]):
        with pytest.raises(ValueError, match="C-contiguous int32"):
            matcher.match(History(["a"], token_ids, one, one), None, one)
    with pytest.raises(ValueError, match="not fit"):
        matcher.match(History(["a"], np.zeros((1, 8), np.int32), one * 9, one), None, one)


def test_compiles_where_nothing_can_be_cached(monkeypatch):
    """numba raises this where neither the package's nor the user's folder is writable."""
    from vllm_specplus import _numba

    def njit(*signature, cache=False, nogil):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: (function, nogil)

    monkeypatch.setattr(_numba.nb, "njit", njit)
    assert _numba.compiled()(len) == (len, True)


def probes_of(matcher, tokens, vocab_homes):
    """How many entries past its home each token's entry stands, summed."""
    entries = matcher._tables[0].view(np.uint32)[: matcher._state[0, matcher._index.TABLE_SIZE]].astype(np.int64)
    filled = np.flatnonzero(entries)
    assert len(filled) == len(tokens) - 1  # the last token has none after it
    ended = np.array(tokens)[(entries[filled] & matcher._state[0, matcher._index.POSITION_MASK]) - 1]
    return int(((filled - vocab_homes[ended]) % len(entries)).sum())


def homes_of(matcher, vocab_size, factor):
    """Where the probing for each token of a vocabulary starts, in a table of n-grams of one token."""
    half, table_size = np.uint64(32), np.uint64(matcher._state[0, matcher._index.TABLE_SIZE])
    hashes = (np.arange(vocab_size, dtype=np.uint64) + np.uint64(1)) * factor
    hashes = (hashes ^ (hashes >> half)) * matcher._index._MIX
    return (((hashes >> half) * table_size) >> half).astype(np.int64)


def test_a_prompt_made_for_one_process_costs_nothing_in_another(monkeypatch):
    """Tokens whose entries collide under one factor do not under others, and the drafts are the same."""
    vocab_size, num_tokens = 150_000, 4000
    known = np.uint64(0x9E3779B97F4A7C15)
    factors = [known, np.uint64(ngram.secrets.randbits(64) | 1), ngram._HASH_FACTOR]
    probes, drafts = [], []
    prompt: list[int] = []
    for factor in factors:
        monkeypatch.setattr(ngram, "_HASH_FACTOR", factor)
        matcher = NgramMatcher(1, num_tokens, min_ngram_size=1, max_ngram_size=1)
        if not prompt:
            match_one(matcher, list(range(num_tokens)))  # the tables of this length
            prompt = np.argsort(homes_of(matcher, vocab_size, factor), kind="stable")[:num_tokens].tolist()
            matcher.retain([])
        match_one(matcher, prompt)
        probes.append(probes_of(matcher, prompt, homes_of(matcher, vocab_size, factor)))
        drafts.append(match_one(matcher, [*prompt[:-1], prompt[17]]))
    assert probes[0] > 1000 * num_tokens
    assert max(probes[1:]) < 20 * num_tokens
    assert drafts == [(prompt[18:22], 1)] * 3


def test_each_process_has_its_own_hash_factor():
    code = "from vllm_specplus.proposers import ngram; print(ngram._HASH_FACTOR)"
    factors = [int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) for _ in "ab"]
    assert factors[0] != factors[1]
    assert all(factor % 2 for factor in factors)
