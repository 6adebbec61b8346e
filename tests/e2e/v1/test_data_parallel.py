"""Data parallelism on the V1 model runner: two engines behind one address."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serving import Server, serve

CONFIG = {"method": "mtp", "num_speculative_tokens": 8, "num_model_steps": 2, "mtp_strategy": "with_ngram"}
PROMPTS = [f"def add(a, b):\n    return a + b\n\n# {k}\ndef sub(a, b):\n    return a" for k in range(6)]
REQUEST: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 60}


def binding() -> str:
    """A core for each engine."""
    cores = sorted(os.sched_getaffinity(0))
    return f"{cores[0]}|{cores[-1]}"


@pytest.fixture(scope="module")
def texts(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The greedy text of each prompt without speculation."""
    with serve(trained, tmp_path_factory.mktemp("plain")) as server:
        return asyncio.run(_texts_of(server))


async def _texts_of(server: Server) -> list[str]:
    async with _client(server) as client:
        requests = (client.completions.create(**REQUEST, prompt=p, extra_body={"ignore_eos": True}) for p in PROMPTS)
        return [found.choices[0].text for found in await asyncio.gather(*requests)]


def _client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)


async def _predict(server: Server, texts: list[str]) -> list[Any]:
    """The response to each prompt, with its text as the prediction, and one to the first prompt twice; all at once."""
    questions = [*([prompt] for prompt in PROMPTS), [PROMPTS[0]] * 2]
    async with _client(server) as client:
        return await asyncio.gather(
            *(
                client.completions.create(
                    **REQUEST,
                    prompt=prompts,
                    extra_body={"ignore_eos": True, "aux_info": True, "prediction": _prediction(text)},
                )
                for prompts, text in zip(questions, [*texts, texts[0]], strict=True)
            )
        )


def _prediction(text: str) -> dict[str, str]:
    return {"type": "content", "content": text}


def _check(server: Server, texts: list[str]) -> None:
    """Every text is the plain one, every response has its counts, and the counts of all together are vLLM's."""
    found = asyncio.run(_predict(server, texts))
    assert [[choice.text for choice in each.choices] for each in found] == [*([t] for t in texts), [texts[0]] * 2]
    for each in found:
        num_choices = len(each.choices)
        details = each.usage.completion_tokens_details
        assert 40 * num_choices < details.accepted_prediction_tokens < 60 * num_choices
        assert each.aux_info["iter_count"] < 20 * num_choices
    stats = json.loads(server.get("/specplus/stats"))
    assert stats["entries"]["request_counts"] == 0
    assert stats["totals"]["reference"]["drafted"] >= sum(
        each.usage.completion_tokens_details.accepted_prediction_tokens for each in found
    )
    for what, name in (("drafted", "draft"), ("accepted", "accepted")):
        counted = server.metric(f"vllm:spec_decode_num_{name}_tokens_total")
        assert sum(row[what] for row in stats["totals"].values()) == counted > 0


def _requests_by_engine(server: Server) -> list[float]:
    """How many requests each engine has finished, by vLLM's own counter."""
    name = "vllm:request_success_total"
    by_engine: dict[str, float] = {}
    for line in server.get("/metrics").splitlines():
        if line.startswith(name + "{"):
            engine = line.split('engine="')[1].split('"')[0]
            by_engine[engine] = by_engine.get(engine, 0.0) + float(line.split()[-1])
    return [by_engine[engine] for engine in sorted(by_engine)]


@pytest.mark.slow
@pytest.mark.parametrize("num_servers", [1, 2])
def test_two_engines_of_one_address(num_servers: int, texts: list[str], trained: Path, tmp_path: Path) -> None:
    """vLLM starts as many API server processes as engines unless told otherwise; each asks all engines."""
    options = ["--data-parallel-size", "2", "--api-server-count", str(num_servers)]
    options += ["--speculative-config", json.dumps(CONFIG)]
    environment = {"VLLM_PLUGINS": "specplus", "VLLM_CPU_OMP_THREADS_BIND": binding()}
    with serve(trained, tmp_path, *options, **environment) as server:
        _check(server, texts)
        requests = _requests_by_engine(server)
        assert len(requests) == 2
        assert min(requests) > 0
