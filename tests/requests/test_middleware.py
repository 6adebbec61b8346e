"""What `PredictedOutputs` makes of requests and responses; vLLM's server and engine are stand-ins."""

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import vllm.logger
from openai import AsyncOpenAI, BadRequestError
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from vllm_specplus.requests import middleware as requests
from vllm_specplus.requests.check import RequestCheck
from vllm_specplus.requests.middleware import PredictedOutputs
from vllm_specplus.requests.options import HANDED_OVER, CarriedOptions, handed_over

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SECRET = "def secret(): return 42"
PREDICTION = {"type": "content", "content": SECRET}
COUNTS = {"num_requests": 1, "num_steps": 4, "accepted": 7, "rejected": 2}
USAGE = {"prompt_tokens": 5, "total_tokens": 15, "completion_tokens": 10}
OTHERS = dict.fromkeys(COUNTS, 99)
DETAILS = {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 2}


class Check(RequestCheck):
    """An engine's check, with a tokenizer of a token for each letter."""

    drafts = True
    model_config = SimpleNamespace(skip_tokenizer_init=False, max_model_len=100, get_vocab_size=lambda: 1000)
    tokenizer = SimpleNamespace(encode=lambda text: np.array([ord(letter) for letter in text], np.int32))


class Engine:
    """An engine client. `answers`: one per worker, or the error that asking them raises."""

    def __init__(self, answers: Any = (None, COUNTS, OTHERS)):
        self.answers = answers
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_answered = 0
        options = SimpleNamespace(drafts_from_history=True)
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(specplus=options),
            model_config=SimpleNamespace(logits_processors=["a.module:Name", Check]),
        )

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, args))
        await self.gate.wait()
        self.num_answered += 1
        if isinstance(self.answers, Exception):
            raise self.answers
        return list(self.answers)


def answer(**changes: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "ünï \u4f60"}
    choices = [{"index": i, "message": message, "finish_reason": "stop", "logprobs": None} for i in range(2)]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": choices,
        "usage": USAGE,
    } | changes


