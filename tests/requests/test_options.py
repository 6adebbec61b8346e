"""The plugin's keys as requests write them, and the options as the workers get them."""

import json
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_specplus.requests import options as options_module
from vllm_specplus.requests.options import (
    KEYS,
    RequestError,
    RequestOptions,
    ResolvedOptions,
    parse_options,
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
    return options.text, options.sp_advice_prompt_token_ids, options.edit, options.max_drafts


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"prediction": PREDICTION}, (SECRET, None, True, None)),
        ({"prediction": PARTS}, (SECRET, None, True, None)),
        ({"prediction": {"type": "content", "content": ""}}, ("", None, True, None)),
        ({"prediction": {"type": "content", "content": []}}, ("", None, True, None)),
        ({"sp_advice_prompt": SECRET}, (SECRET, None, False, None)),
        ({"sp_advice_prompt": SECRET, "sp_advice_prompt_token_ids": []}, (SECRET, [], False, None)),
        ({"sp_advice_prompt_token_ids": [5, 0, 2**31 - 1]}, (None, [5, 0, 2**31 - 1], False, None)),
        ({"spec_tokens": 0}, (None, None, False, 0)),
        ({"spec_tokens": 7}, (None, None, False, 7)),
        ({"force_disable_sp_run": True}, (None, None, False, 0)),
        ({"force_disable_sp_run": 1, "spec_tokens": 3}, (None, None, False, 0)),
        ({"force_sp_accept": True}, (None, None, False, None)),
        ({"aux_info": 1}, (None, None, False, None)),
        # RTP-LLM's defaults, which its clients may send along.
        (
            {"sp_advice_prompt": "", "sp_advice_prompt_token_ids": [], "sp_edit": False, "spec_tokens": None}
            | {"force_disable_sp_run": False, "force_sp_accept": False, "aux_info": False},
            None,
        ),
        ({"sp_advice_prompt": SECRET, "sp_edit": True}, (SECRET, None, True, None)),
        ({"prediction": {"type": "content", "content": SECRET}, "sp_edit": False}, (SECRET, None, False, None)),
        ({"sp_advice_prompt": SECRET, "sp_edit": 1, "spec_tokens": 3}, (SECRET, None, True, 3)),
    ],
)
def test_what_each_key_asks(given: dict[str, Any], expected: tuple[Any, ...] | None) -> None:
    assert plain(parse_options(given)) == expected


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("edit", [0, 1])
def test_a_stated_mode_wins(name: str, edit: int) -> None:
    options = parse_options({name: REFERENCES[name], "sp_edit": edit})
    assert options is not None
    assert options.edit is bool(edit)


def test_what_is_not_of_the_keys_is_left_to_others() -> None:
    foreign = {"my_key": object(), "specplus_key": 3, "": [SECRET]}
    assert parse_options({}) is None
    assert parse_options(foreign) is None
    assert plain(parse_options(foreign | {"spec_tokens": 2})) == (None, None, False, 2)


def test_none_is_not_given() -> None:
    nothing = dict.fromkeys(KEYS)
    assert parse_options(nothing) is None
    for name, reference in REFERENCES.items():
        assert plain(parse_options(nothing | {name: reference})) == plain(parse_options({name: reference}))


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
        parse_options({"spec_tokens": 3, "other": SECRET} | {name: value})
    message = str(caught.value)
    assert caught.value.field == name
    assert message.startswith(name)
    assert ALLOWED[name] in message
    assert "secret" not in message
    assert len(message) < 200
    if name in ("sp_edit", "spec_tokens"):
        shown = json.dumps(value) if isinstance(value, int | float | None) else f"<{type(value).__name__}>"
        assert f"{name}={shown} is" in message or f"{name}={json.dumps(value)} is" in message


@pytest.mark.parametrize("value", [SECRET * 2, [SECRET], {SECRET: 1}])
def test_a_text_in_the_wrong_field(value: Any) -> None:
    with pytest.raises(RequestError, match=f"spec_tokens=<{type(value).__name__}> is not allowed: it must be"):
        parse_options({"spec_tokens": value})


@pytest.mark.parametrize("wrong", ["", None, {}, [], -1])
def test_of_many_wrong_elements_the_first_is_enough(wrong: Any) -> None:
    """An error for each of a million takes ten seconds."""
    for value in (
        {"sp_advice_prompt_token_ids": [wrong] * 1000},
        {"prediction": {"type": "content", "content": [wrong] * 1000}},
    ):
        with pytest.raises(ValidationError) as caught:
            RequestOptions.model_validate(value)
        assert caught.value.error_count() <= 4


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
        parse_options({"spec_tokens": value})


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 2), (1, 2)])
def test_a_request_has_one_reference(one: int, other: int) -> None:
    names = [list(REFERENCES)[i] for i in (one, other)]
    with pytest.raises(RequestError, match="one reference") as caught:
        parse_options({name: REFERENCES[name] for name in names})
    assert caught.value.field in names
    assert all(name in str(caught.value) for name in names)
    assert "secret" not in str(caught.value)


