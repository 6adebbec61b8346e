"""examples/ray_serve.py: what a request asks of the plugin works behind Ray Serve's address as it does with vLLM's."""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.e2e.engines import engine
from tests.e2e.processes import ray_environment
from tests.e2e.serving import Server, free_port

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install '.[ray]'")

SCRIPT = Path(__file__).parents[3] / "examples" / "ray_serve.py"
sys.path.append(str(SCRIPT.parent))
import ray_serve  # noqa: E402

# What an adaptive hybrid drafts depends on times: a model whose passes cost too much sleeps.
HYBRID = ray_serve.HYBRID | {"adaptive": False}
# Tokens are bytes.
PROMPT = "def add(a, b):\n    return a + b\n\n# 1\ndef sub(a, b):\n    return a"
NUM_TOKENS = 48
ENGINE = {"max_model_len": 512, "enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
RAY = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 200_000_000}
START_SECONDS, END_SECONDS = 540, 120
# Ray sends a request to either replica. All to one of them: once in 60,000 runs.
# An odd number: replicas with as many requests each would report the same counts.
NUM_REQUESTS = 17


# Ray 2.60 imports it, and vLLM 0.33 has moved it.
RUNS = find_spec("vllm.entrypoints.launchers.cli_args") is not None


@pytest.fixture(scope="module")
def served(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas of the hybrid."""
    if not RUNS:
        pytest.skip("Ray 2.60 imports what vLLM 0.33 has moved")
    port = free_port()
    log = tmp_path_factory.mktemp("ray") / "log"
    command = [sys.executable, SCRIPT, trained, "--served-model-name", "tiny", "--port", str(port)]
    for option, value in (("speculative-config", HYBRID), ("engine-args", ENGINE), ("ray", RAY)):
        command += [f"--{option}", json.dumps(value)]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=ray_environment(), stdout=out, stderr=subprocess.STDOUT)
    server = Server(f"http://127.0.0.1:{port}", log, process.pid)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, server.log()[-4000:]
            assert time.monotonic() < deadline, server.log()[-4000:]
            with suppress(OSError):
                server.get("/v1/models")
                break
            time.sleep(0.5)
        yield server
    finally:
        started: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(END_SECONDS)
        for each in started:
            with suppress(psutil.NoSuchProcess):
                each.kill()


@pytest.fixture(scope="module")
def text(trained: Path) -> str:
    """The answer of vLLM alone."""
    with engine(trained) as e:
        return e.generate([list(PROMPT.encode())], max_tokens=NUM_TOKENS)[0].outputs[0].text


def complete(server: Server, **fields: Any) -> Any:
    request = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": NUM_TOKENS}
    extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
    return server.client().completions.create(**request | fields, extra_body=extra)


def test_predictions_by_both_replicas(served: Server, text: str) -> None:
    prediction = {"type": "content", "content": text}
    for _ in range(NUM_REQUESTS):
        found = complete(served, extra_body={"prediction": prediction, "aux_info": True})
        assert found.choices[0].text == text
        assert found.usage.completion_tokens_details.accepted_prediction_tokens > NUM_TOKENS // 2
        assert found.aux_info["output_len"] == NUM_TOKENS
        assert found.aux_info["iter_count"] < NUM_TOKENS // 2
    counts = {served.get("/specplus/stats") for _ in range(NUM_REQUESTS)}
    drafted = [sum(row["drafted"] for row in json.loads(each)["totals"].values()) for each in counts]
    assert len(drafted) == 2
    assert min(drafted) > 0


def test_the_default_is_an_adaptive_hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ray_serve.py", "model"])
    assert ray_serve.parse_args().speculative_config == ray_serve.HYBRID
    assert "adaptive" not in ray_serve.HYBRID


def test_the_hybrid_drafts_without_a_prediction(served: Server, text: str) -> None:
    for _ in range(NUM_REQUESTS):
        assert complete(served).choices[0].text == text
    totals = [json.loads(served.get("/specplus/stats"))["totals"] for _ in range(NUM_REQUESTS)]
    for source in ("model", "ngram"):
        assert max(each[source]["drafted"] for each in totals) > 0, source


def test_a_stream(served: Server, text: str) -> None:
    prediction = {"type": "content", "content": text}
    chunks = list(complete(served, stream=True, extra_body={"prediction": prediction}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    assert len(chunks) < NUM_TOKENS // 2


def test_a_chat_with_a_prediction(served: Server) -> None:
    request = {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}
    messages = [{"role": "user", "content": "def add(a, b):"}]
    client = served.client()
    plain = client.chat.completions.create(**request, messages=messages).choices[0].message.content
    prediction = {"type": "content", "content": plain}
    found = client.chat.completions.create(**request, messages=messages, prediction=prediction)
    assert found.choices[0].message.content == plain
    assert found.usage.completion_tokens_details.accepted_prediction_tokens > 0


@pytest.mark.parametrize(
    ("field", "value"), [("spec_tokens", "many"), ("prediction", {"type": "content", "content": 5}), ("aux_info", 3)]
)
def test_bad_input(served: Server, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(served, extra_body={field: value})
    assert field in refused.value.param


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, SCRIPT, tmp_path, "--port", str(port)]
        got = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert got.returncode == 2
    assert got.stderr.splitlines()[-1].startswith(f"--host 127.0.0.1 --port {port} is not allowed: an address that is")


@pytest.mark.every_version
def test_a_vllm_that_ray_does_not_run_beside(trained: Path) -> None:
    if RUNS:
        pytest.skip("Ray runs beside this vLLM")
    command = [sys.executable, SCRIPT, trained, "--port", str(free_port()), "--ray", json.dumps(RAY)]
    got = subprocess.run(
        command, env=ray_environment(), capture_output=True, text=True, timeout=START_SECONDS, check=False
    )
    assert got.returncode == 2
    message = got.stderr.splitlines()[-1]
    assert re.fullmatch(r"Ray \S+ does not run beside vLLM \S+: No module named .*\. Install 'vllm<0\.33'", message)