def event(**fields: Any) -> bytes:
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"} | fields
    return b"data: " + json.dumps(chunk, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def text_event(index: int, text: str, **fields: Any) -> bytes:
    return event(choices=[{"index": index, "delta": {"content": text}, "finish_reason": None}], **fields)


USAGE_EVENT = event(choices=[], usage=USAGE)
DONE = b"data: [DONE]\n\n"
BEFORE = [
    b": keep-alive\n\n",
    text_event(0, 'ünï "usage"'),
    # As with continuous_usage_stats.
    text_event(1, "two\n\n", usage=USAGE),
    event(choices=[], usage=None),
    b'data: {"error":{"message":"\\"usage\\"","code":500}}\n\n',
]
STREAM = [*BEFORE, USAGE_EVENT, DONE]


def streams(messages: Iterable[bytes]) -> Callable[[], Response]:
    return lambda: StreamingResponse(_each(messages), media_type="text/event-stream")


async def _each(messages: Iterable[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


def plain(key: str, options: CarriedOptions | None) -> tuple[Any, ...]:
    """Tokens of the reference, mode, limit, and whether counts are kept under the key."""
    assert options is not None
    assert options.key in (None, key)
    token_ids = None if options.token_ids is None else options.token_ids.tolist()
    return token_ids, options.edit, options.max_drafts, options.key is not None


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


class Server:
    """In place of vLLM's server: it keeps what reaches it, and what was handed over by then."""

    def __init__(
        self,
        respond: Callable[[], Response] = lambda: JSONResponse(answer()),
        engine: Any = None,
        num_middlewares: int = 1,
        force_usage: bool = False,
    ):
        self.engine = Engine() if engine is None else engine
        self.respond = respond
        self.received: list[bytes] = []
        self.headers: list[Any] = []
        self.options: list[Any] = []
        self.app = Starlette(
            routes=[Route(path, self._handle, methods=["POST", "PUT"]) for path in (CHAT, TEXT, "/v1/embeddings")],
            middleware=[Middleware(PredictedOutputs)] * num_middlewares,
        )
        self.app.state.engine_client = self.engine
        self.app.state.args = SimpleNamespace(enable_force_include_usage=force_usage)

    async def _handle(self, request: Request) -> Response:
        self.received.append(await request.body())
        self.headers.append(request.headers)
        if len(handed_over):
            key = json.loads(self.received[-1])["vllm_xargs"][HANDED_OVER]
            self.options.append(plain(key, handed_over.get(key)))
        return self.respond()

    @property
    def seen(self) -> dict[str, Any]:
        """The only request's body."""
        (body,) = self.received
        return json.loads(body)

    def post(self, body: Any, **request: Any) -> "Answer":
        """Send a request, whole or as a list of its pieces; wait until the workers were asked, too."""

        async def ask() -> list[Message]:
            sent = await exchange(self.app, body, **request)
            await asyncio.gather(*requests._asking, return_exceptions=True)
            return sent

        sent = asyncio.run(ask())
        assert len(handed_over) == 0
        assert not requests._asking
        return Answer(sent)


class Answer:
    def __init__(self, sent: list[Message]):
        self.sent = sent
        assert [message["type"] for message in sent[:2]] == ["http.response.start", "http.response.body"]
        assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
        self.status = sent[0]["status"]
        self.headers = dict(sent[0]["headers"])
        self.body = b"".join(message["body"] for message in sent[1:])
        if b"content-length" in self.headers:
            assert int(self.headers[b"content-length"]) == len(self.body)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def scope_for(app: Any, path: str, method: str, headers: dict[str, str], root_path: str) -> Scope:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {
        "type": "http",
        "method": method,
        "path": root_path + path,
        "root_path": root_path,
        "query_string": b"",
        "headers": raw,
        "app": app,
    }


async def exchange(
    app: Any,
    body: Any,
    *,
    path: str = CHAT,
    method: str = "POST",
    media_type: str = "application/json",
    root_path: str = "",
    disconnect: asyncio.Event | None = None,
    send: Send | None = None,
    headers: dict[str, str] | None = None,
) -> list[Message]:
    """What an ASGI app sends. `disconnect`: when it is set, the client goes."""
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    pieces = body if isinstance(body, list) else [body]
    to_come = [
        {"type": "http.request", "body": piece, "more_body": i + 1 < len(pieces)} for i, piece in enumerate(pieces)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        if to_come:
            return to_come.pop(0)
        await (disconnect or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def keep(message: Message) -> None:
        sent.append(message)

    given = {"content-type": media_type, "content-length": str(sum(map(len, pieces)))} | (headers or {})
    scope = scope_for(app, path, method, given, root_path)
    before = list(scope["headers"])
    await app(scope, receive, send or keep)
    assert scope["headers"] == before
    return sent


def middleware_on(app: Any, engine: Any) -> Any:
    """The middleware before a bare ASGI app."""

    async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
        state = SimpleNamespace(engine_client=engine)
        await PredictedOutputs(app)({**scope, "app": SimpleNamespace(state=state)}, receive, send)

    return with_state


ALL_ASKED = {"prediction": PREDICTION, "aux_info": True}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"prediction": None, "aux_info": None},
        {"aux_info": False},
        {"vllm_xargs": None},
        {"vllm_xargs": {}},
        {"vllm_xargs": {"mine": 1, "sp_edit": None}},
        {"stream": True},
    ],
)
def test_nothing_asked(asked: dict[str, Any]) -> None:
    """Both bodies pass byte for byte, and no worker is asked."""
    stream = asked.get("stream", False)
    server = Server(streams(STREAM) if stream else lambda: JSONResponse(answer()))
    body = json.dumps({"model": "m", "n": 1.50, **asked}, indent=3).encode() + b" \n"
    got = server.post([body[:7], b"", body[7:]])
    assert server.received == [body]
    assert server.headers[0]["content-length"] == str(len(body))
    assert got.body == (b"".join(STREAM) if stream else JSONResponse(answer()).body)
    assert not server.engine.calls


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"prediction"',
        b"null",
        b"\xff{}",
        b"[" * 100_000,
        gzip.compress(json.dumps(ALL_ASKED).encode()),
        json.dumps(ALL_ASKED | {"vllm_xargs": "text"}).encode(),
        json.dumps(ALL_ASKED | {"vllm_xargs": [1]}).encode(),
    ],
)
def test_bodies_that_vllm_refuses(body: bytes) -> None:
    server = Server()
    assert server.post(body).body == JSONResponse(answer()).body
    assert server.received == [body]
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
    assert server.post(ALL_ASKED, **request_).body == JSONResponse(answer()).body
    assert server.seen == ALL_ASKED
    assert not server.engine.calls


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_other_scopes(kind: str) -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    scope = {"type": kind, "path": CHAT}
    asyncio.run(PredictedOutputs(app)(scope, "receive", "send"))  # type: ignore[arg-type]
    assert seen == [(scope, "receive", "send")]
    assert seen[0][0] is scope


