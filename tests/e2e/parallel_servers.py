"""Checks of servers of two engines that share the requests among them, and of an engine of two workers."""

import asyncio
import json
import os
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import openai
from vllm import envs

from tests.e2e.engines import engine
from tests.e2e.faults import PayingWorker
from tests.e2e.references import own_sources
from tests.e2e.serving import Server, python_path, serve
from vllm_specplus.config import resolve

# Tokens are bytes.
PROMPTS = [f"def add(a, b):\n    return a + b\n\n# {k}\ndef sub(a, b):\n    return a" for k in range(6)]
NUM_TOKENS = 60
if envs.VLLM_USE_V2_MODEL_RUNNER:
    # A step takes a tenth of a second or more under the interpreter.
    PROMPTS, NUM_TOKENS = PROMPTS[:3], 24
# Each engine or worker gets one.
CORES = sorted(os.sched_getaffinity(0))
REQUEST: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS}
# The workers of these servers can be told to let drafts pay.
PAYING = ("--worker-extension-cls", f"{PayingWorker.__module__}.{PayingWorker.__name__}")
ENVIRONMENT = {"VLLM_PLUGINS": "specplus", "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": python_path()}


def plain_texts(model: Path) -> list[str]:
    """The greedy text of each prompt without speculation, by one engine."""
    with engine(model) as e:
        results = e.generate([list(prompt.encode()) for prompt in PROMPTS], max_tokens=NUM_TOKENS)
    return [result.outputs[0].text for result in results]


def check_two_engines(model: Path, config: dict[str, Any], texts: list[str], folder: Path, *options: str) -> None:
    """Two engines of one address answer as one does, and all that they count is added up."""
    # Each engine gets a core, and both may share a memory node.
    environment = ENVIRONMENT | {"VLLM_CPU_SIM_MULTI_NUMA": "1"}
    parallel = ("--data-parallel-size", "2", "--speculative-config", json.dumps(config), *options, *PAYING)
    with serve(model, folder, *parallel, **environment) as server:
        _check_server(server, config, texts)
        requests = _requests_by_engine(server)
        assert len(requests) == 2
        assert min(requests) > 0


def check_two_workers(model: Path, config: dict[str, Any], texts: list[str], folder: Path) -> None:
    """A server of two tensor-parallel workers answers as one process does, and counts what vLLM counts."""
    environment = ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
    options = ("--tensor-parallel-size", "2", "--speculative-config", json.dumps(config), *PAYING)
    with serve(model, folder, *options, **environment) as server:
        _check_server(server, config, texts)


def check_two_servers(model: Path, config: dict[str, Any], texts: list[str], folder: Path) -> None:
    """Two servers behind a balancer answer as one does, and each counts what its own engine did."""
    options = ("--speculative-config", json.dumps(config), *PAYING)
    with ExitStack() as running:
        servers = []
        for number, core in enumerate((CORES[0], CORES[-1])):
            own = folder / str(number)
            own.mkdir()
            environment = ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
            servers.append(running.enter_context(serve(model, own, *options, **environment)))
            _let_drafts_pay(servers[-1])
        accepted = _check_answers(asyncio.run(_predict_balanced(servers, texts)), texts)
        assert sum(_drafted_by_source(server, config)["reference"] for server in servers) >= accepted


def _let_drafts_pay(server: Server) -> None:
    """An adaptive config may draft nothing on a busy machine otherwise."""
    httpx.post(f"{server.address}/collective_rpc", json={"method": "let_drafts_pay"}, timeout=60).raise_for_status()


def _check_server(server: Server, config: dict[str, Any], texts: list[str]) -> None:
    _let_drafts_pay(server)
    accepted = _check_answers(asyncio.run(_predict(server.address, texts)), texts)
    accepted += _check_streams(asyncio.run(_stream(server.address, texts)), texts)
    assert _drafted_by_source(server, config)["reference"] >= accepted


def _check_answers(found: list[Any], texts: list[str]) -> int:
    """Every text is the plain one, and every response has its counts. The accepted tokens of all predictions."""
    predicted, others = found[: -len(texts)], found[-len(texts) :]
    assert [[choice.text for choice in each.choices] for each in predicted] == [*([t] for t in texts), [texts[0]] * 2]
    assert [each.choices[0].text for each in others] == texts
    for each in predicted:
        assert each.aux_info["iter_count"] < len(each.choices) * NUM_TOKENS / 3
    for each in others:
        assert 0 < each.aux_info["iter_count"] <= NUM_TOKENS
    return sum(_accepted(each.usage, len(each.choices)) for each in predicted)


