"""vLLM's features that are asked of its HTTP server, or of the engine behind it."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from json import dumps, loads
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import openai
import pytest
from vllm import SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
from vllm.entrypoints.launchers.app import build_app
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.e2e.engines import PROMPTS
from tests.e2e.faults import let_drafts_pay_in_worker
from tests.e2e.features.outcomes import Lack, Refusal, filled, registered
from vllm_specplus.requests.engine_client import has_drafter

_MOST_SECONDS = 480
PROMPT = bytes(PROMPTS[0]).decode()
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}


@dataclass(frozen=True)
class Server:
    """A server of vLLM's in this process, whose engine has a process of its own."""

    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    engine: Any

    @property
    def has_drafter(self) -> bool:
        """Whether the plugin drafts."""
        return has_drafter(self.engine)

    async def stats(self) -> dict[str, Any]:
        """The plugin's counts, where it drafts."""
        (stats,) = await self.engine.collective_rpc("specplus_stats")
        return stats

    async def accepted(self) -> int:
        """The drafts that have been accepted so far; 0 where the plugin does not draft."""
        return filled(await self.stats(), "accepted") if self.has_drafter else 0


Feature = Callable[[Server], Awaitable[Any]]
FEATURES: dict[str, Feature] = {}
ASYNCHRONOUS = "--async-scheduling"
# They bring no tokens.
WITHOUT_DRAFTS = {"`/tokenize`"}


feature = partial(registered, FEATURES)


# Whatever the model says, a call of this function is short.
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "ping",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"fast": {"type": "boolean"}},
            "required": ["fast"],
            "additionalProperties": False,
        },
    },
}


@feature("tool calls")
async def tool_calls(s: Server) -> Any:
    """A function that is named, as a whole and as a stream, one that the model has to choose, and one that it may."""
    request = GREEDY | {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 100}
    named: Any = {"type": "function", "function": {"name": "ping"}}
    answer = await s.client.chat.completions.create(**request, tool_choice=named)
    (call,) = answer.choices[0].message.tool_calls
    streamed = ""
    async for chunk in await s.client.chat.completions.create(**request, tool_choice=named, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            streamed += delta.function.arguments or ""
    chosen = (await s.client.chat.completions.create(**request, tool_choice="required")).choices[0].message
    # A model may call as often as its tokens allow, so the last call may be cut.
    calls = [(c.function.name, c.function.arguments) for c in chosen.tool_calls or ()]
    before = await s.accepted()
    free = (await s.client.chat.completions.create(**request, tool_choice="auto")).choices[0].message
    # The model does not know how to call. Outside a call no grammar takes drafts away.
    assert not free.tool_calls
    assert not s.has_drafter or await s.accepted() > before
    return call.function.name, loads(call.function.arguments), loads(streamed), calls, chosen.content, free.content


@feature("`best_of`")
async def best_of(s: Server) -> Any:
    """OpenAI's field, which vLLM ignores: it makes one answer, where three would cost three times the tokens."""
    request = GREEDY | {"prompt": PROMPT, "max_tokens": 16}
    answer = await s.client.completions.create(**request, best_of=3)
    assert answer.usage.completion_tokens <= 16
    return [choice.text for choice in answer.choices]


@feature("`/tokenize`")
async def tokenize(s: Server) -> Any:
    """A prompt and a chat. vLLM ignores a prediction there."""
    bodies: list[Any] = [{"model": "tiny", "prompt": PROMPT}, {"model": "tiny", "messages": MESSAGES}]
    prediction = {"prediction": {"type": "content", "content": PROMPT}}
    answers = [await s.http.post("/tokenize", json=body | more) for more in ({}, prediction) for body in bodies]
    found = [answer.raise_for_status().json() for answer in answers]
    assert found[:2] == found[2:]
    return found


@feature("Responses API")
async def responses(s: Server) -> Any:
    request = GREEDY | {"input": PROMPT, "max_output_tokens": 16}
    whole = await s.client.responses.create(**request)
    stream = await s.client.responses.create(**request, stream=True)
    parts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    return whole.output_text, "".join(parts), whole.usage.output_tokens


@feature("Responses API with a reference in `vllm_xargs`")
async def responses_with_reference(s: Server) -> Any:
    request = GREEDY | {"input": PROMPT, "max_output_tokens": 16}
    text = (await s.client.responses.create(**request)).output_text
    if s.has_drafter:
        with pytest.raises(openai.BadRequestError, match="prediction"):
            await s.client.responses.create(**request, extra_body={"prediction": {"type": "content", "content": text}})
    # Where the plugin does not draft it is refused.
    xargs = {"sp_advice_prompt": text, "sp_edit": 1} if s.has_drafter else {}
    answer = await s.client.responses.create(**request, extra_body={"vllm_xargs": xargs})
    assert not s.has_drafter or sum((await s.stats())["accepted"]["reference"]) > 0
    return answer.output_text


@feature("streaming input")
async def streaming_input(s: Server) -> Any:
    """A session of three prompts, whose texts are the beginning of the next one's prompt."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def turns() -> AsyncIterator[StreamingInput]:
        for prompt in PROMPTS[:3]:
            # vLLM adds the next prompts to the first one's list.
            yield StreamingInput(tokens_input(list(prompt)))

    found: list[int] = []
    async for output in s.engine.generate(turns(), params, "session"):
        found += output.outputs[0].token_ids
    return found


@feature("pause and resume")
async def pause_and_resume(s: Server) -> Any:
    """A request is held in its middle, and goes on."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    found: list[int] = []
    paused = 0
    async for output in s.engine.generate({"prompt_token_ids": PROMPTS[0]}, params, "paused"):
        found += output.outputs[0].token_ids
        if not paused:
            await s.engine.pause_generation(mode="keep")
            paused = len(found)
            await s.engine.resume_generation()
    assert 0 < paused < 24
    return found


@asynccontextmanager
async def serve(model: Path, config: dict[str, Any] | None, *more: str) -> AsyncIterator[Server]:
    """Start vLLM's server without a port, with `more` options."""
    options = ["serve", str(model), "--served-model-name", "tiny", "--max-model-len", "512", "--enforce-eager"]
    options += ["--dtype", "float32", "--kv-cache-memory-bytes", str(64 << 20), "--disable-log-stats"]
    options += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    options += ["--structured-outputs-config", dumps({"backend": "xgrammar", "disable_any_whitespace": True})]
    options += ["--middleware", "vllm_specplus.requests.PredictedOutputs", *more]
    if config is not None:
        options += ["--speculative-config", dumps(config)]
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    args = parser.parse_args(options)
    args.model = args.model_tag
    # This process has threads by now, so the engine's is not forked from it.
    # Functions for its worker are pickled.
    with patch.dict(os.environ, VLLM_WORKER_MULTIPROC_METHOD="spawn", VLLM_ALLOW_INSECURE_SERIALIZATION="1"):
        async with build_async_engine_client(args) as engine:
            tasks = await engine.get_supported_tasks()
            app = build_app(args, tasks, engine.model_config)
            await init_app_state(engine, app.state, args, tasks)
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=None) as http:
                client = openai.AsyncOpenAI(
                    base_url="http://server/v1", api_key="none", max_retries=0, http_client=http
                )
                yield Server(client, http, engine)