@pytest.mark.parametrize(
    ("path", "root_path", "media_type"),
    [
        (CHAT, "", "application/json"),
        (TEXT, "", "Application/JSON; charset=utf-8"),
        (CHAT, "/a/prefix", "application/json ;x=y"),
    ],
)
def test_what_reaches_vllm(path: str, root_path: str, media_type: str) -> None:
    server = Server()
    body = {
        "model": "m",
        "messages": "ünï \ud83d",
        "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        "aux_info": True,
        "spec_tokens": "not a field up here",
        "vllm_xargs": {"sp_edit": 0, "spec_tokens": 3, "mine": [1, "x"]},
    }
    got = server.post(
        body, path=path, root_path=root_path, media_type=media_type, headers={"transfer-encoding": "chunked"}
    )
    key = server.seen["vllm_xargs"][HANDED_OVER]
    assert server.seen == {
        "model": "m",
        "messages": "ünï \ud83d",
        "spec_tokens": "not a field up here",
        "vllm_xargs": {"mine": [1, "x"], HANDED_OVER: key},
    }
    assert server.headers[0]["content-length"] == str(len(server.received[0]))
    assert "transfer-encoding" not in server.headers[0]
    assert server.options == [(letters("ab"), False, 3, True)]
    assert server.engine.calls == [("specplus_request_stats", (key,))]
    assert got.json["usage"]["completion_tokens_details"] == DETAILS


def test_a_reference_in_tokens() -> None:
    server = Server()
    got = server.post({"vllm_xargs": {"sp_advice_prompt_token_ids": [4, 2], "sp_edit": 1}}, path=TEXT)
    assert server.options == [([4, 2], True, None, True)]
    assert set(server.seen["vllm_xargs"]) == {HANDED_OVER}
    assert got.json == answer(usage=USAGE | {"completion_tokens_details": DETAILS})


@pytest.mark.parametrize("asked", [{}, {"prediction": None}])
def test_a_prediction_among_the_xargs(asked: dict[str, Any]) -> None:
    server = Server()
    server.post({**asked, "vllm_xargs": {"prediction": PREDICTION}})
    assert server.options == [(letters(SECRET), True, None, True)]
    assert set(server.seen["vllm_xargs"]) == {HANDED_OVER}


def test_names_may_be_written_in_escapes() -> None:
    server = Server()
    server.post([rb'{"vllm_xargs": {"sp\u005fadvice_prompt": "a"}}'])
    assert server.options == [([97], False, None, True)]


