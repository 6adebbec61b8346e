"""The bounds of docs/limits.md in the API server, each driven to where it holds."""

import asyncio
import gc
import json
import tracemalloc
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from tests.requests.stand_ins import CHAT, TEXT, Check, Engine, Server, answer, exchange, middleware_on
from vllm_specplus.requests.body import read_body
from vllm_specplus.requests.check import handover
from vllm_specplus.requests.response import count_tasks

MAX_LEN = Check.model_config.max_model_len
# Of references; no hexadecimal digit, as those of a key may repeat.
LETTER = "z"
WAIT_SECONDS = 60


class Waiting:
    """A server that reads requests, and answers them when it is told to."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.may_answer = asyncio.Event()
        self.app = middleware_on(self._answer, Engine())

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert LETTER.encode() * 4 not in message["body"]
        del message
        self.num_waiting += 1
        await self.may_answer.wait()
        await JSONResponse(answer())(scope, receive, send)

    async def until_waiting(self, count: int) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while self.num_waiting < count:
                await asyncio.sleep(0.001)


def body_of(text: str, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "prediction": {"type": "content", "content": text}, **fields}).encode()


def status_of(sent: list[Message]) -> int:
    return sent[0]["status"]


def test_a_request_in_flight_holds_no_text() -> None:
    """Its tokens stay, up to the model's length; the body, the text and the tokens past it do not."""
    num_requests, num_letters = 30, 200_000
    whole = body_of(LETTER * num_letters)
    pieces = [whole[:1000], whole[1000:]]

    async def run() -> int:
        server = Waiting()
        # The first request fills caches.
        tasks = [asyncio.create_task(exchange(server.app, pieces))]
        await server.until_waiting(1)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        tasks += [asyncio.create_task(exchange(server.app, pieces)) for _ in range(num_requests)]
        await server.until_waiting(1 + num_requests)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        assert len(handover) == 1 + num_requests
        assert handover.num_bytes == (1 + num_requests) * 2 * 4 * MAX_LEN
        server.may_answer.set()
        assert [status_of(sent) for sent in await asyncio.gather(*tasks)] == [200] * (1 + num_requests)
        await asyncio.gather(*count_tasks)
        return after - before

    tracemalloc.start()
    try:
        taken = asyncio.run(run())
    finally:
        tracemalloc.stop()
    assert (len(handover), handover.num_bytes) == (0, 0)
    assert taken < num_requests * 20_000 < num_requests * num_letters


def test_references_in_flight_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past it a request goes on without its reference, and all have theirs once there is room."""
    most = 5
    monkeypatch.setattr(handover, "max_bytes", most * 2 * 4 * 10)

    async def run() -> None:
        server, other = Waiting(), Waiting()
        tasks = [asyncio.create_task(exchange(server.app, body_of(LETTER * 10))) for _ in range(most)]
        await server.until_waiting(most)
        assert handover.num_bytes == handover.max_bytes
        assert all(options.token_ids is not None for options, _ in handover._entries.values())
        others = [asyncio.create_task(exchange(other.app, body_of("b", vllm_xargs={"spec_tokens": 1}))) for _ in "12"]
        await other.until_waiting(2)
        assert (len(handover), handover.num_bytes) == (most + 2, handover.max_bytes)
        *_, (first, _), (last, _) = handover._entries.values()
        assert first.token_ids is None is last.token_ids
        assert first.max_drafts == 1
        other.may_answer.set()
        assert [status_of(sent) for sent in await asyncio.gather(*others)] == [200, 200]
        # One leaves by its end, one because its client goes.
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert status_of(await exchange(other.app, body_of(LETTER * 10))) == 200
        server.may_answer.set()
        assert [status_of(sent) for sent in await asyncio.gather(*tasks[1:])] == [200] * (most - 1)
        await asyncio.gather(*count_tasks)

    asyncio.run(run())
    assert (len(handover), handover.num_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": "3"}, 3),
        ({"n": None, "prompt": "a"}, 1),
        ({"n": 2, "prompt": ["a", "b", "c"]}, 6),
        ({"prompt": [5, 6, 7]}, 1),
        ({"prompt": [5.0, 6.0]}, 1),
        # vLLM ignores the prompts of a chat.
        ({"prompt": [""] * 1000, "messages": []}, 1),
        ({"prompt": [[5, 6], [7]]}, 2),
        ({"prompt": []}, 1),
        ({"n": 0}, 1),
        ({"n": -2}, 1),
        ({"n": [2]}, 1),
    ],
)
def test_answers_are_counted(fields: dict[str, Any], expected: int) -> None:
    body = read_body(body_of("a", **fields), MAX_LEN)
    assert body is not None
    assert body.num_answers == expected


@pytest.mark.parametrize("fields", [{"n": 10}, {"prompt": ["a"] * 10}])
def test_one_request_takes_no_more_than_its_share(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is a message to the engine, with the reference in it."""
    monkeypatch.setattr(handover, "max_bytes_of_request", 11 * 4 * 10)
    path = TEXT if "prompt" in fields else CHAT
    assert Server().post(body_of("a" * 10, **fields), path=path).status == 200
    server = Server()
    got = server.post(body_of("a" * 11, **fields), path=path)
    assert got.status == 400
    error = json.loads(got.body)["error"]
    assert error["param"] == "prediction"
    assert "for so many answers: it takes 44 bytes for each, and at most 440 are allowed" in error["message"]
    # Python writes no integer of more than 4,300 digits.
    for n in (10**4299, str(10**4299)):
        got = Server().post(body_of("a", prompt=["a", "b"], n=n), path=TEXT)
        assert got.status == 400
        assert "for so many answers" in got.json["error"]["message"]
    assert not server.bodies