def ask(model: Path, config: dict[str, Any] | None, names: Iterable[str], *options: str) -> dict[str, Any]:
    """The outcome of features on one server; each that brings tokens has accepted drafts where the plugin drafts.

    Args:
        model: the folder of the weights.
        config: the speculative config.
        names: of the features.
        options: further options of `vllm serve`.
    """

    async def ask_all() -> dict[str, Any]:
        async with serve(model, config, *options) as server:
            scheduling = await server.engine.collective_rpc(_has_asynchronous_scheduling)
            assert scheduling == [ASYNCHRONOUS in options]
            if not server.has_drafter:
                return {name: await _outcome(FEATURES[name], server) for name in names}
            await server.engine.collective_rpc(let_drafts_pay_in_worker)
            found: dict[str, Any] = {}
            counts = (0, 0)
            for name in names:
                found[name] = await _outcome(FEATURES[name], server)
                stats = await server.stats()
                before, counts = counts, (filled(stats), filled(stats, "accepted"))
                has_none = name in WITHOUT_DRAFTS or isinstance(found[name], Refusal | Lack)
                assert has_none or all(now > then for now, then in zip(counts, before, strict=True)), name
            assert not any(stats["faults"].values()), "a fault of the plugin"
            return found

    return asyncio.run(asyncio.wait_for(ask_all(), _MOST_SECONDS))


def _has_asynchronous_scheduling(worker: Any) -> bool:
    return worker.vllm_config.scheduler_config.async_scheduling


async def _outcome(ask: Feature, server: Server) -> Any:
    try:
        return await ask(server)
    except (openai.BadRequestError, VLLMValidationError) as error:
        return Refusal(error)
    except Exception as error:  # the other features are asked all the same
        return Lack(f"{type(error).__name__}: {error}")