def test_text_is_tokenised_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    server, threads = Server(), []

    def encode(text: str) -> np.ndarray:
        threads.append(threading.get_ident())
        return np.array([len(text)], np.int32)

    monkeypatch.setattr(Check, "tokenizer", SimpleNamespace(encode=encode))
    server.post({"prediction": PREDICTION})
    assert server.options == [([len(SECRET)], True, None, True)]
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"vllm_xargs": {"sp_advice_prompt_token_ids": [1, 1000]}}, "sp_advice_prompt_token_ids"),
        ({"prediction": {"type": "content", "content": "a\u4f60"}}, "prediction"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_the_model_has_not(asked: dict[str, Any], field: str, stream: bool) -> None:
    server = Server()
    got = server.post({**asked, "stream": stream})
    assert got.status == 400
    assert got.json["error"]["param"] == field
    assert not server.received
    assert not server.engine.calls


def test_a_long_reference_is_cut_once_for_all_prompts() -> None:
    server = Server()
    server.post({"prompt": ["a", "b"], "prediction": {"type": "content", "content": "x" * 250}}, path=TEXT)
    assert server.options == [(letters("x" * 100), True, None, True)]


def test_every_request_has_its_own_key() -> None:
    server = Server()
    for _ in range(2):
        server.post({"aux_info": True})
    assert server.options == [(None, False, None, True)] * 2
    keys = {json.loads(body)["vllm_xargs"][HANDED_OVER] for body in server.received}
    assert keys == {args[0] for _, args in server.engine.calls}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"aux_info": 1}, "aux_info"),
        ({"aux_info": SECRET}, "aux_info"),
        ({"prediction": SECRET}, "prediction"),
        ({"prediction": {"type": "content", "content": [SECRET]}}, "prediction"),
        ({"vllm_xargs": {"sp_advice_prompt": [SECRET]}}, "sp_advice_prompt"),
        ({"vllm_xargs": {"sp_edit": 2}}, "sp_edit"),
        ({"vllm_xargs": {"sp_edit": 1}}, "sp_edit"),
        ({"vllm_xargs": {"spec_tokens": -1}}, "spec_tokens"),
        ({"prediction": PREDICTION, "vllm_xargs": {"sp_advice_prompt": SECRET}}, "sp_advice_prompt"),
        ({"prediction": PREDICTION, "aux_info": "yes"}, "aux_info"),
    ],
)
def test_refusals(asked: dict[str, Any], field: str, log: pytest.LogCaptureFixture) -> None:
    """They have vLLM's form, name the field, and do not repeat what may be text of the user's."""
    server = Server()
    got = server.post({"model": "m", **asked})
    assert got.status == 400
    error = got.json["error"]
    assert {**error, "message": ""} == {"message": "", "type": "BadRequestError", "param": field, "code": 400}
    assert field in error["message"]
    assert SECRET not in error["message"]
    assert not log.records
    assert not server.received
    assert not server.engine.calls


def test_usage_of_a_reference() -> None:
    """The other details of the usage stay, and so does every other field."""
    whole = answer(usage=USAGE | {"completion_tokens_details": {"reasoning_tokens": 3}}, extra=[1.5, None])
    got = Server(lambda: JSONResponse(whole)).post({"prediction": PREDICTION})
    whole["usage"]["completion_tokens_details"] |= DETAILS
    assert got.json == whole
    assert "ünï \u4f60".encode() in got.body
    parsed = ChatCompletion.model_validate(got.json, strict=True)
    assert parsed.usage.completion_tokens_details.accepted_prediction_tokens == 7


@pytest.mark.parametrize(
    ("num_tokens", "counts", "accepted"),
    [
        # The prompt's step, and one of eight drafts that is cut after the first.
        (2, {"num_steps": 2, "accepted": 8}, 1),
        (1, {"num_steps": 1, "accepted": 0}, 0),
        (10, {"num_steps": 2, "accepted": 8}, 8),
        # Two choices; where one alone is cut this is one too many.
        (12, {"num_requests": 2, "num_steps": 4, "accepted": 16}, 10),
        (None, {}, 0),
    ],
)
def test_no_more_is_accepted_than_the_text_can_hold(num_tokens: Any, counts: dict[str, int], accepted: int) -> None:
    whole = answer(usage=USAGE | {"completion_tokens": num_tokens})
    got = Server(lambda: JSONResponse(whole), Engine([COUNTS | counts])).post({"prediction": PREDICTION})
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": 2}
    assert got.json["usage"]["completion_tokens_details"] == details


