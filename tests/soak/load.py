"""Streaming clients that ask a server for texts whose right answers are known, abort, and send what is wrong."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import openai

_TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return",
    "import os\nimport sys\n\nclass Error(Exception):\n    pass\n\nclass OtherError(Exception):\n    ",
    '[{"id": 1, "ok": true}, {"id": 2, "ok": true}, {"id": 3, "ok": true}, {"id": 4, "ok"',
    "aaaa",
    "x",
)
_LONGEST_PROMPT = 300
_ERRORS = (openai.APIError, httpx.HTTPError)
_SECONDS_TO_WAIT = 600.0  # for one answer; a server that hangs is a failure, not a long test


@dataclass(frozen=True)
class Kind:
    """A request; those of one kind have one right answer.

    name: what it asks. options: of the request, of a chat where they have messages. extra: further fields of its body.
    """

    name: str
    options: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    streams: bool = True

    @property
    def is_sampled(self) -> bool:
        return self.options["temperature"] > 0

    @property
    def is_reported(self) -> bool:
        """Whether the answer tells what became of the request's drafts."""
        return "aux_info" in self.extra

    @property
    def has_usage(self) -> bool:
        """Whether the answer tells its number of tokens as OpenAI's do."""
        return not self.streams or "stream_options" in self.options

    @property
    def end(self) -> str:
        """How an answer counts in `Tally.ends`. The server sees a stop string, so the engine may go on for a step."""
        return "overrun" if "stop" in self.options else "answered"


Answer = tuple[tuple[str, str | None], ...]
"""The text of each choice, and why it ended."""


def kinds(max_tokens: int, seed: int) -> list[Kind]:
    """Greedy and seeded requests of all forms, but for those with references; a seed sets their lengths."""
    found, rng = [], random.Random(seed)

    def options_of(i: int, **sampling: Any) -> dict[str, Any]:
        """A text from its middle on, again and again; the first kinds of all get a single token."""
        text = (_TEXTS[i] * _LONGEST_PROMPT)[rng.randrange(len(_TEXTS[i])) :][: rng.randint(1, _LONGEST_PROMPT)]
        return {"prompt": text, "max_tokens": rng.randint(1, max_tokens) if i else 1, "temperature": 0.0} | sampling

    for i in range(len(_TEXTS)):
        seeded = {"temperature": 0.8, "top_p": 0.9, "seed": 7 + i}
        found.append(Kind(f"greedy {i}", options_of(i)))
        found.append(Kind(f"seeded {i}", options_of(i, **seeded)))
        found.append(Kind(f"limited {i}", options_of(i), {"vllm_xargs": {"spec_tokens": i % 3}}))
        found.append(Kind(f"salted {i}", options_of(i), {"cache_salt": f"tenant {i % 2}"}, streams=False))
    options = {"prompt": _TEXTS[0], "max_tokens": max_tokens, "temperature": 0.0}
    chat = {"messages": [{"role": "user", "content": _TEXTS[2]}], "max_tokens": max_tokens, "temperature": 0.0}
    return [
        *found,
        Kind("two choices", options | {"n": 2, "temperature": 0.9, "seed": 3}),
        Kind("a stop string", options | {"stop": ["return", "\n\n"]}),
        Kind("penalties", options | {"frequency_penalty": 0.7, "presence_penalty": 0.3}),
        Kind("a chat", chat, {"cache_salt": "tenant 0"}),
        Kind("a chat at once", chat | {"temperature": 0.8, "seed": 5}, streams=False),
        Kind("a grammar", options, {"structured_outputs": {"regex": "[a-c]{3}x*"}}),
    ]


