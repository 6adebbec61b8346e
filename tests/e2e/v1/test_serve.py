"""`vllm serve` as a user starts it, asked by the stock openai client."""

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.serving import Server, serve
from vllm_specplus.cli import main

PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a"
CONFIG = {
    "method": "mtp",
    "num_speculative_tokens": 5,
    "num_model_steps": 2,
    "mtp_strategy": "with_ngram",
    "verify_strategy": "target_match",
    "adaptive": False,  # every step drafts, however slow this machine is
}


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tiny, tmp_path_factory.mktemp("serve"), "--speculative-config", json.dumps(CONFIG)) as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()


def test_completions_streaming_and_not(client: openai.OpenAI) -> None:
    request = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 0.8,
        "seed": 5,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**request)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40
    chunks = client.completions.create(**request, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text


def test_chat_streaming_and_not(client: openai.OpenAI) -> None:
    request = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 40,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**request)
    chunks = client.chat.completions.create(**request, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content


def test_metrics_and_log(client: openai.OpenAI, server: Server) -> None:
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20)
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    assert server.log().count("resolved speculative config") == 1
    says = "drafts: mtp, n-grams of the request's text, the request's reference; "
    assert server.log().count(f"{says}verification: target_match, lossless; shared: nothing") == 1


def test_compare_measures_it(server: Server, tmp_path: Path) -> None:
    before = server.metric("vllm:spec_decode_num_drafts_total")
    words = ["compare", "--serve", server.address, "--model", "tiny", "--workload", "prose", "--concurrency", "4"]
    assert main([*words, "--max-tokens", "24", "--repeat", "1", "--out", str(tmp_path)]) == 0
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert (run["completed"], run["failed"]) == (8, 0)
    assert 0 < run["total_output_tokens"] <= 8 * 24
    assert 0 < run["median_ttft_ms"] <= run["median_e2el_ms"]
    assert 0 < run["spec_decode_num_drafts"] <= server.metric("vllm:spec_decode_num_drafts_total") - before


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_refused_stream_leaves_no_traceback(endpoint: str, client: openai.OpenAI, server: Server) -> None:
    """Without the middleware vLLM checks a stream's parameters when the stream has begun; the client reads an event."""
    start = len(server.log())
    request = {"model": "tiny", "stream": True, "extra_body": {"vllm_xargs": {"spec_tokens": -1}}}
    if endpoint == "chat":
        stream = client.chat.completions.create(**request, messages=[{"role": "user", "content": PROMPT}])
    else:
        stream = client.completions.create(**request, prompt=PROMPT)
    with pytest.raises(openai.APIError, match="spec_tokens=-1 is not allowed") as refused:
        list(stream)
    assert (refused.value.type, refused.value.param) == ("BadRequestError", "spec_tokens")
    log = server.log()[start:]
    assert "Traceback" not in log
    (line,) = (line for line in log.splitlines() if "spec_tokens" in line)
    assert line.endswith("spec_tokens=-1 is not allowed: it must be an integer of 0 or more (parameter=spec_tokens)")