@pytest.mark.parametrize("details", [None, {}])
def test_usage_without_details(details: Any) -> None:
    whole = answer(usage=USAGE | {"completion_tokens_details": details})
    got = Server(lambda: JSONResponse(whole)).post({"prediction": {"type": "content", "content": ""}})
    assert got.json["usage"]["completion_tokens_details"] == DETAILS


@pytest.mark.parametrize(("num_steps", "tokens", "average"), [(4, 10, 2.5), (0, 10, 0.0), (4, None, 0.0)])
def test_aux_info(num_steps: int, tokens: int | None, average: float, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.25])
    monkeypatch.setattr(requests.time, "perf_counter", lambda: next(times))
    whole = answer(usage=USAGE | {"completion_tokens": tokens})
    server = Server(lambda: JSONResponse(whole), Engine([COUNTS | {"num_requests": 1, "num_steps": num_steps}]))
    got = server.post({"aux_info": True, "stream": False})
    assert "stream_options" not in server.seen
    assert got.json == whole | {
        "aux_info": {
            "iter_count": num_steps,
            "output_len": tokens or 0,
            "avg_tokens_per_iter": average,
            "cost_time": 250.0,
        }
    }


def test_both_asked() -> None:
    got = Server().post(ALL_ASKED).json
    assert got["usage"]["completion_tokens_details"] == DETAILS
    assert got["aux_info"]["iter_count"] == 4


@pytest.mark.parametrize("answers", [[], [None, None]])
def test_no_worker_knows_anything(answers: list[None]) -> None:
    """Nothing is made up."""
    got = Server(engine=Engine(answers)).post(ALL_ASKED).json
    assert "completion_tokens_details" not in got["usage"]
    assert "aux_info" not in got


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_alone(stream: bool) -> None:
    """Nothing is told of such a request, so nothing is counted for it."""
    pieces = pieces_of(STREAM, 50) if stream else [json.dumps(answer(), indent=1).encode()]
    media_type = "text/event-stream" if stream else "application/json"
    server = Server(lambda: StreamingResponse(_each(pieces), media_type=media_type))
    got = server.post({"stream": stream, "vllm_xargs": {"spec_tokens": 0}})
    assert [message["body"] for message in got.sent[1:]] == [*pieces, b""]
    assert "stream_options" not in server.seen
    assert server.options == [(None, False, 0, False)]
    assert not server.engine.calls


@pytest.mark.parametrize(
    "response",
    [
        JSONResponse({"error": {"message": "no", "code": 404}, "usage": USAGE}, 404),
        JSONResponse(answer(), 500),
        Response(JSONResponse(answer()).body, media_type="text/plain"),
        Response(gzip.compress(JSONResponse(answer()).body), headers={"content-encoding": "gzip"}),
        JSONResponse(None),
        JSONResponse([answer()]),
        JSONResponse(answer(usage=None)),
        Response(b'{"usage":{}', media_type="application/json"),
        StreamingResponse(_each([b'{ "usage"', b":1}"]), media_type="application/json"),
        StreamingResponse(_each(STREAM), 400, media_type="text/event-stream"),
    ],
)
def test_responses_that_stay(response: Response) -> None:
    server = Server(lambda: response)
    got = server.post(ALL_ASKED)
    assert got.status == response.status_code
    assert list(got.sent[0]["headers"]) == response.raw_headers
    kept = getattr(response, "body", None)
    assert got.body == kept if kept is not None else got.body in (b"".join(STREAM), b'{ "usage":1}')
    assert len(server.engine.calls) == 1


def test_a_json_response_in_pieces() -> None:
    """It has no length of its own until it is altered."""
    body = JSONResponse(answer()).body
    pieces = [body[:100], b"", body[100:]]
    got = Server(lambda: StreamingResponse(_each(pieces), media_type="application/json; charset=utf-8")).post(ALL_ASKED)
    assert b"content-length" in got.headers
    assert len(got.sent) == 2
    assert got.json["usage"]["completion_tokens_details"] == DETAILS


