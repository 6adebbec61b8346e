"""RTP-LLM's requests to `vllm serve`, streaming and not: where the plugin drafts, and where vLLM does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.serving import Server, serve

GREEDY: dict[str, Any] = {"model": "tiny", "prompt": "def add(a, b):\n    return a", "temperature": 0, "max_tokens": 40}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "def add"}], "temperature": 0}
CHAT |= {"max_tokens": 40}

# Requests that only the middleware can read, and the field that an error names.
UNREAD: list[tuple[dict[str, Any], str]] = [
    ({"sp_advice_prompt": "x"}, "sp_advice_prompt"),
    ({"extra_config": {"sp_advice_prompt": "x", "sp_edit": 1}}, "sp_advice_prompt"),
    ({"aux_info": True}, "aux_info"),
    ({"extra_config": {"aux_info": True}}, "aux_info"),
    ({"force_disable_sp_run": True}, "force_disable_sp_run"),
    ({"force_sp_accept": True}, "force_sp_accept"),
]


# The stand-in key of the test servers' clients.
KEY = "none"


@pytest.fixture(scope="module")
def deterministic(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = json.dumps({"sp_type": "deterministic", "gen_num_per_cycle": 8})
    folder = tmp_path_factory.mktemp("deterministic")
    options = ["--speculative-config", config, "--api-key", "other", KEY]
    with serve(trained, folder, *options, VLLM_PLUGINS="specplus") as running:
        yield running


@pytest.fixture(scope="module")
def of_vllm(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # The plugin's key asks for what vLLM does by itself.
    config = json.dumps({"method": "mtp", "num_speculative_tokens": 2, "num_model_steps": 2})
    folder = tmp_path_factory.mktemp("mtp")
    with serve(trained, folder, "--speculative-config", config, VLLM_PLUGINS="specplus") as running:
        yield running


def refusal(
    client: openai.OpenAI, fields: dict[str, Any], stream: bool, route: str = "completions"
) -> openai.BadRequestError:
    create = client.completions.create if route == "completions" else client.chat.completions.create
    body = GREEDY if route == "completions" else CHAT
    with pytest.raises(openai.BadRequestError) as caught:
        list(create(**body, stream=stream, extra_body=fields))
    return caught.value


@pytest.mark.parametrize("place", ["top", "extra_config"])
def test_the_advice_drafts(deterministic: Server, place: str) -> None:
    client = deterministic.client()
    plain = client.completions.create(**GREEDY, extra_body={"ignore_eos": True, "aux_info": True})
    # Nothing drafts without an advice: a step a token.
    assert plain.aux_info["iter_count"] == plain.aux_info["output_len"] == 40
    advice = {"sp_advice_prompt": plain.choices[0].text, "sp_edit": 0, "aux_info": True}
    body = {"ignore_eos": True} | (advice if place == "top" else {"extra_config": advice})
    whole = client.completions.create(**GREEDY, extra_body=body)
    assert whole.choices[0].text == plain.choices[0].text
    assert whole.aux_info["iter_count"] <= 10
    chunks = list(client.completions.create(**GREEDY, stream=True, extra_body=body))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == plain.choices[0].text
    assert chunks[-1].aux_info["iter_count"] <= 10
    body |= {"force_disable_sp_run": True}
    disabled = client.completions.create(**GREEDY, extra_body=body)
    assert disabled.aux_info["iter_count"] == 40


@pytest.mark.parametrize("route", ["completions", "chat"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"extra_config": {"sp_edit": 3}}, "sp_edit"),
        ({"sp_advice_prompt": 3}, "sp_advice_prompt"),
        ({"force_sp_accept": True}, "force_sp_accept"),
        ({"extra_config": {"top_k": 3}}, "extra_config.top_k"),
        ({"extra_config": "x"}, "extra_config"),
        ({"extra_config": {"force_sp_accept": True}}, "force_sp_accept"),
        ({"force_disable_sp_run": 2}, "force_disable_sp_run"),
        ({"aux_info": "yes"}, "aux_info"),
        ({"sp_edit": 1}, "sp_edit"),
        ({"sp_advise_prompt": "x"}, "sp_advise_prompt"),
        ({"sp_advice_prompt": "x", "extra_config": {"sp_advice_prompt": "y"}}, "sp_advice_prompt"),
        ({"sp_advice_prompt": "x", "sp_advice_prompt_token_ids": [4]}, "sp_advice_prompt_token_ids"),
        ({"sp_advice_prompt_token_ids": [1 << 30]}, "sp_advice_prompt_token_ids"),
    ],
)
def test_wrong_fields(deterministic: Server, fields: dict[str, Any], field: str, stream: bool, route: str) -> None:
    error = refusal(deterministic.client(), fields, stream, route)
    assert error.body["param"] == field


def test_the_servers_api_key(deterministic: Server) -> None:
    """It guards the plugin's routes too, and a request without it is not read."""
    for path in ("/specplus/stats", "/specplus/metrics"):
        for key, status in (("", 401), ("wrong", 401), (KEY, 200)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            assert httpx.get(deterministic.address + path, headers=headers, timeout=60).status_code == status
    stranger = deterministic.client().with_options(api_key="wrong")
    for fields in ({"sp_advice_prompt": "x"}, {"aux_info": "no boolean"}):
        with pytest.raises(openai.AuthenticationError):
            stranger.completions.create(**GREEDY, extra_body=fields)


@pytest.mark.parametrize("stream", [False, True])
def test_where_vllm_drafts(of_vllm: Server, stream: bool) -> None:
    client = of_vllm.client()
    before = of_vllm.metric("vllm:spec_decode_num_accepted_tokens_total")
    extra = {"ignore_eos": True, "extra_config": {"aux_info": True, "sp_advice_prompt": "", "sp_edit": False}}
    answer = client.chat.completions.create(**CHAT, stream=stream, extra_body=extra)
    aux = (list(answer)[-1] if stream else answer).aux_info
    accepted = of_vllm.metric("vllm:spec_decode_num_accepted_tokens_total") - before
    assert aux["output_len"] == 40
    assert 40 - accepted <= aux["iter_count"] <= 40 - accepted + 2
    assert aux["cost_time"] > 0
    error = refusal(client, {"sp_advice_prompt": "x"}, stream)
    assert error.body["param"] == "sp_advice_prompt"
    assert "no method with which vllm-specplus drafts" in str(error)


@pytest.mark.parametrize("sp_type", ["deterministic", pytest.param("mtp", marks=pytest.mark.slow)])
def test_without_the_middleware(sp_type: str, trained: Path, tmp_path: Path) -> None:
    """What nobody would read is refused, where the plugin drafts and where vLLM does."""
    config = json.dumps({"sp_type": sp_type, "gen_num_per_cycle": 2})
    with serve(trained, tmp_path, "--speculative-config", config) as running:
        client = running.client()
        for stream in (False, True):
            for fields, field in UNREAD:
                error = refusal(client, fields, stream)
                assert error.body["param"] == field
                assert "VLLM_PLUGINS=specplus" in str(error)
                error = refusal(client, fields, stream, "chat")
                assert error.body["param"] == field
        # RTP-LLM's defaults ask for nothing.
        client.completions.create(**GREEDY, extra_body={"sp_advice_prompt": "", "sp_edit": False})
        error = refusal(client, {"vllm_xargs": {"aux_info": 1}}, stream=False)
        assert "middleware" in str(error)
        error = refusal(client, {"vllm_xargs": {"sp_edit": 2}}, stream=False)
        assert "sp_edit=2" in str(error)
        assert "Traceback" not in running.log()
