"""Checks of examples/pd_disaggregation: one server prefills, another decodes, a proxy joins them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import envs

from tests.e2e.engines import engine
from tests.e2e.processes import alive, of_group, wait_for
from tests.e2e.references import stats
from tests.e2e.serving import Server, free_port

SCRIPT = Path(__file__).parents[2] / "examples" / "pd_disaggregation" / "serve.py"
BLOCK_SIZE = 32
# Tokens are bytes. The connector hands over whole blocks of a prompt.
PROMPTS = [f"def add(a, b):\n    return a + b\n\n# {'=' * k}\ndef sub(a, b):\n    return a" for k in range(0, 60, 12)]
NUM_TOKENS = 48
if envs.VLLM_USE_V2_MODEL_RUNNER:
    # A step takes a tenth of a second or more under the interpreter.
    PROMPTS, NUM_TOKENS = PROMPTS[::2], 20
# It has no whole block.
PROMPTS.append("def add(")
MAX_MODEL_LEN = 8192
# More than a busy machine takes.
START_SECONDS = 480
END_SECONDS = 240


@dataclass(frozen=True)
class Pd:
    """The running script: the proxy, and the servers behind it."""

    proxy: Server
    prefill: Server
    decode: Server
    prefill_pid: int
    decode_pid: int

    def complete(self, prompt: str, **fields: Any) -> Any:
        request = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS}
        extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
        return self.proxy.client().completions.create(**request | fields, extra_body=extra)


@dataclass(frozen=True)
class Results:
    """What became of all prompts: the text and the steps of each, and the drafts of each source by position."""

    answers: list[tuple[str, int]]
    drafts: dict[str, dict[str, list[int]]]

    @property
    def texts(self) -> list[str]:
        return [text for text, _ in self.answers]


@contextmanager
def started(
    model: Path, config: dict[str, Any], folder: Path, *options: str, ended_by: signal.Signals = signal.SIGTERM
) -> Iterator[Pd]:
    ports = [free_port() for _ in range(3)]
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, SCRIPT, model, "--port", str(ports[0])]
    for role, port, core in (("prefill", ports[1], cores[0]), ("decode", ports[2], cores[-1])):
        command += [f"--{role}-port", str(port), f"--{role}-env", f"VLLM_CPU_OMP_THREADS_BIND={core}"]
        command += [f"--{role}-env", f"VLLM_NIXL_SIDE_CHANNEL_PORT={free_port()}"]
    command += ["--served-model-name", "tiny", "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--enforce-eager", "--dtype", "float32"]
    command += ["--kv-cache-memory-bytes", str(64 << 20), "--speculative-config", json.dumps(config), *options]
    inherited = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    log = folder / "log"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env={**inherited, "VLLM_LOGGING_LEVEL": "INFO", "PATH": path},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while "proxy: http" not in log.read_text():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        pids = [int(pid) for pid in re.findall(r"^\w+ server: process (\d+)", log.read_text(), re.MULTILINE)]
        yield Pd(*(Server(f"http://127.0.0.1:{port}", log, process.pid) for port in ports), *pids)
    except BaseException:
        print(log.read_text()[-8000:])
        raise
    finally:
        process.send_signal(ended_by)
        process.wait(END_SECONDS)


def one_engine(model: Path, config: dict[str, Any], **sampling: Any) -> Results:
    """The results of one engine that has no connector."""
    prompts = [list(prompt.encode()) for prompt in PROMPTS]
    with engine(model, config) as e:
        # One at a time, as the proxy is asked: what one request learns of the drafts the next one uses.
        results = [
            e.generate([p], max_tokens=NUM_TOKENS, extra_args={"aux_info": True}, **sampling)[0] for p in prompts
        ]
        drafts = _drafts(stats(e))
    return Results([(result.outputs[0].text, result.aux_info["iter_count"]) for result in results], drafts)


def _results(pd: Pd, **sampling: Any) -> Results:
    found = [pd.complete(prompt, **sampling, extra_body={"aux_info": True}) for prompt in PROMPTS]
    drafts = _drafts(json.loads(pd.decode.get("/specplus/stats")))
    return Results([(each.choices[0].text, each.aux_info["iter_count"]) for each in found], drafts)


def _drafts(counts: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    # vLLM pads the first step where one token is left to compute, as NIXL leaves one.
    sources = [source for source in counts["drafted"] if source != "unfilled"]
    return {kind: {source: counts[kind][source] for source in sources} for kind in ("drafted", "accepted")}


def whole_blocks(prompt: str) -> int:
    """The tokens of a prompt that ExampleConnector hands over. NixlConnector hands all over, by `len`."""
    return (len(prompt) - 2) // BLOCK_SIZE * BLOCK_SIZE


def check_results(pd: Pd, expected: Results, handed_over: Callable[[str], int] = whole_blocks, **sampling: Any) -> None:
    """Same texts in the same steps, and the same drafts of each source: so the draft model's cache came over too."""
    assert _results(pd, **sampling) == expected
    assert min(steps for _, steps in expected.answers) < NUM_TOKENS
    assert pd.prefill.metric("vllm:generation_tokens_total") == len(PROMPTS)
    assert pd.prefill.metric("vllm:spec_decode_num_draft_tokens_total") == 0
    assert pd.decode.metric("vllm:external_prefix_cache_hits_total") == sum(map(handed_over, PROMPTS))


