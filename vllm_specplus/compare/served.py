"""Measures a running server over HTTP: how fast answers come, by the field names of ``vllm bench serve``."""

import asyncio
import json
import secrets
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from vllm_specplus.compare.processes import RefusedError
from vllm_specplus.compare.prompts import Prompt

_PERCENTILES = (90, 99)
_WARM_UP_TOKENS = 8
_COUNTER = "vllm:spec_decode_num_"
_TEXTS = ("content", "reasoning", "reasoning_content", "tool_calls")


@dataclass
class Answer:
    """What came of one request; times are of `time.perf_counter`, in seconds.

    Attributes:
        asked: when the request went out.
        arrivals: when each part of the text came. A step that accepts drafts sends several tokens as one part.
        num_prompt_tokens, num_tokens: as the server counts them.
        text: all that came, reasoning too; without calls of tools.
        error: why it failed; "" if it did not.
    """

    asked: float
    arrivals: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    text: str = ""
    error: str = ""


class ServedModel:
    """A model at a server that speaks OpenAI's API.

    Args:
        url: the server's address, without ``/v1``.
        model: the name under which it serves the model.
        api_key: "" if it asks for none.
        max_tokens: of an answer.
        temperature: of every request.
    """

    def __init__(self, url: str, model: str, api_key: str, *, max_tokens: int, temperature: float):
        self.url = url
        self._settings: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # An answer may take any time.
        timeout, limits = httpx.Timeout(None, connect=10.0), httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def warm_up(self, prompts: Sequence[Prompt]) -> None:
        """Ask for the beginnings of some answers at once.

        Raises:
            RefusedError: the server does not answer, or refuses a request.
        """
        asked = (self._ask(prompt, max_tokens=_WARM_UP_TOKENS) for prompt in prompts)
        for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True):
            if answer.error:
                raise RefusedError(f"{self.url}: prompt {prompt.name}: {answer.error}")

    async def run(self, prompts: Sequence[Prompt], concurrency: int) -> dict[str, Any]:
        """Ask every prompt once, `concurrency` at a time; return the fields, times in milliseconds.

        Each run has a ``cache_salt`` of its own, and so has a prompt that comes again: the server's prefix cache and
        the plugin's suffix trees hold neither prompt nor answer of theirs.
        """
        waiting, copies, salt = iter(enumerate(prompts)), Counter[str](), secrets.token_hex(8)
        answers: dict[int, Answer] = {}

        async def ask_in_turn() -> None:
            for place, prompt in waiting:
                copies[prompt.name] += 1
                answers[place] = await self._ask(prompt, cache_salt=f"{salt} {copies[prompt.name]}")

        before = await self._draft_counts()
        began = time.perf_counter()
        await asyncio.gather(*(ask_in_turn() for _ in range(concurrency)))
        seconds = time.perf_counter() - began
        in_order = [answers[place] for place in range(len(prompts))]
        return fields_of(in_order, seconds) | draft_fields(before, await self._draft_counts())

    async def _ask(self, prompt: Prompt, **settings: Any) -> Answer:
        body: dict[str, Any] = self._settings | settings | {"stream": True, "stream_options": {"include_usage": True}}
        if prompt.reference:
            body["prediction"] = {"type": "content", "content": prompt.reference}
        if prompt.messages:
            path, body["messages"] = "/v1/chat/completions", list(prompt.messages)
        else:
            path, body["prompt"] = "/v1/completions", prompt.text
        answer = Answer(time.perf_counter())
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.is_error:
                    answer.error = _reason(response.status_code, await response.aread())
                else:
                    await _read(response, answer)
        except httpx.HTTPError as problem:
            answer.error = f"no answer: {str(problem) or type(problem).__name__}"
        except (ValueError, KeyError, TypeError, AttributeError):
            answer.error = "the answer is none of OpenAI's API"
        return answer

    async def _draft_counts(self) -> dict[str, Any]:
        """vLLM's counters of drafts by name, those by position as a dict; {} where the server shows none."""
        try:
            text = (await self._client.get("/metrics")).raise_for_status().text
            families = [*text_string_to_metric_families(text)]
        except (httpx.HTTPError, ValueError):
            return {}
        counts: dict[str, Any] = {"accepted_tokens_per_pos": {}}
        for family in families:
            for sample in family.samples:
                if not sample.name.startswith(_COUNTER) or not sample.name.endswith("_total"):
                    continue
                name = sample.name.removeprefix(_COUNTER).removesuffix("_total")
                if name == "accepted_tokens_per_pos":
                    by_position, position = counts[name], int(sample.labels["position"])
                    by_position[position] = by_position.get(position, 0) + int(sample.value)
                else:
                    counts[name] = counts.get(name, 0) + int(sample.value)
        return counts