def with_references(kinds: list[Kind], answers: dict[str, Answer]) -> list[Kind]:
    """The greedy and seeded kinds with references that are right, half right and wrong; the answers stay the same."""
    found = []
    for kind in kinds:
        if not kind.name.startswith(("greedy", "seeded")):
            continue
        right = answers[kind.name][0][0]
        references = {
            "right": right,
            "half": right[: len(right) // 2] + "@" + right[len(right) // 2 :],
            "wrong": "@#" * 40,
        }
        asks_usage = kind.options | {"stream_options": {"include_usage": True}}
        forms = {"right": replace(kind, options=asks_usage), "half": replace(kind, streams=False), "wrong": kind}
        for name, text in references.items():
            extra = {"prediction": {"type": "content", "content": text}, "aux_info": True}
            found.append(replace(forms[name], name=f"{kind.name}, {name} reference", extra=extra))
            answers[found[-1].name] = answers[kind.name]
    return found


WRONG = [
    Kind("spec_tokens below 0", {"prompt": "x"}, {"vllm_xargs": {"spec_tokens": -1}}),
    Kind("a prediction of no form", {"prompt": "x"}, {"prediction": {"type": "content"}}),
    Kind("no such option", {"prompt": "x"}, {"vllm_xargs": {"sp_nonsense": 1}}),
    Kind("max_tokens of 0", {"prompt": "x", "max_tokens": 0}),
    Kind("a prompt too long", {"prompt": "x" * 8000}),
]


@dataclass
class Tally:
    """What became of the requests: `ends` by what was sent, and each difference in words.

    "overrun" counts answers after which the engine may have gone on for a step.
    """

    ends: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


class Clients:
    """Clients of one server."""

    def __init__(self, address: str) -> None:
        # A connection that is kept may be closed by the server just when a request is sent.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = openai.AsyncOpenAI(
            base_url=f"{address}/v1",
            api_key="none",
            max_retries=0,
            timeout=_SECONDS_TO_WAIT,
            http_client=httpx.AsyncClient(limits=limits, timeout=_SECONDS_TO_WAIT),
        )

    async def ask(self, kind: Kind, most_chunks: int | None = None) -> Answer | None:
        """The answer to a request; None where it streams and is aborted, after `most_chunks` chunks."""
        if not kind.streams:
            response = await self._create(kind)
            _check_report(kind, response)
            return tuple((_text(choice), choice.finish_reason) for choice in response.choices)
        stream = await self._create(kind)
        chunk = None
        texts: Counter[int] = Counter()
        parts: dict[int, list[str]] = {}
        reasons: dict[int, str] = {}
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    if choice.index in reasons:
                        raise AssertionError(f"{kind.name}: more text behind the end of a choice")
                    texts[choice.index] += 1
                    parts.setdefault(choice.index, []).append(_text(choice))
                    if choice.finish_reason:
                        reasons[choice.index] = choice.finish_reason
                if most_chunks is not None and sum(texts.values()) > most_chunks:
                    return None
        _check_report(kind, chunk)
        return tuple(("".join(parts[i]), reasons.get(i)) for i in sorted(parts))

    async def _create(self, kind: Kind) -> Any:
        """A stream of chunks, or the whole response."""
        of_chat = "messages" in kind.options
        create: Any = self._client.chat.completions.create if of_chat else self._client.completions.create
        return await create(model="tiny", stream=kind.streams, **kind.options, extra_body=kind.extra or None)

    async def take_turns(
        self, kinds: list[Kind], answers: dict[str, Answer], until: float, rng: random.Random, to: Tally
    ) -> None:
        """Send one request after another until a time of `time.monotonic`."""
        while time.monotonic() < until:
            if rng.random() < 0.1:
                await self._send_wrong(rng.choice(WRONG), to)
                continue
            kind = rng.choice(kinds)
            if rng.random() < 0.25:
                await self._abort(kind, answers, rng, to)
                continue
            _enter(kind, await self.ask(kind), answers, to)

    async def _send_wrong(self, kind: Kind, to: Tally) -> None:
        try:
            await self.ask(kind)
        except openai.BadRequestError:
            to.ends["refused"] += 1
        else:
            to.differences.append(f"{kind.name}: not refused")

    async def _abort(self, kind: Kind, answers: dict[str, Answer], rng: random.Random, to: Tally) -> None:
        """Go away before the first chunk, or after some, unless the answer is there by then."""
        if rng.random() < 0.5:
            try:
                answer = await asyncio.wait_for(self.ask(kind), rng.random())
            except TimeoutError:
                to.ends["gone early"] += 1
                return
        else:
            answer = await self.ask(kind, most_chunks=rng.randrange(12))
            if answer is None:
                to.ends["gone amid"] += 1
                return
        _enter(kind, answer, answers, to)

    async def lose_the_server(
        self, kind: Kind, num_streams: int, end_server: Callable[[], None], seconds: float
    ) -> Counter[str]:
        """Open streams, end the server once all have text, and say how the streams end within some seconds.

        A stream ends with an error, with the reason of a choice, or in silence.
        """
        begun = asyncio.Barrier(num_streams + 1)

        async def read() -> str:
            end, is_first = "silence", True
            try:
                stream = await self._create(kind)
                async for chunk in stream:
                    if is_first:
                        is_first = False
                        await begun.wait()
                    end = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), end)
            except _ERRORS:
                return "error"
            return end

        streams = [asyncio.create_task(read()) for _ in range(num_streams)]
        await begun.wait()
        end_server()
        return Counter(await asyncio.wait_for(asyncio.gather(*streams), seconds))


