import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from arctic_inference.suffix_decoding import SuffixDecodingCache
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

from tests.proposers.reference import make_history
from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.proposers import HybridDrafter, SuffixMatcher

MAX_LEN = 256


def make_matcher(**changes):
    """A matcher with vLLM's defaults, but for `changes`."""
    defaults = SpecPlusOptions(method="suffix", num_speculative_tokens=1).suffix_matcher
    return SuffixMatcher(**defaults | changes)


def match_one(matcher, req_id, prompt, output, drafts=None, max_drafts=4):
    history = make_history({req_id: [*prompt, *output]}, MAX_LEN, len(prompt))
    model_drafts = None if drafts is None else np.array([drafts])
    return matcher.match(history, model_drafts, np.array([max_drafts]))


def vllm_proposer(max_cached_requests):
    """vLLM's own proposer, without the config objects that its constructor wants."""
    proposer = object.__new__(SuffixDecodingProposer)
    proposer.num_speculative_tokens = 5
    proposer.max_tree_depth = 12
    proposer.max_spec_factor = 2.0
    proposer.min_token_prob = 0.1
    proposer.max_model_len = MAX_LEN
    proposer.suffix_cache = SuffixDecodingCache(12, max_cached_requests)
    return proposer


@pytest.mark.parametrize("max_cached_requests", [0, 3, 1000])
def test_alone_it_drafts_what_vllms_proposer_drafts(max_cached_requests):
    """Requests come and go, and the cache is too small for them in one of the cases."""
    rng = np.random.default_rng(0)
    theirs = vllm_proposer(max_cached_requests)
    ours = make_matcher(max_tree_depth=12, max_cached_requests=max_cached_requests, max_spec_factor=2.0)
    texts, num_drafts = {}, 0
    for step in range(60):
        if step % 6 == 0:
            texts = dict(list(texts.items())[2:])
            texts |= {f"{step}-{k}": rng.integers(0, 4, 20).tolist() for k in range(2)}
        new = [rng.integers(0, 4, rng.integers(1, 4)).tolist() for _ in texts]
        texts = {req_id: text + more for (req_id, text), more in zip(texts.items(), new, strict=True)}
        history = make_history(texts, MAX_LEN, 20)
        batch = SimpleNamespace(
            req_ids=history.req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(texts)},
            num_tokens_no_spec=history.num_tokens,
            num_prompt_tokens=history.num_prompt_tokens,
            token_ids_cpu=history.token_ids,
        )
        expected = theirs.propose(5, batch, new)
        assert ours.match(history, None, np.full(len(texts), 5)).to_lists() == expected
        ours.retain(texts)
        num_drafts += sum(map(len, expected))
    assert num_drafts > 100


def test_model_drafts_extend_the_context_and_are_not_remembered():
    matcher = make_matcher()
    prompt = [1, 2, 3, 4, 5, 6]
    first = match_one(matcher, "a", prompt, [9], drafts=[2, 3], max_drafts=2)
    assert first.to_lists() == [[4, 5]]
    assert match_one(matcher, "a", prompt, [9, 9]).to_lists()[0][:2] != [2, 3]


@pytest.mark.parametrize(("limit", "num_cached"), [(-1, 40), (7, 7), (0, 0)])
def test_cached_responses(limit, num_cached):
    matcher = make_matcher(max_cached_requests=limit)
    for k in range(40):
        match_one(matcher, f"{k}", [k], [100 + k, 200 + k, 300 + k])
        matcher.retain([])
    assert matcher.num_cached_requests == num_cached
    drafts = match_one(matcher, "new", [0], [5, 100, 200]).to_lists()[0]
    assert drafts == ([300] if limit == -1 else [])


def test_tokens_of_cached_responses_are_bounded():
    """The oldest response goes first, a running one too; the drafts of what is left stay."""
    matcher = make_matcher(max_cached_tokens=100)
    for k in range(40):
        match_one(matcher, f"{k}", [k], [1000 * k + j for j in range(30)])
        assert matcher.num_cached_tokens == 30 * min(k + 1, 3)
        matcher.retain([])
    assert matcher.num_cached_requests == 3
    assert match_one(matcher, "new", [7], [5, 36000, 36001]).to_lists() == [[]]
    assert match_one(matcher, "newer", [7], [6, 39000, 39001]).to_lists()[0][0] == 39002


def test_a_response_longer_than_the_bound_is_not_kept():
    matcher = make_matcher(max_cached_tokens=100)
    output = []
    for _ in range(20):
        output += range(len(output), len(output) + 10)
        match_one(matcher, "a", [9999], output)
        assert matcher.num_cached_tokens == (len(output) if len(output) <= 100 else 0)
    # Its own text goes on drafting for it.
    assert match_one(matcher, "a", [9999], [*output, 3, 4]).to_lists()[0][0] == 5
    matcher.retain([])
    assert (matcher.num_cached_requests, matcher.num_scopes) == (0, 0)


@pytest.mark.parametrize("limit", [0, -1])
def test_no_cached_tokens_and_no_limit(limit):
    matcher = make_matcher(max_cached_tokens=limit)
    for k in range(40):
        match_one(matcher, f"{k}", [k], [100 + k, 200 + k, 300 + k])
        matcher.retain([])
    assert matcher.num_cached_tokens == (120 if limit else 0)