async def _read(response: httpx.Response, answer: Answer) -> None:
    """Read a stream of events to its end. A text's part may be of an answer, a reasoning or a call of a tool."""
    async for line in _lines(response):
        if not line.startswith(b"data: ") or line == b"data: [DONE]":
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            answer.error = str(event["error"].get("message", event["error"]))
        for choice in event.get("choices", ()):
            parts = [choice.get("text"), *map((choice.get("delta") or {}).get, _TEXTS)]
            if any(parts):
                answer.arrivals.append(time.perf_counter())
            answer.text += "".join(part for part in parts if isinstance(part, str))
        if usage := event.get("usage"):
            answer.num_prompt_tokens, answer.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if not answer.error and not answer.num_tokens:
        answer.error = "the stream ended without usage"
    if not answer.error and not answer.arrivals:
        # A token that ends the answer at once has no text.
        answer.arrivals.append(time.perf_counter())


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a stream. `httpx` would also part them at characters that may stand within a JSON text."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")


def _reason(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:200]
    # In one line: a proxy answers with a page.
    return f"HTTP {status}: {' '.join(str(message).split())}"


def fields_of(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Counts, throughputs by second, texts in the answers' order, and the spread of four times in milliseconds.

    ``ttft``: to the first part of the text. ``itl``: between two parts. ``tpot``: for each token behind the first.
    ``e2el``: to the last part.
    """
    whole = [answer for answer in answers if not answer.error and answer.arrivals]
    num_in, num_out = sum(a.num_prompt_tokens for a in whole), sum(a.num_tokens for a in whole)
    times = {
        "ttft": [a.arrivals[0] - a.asked for a in whole],
        "tpot": [(a.arrivals[-1] - a.arrivals[0]) / (a.num_tokens - 1) for a in whole if a.num_tokens > 1],
        "itl": [b - a for answer in whole for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)],
        "e2el": [a.arrivals[-1] - a.asked for a in whole],
    }
    fields: dict[str, Any] = {
        "duration": seconds,
        "completed": len(whole),
        "failed": len(answers) - len(whole),
        "errors": [answer.error for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(whole) / seconds,
        "output_throughput": num_out / seconds,
        "total_token_throughput": (num_in + num_out) / seconds,
    }
    for name, values in times.items():
        fields |= _spread(name, [1000 * value for value in values])
    return fields


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """The mean, median, standard deviation and percentiles; 0 where there are no values."""
    known = values or [0.0]
    spread = {"mean": statistics.fmean(known), "median": statistics.median(known), "std": statistics.pstdev(known)}
    spread |= {f"p{percent}": float(np.percentile(known, percent)) for percent in _PERCENTILES}
    return {f"{measure}_{name}_ms": value for measure, value in spread.items()}


def draft_fields(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What a run added to vLLM's counters of drafts; the rates are in percent.

    {} if nothing was drafted, and where a count is missing or fell, as that of a server that was started anew.
    """
    if not before or not after:
        return {}
    drafts, drafted, accepted = (
        after.get(name, 0) - before.get(name, 0) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if drafts <= 0 or drafted <= 0 or accepted < 0:
        return {}
    positions = after["accepted_tokens_per_pos"]
    earlier = before.get("accepted_tokens_per_pos", {})
    return {
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_per_position_acceptance_rates": [
            (positions[position] - earlier.get(position, 0)) / drafts for position in sorted(positions)
        ],
    }
