"""References over HTTP with the stock openai client: predicted outputs, counts, and what is left after load."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serving import Server, serve
from vllm_specplus.cli import main
from vllm_specplus.top.sample import ACCEPTED, STEPS, TOKENS
from vllm_specplus.top.server import Server as CountedServer

CONFIG = {
    "method": "mtp",
    "num_speculative_tokens": 8,
    "num_model_steps": 2,
    "mtp_strategy": "with_ngram",
    "adaptive": False,
    "allow_force_accept": True,
}
PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a"
MESSAGES = [{"role": "user", "content": PROMPT}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 60}
MARK = "zq-reference-zq"


@pytest.fixture(scope="module")
def server(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the middleware twice, by option and by plugin, and a KV cache for a few requests only."""
    options = ["--speculative-config", json.dumps(CONFIG), "--middleware", "vllm_specplus.requests.PredictedOutputs"]
    options += ["--num-gpu-blocks-override", "24", "--block-size", "32", "--enable-log-requests"]
    with serve(trained, tmp_path_factory.mktemp("serve"), *options, VLLM_PLUGINS="specplus") as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()


def test_chat(client: openai.OpenAI) -> None:
    request = GREEDY | {"messages": MESSAGES, "extra_body": {"ignore_eos": True}}
    plain = client.chat.completions.create(**request)
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details is None
    for content in (text, [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]):
        predicted = client.chat.completions.create(**request, prediction={"type": "content", "content": content})
        assert predicted.choices[0].message.content == text
        details = predicted.usage.completion_tokens_details
        # A step of nine tokens has eight of the reference.
        assert 60 * 8 // 9 - 1 <= details.accepted_prediction_tokens < 60
        assert details.rejected_prediction_tokens <= 8
    wrong = client.chat.completions.create(**request, prediction={"type": "content", "content": "\x01" * 200})
    assert wrong.choices[0].message.content == text
    assert wrong.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_chat_stream(client: openai.OpenAI) -> None:
    request = GREEDY | {"messages": MESSAGES, "extra_body": {"ignore_eos": True}, "stream": True}
    text = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**request))
    request["prediction"] = {"type": "content", "content": text}
    chunks = list(client.chat.completions.create(**request, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [bool(c.usage) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 40
    # Fewer chunks than tokens: a chunk is a step.
    assert len(chunks) < 20
    chunks = list(client.chat.completions.create(**request))
    assert not any(c.usage for c in chunks)


def test_completions_and_xargs(client: openai.OpenAI) -> None:
    request = GREEDY | {"prompt": PROMPT}
    plain = client.completions.create(**request, extra_body={"ignore_eos": True})
    text = plain.choices[0].text
    for extra in (
        {"prediction": {"type": "content", "content": text}},
        {"vllm_xargs": {"sp_advice_prompt": text, "sp_edit": 1}},
        {"vllm_xargs": {"sp_advice_prompt_token_ids": list(text.encode())}},
    ):
        for prompts in ([PROMPT], [PROMPT] * 2):
            found = client.completions.create(**GREEDY, prompt=prompts, extra_body={"ignore_eos": True, **extra})
            assert [choice.text for choice in found.choices] == [text] * len(prompts)
            details = found.usage.completion_tokens_details
            assert 50 * len(prompts) < details.accepted_prediction_tokens < 60 * len(prompts)
    prediction = {"ignore_eos": True, "prediction": {"type": "content", "content": text}}
    # The first token and the last one come from the target.
    short = client.completions.create(**request | {"max_tokens": 3}, extra_body=prediction)
    assert short.usage.completion_tokens_details.accepted_prediction_tokens == 1
    # Drafts that were accepted past the end are not in the text.
    end = text.index(text[2])
    cut = client.completions.create(**request, extra_body=prediction | {"stop_token_ids": [ord(text[2])]})
    assert cut.usage.completion_tokens == end + 1 > 1
    assert cut.usage.completion_tokens_details.accepted_prediction_tokens == end
    several = client.completions.create(
        **request | {"temperature": 0.1}, n=3, extra_body={"prediction": {"type": "content", "content": text}}
    )
    assert len(several.choices) == 3
    details = several.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 60
    limited = client.completions.create(
        **request, extra_body={"ignore_eos": True, "vllm_xargs": {"spec_tokens": 0}, "aux_info": True}
    )
    assert limited.choices[0].text == text
    assert limited.aux_info["iter_count"] == 60


@pytest.mark.every_version
def test_aux_info(client: openai.OpenAI) -> None:
    request = GREEDY | {"messages": MESSAGES, "extra_body": {"ignore_eos": True, "aux_info": True}}
    whole = client.chat.completions.create(**request)
    aux = whole.aux_info
    assert set(aux) == {"iter_count", "output_len", "avg_tokens_per_iter", "cost_time"}
    assert aux["output_len"] == 60
    assert 60 / 9 <= aux["iter_count"] <= 60
    assert aux["avg_tokens_per_iter"] == aux["output_len"] / aux["iter_count"]
    assert 0 < aux["cost_time"] < 60_000
    predicted = client.chat.completions.create(
        **request, prediction={"type": "content", "content": whole.choices[0].message.content}
    )
    assert predicted.aux_info["iter_count"] <= 9
    *chunks, last = client.chat.completions.create(**request, stream=True)
    assert last.choices == []
    assert last.usage is None
    assert last.aux_info["output_len"] == 60
    assert not any(hasattr(chunk, "aux_info") for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["top", "extra_config"])
def test_all_drafts_are_accepted(client: openai.OpenAI, place: str, stream: bool) -> None:
    fields = {"force_sp_accept": True, "aux_info": True}
    body = {"ignore_eos": True} | (fields if place == "top" else {"extra_config": fields})
    for answer in (
        client.completions.create(**GREEDY, prompt=PROMPT, extra_body=body, stream=stream),
        client.chat.completions.create(**GREEDY, messages=MESSAGES, extra_body=body, stream=stream),
    ):
        aux = (list(answer)[-1] if stream else answer).aux_info
        assert aux["output_len"] == 60
        # The model drafts two tokens a step at least, but for the first.
        assert aux["iter_count"] <= 1 + 60 // 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"prediction": {"type": "text"}}, "prediction"),
        ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction"),
        ({"aux_info": "yes"}, "aux_info"),
        ({"vllm_xargs": {"sp_edit": 3, "sp_advice_prompt": "x"}}, "sp_edit"),
        ({"vllm_xargs": {"sp_advice_prompt": 3}}, "sp_advice_prompt"),
        ({"vllm_xargs": {"spec_tokens": "many"}}, "spec_tokens"),
        ({"vllm_xargs": {"sp_advise_prompt": "x"}}, "sp_advise_prompt"),
        ({"vllm_xargs": {"sp_advice_prompt_token_ids": [1, 320]}}, "sp_advice_prompt_token_ids"),
    ],
)
def test_bad_input(extra: dict[str, Any], field: str, stream: bool, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=field) as refused:
        client.chat.completions.create(**GREEDY, messages=MESSAGES, extra_body=extra, stream=stream)
    assert refused.value.status_code == 400
    assert refused.value.param == field


@pytest.mark.every_version
def test_counts_agree_with_vllms(client: openai.OpenAI, server: Server) -> None:
    client.completions.create(**GREEDY, prompt=PROMPT, extra_body={"prediction": {"type": "content", "content": "a"}})
    totals = json.loads(server.get("/specplus/stats"))["totals"]
    assert {"model", "ngram", "reference"} <= {source for source, row in totals.items() if row["drafted"]}
    for what, name in (("drafted", "draft"), ("accepted", "accepted")):
        counted = sum(row[what] for row in totals.values())
        assert counted == server.metric(f"vllm:spec_decode_num_{name}_tokens_total")
        exported = [line for line in server.get("/specplus/metrics").splitlines() if line.startswith("specplus:")]
        samples = [line for line in exported if line.startswith(f"specplus:{name}_tokens_total{{")]
        assert sum(float(line.split()[-1]) for line in samples) == counted


@pytest.mark.every_version
def test_page_in_the_terminal(client: openai.OpenAI, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Between two pages one request runs: tokens are those of its answer, and steps those that vLLM counts for it."""
    before = CountedServer(server.address, "").sample()
    answer = client.completions.create(**GREEDY, prompt=PROMPT, extra_body={"aux_info": True, "ignore_eos": True})
    last = CountedServer(server.address, "").sample().since(before)
    assert last is not None
    assert last.engine[TOKENS] == answer.usage.completion_tokens == 60
    assert sum(last.engine[name] for name in STEPS) == answer.aux_info["iter_count"]
    assert last.engine[ACCEPTED] == last.accepted.total()
    assert main(["top", server.address, "--once"]) == 0
    assert "requests: 0 running, 0 waiting" in capsys.readouterr().out


def check_under_load(server: Server, max_tokens: int) -> None:
    """Check texts, counts and entries for 32 requests at once: right and wrong references, none, some cancelled."""
    prompts = [f"{PROMPT}\n\n# {k}\ndef f{k}(a):\n    " for k in range(8)]
    client = server.client()
    request = GREEDY | {"max_tokens": max_tokens, "extra_body": {"ignore_eos": True}}
    texts = [client.completions.create(**request, prompt=p, extra_headers={}).choices[0].text for p in prompts]

    async def one(open_client: openai.AsyncOpenAI, k: int) -> None:
        prompt, text = prompts[k % 8], texts[k % 8]
        middle = len(text) // 2
        ways: list[dict[str, Any]] = [
            {},
            {"prediction": {"type": "content", "content": text}},
            {"prediction": {"type": "content", "content": MARK + texts[(k + 1) % 8]}, "aux_info": True},
            {"vllm_xargs": {"sp_advice_prompt": text[: middle - 5] + MARK + text[middle:], "sp_edit": 1}},
        ]
        body = {"ignore_eos": True, **ways[k // 8]}
        is_cancelled = k % 8 == 5
        if k % 2 == 0:
            found = await open_client.completions.create(**request | {"extra_body": body}, prompt=prompt)
            assert found.choices[0].text == text
            return
        stream = await open_client.completions.create(**request | {"extra_body": body}, prompt=prompt, stream=True)
        came = ""
        async for chunk in stream:
            came += "".join(choice.text for choice in chunk.choices)
            if is_cancelled:
                break
        await stream.close()
        assert text.startswith(came)
        assert is_cancelled or came == text

    async def all_at_once() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as open_client:
            await asyncio.gather(*(one(open_client, k) for k in range(32)))

    asyncio.run(all_at_once())
    # Workers hear of cancelled requests with the next step.
    assert client.completions.create(**request, prompt=prompts[0]).choices[0].text == texts[0]
    stats = json.loads(server.get("/specplus/stats"))
    assert stats["entries"] == {"requests": 0, "references": 0, "request_counts": 0}
    for what, name in (("drafted", "draft"), ("accepted", "accepted")):
        # vLLM leaves out the step in which a request was cancelled.
        counted = server.metric(f"vllm:spec_decode_num_{name}_tokens_total")
        assert 0 <= sum(row[what] for row in stats["totals"].values()) - counted <= 4 * CONFIG["num_speculative_tokens"]


def test_under_load(server: Server) -> None:
    preempted = server.metric("vllm:num_preemptions_total")
    check_under_load(server, max_tokens=100)
    assert server.metric("vllm:num_preemptions_total") > preempted


def test_no_reference_text_is_logged(client: openai.OpenAI, server: Server) -> None:
    """Not even by `--enable-log-requests`, which logs the parameters of requests."""
    for extra in (
        {"prediction": {"type": "content", "content": MARK}},
        {"vllm_xargs": {"sp_advice_prompt": MARK}},
        {"prediction": {"type": "content", "content": MARK * 100}},
    ):
        client.completions.create(**GREEDY, prompt=PROMPT, extra_body=extra)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**GREEDY, prompt=PROMPT, extra_body={"prediction": {"type": MARK}})
    assert MARK not in str(refused.value)
    log = server.log()
    assert "SamplingParams(" in log
    assert MARK not in log
    assert "its reference is longer than the model length" in log
