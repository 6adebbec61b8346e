import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.proposers.reference import make_history, slow_match
from vllm_specplus.proposers import HybridDrafter, NgramMatcher

MAX_LEN = 64


@settings(max_examples=200)
@given(st.data())
def test_equals_the_definition(data):
    """Append and override over several steps, against the slow n-gram reference."""
    tokens = st.integers(0, data.draw(st.integers(1, 3)))
    num_steps = data.draw(st.integers(1, 3))
    width = num_steps + data.draw(st.integers(0, 4))
    override_len = data.draw(st.integers(0, 6))
    matcher = NgramMatcher(3, MAX_LEN, min_ngram_size=2, max_ngram_size=3)
    drafter = HybridDrafter(
        matcher,
        num_model_steps=num_steps,
        num_speculative_tokens=width,
        match_override_len=override_len,
    )
    texts = {"a": [], "b": [], "c": []}
    for _ in range(data.draw(st.integers(1, 4))):
        for text in texts.values():
            text.extend(data.draw(st.lists(tokens, max_size=10)))
        model = [data.draw(st.lists(tokens, min_size=num_steps, max_size=num_steps)) for _ in texts]
        max_drafts = [data.draw(st.integers(0, width + 1)) for _ in texts]
        drafts = drafter.draft(make_history(texts, MAX_LEN), np.array(model), np.array(max_drafts, np.int32))
        for i, text in enumerate(texts.values()):
            limit = min(max_drafts[i], width)
            alone, length = slow_match(text, 2, 3, 64, limit)
            if override_len and alone and length >= override_len:
                expected, num_model = alone, 0
            else:
                num_model = min(num_steps, limit)
                more, _ = slow_match(text + model[i], 2, 3, 64, max(0, limit - num_steps))
                expected = model[i][:num_model] + more
            assert drafts.token_ids[i] == expected
            assert drafts.num_model[i] == num_model


def test_the_match_goes_on_from_the_models_drafts():
    """History alone would draft 9; with the model's draft 3 the match goes on with 4, 5."""
    matcher = NgramMatcher(1, MAX_LEN, min_ngram_size=2, max_ngram_size=4)
    drafter = HybridDrafter(matcher, num_model_steps=1, num_speculative_tokens=3)
    history = make_history({"a": [1, 2, 3, 4, 5, 1, 2, 9, 1, 2]}, MAX_LEN)
    drafts = drafter.draft(history, np.array([[3]]), np.array([3]))
    assert drafts.token_ids == [[3, 4, 5]]
    assert drafts.num_model.tolist() == [1]


@pytest.mark.parametrize(
    ("override_len", "expected", "num_model"),
    [(0, [8, 8], 2), (3, [4, 5, 6], 0), (4, [8, 8], 2)],
)
def test_override_from_the_threshold_on(override_len, expected, num_model):
    """The history's match has three tokens; nothing follows the model's drafts."""
    matcher = NgramMatcher(1, MAX_LEN, min_ngram_size=2, max_ngram_size=2)
    drafter = HybridDrafter(matcher, num_model_steps=2, num_speculative_tokens=3, match_override_len=override_len)
    history = make_history({"a": [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]}, MAX_LEN)
    drafts = drafter.draft(history, np.array([[8, 8]]), np.array([3]))
    # Both of the model's tokens are 8, which repeats nothing of two tokens.
    assert drafts.token_ids == [expected]
    assert drafts.num_model.tolist() == [num_model]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"num_model_steps": 0}, "num_model_steps=0"),
        ({"num_model_steps": 4}, "num_speculative_tokens=3"),
        ({"match_override_len": -1}, "match_override_len=-1"),
        ({"match_override_len": 65}, "at most 64"),
    ],
)
def test_settings_out_of_range(settings_, message):
    matcher = NgramMatcher(1, MAX_LEN, min_ngram_size=2, max_ngram_size=4)
    with pytest.raises(ValueError, match=message):
        HybridDrafter(matcher, **({"num_model_steps": 1, "num_speculative_tokens": 3} | settings_))


def test_model_drafts_of_another_shape():
    matcher = NgramMatcher(1, MAX_LEN, min_ngram_size=2, max_ngram_size=4)
    drafter = HybridDrafter(matcher, num_model_steps=2, num_speculative_tokens=3)
    with pytest.raises(ValueError, match="model_drafts has shape"):
        drafter.draft(make_history({"a": [1]}, MAX_LEN), np.array([[1]]), np.array([3]))
