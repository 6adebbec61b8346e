"""What requests may write in the plugin's keys, and how it travels to the workers."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_specplus.requests.options import (
    HANDED_OVER,
    KEYS,
    CarriedOptions,
    RequestError,
    RequestOptions,
    handed_over,
    parse,
)

SECRET = "def secret(): return 42"
PREDICTION = {"type": "content", "content": SECRET}
PARTS = PREDICTION | {"content": [{"type": "text", "text": text} for text in ("def secret(): ", "return 42")]}
REFERENCES = {
    "prediction": PREDICTION,
    "sp_advice_prompt": SECRET,
    "sp_advice_prompt_token_ids": [5, 0, 2**31 - 1],
}


def plain(options: RequestOptions | None) -> tuple[Any, ...] | None:
    """Text, token ids, mode, limit."""
    if options is None:
        return None
    assert options.token_ids is None or options.token_ids.dtype == np.int32
    token_ids = None if options.token_ids is None else options.token_ids.tolist()
    return options.text, token_ids, options.edit, options.max_drafts


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"prediction": PREDICTION}, (SECRET, None, True, None)),
        ({"prediction": PARTS}, (SECRET, None, True, None)),
        ({"prediction": {"type": "content", "content": ""}}, ("", None, True, None)),
        ({"prediction": {"type": "content", "content": []}}, ("", None, True, None)),
        ({"sp_advice_prompt": SECRET}, (SECRET, None, False, None)),
        ({"sp_advice_prompt": ""}, ("", None, False, None)),
        ({"sp_advice_prompt_token_ids": [5, 0, 2**31 - 1]}, (None, [5, 0, 2**31 - 1], False, None)),
        ({"sp_advice_prompt_token_ids": []}, (None, [], False, None)),
        ({"spec_tokens": 0}, (None, None, False, 0)),
        ({"spec_tokens": 7}, (None, None, False, 7)),
        ({"sp_edit": 0}, (None, None, False, None)),
        ({"sp_advice_prompt": SECRET, "sp_edit": True}, (SECRET, None, True, None)),
        ({"prediction": {"type": "content", "content": SECRET}, "sp_edit": False}, (SECRET, None, False, None)),
        ({"sp_advice_prompt": SECRET, "sp_edit": 1, "spec_tokens": 3}, (SECRET, None, True, 3)),
    ],
)
def test_what_each_key_asks(given: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert plain(parse(given)) == expected


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("edit", [0, 1])
def test_a_stated_mode_wins(name: str, edit: int) -> None:
    options = parse({name: REFERENCES[name], "sp_edit": edit})
    assert options is not None
    assert options.edit is bool(edit)


def test_what_is_not_of_the_keys_is_left_to_others() -> None:
    foreign = {"my_key": object(), HANDED_OVER: 3, "": [SECRET]}
    assert parse({}) is None
    assert parse(foreign) is None
    assert plain(parse(foreign | {"spec_tokens": 2})) == (None, None, False, 2)


def test_none_is_not_given() -> None:
    nothing = dict.fromkeys(KEYS)
    assert parse(nothing) is None
    for name, reference in REFERENCES.items():
        assert plain(parse(nothing | {name: reference})) == plain(parse({name: reference}))


WRONG = {
    "prediction": [
        SECRET,
        [SECRET],
        {},
        {"content": SECRET},
        {"type": "content"},
        {"type": "text", "content": SECRET},
        {"type": "content", "content": 3},
        {"type": "content", "content": [SECRET]},
        {"type": "content", "content": [{"type": "content", "text": SECRET}]},
        {"type": "content", "content": [{"type": "text", "text": SECRET}, {"type": "text"}]},
    ],
    "sp_advice_prompt": [3, True, [SECRET], {"text": SECRET}],
    "sp_advice_prompt_token_ids": [SECRET, 3, ["3"], [SECRET], [1.0], [True], [None], [3, -1], [2**31]],
    "sp_edit": [2, -1, "1", "no", [], 1.0],
    "spec_tokens": [-1, 1.0, "1", True, 2**31, [1], "x" * 1000],
}
NESTED: list[Any] = []
for _ in range(5000):
    NESTED = [NESTED]
ALLOWED = {
    "prediction": '{"type": "content", "content": text',
    "sp_advice_prompt": "must be text",
    "sp_advice_prompt_token_ids": "a list of token ids",
    "sp_edit": "0 or 1",
    "spec_tokens": "an integer of 0 or more",
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_that_is_not_allowed(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse({"spec_tokens": 3, "other": SECRET} | {name: value})
    message = str(caught.value)
    assert caught.value.field == name
    assert message.startswith(name)
    assert ALLOWED[name] in message
    assert "secret" not in message
    assert len(message) < 200
    if name in ("sp_edit", "spec_tokens"):
        assert f"{name}={json.dumps(value):.20}" in message


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        pytest.param(10**5000, "<int>", id="long"),
        pytest.param(NESTED, "<list>", id="deep"),
        pytest.param(object(), "<object>", id="strange"),
    ],
)
def test_a_value_that_cannot_be_shown(value: Any, shown: str) -> None:
    with pytest.raises(RequestError, match=f"spec_tokens={shown} is not allowed"):
        parse({"spec_tokens": value})


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 2), (1, 2)])
def test_a_request_has_one_reference(one: int, other: int) -> None:
    names = [list(REFERENCES)[i] for i in (one, other)]
    with pytest.raises(RequestError, match="one reference") as caught:
        parse({name: REFERENCES[name] for name in names})
    assert caught.value.field in names
    assert all(name in str(caught.value) for name in names)
    assert "secret" not in str(caught.value)


def test_walking_needs_a_reference() -> None:
    with pytest.raises(RequestError, match="sp_edit=1 is not allowed") as caught:
        parse({"sp_edit": 1, "spec_tokens": 2, "prediction": None})
    assert caught.value.field == "sp_edit"
    assert all(name in str(caught.value) for name in REFERENCES)


WORDS = st.sampled_from(["type", "content", "text"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=3)
        | st.builds(lambda content: {"type": "content", "content": content}, inner)
    ),
    max_leaves=6,
)


def attempt(given: dict[str, Any]) -> tuple[RequestOptions | None, RequestError | None]:
    try:
        return parse(given), None
    except RequestError as error:
        return None, error


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), JSON, max_size=5))
@example({"prediction": {"type": "content", "content": [{"type": "text", "text": "\ud800"}]}})
@example({"spec_tokens": 10**1000})
@example({"sp_advice_prompt_token_ids": [-(10**1000)]})
def test_any_json_is_read_or_refused(given: dict[str, Any]) -> None:
    options, error = attempt(given)
    if error is not None:
        assert error.field in KEYS
        assert str(error).startswith(KEYS)
        return
    assert (options is None) == all(given.get(key) is None for key in KEYS)
    if options is not None:
        assert options.text is None or options.token_ids is None
        assert options.token_ids is None or options.token_ids.dtype == np.int32


@pytest.mark.parametrize(
    ("carried", "token_ids"),
    [
        (CarriedOptions(), None),
        (CarriedOptions(np.array([3, 0, 2**31 - 1], np.int32), True, 5, "a-key"), [3, 0, 2**31 - 1]),
        (CarriedOptions(np.array([], np.int32), max_drafts=0), []),
    ],
)
def test_what_is_carried_arrives(carried: CarriedOptions, token_ids: list[int] | None) -> None:
    """As it is where there is one process, and through msgpack where there are more."""
    for encoded in (carried.encode(), msgspec.msgpack.decode(msgspec.msgpack.encode(carried.encode()))):
        arrived = CarriedOptions.decode(encoded)
        assert (arrived.edit, arrived.max_drafts, arrived.key) == (carried.edit, carried.max_drafts, carried.key)
        if token_ids is None:
            assert arrived.token_ids is None
        else:
            assert arrived.token_ids is not None
            assert arrived.token_ids.dtype == np.int32
            assert arrived.token_ids.tolist() == token_ids


def test_what_is_handed_over_is_there_until_it_is_dropped() -> None:
    before, options = len(handed_over), CarriedOptions(max_drafts=1)
    handed_over.put("one", options)
    try:
        assert len(handed_over) == before + 1
        assert handed_over.get("one") is options
    finally:
        handed_over.drop("one")
    handed_over.drop("one")
    assert len(handed_over) == before
    assert handed_over.get("one") is None


@pytest.mark.parametrize("key", ["unknown", None, 3, ["one"], {}])
def test_nothing_is_handed_over_under_other_keys(key: Any) -> None:
    assert handed_over.get(key) is None


@pytest.mark.parametrize(
    "given", [{"sp_advice_prompt": "ab\ud800"}, {"prediction": {"type": "content", "content": "\udfff"}}]
)
def test_text_that_no_tokenizer_takes(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="is half of a surrogate pair") as refused:
        parse(given)
    assert refused.value.field in given
