"""Requests that do not come to their end: neither options nor counts may be left behind."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tests.requests.stand_ins import (
    ALL_FIELDS,
    CHAT,
    COUNTS,
    STREAM,
    Engine,
    Server,
    answer,
    exchange,
    middleware_on,
    scope_for,
    streams,
    text_event,
)
from vllm_specplus.requests.check import handover
from vllm_specplus.requests.response import count_tasks


@pytest.mark.parametrize("answers", [[COUNTS], RuntimeError("engine is dead")])
@pytest.mark.parametrize("fields", [ALL_FIELDS, {"vllm_xargs": {"spec_tokens": 1}}])
def test_cancelled_in_mid_stream(answers: Any, fields: dict[str, Any], log: pytest.LogCaptureFixture) -> None:
    engine = Engine(answers)

    async def run() -> None:
        reached = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": text_event(0, "a"), "more_body": True})
            assert len(handover) == 1
            reached.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(exchange(middleware_on(app, engine), {**fields, "stream": True}))
        await reached.wait()
        assert not engine.calls
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(handover) == 0
        await asyncio.gather(*count_tasks, return_exceptions=True)

    asyncio.run(run())
    is_counted = fields is ALL_FIELDS
    assert (len(engine.calls), engine.num_answered) == (is_counted, is_counted)
    failed = is_counted and isinstance(answers, Exception)
    assert [record.levelname for record in log.records] == ["DEBUG"] * failed


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_while_the_workers_are_asked(stream: bool) -> None:
    """The workers are asked once, and the question is not cancelled."""

    async def run() -> Engine:
        engine = Engine()
        engine.gate.clear()
        server = Server(streams(STREAM) if stream else lambda: JSONResponse(answer()), engine)
        task = asyncio.create_task(exchange(server.app, {**ALL_FIELDS, "stream": stream}))
        while not engine.calls:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(handover) == 0
        assert len(count_tasks) == 1
        engine.gate.set()
        await asyncio.gather(*count_tasks)
        return engine

    engine = asyncio.run(run())
    assert (len(engine.calls), engine.num_answered) == (1, 1)


def test_the_client_goes_in_mid_stream() -> None:
    """vLLM's server still learns of it, though the middleware has read the body."""

    async def run() -> tuple[Engine, list[Message]]:
        gone = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            yield text_event(0, "a")
            gone.set()
            await asyncio.Event().wait()

        server = Server(lambda: StreamingResponse(endless(), media_type="text/event-stream"))
        sent = await exchange(server.app, {**ALL_FIELDS, "stream": True}, disconnect=gone)
        assert len(handover) == 0
        await asyncio.gather(*count_tasks)
        return server.engine, sent

    engine, sent = asyncio.run(asyncio.wait_for(run(), 10))
    assert sent[1]["body"] == text_event(0, "a")
    assert len(engine.calls) == 1


def test_the_client_goes_before_the_body_is_there() -> None:
    async def run() -> tuple[Server, list[Message]]:
        server, gone = Server(), asyncio.Event()
        gone.set()
        sent: list[Message] = []
        to_come = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

        async def receive() -> Message:
            return to_come.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        headers = {"content-type": "application/json"}
        await server.app(scope_for(server.app, CHAT, "POST", headers, ""), receive, send)
        return server, sent

    server, sent = asyncio.run(run())
    assert not sent
    assert not server.bodies
    assert not server.engine.calls


def test_the_server_fails() -> None:
    def fail() -> Response:
        raise KeyError("of the server")

    server = Server(fail)

    async def run() -> None:
        with pytest.raises(KeyError, match="of the server"):
            await exchange(server.app, ALL_FIELDS)
        assert len(handover) == 0
        await asyncio.gather(*count_tasks)

    asyncio.run(run())
    assert len(server.engine.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_workers_cannot_be_asked(stream: bool, log: pytest.LogCaptureFixture) -> None:
    """A response goes out without its counts."""
    engine = Engine(RuntimeError("engine is dead"))
    server = Server(streams(STREAM) if stream else lambda: JSONResponse(answer()), engine)
    got = server.post({**ALL_FIELDS, "stream": stream, "stream_options": {"include_usage": True} if stream else None})
    assert got.body == (b"".join(STREAM) if stream else JSONResponse(answer()).body)
    assert len(engine.calls) == 1
    (warning,) = (record for record in log.records if record.levelname == "WARNING")
    assert "RuntimeError" in warning.getMessage()
    assert "engine is dead" not in log.text
