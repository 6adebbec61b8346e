"""`vllm serve` as a user starts it, asked by the stock openai client."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

START_SECONDS = 240
PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a"
CONFIG = {
    "method": "mtp",
    "num_speculative_tokens": 5,
    "num_model_steps": 2,
    "mtp_strategy": "with_ngram",
    "verify_strategy": "target_match",
}

OPTIONS = [
    *("--served-model-name", "tiny", "--host", "127.0.0.1", "--max-model-len", "512", "--enforce-eager"),
    *("--dtype", "float32", "--kv-cache-memory-bytes", str(64 << 20), "--speculative-config", json.dumps(CONFIG)),
]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The base address of a server, and its log."""
    log = tmp_path_factory.mktemp("serve") / "log"
    address = f"http://127.0.0.1:{(port := free_port())}"
    # As a user starts it: the engine in processes of its own.
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    with log.open("w") as out:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("vllm"), "serve", tiny, "--port", str(port), *OPTIONS],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until_healthy(address, process, log)
            yield address, log
        finally:
            process.terminate()
            process.wait(60)


def wait_until_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"not healthy after {START_SECONDS} s: {log.read_text()[-4000:]}")


@pytest.fixture
def client(server: tuple[str, Path]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0)


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


def test_metrics_and_log(client: openai.OpenAI, server: tuple[str, Path]) -> None:
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20)
    address, log = server
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        metrics = answer.read().decode()
    drafted = [
        float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("vllm:spec_decode_num_draft_tokens_total")
    ]
    assert sum(drafted) > 0
    assert log.read_text().count("resolved speculative config") == 1
