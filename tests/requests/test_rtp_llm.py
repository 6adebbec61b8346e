"""RTP-LLM's forms of a request, over HTTP; vLLM's server and engine are stand-ins."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from tests.requests.stand_ins import CHAT, SECRET, STREAM, TEXT, Check, Server, engine_with, letters, streams
from vllm_specplus.requests.options import HANDOVER_ENTRY
from vllm_specplus.requests.refusal import RefusedRequestError
from vllm_specplus.requests.steps import StepCounter, step_counter
from vllm_specplus.requests.unread_fields import refuse_unread_fields

# (fields of a request, what its reference, mode, limit and counts are)
FORMS: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({"extra_config": {"sp_advice_prompt": "ab", "sp_edit": 0}}, (letters("ab"), False, None, True)),
    ({"extra_config": {"sp_advice_prompt": "ab", "sp_edit": 1}}, (letters("ab"), True, None, True)),
    ({"extra_configs": {"sp_advice_prompt": "ab"}}, (letters("ab"), False, None, True)),
    ({"sp_advice_prompt": "ab", "sp_edit": True}, (letters("ab"), True, None, True)),
    ({"sp_advice_prompt_token_ids": [4, 2]}, ([4, 2], False, None, True)),
    ({"sp_advice_prompt": "ab", "extra_config": {"sp_advice_prompt": "ab"}}, (letters("ab"), False, None, True)),
    ({"sp_advice_prompt": "ab", "vllm_xargs": {"sp_edit": 1}}, (letters("ab"), True, None, True)),
    ({"force_disable_sp_run": True}, (None, False, 0, False)),
    ({"extra_config": {"force_disable_sp_run": 1}}, (None, False, 0, False)),
    ({"spec_tokens": 3}, (None, False, 3, False)),
    ({"extra_config": {"aux_info": True}}, (None, False, None, True)),
]
DEFAULTS = {
    "sp_advice_prompt": "",
    "sp_advice_prompt_token_ids": [],
    "sp_edit": False,
    "force_disable_sp_run": False,
    "force_sp_accept": False,
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "expected"), FORMS)
def test_forms(path: str, stream: bool, fields: dict[str, Any], expected: tuple[Any, ...]) -> None:
    server = Server(streams(STREAM)) if stream else Server()
    got = server.post({"model": "m", "stream": stream, **fields}, path=path)
    assert got.status == 200
    assert server.resolved == [expected]
    assert set(server.body) - {"stream_options"} == {"model", "stream", "vllm_xargs"}
    assert set(server.body["vllm_xargs"]) == {HANDOVER_ENTRY}


@pytest.mark.parametrize("fields", [DEFAULTS, {"extra_config": DEFAULTS}])
def test_the_defaults_ask_nothing(fields: dict[str, Any]) -> None:
    for engine in (None, engine_with(None), engine_with(SimpleNamespace())):
        server = Server(engine=engine)
        assert server.post({"model": "m", **fields}).status == 200
        assert not server.resolved


@pytest.mark.parametrize("name", ["sp_advice_prompt", "spec_tokens", "force_sp_accept", "force_disable_sp_run"])
def test_an_engine_in_which_vllm_drafts_refuses(name: str) -> None:
    server = Server(engine=engine_with(SimpleNamespace()))
    got = server.post({name: SECRET if name == "sp_advice_prompt" else 1})
    assert (got.status, got.json["error"]["param"]) == (400, name)
    assert "no method with which vllm-specplus drafts" in got.json["error"]["message"]
    assert not server.bodies


def test_no_drafts_are_asked_of_an_engine_that_does_not_draft() -> None:
    server = Server(engine=engine_with(None))
    assert server.post({"force_disable_sp_run": True}).status == 200
    assert server.post({"sp_advice_prompt": "ab"}).status == 400


def test_all_drafts_are_accepted_where_the_server_permits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Check, "allows_force_accept", True)
    seen = []
    resolve = Check.resolve
    monkeypatch.setattr(Check, "resolve", lambda *args: seen.append(resolve(*args)) or seen[-1])
    for drafts in (True, False):
        monkeypatch.setattr(Check, "drafts", drafts)
        assert Server().post({"force_sp_accept": True}).status == 200
    assert [options.accepts_all for options in seen] == [True, True]


@pytest.mark.parametrize("speculative_config", [None, SimpleNamespace(), SimpleNamespace(specplus=None)])
@pytest.mark.parametrize("stream", [False, True])
def test_aux_info_where_vllm_drafts(speculative_config: Any, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are counted where vLLM hands the tokens over; here three of them."""
    watch = StepCounter.watch

    def after_three_steps(self: StepCounter, key: str) -> Any:
        steps = watch(self, key)
        steps.num_steps = 3
        return steps

    monkeypatch.setattr(StepCounter, "watch", after_three_steps)
    engine = engine_with(speculative_config)
    server = Server(streams(STREAM), engine=engine) if stream else Server(engine=engine)
    got = server.post({"aux_info": True, "stream": stream})
    assert b'"iter_count":3' in got.body
    assert b'"output_len":10' in got.body
    assert len(step_counter) == 0