def check_same_results(model: Path, config: dict[str, Any], folder: Path, **sampling: Any) -> None:
    """The pair gives what one engine gives."""
    expected = one_engine(model, config, **sampling)
    with started(model, config, folder) as pd:
        check_results(pd, expected, **sampling)


def check_same_texts(model: Path, config: dict[str, Any], folder: Path) -> None:
    """The pair says what one engine says. What an adaptive config drafts depends on times."""
    expected = one_engine(model, config)
    with started(model, config, folder) as pd:
        found = _results(pd)
        assert found.texts == expected.texts
        assert sum(map(sum, found.drafts["accepted"].values())) > 0
        assert pd.prefill.metric("vllm:spec_decode_num_draft_tokens_total") == 0
        assert pd.decode.metric("vllm:external_prefix_cache_hits_total") == sum(map(whole_blocks, PROMPTS))


def check_draft_cache(model: Path, config: dict[str, Any], folder: Path) -> None:
    """Fewer of the draft model's drafts are accepted once noise comes over in place of its own cache."""
    caches = folder / "caches"
    expected = one_engine(model, config)
    with started(model, config, folder, "--shared-folder", str(caches)) as pd:
        check_results(pd, expected)
        _spoil_draft_cache(model, caches)
        spoiled = _results(pd)
    assert spoiled.texts == expected.texts
    # The decode server has counted both rounds.
    first, both = (sum(each.drafts["accepted"]["model"]) for each in (expected, spoiled))
    assert first <= both < 2 * first, (first, both)


def _spoil_draft_cache(model: Path, caches: Path) -> None:
    """Put large noise into the caches behind the target's layers. Nobody writes those of a known prompt anew."""
    num_layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    files = [file for file in caches.rglob("*.safetensors") if int(file.name.split(".")[2]) >= num_layers]
    assert len(files) == len(PROMPTS)
    noise = torch.Generator().manual_seed(0)
    for file in files:
        found = load_file(file)
        save_file({name: (5 * torch.randn(c.shape, generator=noise)).to(c.dtype) for name, c in found.items()}, file)


def check_hybrid(
    model: Path,
    config: dict[str, Any],
    folder: Path,
    *options: str,
    handed_over: Callable[[str], int] = whole_blocks,
) -> None:
    """All that the proxy and its servers promise."""
    expected = one_engine(model, config)
    # As where a terminal is closed.
    with started(model, config, folder, *options, ended_by=signal.SIGHUP) as pd:
        check_results(pd, expected, handed_over)
        text = expected.answers[0][0]
        check_chat(pd)
        check_fields(pd, text)
        check_death(pd, text)
    check_nothing_is_left(pd.prefill_pid)
    check_nothing_is_left(pd.decode_pid)