def test_a_compressed_stream() -> None:
    """It cannot be read, and is not held up."""
    pieces = [gzip.compress(piece) for piece in STREAM]
    headers = {"content-encoding": "gzip"}
    server = Server(lambda: StreamingResponse(_each(pieces), headers=headers, media_type="text/event-stream"))
    got = server.post({**ALL_ASKED, "stream": True, "stream_options": {"include_usage": True}})
    assert [message["body"] for message in got.sent[1:]] == [*pieces, b""]


def events_of(body: bytes) -> list[bytes]:
    *events, rest = body.split(b"\n\n")
    assert rest == b""
    return [event + b"\n\n" for event in events]


def pieces_of(messages: list[bytes], size: int) -> list[bytes]:
    whole = b"".join(messages)
    return [whole[i : i + size] for i in range(0, len(whole), size)]


@pytest.mark.parametrize("size", [None, 1, 2, 3, 7, 64, 300, 10_000])
@pytest.mark.parametrize("end", [[DONE], []])
def test_a_stream_with_usage(size: int | None, end: list[bytes]) -> None:
    """Its last chunk is altered however the events are cut, and no other."""
    messages = [*BEFORE, USAGE_EVENT, *end]
    server = Server(streams(pieces_of(messages, size) if size else messages))
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = server.post({**ALL_ASKED, "stream": True, "stream_options": options})
    assert server.seen["stream_options"] == options
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
    assert Server(streams(messages)).post({**ALL_ASKED, "stream": True}).body == b"".join(messages)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
@pytest.mark.parametrize("forced", [False, True])
def test_a_stream_without_usage(options: dict[str, Any] | None, forced: bool) -> None:
    """Of a reference nothing can be told then, unless the server gives usage to everybody."""
    server = Server(streams(STREAM if forced else [*BEFORE, DONE]), force_usage=forced)
    body = {"prediction": PREDICTION, "stream": True, "stream_options": options}
    got = server.post(body)
    assert server.seen["stream_options"] == options
    usage = [event(choices=[], usage=USAGE | {"completion_tokens_details": DETAILS})] if forced else []
    assert got.body == b"".join([*BEFORE, *usage, DONE])
    assert len(server.engine.calls) == 1


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("options", ["absent", None, {}, {"include_usage": False}, {"continuous_usage_stats": True}])
def test_aux_info_of_a_stream_without_usage(options: Any, forced: bool) -> None:
    """vLLM is asked for the chunk, and the client gets it without the usage that it has not asked for."""
    server = Server(streams(STREAM), force_usage=forced)
    got = server.post({"aux_info": True, "stream": True} | ({} if options == "absent" else {"stream_options": options}))
    if forced:
        assert server.seen.get("stream_options", "absent") == options
    else:
        # Not continuous usage, or every chunk would have it.
        assert server.seen["stream_options"] == {"include_usage": True}
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
    assert server.seen["stream_options"] == "usage"
    assert b'"usage":{"prompt_tokens"' in events_of(got.body)[-2]


def test_events_are_passed_on_at_once() -> None:
    """Each as soon as it is whole, also the one before a last chunk that waits for the workers."""
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

    body = {**ALL_ASKED, "stream": True, "stream_options": {"include_usage": True}}
    asyncio.run(exchange(middleware_on(app, engine), body, send=send))
    assert len(got) == 6
    assert b"aux_info" in got[3]


@pytest.mark.parametrize("media_type", [None, "text/event-stream", "application/json"])
def test_messages_with_the_least_in_them(media_type: str | None) -> None:
    """ASGI lets an app leave out headers, a body, and that no more of it comes."""
    sent = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"headers": [(b"content-type", media_type.encode())]} if media_type else {}
        await send({"type": "http.response.start", "status": 200, **headers})
        await send({"type": "http.response.body", "more_body": True})
        await send({"type": "http.response.body", "body": b"data: 1\n\n"})
        await send({"type": "http.response.trailers"})

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(exchange(middleware_on(app, Engine()), ALL_ASKED, send=send))
    start, *bodies, trailers = sent
    assert (start["type"], trailers["type"]) == ("http.response.start", "http.response.trailers")
    assert b"".join(message.get("body", b"") for message in bodies) == b"data: 1\n\n"
    assert [message.get("more_body", False) for message in bodies] == [True] * (len(bodies) - 1) + [False]