def _enter(kind: Kind, answer: Answer | None, answers: dict[str, Answer], to: Tally) -> None:
    """Enter an answer that has come to its end, and how it differs from the right one, where there is a right one."""
    to.ends[kind.end] += 1
    assert answer is not None
    right = answers.get(kind.name)
    if right is None:
        is_right = len(answer) == kind.options.get("n", 1) and all(reason for _, reason in answer)
    else:
        is_right = answer == right
    if not is_right:
        to.differences.append(f"{kind.name}: {answer} instead of {right}")


def _check_report(kind: Kind, answer: Any) -> None:
    """Check what an answer, or the last chunk of one, tells of its request's drafts, if the request asked."""
    if not kind.is_reported:
        return
    told = f"{kind.name}: {answer}"
    info, usage = answer.aux_info, answer.usage
    num_tokens, num_steps = info["output_len"], info["iter_count"]
    assert 1 <= num_steps <= num_tokens <= kind.options["max_tokens"], told
    assert info["avg_tokens_per_iter"] == num_tokens / num_steps, told
    assert info["cost_time"] > 0, told
    assert (usage is not None) == kind.has_usage, told
    if usage is not None:
        details = usage.completion_tokens_details
        assert usage.completion_tokens == num_tokens, told
        assert 0 <= details.accepted_prediction_tokens <= num_tokens, told
        assert details.rejected_prediction_tokens >= 0, told


def _text(choice: Any) -> str:
    """The text of a choice or of a part of one, of a completion or a chat."""
    if hasattr(choice, "text"):
        return choice.text
    message = choice.delta if hasattr(choice, "delta") else choice.message
    return message.content or ""


async def answers_alone(clients: Clients, kinds: list[Kind]) -> dict[str, Answer]:
    """The answer of each kind, one request after another."""
    answers = {}
    for kind in kinds:
        answer = await clients.ask(kind)
        assert answer is not None
        answers[kind.name] = answer
    return answers


async def soak(
    clients: Clients, kinds: list[Kind], answers: dict[str, Answer], num_clients: int, seconds: float, seed: int
) -> Tally:
    """Let clients ask at the same time; a seed sets what each of them does."""
    tally, until = Tally(), time.monotonic() + seconds
    choices = (random.Random(f"client {i} of {seed}") for i in range(num_clients))
    await asyncio.gather(*(clients.take_turns(kinds, answers, until, rng, tally) for rng in choices))
    return tally