def test_the_check_refuses_aux_info_without_the_middleware() -> None:
    params = SimpleNamespace(extra_args={"aux_info": 1})
    with pytest.raises(RefusedRequestError, match="without the middleware"):
        Check.validate_params(params)
    for name, value in (("sp_edit", 2), ("force_sp_accept", True), ("sp_advise_prompt", "x")):
        with pytest.raises(RefusedRequestError, match=name):
            Check.validate_params(SimpleNamespace(extra_args={name: value}))


def restore_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (ChatCompletionRequest, CompletionRequest):
        monkeypatch.setattr(kind, "to_sampling_params", kind.to_sampling_params)


@pytest.mark.parametrize("place", ["top", "extra_config", "extra_configs"])
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sp_advice_prompt": SECRET}, "sp_advice_prompt"),
        ({"sp_advice_prompt_token_ids": [4]}, "sp_advice_prompt_token_ids"),
        ({"sp_advice_prompt_token_ids": ["too many of them"] * 801}, "has 801 elements"),
        ({"force_disable_sp_run": True}, "force_disable_sp_run"),
        ({"force_sp_accept": True}, "force_sp_accept"),
        ({"aux_info": True}, "aux_info"),
        ({"spec_tokens": 0}, "spec_tokens"),
        ({"sp_edit": 3}, "sp_edit"),
        ({"sp_advise_prompt": SECRET}, "sp_advise_prompt"),
    ],
)
@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_a_server_without_the_middleware_refuses_what_it_would_ignore(
    kind: Any, fields: dict[str, Any], name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore_afterwards(monkeypatch)
    refuse_unread_fields(100)
    refuse_unread_fields(100)
    text = {"prompt": "x"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    sent = kind(model="m", **text, **(fields if place == "top" else {place: fields}))
    with pytest.raises(RefusedRequestError) as caught:
        sent.to_sampling_params(4, {})
    assert caught.value.parameter in fields
    assert name in str(caught.value)
    assert SECRET not in str(caught.value)
    for passing in (DEFAULTS, {"prediction": {"type": "content", "content": "y"}}, {"another_plugins": 1}):
        assert kind(model="m", **text, **passing).to_sampling_params(4, {}).max_tokens == 4


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
@pytest.mark.parametrize("fields", [{"aux_info": 1}, {"spec_tokens": 0}, {"sp_edit": 3}])
def test_xargs_that_no_check_reads(kind: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    text = {"prompt": "x"} if kind is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    sent = kind(model="m", **text, vllm_xargs=fields)
    with monkeypatch.context() as patches:
        restore_afterwards(patches)
        refuse_unread_fields(100)
        assert sent.to_sampling_params(4, {}).extra_args == fields
    restore_afterwards(monkeypatch)
    refuse_unread_fields(100, reads_xargs=False)
    with pytest.raises(RefusedRequestError, match=next(iter(fields))):
        sent.to_sampling_params(4, {})
    # What the middleware hands over passes.
    handed = kind(model="m", **text, vllm_xargs={HANDOVER_ENTRY: "k"})
    assert handed.to_sampling_params(4, {}).extra_args == {HANDOVER_ENTRY: "k"}


def test_offline_aux_info_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Check, "is_server", False)
    params = SimpleNamespace(extra_args={"aux_info": True})
    Check.validate_params(params)
    assert params.extra_args["aux_info"] is True