@pytest.mark.parametrize("answers", [[COUNTS], RuntimeError("engine is dead")])
@pytest.mark.parametrize("asked", [ALL_ASKED, {"vllm_xargs": {"spec_tokens": 1}}])
def test_cancelled_in_mid_stream(answers: Any, asked: dict[str, Any], log: pytest.LogCaptureFixture) -> None:
    engine = Engine(answers)

    async def run() -> None:
        reached = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": text_event(0, "a"), "more_body": True})
            assert len(handed_over) == 1
            reached.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(exchange(middleware_on(app, engine), {**asked, "stream": True}))
        await reached.wait()
        assert not engine.calls
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(handed_over) == 0
        await asyncio.gather(*requests._asking, return_exceptions=True)

    asyncio.run(run())
    is_counted = asked is ALL_ASKED
    assert (len(engine.calls), engine.num_answered) == (is_counted, is_counted)
    failed = is_counted and isinstance(answers, Exception)
    assert [record.levelname for record in log.records] == ["DEBUG"] * failed


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_while_the_workers_are_asked(stream: bool) -> None:
    """The question is neither put again nor given up."""

    async def run() -> Engine:
        engine = Engine()
        engine.gate.clear()
        server = Server(streams(STREAM) if stream else lambda: JSONResponse(answer()), engine)
        task = asyncio.create_task(exchange(server.app, {**ALL_ASKED, "stream": stream}))
        while not engine.calls:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(handed_over) == 0
        assert len(requests._asking) == 1
        engine.gate.set()
        await asyncio.gather(*requests._asking)
        return engine

    engine = asyncio.run(run())
    assert (len(engine.calls), engine.num_answered) == (1, 1)


def test_the_client_goes_in_mid_stream() -> None:
    """vLLM's server learns of it through the body that is given to it again."""

    async def run() -> tuple[Engine, list[Message]]:
        gone = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            yield text_event(0, "a")
            gone.set()
            await asyncio.Event().wait()

        server = Server(lambda: StreamingResponse(endless(), media_type="text/event-stream"))
        sent = await exchange(server.app, {**ALL_ASKED, "stream": True}, disconnect=gone)
        assert len(handed_over) == 0
        await asyncio.gather(*requests._asking)
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
    assert not server.received
    assert not server.engine.calls


