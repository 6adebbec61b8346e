"""`PredictedOutputs` adds a report to a stream; vLLM's server and engine are stand-ins."""

import asyncio
import gzip
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tests.requests.stand_ins import (
    ALL_FIELDS,
    BEFORE,
    DETAILS,
    DONE,
    PREDICTION,
    STREAM,
    USAGE,
    USAGE_EVENT,
    Engine,
    Server,
    each,
    event,
    events_of,
    exchange,
    middleware_on,
    pieces_of,
    streams,
    text_event,
)


def test_a_compressed_stream() -> None:
    """It cannot be read, so it passes without delay."""
    pieces = [gzip.compress(piece) for piece in STREAM]
    headers = {"content-encoding": "gzip"}
    server = Server(lambda: StreamingResponse(each(pieces), headers=headers, media_type="text/event-stream"))
    got = server.post({**ALL_FIELDS, "stream": True, "stream_options": {"include_usage": True}})
    assert [message["body"] for message in got.sent[1:]] == [*pieces, b""]


@pytest.mark.parametrize("size", [None, 1, 2, 3, 7, 64, 300, 10_000])
@pytest.mark.parametrize("end", [[DONE], []])
def test_a_stream_with_usage(size: int | None, end: list[bytes]) -> None:
    """Only its last chunk is changed, however the events are cut."""
    messages = [*BEFORE, USAGE_EVENT, *end]
    server = Server(streams(pieces_of(messages, size) if size else messages))
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = server.post({**ALL_FIELDS, "stream": True, "stream_options": options})
    assert server.body["stream_options"] == options
    events = events_of(got.body)
    assert events[: len(BEFORE)] == BEFORE
    assert events[len(BEFORE) + 1 :] == end
    chunk = json.loads(events[len(BEFORE)].removeprefix(b"data: "))
    aux_info = chunk.pop("aux_info")
    assert aux_info.pop("cost_time") > 0
    assert aux_info == {"iter_count": 4, "output_len": 10, "avg_tokens_per_iter": 2.5}
    assert chunk == json.loads(event(choices=[], usage=USAGE | {"completion_tokens_details": DETAILS})[6:])
    assert len(server.engine.calls) == 1


def test_an_end_without_a_boundary() -> None:
    messages = [b"data: 1\n\n", b"data: 2"]
    assert Server(streams(messages)).post({**ALL_FIELDS, "stream": True}).body == b"".join(messages)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
@pytest.mark.parametrize("forced", [False, True])
def test_a_stream_without_usage(options: dict[str, Any] | None, forced: bool) -> None:
    """It has no place for a reference's counts, unless the server gives usage to every client."""
    server = Server(streams(STREAM if forced else [*BEFORE, DONE]), force_usage=forced)
    body = {"prediction": PREDICTION, "stream": True, "stream_options": options}
    got = server.post(body)
    assert server.body["stream_options"] == options
    usage = [event(choices=[], usage=USAGE | {"completion_tokens_details": DETAILS})] if forced else []
    assert got.body == b"".join([*BEFORE, *usage, DONE])
    assert len(server.engine.calls) == 1


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("options", ["absent", None, {}, {"include_usage": False}, {"continuous_usage_stats": True}])
def test_aux_info_of_a_stream_without_usage(options: Any, forced: bool) -> None:
    """vLLM is asked for the chunk; the client gets it without the usage, for which it has not asked."""
    server = Server(streams(STREAM), force_usage=forced)
    got = server.post({"aux_info": True, "stream": True} | ({} if options == "absent" else {"stream_options": options}))
    if forced:
        assert server.body.get("stream_options", "absent") == options
    else:
        # With `continuous_usage_stats` every chunk would have it.
        assert server.body["stream_options"] == {"include_usage": True}
    *before, last, done = events_of(got.body)
    assert (before, done) == (BEFORE, DONE)
    chunk = json.loads(last.removeprefix(b"data: "))
    assert chunk["choices"] == []
    assert chunk["aux_info"]["output_len"] == 10
    assert chunk.get("usage") == (USAGE if forced else None)
    assert ("usage" in chunk) == forced
    ChatCompletionChunk.model_validate(chunk, strict=True)


def test_wrong_stream_options_are_left_to_vllm() -> None:
    server = Server(streams(STREAM))
    got = server.post({"aux_info": True, "stream": True, "stream_options": "usage"})
    assert server.body["stream_options"] == "usage"
    assert b'"usage":{"prompt_tokens"' in events_of(got.body)[-2]


def test_events_are_passed_on_at_once() -> None:
    """Each event is sent once it is whole, also while the last chunk waits for the workers."""
    engine = Engine()
    engine.gate.clear()
    got: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        assert got == [b"start"]
        await send({"type": "http.response.body", "body": text_event(0, "a") + b"da", "more_body": True})
        assert got[1:] == [text_event(0, "a")]
        asyncio.get_running_loop().call_soon(look)
        await send({"type": "http.response.body", "body": b"ta: 1\n\n" + USAGE_EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": DONE})

    def look() -> None:
        assert got[2:] == [b"data: 1\n\n"]
        engine.gate.set()

    async def send(message: Message) -> None:
        got.append(message.get("body", b"start"))

    body = {**ALL_FIELDS, "stream": True, "stream_options": {"include_usage": True}}
    asyncio.run(exchange(middleware_on(app, engine), body, send=send))
    assert len(got) == 6
    assert b"aux_info" in got[3]


@pytest.mark.parametrize("media_type", [None, "text/event-stream", "application/json"])
def test_messages_with_the_least_in_them(media_type: str | None) -> None:
    """ASGI lets an app leave out headers, `body` and `more_body`."""
    sent = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"headers": [(b"content-type", media_type.encode())]} if media_type else {}
        await send({"type": "http.response.start", "status": 200, **headers})
        await send({"type": "http.response.body", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: 1\n\n"})
        await send({"type": "http.response.trailers"})

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(exchange(middleware_on(app, Engine()), ALL_FIELDS, send=send))
    start, *bodies, trailers = sent
    assert (start["type"], trailers["type"]) == ("http.response.start", "http.response.trailers")
    assert b"".join(message.get("body", b"") for message in bodies) == b"data: 1\n\n"
    assert [message.get("more_body", False) for message in bodies] == [True] * (len(bodies) - 1) + [False]