def test_a_request_without_output_is_left_for_later():
    matcher = make_matcher()
    assert match_one(matcher, "a", [1, 2, 3, 1, 2], []).to_lists() == [[]]
    assert match_one(matcher, "a", [1, 2, 3, 1], [2]).to_lists()[0][0] == 3


def test_tokens_are_cached_even_if_no_drafts_are_wanted():
    matcher = make_matcher()
    assert match_one(matcher, "a", [1], [7, 8, 9], max_drafts=0).to_lists() == [[]]
    assert match_one(matcher, "b", [2], [5, 7, 8]).to_lists()[0][0] == 9


@pytest.mark.parametrize(
    ("prompt", "output"),
    [
        pytest.param([1, 2, 3], [7, 7, 7, 7, 7], id="other content"),
        pytest.param([1, 2, 3], [4, 4], id="shorter"),
        pytest.param([1], [2, 3, 4, 5, 6, 9], id="other prompt length"),
    ],
)
def test_a_reused_id_starts_anew(prompt, output):
    """Its own drafts, and those that another request gets from it, are as if it were new."""
    answers = []
    for matcher in (make_matcher(), make_matcher()):
        if not answers:
            match_one(matcher, "a", [1, 2, 3], [4, 5, 6])
        own = match_one(matcher, "a", prompt, output)
        other = match_one(matcher, "b", [8], [9, 2])
        answers.append([(m.to_lists(), m.match_len.tolist()) for m in (own, other)])
        assert matcher.num_cached_requests == 2
    assert answers[0] == answers[1]


def test_hybrid_override_reaches_the_suffix_matchers_cap():
    drafter = HybridDrafter(
        make_matcher(max_tree_depth=8),
        num_model_steps=1,
        num_speculative_tokens=1,
        match_override_len=7,
    )
    text = [*range(20), *range(12)]
    history = make_history({"a": text}, MAX_LEN, 20)
    drafts = drafter.draft(history, np.array([[99]]), np.array([1]))
    assert (drafts.token_ids, drafts.num_model.tolist()) == ([[12]], [0])
    with pytest.raises(ValueError, match="at most 7"):
        HybridDrafter(
            make_matcher(max_tree_depth=8),
            num_model_steps=1,
            num_speculative_tokens=1,
            match_override_len=8,
        )


def test_without_arctic_inference(monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(ImportError, match=r"docs/index\.md"):
        make_matcher()


def test_limit_below_unlimited():
    with pytest.raises(ValueError, match="max_cached_requests=-2"):
        make_matcher(max_cached_requests=-2)
    with pytest.raises(ValueError, match="max_cached_tokens=-2"):
        make_matcher(max_cached_tokens=-2)


def match_in(matcher, scope, req_id, prompt, output):
    """The drafts of a request of that scope."""
    history = make_history({req_id: [*prompt, *output]}, MAX_LEN, len(prompt))
    history = replace(history, scopes=[scope])
    return matcher.match(history, None, np.array([4])).to_lists()[0]


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("scope", ["x", "", None])
def test_drafts_come_from_requests_of_the_same_scope_alone(scope, runs):
    """Whether the other request runs or has ended."""
    matcher = make_matcher()
    match_in(matcher, scope, "a", [1, 2], [7, 8, 9, 10])
    if not runs:
        matcher.retain([])
    for other in {"x", "y", "", None}:
        drafts = match_in(matcher, other, f"b{other}", [3], [4, 7, 8])
        assert drafts == ([9, 10] if other == scope is not None else [])
    # In its own text each request is matched, whatever its scope.
    assert match_in(matcher, scope, "c", [5, 6, 7], [1, 5])[0] == 6


def test_scopes_are_bounded_together_and_the_oldest_response_goes_first():
    matcher = make_matcher(max_cached_requests=3)
    for k in range(12):
        match_in(matcher, f"scope {k % 5}", f"{k}", [k], [100 + k, 200 + k, 300 + k])
        matcher.retain([])
        assert matcher.num_cached_requests == matcher.num_scopes == min(k + 1, 3)
    # A request that asks takes the place of the oldest: the answer of request 9 goes, and the next ones stay.
    asked = [match_in(matcher, f"scope {k % 5}", "new", [0], [5, 100 + k, 200 + k]) for k in (10, 11, 8)]
    assert asked == [[310], [311], []]


def test_a_scope_whose_requests_run_stays_when_their_responses_are_evicted():
    matcher = make_matcher(max_cached_requests=1)
    match_in(matcher, "x", "a", [1, 2, 3], [1])
    match_in(matcher, "y", "b", [4], [5])
    assert (matcher.num_cached_requests, matcher.num_scopes) == (1, 2)
    assert match_in(matcher, "x", "a", [1, 2, 3], [1, 2])[0] == 3
    matcher.retain(["b"])
    assert matcher.num_scopes == 1


def test_a_reused_id_may_have_another_scope():
    matcher = make_matcher()
    match_in(matcher, "x", "a", [1], [7, 8, 9])
    match_in(matcher, "y", "a", [2], [4, 5, 6])
    assert (matcher.num_cached_requests, matcher.num_scopes) == (1, 1)
    assert match_in(matcher, "x", "b", [3], [7, 8]) == []
    assert match_in(matcher, "y", "c", [3], [4, 5]) == [6]