def test_the_server_fails() -> None:
    def fail() -> Response:
        raise KeyError("of the server")

    server = Server(fail)

    async def run() -> None:
        with pytest.raises(KeyError, match="of the server"):
            await exchange(server.app, ALL_ASKED)
        assert len(handed_over) == 0
        await asyncio.gather(*requests._asking)

    asyncio.run(run())
    assert len(server.engine.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_workers_cannot_be_asked(stream: bool, log: pytest.LogCaptureFixture) -> None:
    """A finished response is not lost for want of its counts."""
    engine = Engine(RuntimeError("engine is dead"))
    server = Server(streams(STREAM) if stream else lambda: JSONResponse(answer()), engine)
    got = server.post({**ALL_ASKED, "stream": stream, "stream_options": {"include_usage": True} if stream else None})
    assert got.body == (b"".join(STREAM) if stream else JSONResponse(answer()).body)
    assert len(engine.calls) == 1
    (warning,) = (record for record in log.records if record.levelname == "WARNING")
    assert "engine is dead" in warning.getMessage()


def test_two_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one further in has nothing to do, not even to read the body."""
    reads, read = [], requests._read
    monkeypatch.setattr(requests, "_read", lambda body: reads.append(body) or read(body))
    server = Server(num_middlewares=2)
    got = server.post(ALL_ASKED).json
    assert len(reads) == 1
    assert len(server.engine.calls) == 1
    assert server.options == [(letters(SECRET), True, None, True)]
    assert got["usage"]["completion_tokens_details"] == DETAILS
    untouched = Server(num_middlewares=2)
    untouched.post(b'{ "model":1}')
    assert untouched.received == [b'{ "model":1}']


def engine_with(speculative_config: Any) -> SimpleNamespace:
    unchecked = SimpleNamespace(logits_processors=None)
    return SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=speculative_config, model_config=unchecked))


@pytest.mark.parametrize(
    "engine",
    [
        SimpleNamespace(),
        engine_with(None),
        engine_with(SimpleNamespace()),
        engine_with(SimpleNamespace(specplus=None)),
        engine_with(SimpleNamespace(specplus=SimpleNamespace(drafts_from_history=False))),
        engine_with(SimpleNamespace(specplus=SimpleNamespace(drafts_from_history=True))),
    ],
)
def test_an_engine_without_the_plugin(engine: Any, log: pytest.LogCaptureFixture) -> None:
    """Requests pass through as they are, with one line in the log of a process."""
    vllm.logger._print_warning_once.cache_clear()
    server = Server(engine=engine, num_middlewares=2)
    body = json.dumps(ALL_ASKED, indent=1).encode()
    for _ in range(2):
        assert server.post(body).body == JSONResponse(answer()).body
    assert server.received == [body, body]
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

    asyncio.run(exchange(outer, ALL_ASKED))
    assert [json.loads(message["body"]) for message in reached] == [ALL_ASKED]


def test_reference_text_is_not_logged(log: pytest.LogCaptureFixture) -> None:
    for engine in (Engine(), Engine(RuntimeError())):
        Server(engine=engine).post(ALL_ASKED)
        Server(engine=engine).post({"vllm_xargs": {"sp_advice_prompt": SECRET}})
    assert log.records
    assert "secret" not in log.text


def client_of(server: Server) -> AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=server.app))
    return AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


def test_stock_client() -> None:
    async def run() -> None:
        client = client_of(Server())
        whole = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            prediction={"type": "content", "content": SECRET},
            n=2,
            extra_body={"aux_info": True},
        )
        assert whole.usage.completion_tokens_details.accepted_prediction_tokens == 7
        assert whole.usage.completion_tokens_details.rejected_prediction_tokens == 2
        assert len(whole.choices) == 2
        assert whole.aux_info["iter_count"] == 4

    asyncio.run(run())


def test_stock_client_streams() -> None:
    async def run(include_usage: bool) -> list[ChatCompletionChunk]:
        client = client_of(Server(streams([text_event(0, "a"), text_event(1, "b"), USAGE_EVENT, DONE])))
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            prediction={"type": "content", "content": SECRET},
            stream=True,
            stream_options={"include_usage": include_usage},
            extra_body={"aux_info": True},
        )
        return [chunk async for chunk in stream]

    *_, last = asyncio.run(run(True))
    assert last.usage.completion_tokens_details.accepted_prediction_tokens == 7
    assert last.aux_info["output_len"] == 10
    first, second, last = asyncio.run(run(False))
    assert [first.choices[0].delta.content, second.choices[0].delta.content] == ["a", "b"]
    assert last.usage is None
    assert last.aux_info["output_len"] == 10


def test_stock_client_completes_prompts() -> None:
    choices = [{"index": i, "text": "t", "finish_reason": "stop", "logprobs": None} for i in range(2)]
    whole = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": choices}

    async def run() -> Completion:
        client = client_of(Server(lambda: JSONResponse(whole | {"usage": USAGE})))
        return await client.completions.create(
            model="m", prompt=["a", "b"], extra_body={"vllm_xargs": {"sp_advice_prompt": SECRET}}
        )

    assert asyncio.run(run()).usage.completion_tokens_details.rejected_prediction_tokens == 2


def test_stock_client_is_refused() -> None:
    async def run() -> None:
        extra = {"vllm_xargs": {"spec_tokens": "many"}}
        await client_of(Server()).completions.create(model="m", prompt="a", extra_body=extra)

    with pytest.raises(BadRequestError, match="spec_tokens") as refused:
        asyncio.run(run())
    assert refused.value.param == "spec_tokens"
