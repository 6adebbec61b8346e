"""`PredictedOutputs` acts on some requests alone; vLLM's server and engine are stand-ins."""

import asyncio
import json
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.logger
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from tests.requests.stand_ins import (
    ALL_FIELDS,
    CHAT,
    DETAILS,
    INVOCATIONS,
    OTHER_ROUTES,
    PREDICTION,
    SECRET,
    STREAM,
    TEXT,
    Engine,
    Server,
    answer,
    engine_with,
    exchange,
    letters,
    streams,
)
from vllm_specplus.requests import middleware
from vllm_specplus.requests.middleware import PredictedOutputs


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prediction": None, "aux_info": None},
        {"aux_info": False},
        {"vllm_xargs": None},
        {"vllm_xargs": {}},
        {"vllm_xargs": {"mine": 1, "sp_edit": None}},
        {"vllm_xargs": {"my_speaker": 1, "other_tokens": [2]}},
        {"stream": True},
    ],
)
def test_requests_that_ask_nothing(fields: dict[str, Any]) -> None:
    """Both bodies pass byte for byte, and no worker is asked."""
    stream = fields.get("stream", False)
    server = Server(streams(STREAM) if stream else lambda: JSONResponse(answer()))
    body = json.dumps({"model": "m", "n": 1.50, **fields}, indent=3).encode() + b" \n"
    got = server.post([body[:7], b"", body[7:]])
    assert server.bodies == [body]
    assert server.headers[0]["content-length"] == str(len(body))
    assert got.body == (b"".join(STREAM) if stream else JSONResponse(answer()).body)
    assert not server.engine.calls


@pytest.mark.parametrize(
    "request_",
    [
        {"path": "/v1/embeddings"},
        {"method": "PUT"},
        {"media_type": "text/plain"},
        {"media_type": "multipart/form-data; boundary=application/json"},
    ],
)
def test_requests_of_other_kinds(request_: dict[str, Any]) -> None:
    server = Server()
    assert server.post(ALL_FIELDS, **request_).body == JSONResponse(answer()).body
    assert server.body == ALL_FIELDS
    assert not server.engine.calls


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_other_scopes(kind: str) -> None:
    calls = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append((scope, receive, send))

    scope = {"type": kind, "path": CHAT}
    asyncio.run(PredictedOutputs(app)(scope, "receive", "send"))  # type: ignore[arg-type]
    assert calls == [(scope, "receive", "send")]
    assert calls[0][0] is scope


def test_two_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner one does nothing; it does not even read the body."""
    reads, read_body = [], middleware.read_body
    monkeypatch.setattr(middleware, "read_body", lambda *args: reads.append(args) or read_body(*args))
    server = Server(num_middlewares=2)
    got = server.post(ALL_FIELDS).json
    assert len(reads) == 1
    assert len(server.engine.calls) == 1
    assert server.resolved == [(letters(SECRET), True, None, True)]
    assert got["usage"]["completion_tokens_details"] == DETAILS
    untouched = Server(num_middlewares=2)
    untouched.post(b'{ "model":1}')
    assert untouched.bodies == [b'{ "model":1}']


@pytest.mark.parametrize(
    "engine",
    [
        engine_with(None),
        engine_with(SimpleNamespace()),
        engine_with(SimpleNamespace(specplus=None)),
        engine_with(SimpleNamespace(specplus=SimpleNamespace(drafts_from_history=False))),
        engine_with(SimpleNamespace(specplus=SimpleNamespace(drafts_from_history=True))),
    ],
)
def test_an_engine_without_the_plugin(engine: Any, log: pytest.LogCaptureFixture) -> None:
    """Predictions pass through unchanged, with one line in the log of a process."""
    vllm.logger._print_warning_once.cache_clear()
    server = Server(engine=engine, num_middlewares=2)
    body = json.dumps({"prediction": PREDICTION}, indent=1).encode()
    for _ in range(2):
        assert server.post(body).body == JSONResponse(answer()).body
    assert server.bodies == [body, body]
    assert [record.levelname for record in log.records] == ["WARNING"]
    assert "no method of vllm-specplus" in log.text


@pytest.mark.parametrize("app", [None, SimpleNamespace(), SimpleNamespace(state=SimpleNamespace(engine_client=None))])
def test_a_server_without_an_engine(app: Any) -> None:
    reached = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(await receive())

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        scope = {key: value for key, value in scope.items() if key != "app"} | ({"app": app} if app else {})
        await PredictedOutputs(inner)(scope, receive, send)

    asyncio.run(exchange(outer, ALL_FIELDS))
    assert [json.loads(message["body"]) for message in reached] == [ALL_FIELDS]


def test_reference_text_is_not_logged(log: pytest.LogCaptureFixture) -> None:
    for engine in (Engine(), Engine(RuntimeError())):
        Server(engine=engine).post(ALL_FIELDS)
        Server(engine=engine).post({"vllm_xargs": {"sp_advice_prompt": SECRET}})
    assert log.records
    assert "secret" not in log.text


@pytest.mark.parametrize("place", ["args", "environment"])
def test_a_request_without_the_api_key_is_left_to_vllm(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body passes unread; with the key it is read."""
    server = Server()
    if place == "args":
        server.app.state.args.api_key = ["other", "key"]
    else:
        monkeypatch.setenv("VLLM_API_KEY", "key")
    reads, read_body = [], middleware.read_body
    monkeypatch.setattr(middleware, "read_body", lambda *args: reads.append(args) or read_body(*args))
    wrong = {"prediction": 3}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "key"}):
        assert server.post(wrong, headers=headers).status == 200
    assert server.bodies == [json.dumps(wrong).encode()] * 3
    assert not reads
    assert server.post(wrong, headers={"authorization": "Bearer key"}).status == 400
    assert len(reads) == 1