def check_chat(pd: Pd) -> None:
    """A chat's prediction reaches the decode server, beside the prompt's cache."""
    messages = [{"role": "user", "content": PROMPTS[0]}]
    request: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS}
    request["extra_body"] = {"ignore_eos": True}
    chats = pd.proxy.client().chat.completions
    text = chats.create(**request).choices[0].message.content
    before = pd.decode.metric("vllm:external_prefix_cache_hits_total")
    predicted = chats.create(**request, prediction={"type": "content", "content": text})
    assert predicted.choices[0].message.content == text
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens > NUM_TOKENS // 2
    assert pd.decode.metric("vllm:external_prefix_cache_hits_total") > before


def check_fields(pd: Pd, text: str) -> None:
    """What a request asks of the plugin passes the proxy, and so do its refusals."""
    prediction = {"type": "content", "content": text}
    predicted = pd.complete(PROMPTS[0], extra_body={"prediction": prediction, "aux_info": True})
    assert predicted.choices[0].text == text
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens > NUM_TOKENS // 2
    assert predicted.aux_info["output_len"] == NUM_TOKENS
    asked = {"sp_advice_prompt": text, "spec_tokens": 3}
    advised = pd.complete(PROMPTS[0], extra_body={"vllm_xargs": asked, "aux_info": True})
    assert advised.choices[0].text == text
    assert advised.usage.completion_tokens_details.accepted_prediction_tokens > NUM_TOKENS // 2
    # A step gives one token more than it has drafts.
    assert NUM_TOKENS // 4 <= advised.aux_info["iter_count"] < NUM_TOKENS // 2
    without = pd.complete(PROMPTS[0], extra_body={"spec_tokens": 0, "aux_info": True})
    assert (without.choices[0].text, without.aux_info["iter_count"]) == (text, NUM_TOKENS)
    chunks = list(pd.complete(PROMPTS[0], stream=True, extra_body={"prediction": prediction}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    assert len(chunks) < NUM_TOKENS // 2
    with pytest.raises(openai.BadRequestError) as refused:
        pd.complete(PROMPTS[0], extra_body={"spec_tokens": "many"})
    assert refused.value.param == "spec_tokens"
    stats = json.loads(pd.proxy.get("/specplus/stats"))
    assert stats == json.loads(pd.decode.get("/specplus/stats"))
    drafted = sum(row["drafted"] for row in stats["totals"].values())
    assert drafted == pd.decode.metric("vllm:spec_decode_num_draft_tokens_total") > 0


def check_death(pd: Pd, text: str) -> None:
    """Kill the decode server in the middle of a stream, and ask again."""
    came: list[str] = []
    # A long one: the server makes a token in some milliseconds, and this process may be late to read the first.
    max_tokens = MAX_MODEL_LEN - len(PROMPTS[0])

    def read() -> None:
        for chunk in pd.complete(PROMPTS[0], max_tokens=max_tokens, stream=True, extra_body={"spec_tokens": 0}):
            if not came:
                os.kill(pd.decode_pid, signal.SIGKILL)
            came.append(chunk.choices[0].text)

    with pytest.raises(openai.APIError, match="the decode server failed"):
        read()
    assert 0 < len(came) < max_tokens
    assert text.startswith("".join(came)[: len(text)])
    with pytest.raises(openai.APIStatusError, match="the decode server failed") as refused:
        pd.complete(PROMPTS[0])
    assert refused.value.status_code == 502
    told = f"the decode server ended with {-signal.SIGKILL}"
    # The script tells it in a thread, which the answers above do not wait for.
    wait_for(lambda: told in pd.proxy.log(), END_SECONDS, told)


def check_nothing_is_left(group: int) -> None:
    """The processes of a server are gone once the system has noticed it."""
    wait_for(lambda: not alive(of_group(group)), END_SECONDS, f"the end of group {group}")