def _check_streams(found: list[list[Any]], texts: list[str]) -> int:
    """Every stream is the plain text in few parts, and ends with its counts. The accepted tokens of all predictions."""
    parts = [[chunk.choices[0].text for chunk in chunks if chunk.choices] for chunks in found]
    assert ["".join(each) for each in parts] == texts
    assert all(len(each) < NUM_TOKENS / 2 for each in parts)
    return sum(_accepted(chunks[-1].usage, 1) for chunks in found)


def _accepted(usage: Any, num_choices: int) -> int:
    """The accepted tokens of a prediction that is right."""
    num_tokens = num_choices * NUM_TOKENS
    accepted = usage.completion_tokens_details.accepted_prediction_tokens
    assert num_tokens / 2 < accepted < num_tokens
    return accepted


def _drafted_by_source(server: Server, config: dict[str, Any]) -> dict[str, int]:
    """The drafts of a server by source; its counts have to be vLLM's, and each source of the config has drafted."""
    stats = json.loads(server.get("/specplus/stats"))
    assert stats["entries"]["request_counts"] == 0
    for what, name in (("drafted", "draft"), ("accepted", "accepted")):
        counted = server.metric(f"vllm:spec_decode_num_{name}_tokens_total")
        assert sum(row[what] for row in stats["totals"].values()) == counted > 0
        assert server.metric(f"specplus:{name}_tokens_total", "/specplus/metrics") == counted
    assert not stats["faults"]
    drafted = {source: row["drafted"] for source, row in stats["totals"].items()}
    options = resolve(config).options
    assert options is not None
    assert all(drafted[source] > 0 for source in own_sources(options))
    return drafted


async def _predict_balanced(servers: list[Server], texts: list[str]) -> list[Any]:
    """The responses by a balancer that gives each connection to the next server in turn."""
    turns = cycle(servers)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = int(next(turns).address.rsplit(":", 1)[1])
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_forward(reader, server_writer), _forward(server_reader, writer))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as balancer:
        port = balancer.sockets[0].getsockname()[1]
        return await _predict(f"http://127.0.0.1:{port}", texts)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _predict(address: str, texts: list[str]) -> list[Any]:
    """The responses to all that is asked at once.

    That is each prompt with its text as the prediction, the first one twice in one request, and each prompt without a
    prediction.
    """
    predicted = [({"prompt": [prompt]}, text) for prompt, text in zip(PROMPTS, texts, strict=True)]
    asked = [
        *((question, _prediction(text)) for question, text in predicted),
        ({"prompt": [PROMPTS[0]] * 2}, _prediction(texts[0])),
        *((question, {}) for question, _ in predicted),
    ]
    async with _client(address) as client:
        return await asyncio.gather(
            *(
                client.completions.create(
                    **REQUEST, **question, extra_body={"ignore_eos": True, "aux_info": True} | prediction
                )
                for question, prediction in asked
            )
        )


async def _stream(address: str, texts: list[str]) -> list[list[Any]]:
    """The chunks of each prompt's text, which is its prediction too, all streamed at once."""
    usage: Any = {"include_usage": True}
    async with _client(address) as client:

        async def chunks(prompt: str, text: str) -> list[Any]:
            extra = {"ignore_eos": True} | _prediction(text)
            stream = await client.completions.create(
                **REQUEST, prompt=prompt, stream=True, stream_options=usage, extra_body=extra
            )
            return [chunk async for chunk in stream]

        return await asyncio.gather(*map(chunks, PROMPTS, texts))


def _client(address: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600)


def _prediction(text: str) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


def _requests_by_engine(server: Server) -> list[float]:
    """How many requests each engine has finished, by vLLM's own counter."""
    name = "vllm:request_success_total"
    by_engine: dict[str, float] = {}
    for line in server.get("/metrics").splitlines():
        if line.startswith(name + "{"):
            engine = line.split('engine="')[1].split('"')[0]
            by_engine[engine] = by_engine.get(engine, 0.0) + float(line.split()[-1])
    return [by_engine[engine] for engine in sorted(by_engine)]