def test_large_bodies_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, read_body = [], middleware.read_body
    monkeypatch.setattr(
        middleware, "read_body", lambda *args: threads.append(threading.get_ident()) or read_body(*args)
    )
    body = json.dumps(ALL_FIELDS).encode()
    for num_spaces in (0, 1 << 20):
        Server().post(body + b" " * num_spaces)
    assert threads[0] == threading.get_ident() != threads[1]


def test_invocations_take_what_the_other_routes_take() -> None:
    """They ask for no API key, as in vLLM."""
    server = Server()
    server.app.state.args.api_key = ["key"]
    got = server.post(ALL_FIELDS, path=INVOCATIONS).json
    assert server.resolved == [(letters(SECRET), True, None, True)]
    assert got["usage"]["completion_tokens_details"] == DETAILS
    assert server.post({"aux_info": 3}, path=INVOCATIONS).status == 400


@pytest.mark.parametrize("path", OTHER_ROUTES)
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prediction": PREDICTION}, "prediction"),
        ({"prediction": 3}, "prediction"),
        ({"aux_info": True}, "aux_info"),
        ({"extra_config": {"spec_tokens": 2}}, "spec_tokens"),
        ({"sp_advise_prompt": SECRET}, "sp_advise_prompt"),
    ],
)
def test_other_routes_refuse_what_they_would_ignore(path: str, fields: dict[str, Any], name: str) -> None:
    server = Server()
    got = server.post(fields, path=path)
    assert (got.status, got.json["error"]["param"]) == (400, name)
    assert not server.bodies


# Posts that bring no prompt to draft for: they pool, score, translate, transcribe, count, or steer the server.
WITHOUT_DRAFTS = re.compile(
    "/(detokenize|tokenize|pooling|classify|(v[12]/)?(embed|embeddings|rerank|score)|generative_scoring|v1/audio/.*|"
    r".*/derender|v1/messages/count_tokens|fault_tolerance/apply|scale_elastic_ep|v1/(un)?load_lora_adapter|v1/responses/\{.*|"
    "(is|init|start|finish|shutdown|update|reset|release|abort|stop|weight|wake|collective)_.*|ping|pause|resume|sleep)"
)


@pytest.mark.parametrize("folder", [os.path.dirname(vllm.__file__), os.environ.get("SPECPLUS_OTHER_VLLM", "none")])
def test_every_route_with_a_prompt_is_known(folder: str) -> None:
    if folder == "none":
        pytest.skip("ci/test.sh unpacks another version and names it")
    sources = [path.read_text() for path in Path(folder).rglob("entrypoints/**/*.py")]
    found = {route for text in sources for route in re.findall(r"""\.post\(\s*"(/[^"]+)\"""", text)}
    assert len(found) > 30
    known = {CHAT, TEXT, INVOCATIONS, *OTHER_ROUTES}
    assert {route for route in found - known if not WITHOUT_DRAFTS.fullmatch(route)} == set()


WITHOUT_XARGS = (
    "/v1/systemone",
    "/v1/decisions",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
)


@pytest.mark.parametrize("path", OTHER_ROUTES)
def test_other_routes_leave_the_rest_alone(path: str) -> None:
    """Fields in ``vllm_xargs`` are checked where vLLM admits the request."""
    unread = [{"aux_info": False}, {"input": "sp_edit"}]
    for fields in unread if path in WITHOUT_XARGS else [*unread, {"vllm_xargs": {"spec_tokens": 2}}]:
        server = Server()
        body = json.dumps(fields, indent=1).encode()
        assert server.post(body, path=path).status == 200
        assert server.bodies == [body]
    without_drafter = Server(engine=engine_with(None))
    assert without_drafter.post({"prediction": PREDICTION}, path=path).status == 200
    assert without_drafter.body == {"prediction": PREDICTION}


@pytest.mark.parametrize("path", OTHER_ROUTES)
@pytest.mark.parametrize("has_check", [True, False])
def test_other_routes_where_nothing_reads_xargs(path: str, has_check: bool) -> None:
    """vLLM would ignore the fields there, and log them."""
    for field, value in (("sp_advice_prompt", SECRET), ("aux_info", 1)):
        server = Server() if has_check else Server(engine=engine_with(None))
        got = server.post({"vllm_xargs": {field: value}}, path=path)
        if has_check and path not in WITHOUT_XARGS:
            assert got.status == 200
            continue
        assert got.status == 400
        assert got.json["error"]["param"] == field
        assert not server.bodies
    # Without keys of the plugin these are another's.
    for fields in ({"vllm_xargs": {"mine": "sp_edit", "speaker": 1}}, {"vllm_xargs": 3, "prediction": 3}):
        assert Server(engine=engine_with(None)).post(fields, path=path).status == 200