def test_walking_needs_a_reference() -> None:
    with pytest.raises(RequestError, match="sp_edit=1 is not allowed") as caught:
        parse_options({"sp_edit": 1, "spec_tokens": 2, "prediction": None})
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
        return parse_options(given), None
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
        assert error.field in KEYS or error.field.lower().startswith(("sp", '"sp', "force_"))
        assert str(error).startswith(error.field)
        return
    assert (options is None) == all(given.get(key) in (None, False, "", []) for key in KEYS if key != "spec_tokens") * (
        given.get("spec_tokens") is None
    )
    if options is not None:
        assert options.text is None or not options.sp_advice_prompt_token_ids


@pytest.mark.parametrize(
    ("sent", "token_ids"),
    [
        (ResolvedOptions(), None),
        (
            ResolvedOptions(
                token_ids=np.array([3, 0, 2**31 - 1], np.int32), edit=True, max_drafts=5, counts_key="a-key"
            ),
            [3, 0, 2**31 - 1],
        ),
        (ResolvedOptions(token_ids=np.array([], np.int32), max_drafts=0), []),
    ],
)
def test_resolved_options_arrive(sent: ResolvedOptions, token_ids: list[int] | None) -> None:
    """Within one process as plain values, and through msgpack to others."""
    for wire in (sent.to_wire(), msgspec.msgpack.decode(msgspec.msgpack.encode(sent.to_wire()))):
        arrived = ResolvedOptions.from_wire(wire)
        assert arrived is not None
        assert (arrived.edit, arrived.max_drafts, arrived.counts_key) == (sent.edit, sent.max_drafts, sent.counts_key)
        if token_ids is None:
            assert arrived.token_ids is None
        else:
            assert arrived.token_ids is not None
            assert arrived.token_ids.dtype == np.int32
            assert arrived.token_ids.tolist() == token_ids


@pytest.mark.parametrize(
    "given", [{"sp_advice_prompt": "ab\ud800"}, {"prediction": {"type": "content", "content": "\udfff"}}]
)
def test_text_that_no_tokenizer_takes(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="is half of a surrogate pair") as refused:
        parse_options(given)
    assert refused.value.field in given


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("sp_advise_prompt", "sp_advice_prompt"),
        ("sp_advice_prompt_tokens", "sp_advice_prompt_token_ids"),
        ("sp_edits", "sp_edit"),
        ("sp-edit", "sp_edit"),
        ("SP_EDIT", "sp_edit"),
        ("spedit", "sp_edit"),
        ("spec_token", "spec_tokens"),
        ("spectokens", "spec_tokens"),
        ("specTokens", "spec_tokens"),
        ("sp_type", None),
        ("sp_", "sp_edit"),
        ("sp", None),
        ("special_tokens", "spec_tokens"),
        ("split_tokens", "spec_tokens"),
        ("speaker", None),
        ("Speed", "sp_edit"),
        ("specplus_keys", "spec_tokens"),
    ],
)
@pytest.mark.parametrize("value", [SECRET, None])
def test_an_unknown_key_is_refused_with_the_nearest_name(name: str, meant: str | None, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse_options({"spec_tokens": 3, name: value})
    message = str(caught.value)
    assert "secret" not in message
    assert message.startswith(f"{caught.value.field} is not allowed: unknown key; ")
    assert caught.value.field.strip('"') == name
    assert (f"did you mean {meant}? " in message) == (meant is not None)
    assert ("did you mean" in message) == (meant is not None)
    assert message.endswith(f"Allowed: {', '.join(KEYS)}")


@pytest.mark.parametrize("name", ["sp_\n" + "x" * 1000, "sp_" + "x" * 1000])
def test_a_long_key_is_cut_in_the_message(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a name sought that it may stand for, which takes a second for two million letters."""
    monkeypatch.delattr(options_module, "nearest")
    with pytest.raises(RequestError) as caught:
        parse_options({name: 1})
    assert len(caught.value.field) <= 80
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "specplus",
        "specplus_key",
        "my_speaker",
        "s",
        "s_p",
        "",
        3,
        None,
    ],
)
def test_a_key_of_another_is_left_alone(name: Any) -> None:
    assert parse_options({name: 3}) is None


SCRIPT = """
import sys
import vllm_specplus.requests.options
heavy = {"starlette", "fastapi", "vllm", "torch"} & set(sys.modules)
assert not heavy, heavy
print("light")
"""


def test_workers_load_no_web_framework() -> None:
    """They import the options; the middleware is imported when somebody asks for it."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout.strip() == "light", done.stderr
