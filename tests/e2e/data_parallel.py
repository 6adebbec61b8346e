"""Data parallelism: checks of servers whose engines share the requests among them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
from vllm import envs

from tests.e2e.engines import engine
from tests.e2e.serving import Server, serve

# Tokens are bytes.
PROMPTS = [f"def add(a, b):\n    return a + b\n\n# {k}\ndef sub(a, b):\n    return a" for k in range(6)]
NUM_TOKENS = 60
if envs.VLLM_USE_V2_MODEL_RUNNER:
    # A step takes a tenth of a second or more under the interpreter.
    PROMPTS, NUM_TOKENS = PROMPTS[:3], 24
REQUEST: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS}


def plain_texts(model: Path) -> list[str]:
    """The greedy text of each prompt without speculation, by one engine."""
    with engine(model) as e:
        results = e.generate([list(prompt.encode()) for prompt in PROMPTS], max_tokens=NUM_TOKENS)
    return [result.outputs[0].text for result in results]


def check_two_engines(model: Path, config: dict[str, Any], texts: list[str], folder: Path, *options: str) -> None:
    """Two engines of one address answer as one does, and all that they count is added up."""
    # Each engine gets a core, and both may share a memory node.
    environment = {"VLLM_PLUGINS": "specplus", "VLLM_CPU_SIM_MULTI_NUMA": "1"}
    parallel = ("--data-parallel-size", "2", "--speculative-config", json.dumps(config), *options)
    with serve(model, folder, *parallel, **environment) as server:
        check_predictions(server, texts)
        requests = _requests_by_engine(server)
        assert len(requests) == 2
        assert min(requests) > 0


def check_predictions(server: Server, texts: list[str]) -> None:
    """Every text is the plain one, every response has its counts, and the counts of all together are vLLM's."""
    found = asyncio.run(_predict(server, texts))
    assert [[choice.text for choice in each.choices] for each in found] == [*([t] for t in texts), [texts[0]] * 2]
    for each in found:
        num_tokens = len(each.choices) * NUM_TOKENS
        assert num_tokens / 2 < each.usage.completion_tokens_details.accepted_prediction_tokens < num_tokens
        assert each.aux_info["iter_count"] < num_tokens / 3
    stats = json.loads(server.get("/specplus/stats"))
    assert stats["entries"]["request_counts"] == 0
    assert stats["totals"]["reference"]["drafted"] >= sum(
        each.usage.completion_tokens_details.accepted_prediction_tokens for each in found
    )
    for what, name in (("drafted", "draft"), ("accepted", "accepted")):
        counted = server.metric(f"vllm:spec_decode_num_{name}_tokens_total")
        assert sum(row[what] for row in stats["totals"].values()) == counted > 0


async def _predict(server: Server, texts: list[str]) -> list[Any]:
    """The response to each prompt, with its text as the prediction, and one to the first prompt twice; all at once."""
    questions = [*([prompt] for prompt in PROMPTS), [PROMPTS[0]] * 2]
    address = f"{server.address}/v1"
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=600) as client:
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


def _requests_by_engine(server: Server) -> list[float]:
    """How many requests each engine has finished, by vLLM's own counter."""
    name = "vllm:request_success_total"
    by_engine: dict[str, float] = {}
    for line in server.get("/metrics").splitlines():
        if line.startswith(name + "{"):
            engine = line.split('engine="')[1].split('"')[0]
            by_engine[engine] = by_engine.get(engine, 0.0) + float(line.split()[-1])
    return [by_engine[engine] for engine in sorted(by_engine)]
