"""Stand-ins for vLLM's engine and server, and what tests send to them and expect of them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from vllm_specplus.requests.check import RequestCheck, handover
from vllm_specplus.requests.middleware import PredictedOutputs
from vllm_specplus.requests.options import HANDOVER_ENTRY, ResolvedOptions
from vllm_specplus.requests.response import count_tasks

CHAT, TEXT, INVOCATIONS = "/v1/chat/completions", "/v1/completions", "/invocations"
OTHER_ROUTES = (
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v1/systemone",
    "/v1/decisions",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
    "/cohere/v2/chat/render",
)
ROUTES = (CHAT, TEXT, INVOCATIONS, *OTHER_ROUTES, "/v1/embeddings")
SECRET = "def secret(): return 42"
PREDICTION = {"type": "content", "content": SECRET}
ALL_FIELDS = {"prediction": PREDICTION, "aux_info": True}
COUNTS = {"num_requests": 1, "num_steps": 4, "accepted": 7, "rejected": 2}
# Workers of one engine agree; these counts show which answer is taken.
OTHER_COUNTS = dict.fromkeys(COUNTS, 99)
USAGE = {"prompt_tokens": 5, "total_tokens": 15, "completion_tokens": 10}
DETAILS = {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 2}


class Check(RequestCheck):
    """An engine's check, whose tokenizer makes a token of each letter."""

    drafts = True
    allows_force_accept = False
    is_server = True
    model_config = SimpleNamespace(skip_tokenizer_init=False, max_model_len=100, get_vocab_size=lambda: 1000)
    tokenizer = SimpleNamespace(encode=lambda text: np.array([ord(letter) for letter in text], np.int32))


class Engine:
    """An engine client.

    Args:
        answers: one for each worker of the first engine, or the error that it raises when they are asked.
        other_engines: the answers of the other data-parallel engines' workers.
    """

    def __init__(self, answers: Any = (None, COUNTS, OTHER_COUNTS), other_engines: Iterable[list[Any]] = ()):
        self.answers = answers
        self.other_engines = list(other_engines)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_answered = 0
        options = SimpleNamespace(drafts_from_history=True)
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(specplus=options),
            model_config=SimpleNamespace(logits_processors=["a.module:Name", Check], max_model_len=100),
        )

        self.engine_core = self

    async def call_utility_all_async(self, utility: str, *args: Any) -> list[list[Any]]:
        self.calls.append(worker_call(utility, *args))
        await self.gate.wait()
        self.num_answered += 1
        if isinstance(self.answers, Exception):
            raise self.answers
        return [list(self.answers), *self.other_engines]


def worker_call(utility: str, *args: Any) -> tuple[str, tuple[Any, ...]]:
    """The method of workers that is called in each engine, and its arguments."""
    method, timeout, method_args, kwargs = args
    assert (utility, timeout, kwargs) == ("collective_rpc", None, None)
    return method, method_args


def engine_with(speculative_config: Any) -> SimpleNamespace:
    unchecked = SimpleNamespace(logits_processors=None, max_model_len=100)
    return SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=speculative_config, model_config=unchecked))


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
    # With `continuous_usage_stats` every chunk has a usage.
    text_event(1, "two\n\n", usage=USAGE),
    event(choices=[], usage=None),
    b'data: {"error":{"message":"\\"usage\\"","code":500}}\n\n',
]
STREAM = [*BEFORE, USAGE_EVENT, DONE]


def streams(messages: Iterable[bytes]) -> Callable[[], Response]:
    return lambda: StreamingResponse(each(messages), media_type="text/event-stream")


async def each(messages: Iterable[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


def plain(key: str, options: ResolvedOptions | None) -> tuple[Any, ...]:
    """The reference's tokens, mode, limit, and whether counts are kept under the key."""
    assert options is not None
    assert options.counts_key in (None, key)
    token_ids = None if options.token_ids is None else options.token_ids.tolist()
    return token_ids, options.edit, options.max_drafts, options.counts_key is not None


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def events_of(body: bytes) -> list[bytes]:
    *events, tail = body.split(b"\n\n")
    assert tail == b""
    return [event + b"\n\n" for event in events]


def pieces_of(messages: list[bytes], size: int) -> list[bytes]:
    whole = b"".join(messages)
    return [whole[i : i + size] for i in range(0, len(whole), size)]


class Server:
    """vLLM's server; it keeps each request's body and headers, and the options that wait for it in `handover`."""

    def __init__(
        self,
        respond: Callable[[], Response] = lambda: JSONResponse(answer()),
        engine: Any = None,
        num_middlewares: int = 1,
        force_usage: bool = False,
    ):
        self.engine = Engine() if engine is None else engine
        self.respond = respond
        self.bodies: list[bytes] = []
        self.headers: list[Any] = []
        self.resolved: list[Any] = []
        self.app = Starlette(
            routes=[Route(path, self._handle, methods=["POST", "PUT"]) for path in ROUTES],
            middleware=[Middleware(PredictedOutputs)] * num_middlewares,
        )
        self.app.state.engine_client = self.engine
        self.app.state.args = SimpleNamespace(enable_force_include_usage=force_usage)

    async def _handle(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        self.headers.append(request.headers)
        if len(handover):
            key = json.loads(self.bodies[-1])["vllm_xargs"][HANDOVER_ENTRY]
            self.resolved.append(plain(key, handover.get(key)))
        return self.respond()

    @property
    def body(self) -> dict[str, Any]:
        """The body of the only request."""
        (body,) = self.bodies
        return json.loads(body)

    def post(self, body: Any, **request: Any) -> "Answer":
        """Send a request, whole or as a list of pieces; wait until the workers have been asked, too."""

        async def ask() -> list[Message]:
            sent = await exchange(self.app, body, **request)
            await asyncio.gather(*count_tasks, return_exceptions=True)
            return sent

        sent = asyncio.run(ask())
        assert len(handover) == 0
        assert not count_tasks
        return Answer(sent)


class Answer:
    """A whole response, which follows ASGI's rules."""

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
    """The messages that an ASGI app sends. When `disconnect` is set, the client goes."""
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

    sent_headers = {"content-type": media_type, "content-length": str(sum(map(len, pieces)))} | (headers or {})
    scope = scope_for(app, path, method, sent_headers, root_path)
    before = list(scope["headers"])
    await app(scope, receive, send or keep)
    assert scope["headers"] == before
    return sent


def middleware_on(app: Any, engine: Any) -> Any:
    """The middleware in front of a bare ASGI app."""

    async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
        state = SimpleNamespace(engine_client=engine)
        await PredictedOutputs(app)({**scope, "app": SimpleNamespace(state=state)}, receive, send)

    return with_state


def client_of(server: Server) -> AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=server.app))
    return AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)
