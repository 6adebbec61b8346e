"""Requests with options over HTTP: OpenAI's ``prediction``, `aux_info`, and the keys of ``vllm_xargs``.

`PredictedOutputs` stands between the client and vLLM's OpenAI server. It takes what a request asks of the plugin out
of its body, and adds to its response what became of that.
"""

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from operator import attrgetter
from typing import Any
from uuid import uuid4

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.logger import init_logger

from vllm_specplus.requests.check import RequestCheck, check_of
from vllm_specplus.requests.options import (
    HANDED_OVER,
    KEYS,
    CarriedOptions,
    RequestError,
    RequestOptions,
    handed_over,
    parse,
)

logger = init_logger("vllm.specplus")

# A body without any of these asks nothing, and need not be decoded to see that. A name may be written in escapes.
_NAMES = re.compile(rf'"(?:{"|".join(("aux_info", *KEYS))})"|\\u00[2-7]'.encode())
_PATHS = ("/v1/chat/completions", "/v1/completions")
_JSON, _EVENTS = "application/json", "text/event-stream"
# Marks a scope that a PredictedOutputs further out has taken care of.
_SEEN = "specplus"
_drafts_from_history = attrgetter("vllm_config.speculative_config.specplus.drafts_from_history")
# An event loop itself keeps no task alive.
_asking: set[asyncio.Task[Any]] = set()


def has_drafter(engine_client: Any) -> bool:
    """Whether the plugin drafts in the engine; False for None."""
    try:
        return bool(_drafts_from_history(engine_client))
    except AttributeError:
        return False


def _check_of(engine_client: Any) -> type[RequestCheck] | None:
    return check_of(engine_client.vllm_config.model_config) if has_drafter(engine_client) else None


async def ask_workers(engine_client: Any, method: str, *args: Any) -> dict[str, Any] | None:
    """Call a method of every worker; return the first answer that is not None, as it is the same on all that have one.

    Raises:
        Exception: what the engine raises if it cannot be asked.
    """
    answers = await engine_client.collective_rpc(method, args=args)
    return next((answer for answer in answers if answer is not None), None)


def error_response(status: HTTPStatus, kind: str, message: str, field: str | None = None) -> JSONResponse:
    """An error in the form that vLLM's OpenAI server gives its own."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": field, "code": status}}, status)


class PredictedOutputs:
    """ASGI middleware for ``vllm serve --middleware vllm_specplus.requests.PredictedOutputs``.

    It acts on POSTs of JSON to the chat completions and completions of an engine in which the plugin drafts. What it
    reads is not passed on to vLLM but left in `handed_over`. A request with a reference gets
    ``accepted_prediction_tokens`` and ``rejected_prediction_tokens`` in its usage; one with ``aux_info: true`` gets
    RTP-LLM's ``aux_info`` (``cost_time`` in milliseconds), a stream in its last chunk. A field that is not allowed is
    answered with HTTP 400. Requests that ask nothing of the plugin pass through as they are.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _may_ask(scope):
            return await self.app(scope, receive, send)
        arrived = time.perf_counter()
        scope = {**scope, _SEEN: True}
        state = getattr(scope.get("app"), "state", None)
        engine_client = getattr(state, "engine_client", None)
        check = _check_of(engine_client)
        if check is None:
            logger.warning_once(
                "PredictedOutputs does nothing: the engine's speculative config has no method of vllm-specplus, or its "
                "requests cannot be checked",
                scope="process",
            )
            return await self.app(scope, receive, send)
        try:
            received = await Request(scope, receive).body()
        except ClientDisconnect:
            return None
        key = uuid4().hex
        try:
            asked = _read(received)
            if asked is not None:
                carried = await asked.resolve(check, key)
        except RequestError as error:
            refusal = error_response(HTTPStatus.BAD_REQUEST, "BadRequestError", str(error), error.field)
            return await refusal(scope, receive, send)
        if asked is None:
            return await self.app(scope, _replay(received, receive), send)

        body = asked.body
        body["vllm_xargs"] = {**body["vllm_xargs"], HANDED_OVER: key}
        usage_forced = getattr(getattr(state, "args", None), "enable_force_include_usage", False)
        hide_usage = asked.aux_info and not usage_forced and _add_usage(body)
        encoded = json.dumps(body).encode()
        headers = MutableHeaders(scope=scope)
        headers["content-length"] = str(len(encoded))
        del headers["transfer-encoding"]
        report = _Report(engine_client, key, asked, arrived)
        if asked.wants_counts:
            send = _Response(send, report, hide_usage=hide_usage)
        handed_over.put(key, carried)
        try:
            await self.app(scope, _replay(encoded, receive), send)
        finally:
            handed_over.drop(key)
            if asked.wants_counts:
                # The workers keep a request's counts until they are asked for them.
                report.ask()


def _may_ask(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] == "POST"
        and scope["path"].endswith(_PATHS)
        and _media_type(_headers(scope)) == _JSON
        and _SEEN not in scope
    )


def _headers(message: Mapping[str, Any]) -> Headers:
    return Headers(raw=list(message.get("headers", ())))


def _media_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _decode(encoded: bytes) -> dict[str, Any] | None:
    """The JSON object; None if it is none."""
    try:
        decoded = json.loads(encoded)
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) else None


def _encode(value: dict[str, Any]) -> bytes:
    """JSON as vLLM's server writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True)
class _Asked:
    """What an HTTP request asks of the plugin, and the rest of its body, with a dict as its ``vllm_xargs``."""

    body: dict[str, Any]
    options: RequestOptions | None
    aux_info: bool

    @property
    def on_reference(self) -> bool:
        return self.options is not None and self.options.has_reference

    @property
    def wants_counts(self) -> bool:
        return self.on_reference or self.aux_info

    async def resolve(self, check: type[RequestCheck], key: str) -> CarriedOptions:
        """What the workers are told; its counts, if they are wanted, are kept under `key`.

        Raises:
            RequestError: a field is not allowed.
        """
        counts_under = key if self.wants_counts else None
        if self.options is None:
            return CarriedOptions(key=counts_under)
        # Text is turned into tokens once, whatever it is asked for, and the server goes on meanwhile.
        return await run_in_threadpool(check.resolve, self.options, counts_under)


def _read(received: bytes) -> _Asked | None:
    """Take what is asked of the plugin out of a request's body; None if it is nothing, or vLLM will refuse the body.

    Raises:
        RequestError: a field is not allowed.
    """
    body = _decode(received) if _NAMES.search(received) else None
    if body is None:
        return None
    xargs = body.pop("vllm_xargs", None)
    xargs = {} if xargs is None else xargs
    if not isinstance(xargs, dict):
        return None
    prediction, aux_info = body.pop("prediction", None), body.pop("aux_info", None)
    if not isinstance(aux_info, bool | None):
        raise RequestError("aux_info", "aux_info is not allowed: it must be true or false")
    options = parse(xargs if prediction is None else {**xargs, "prediction": prediction})
    if options is None and not aux_info:
        return None
    body["vllm_xargs"] = {key: value for key, value in xargs.items() if key not in KEYS}
    return _Asked(body, options, bool(aux_info))


def _add_usage(body: dict[str, Any]) -> bool:
    """Have vLLM end a stream with a chunk for its usage; False if it does so already, or it is no stream."""
    options = body.get("stream_options") or {}
    if not body.get("stream") or not isinstance(options, dict) or options.get("include_usage"):
        return False
    # Without usage vLLM ignores this one.
    options = {key: value for key, value in options.items() if key != "continuous_usage_stats"}
    body["stream_options"] = {**options, "include_usage": True}
    return True


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body, and then what the client still sends: that it has gone."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replayed() -> Message:
        return next(messages, None) or await receive()

    return replayed


@dataclass
class _Report:
    """What a response tells of its request; `arrived` is in seconds of `time.perf_counter`."""

    engine_client: Any
    key: str
    asked: _Asked
    arrived: float
    _counts: asyncio.Task[dict[str, Any] | None] | None = None

    def ask(self) -> asyncio.Task[dict[str, Any] | None]:
        """Ask the workers for the counts, once; the task goes on if whoever waits for it is cancelled."""
        if self._counts is None:
            self._counts = asyncio.create_task(ask_workers(self.engine_client, "specplus_request_stats", self.key))
            _asking.add(self._counts)
            self._counts.add_done_callback(_has_asked)
        return self._counts

    async def add_to(self, payload: dict[str, Any]) -> None:
        """Add to a payload with usage; it stays as it is if the workers cannot be asked, or none knows the request."""
        try:
            counts = await asyncio.shield(self.ask())
        except Exception as error:
            logger.warning("a response goes without its counts: the workers cannot be asked for them: %r", error)
            return
        if counts is None:
            return
        usage, num_steps = payload["usage"], counts["num_steps"]
        num_tokens = usage.get("completion_tokens") or 0
        if self.asked.on_reference:
            # The most that the text can hold: each step but a last one that was cut gave a token of the target's own.
            most = max(0, num_tokens - num_steps + counts["num_requests"])
            usage["completion_tokens_details"] = {
                **(usage.get("completion_tokens_details") or {}),
                "accepted_prediction_tokens": min(counts["accepted"], most),
                "rejected_prediction_tokens": counts["rejected"],
            }
        if self.asked.aux_info:
            payload["aux_info"] = {
                "iter_count": num_steps,
                "output_len": num_tokens,
                "avg_tokens_per_iter": num_tokens / num_steps if num_steps else 0.0,
                "cost_time": (time.perf_counter() - self.arrived) * 1000,
            }


def _has_asked(task: asyncio.Task[Any]) -> None:
    _asking.discard(task)
    if not task.cancelled() and (error := task.exception()):
        logger.debug("the workers cannot be asked for the counts of a request: %r", error)


class _Response:
    """A `send` that adds a report to the response; what is no response of vLLM's with usage passes as it is.

    `hide_usage`: the client has not asked for the usage that a stream ends with.
    """

    def __init__(self, send: Send, report: _Report, hide_usage: bool) -> None:
        self._send = send
        self._report = report
        self._hide_usage = hide_usage
        self._media_type = ""
        self._start: Message = {}
        # Of the body, what has come and has not been sent.
        self._held = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = _headers(message)
            if message["status"] == HTTPStatus.OK and "content-encoding" not in headers:
                self._media_type = _media_type(headers)
            if self._media_type == _JSON:
                # Its content-length is known with the whole body.
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._media_type in (_JSON, _EVENTS):
            self._held += message.get("body", b"")
            more = message.get("more_body", False)
            if self._media_type == _EVENTS:
                await self._send_events(more)
            elif not more:
                await self._send_json()
            return
        await self._send(message)

    async def _send_json(self) -> None:
        payload = _decode(self._held)
        if payload is not None and isinstance(payload.get("usage"), dict):
            await self._report.add_to(payload)
            self._held = _encode(payload)
            MutableHeaders(scope=self._start)["content-length"] = str(len(self._held))
        await self._send(self._start)
        await self._send_body(self._held)

    async def _send_events(self, more: bool) -> None:
        *events, self._held = self._held.split(b"\n\n")
        for event in events:
            await self._send_body(await self._with_report(event) + b"\n\n", more=True)
        if not more:
            await self._send_body(self._held)

    async def _with_report(self, event: bytes) -> bytes:
        """The event with the report in it, if it is the chunk that gives the usage of the whole stream."""
        if b'"usage"' not in event:
            return event
        chunk = _decode(event.removeprefix(b"data:"))
        if chunk is None or chunk.get("choices") != [] or not isinstance(chunk.get("usage"), dict):
            return event
        await self._report.add_to(chunk)
        if self._hide_usage:
            del chunk["usage"]
        return b"data: " + _encode(chunk)

    async def _send_body(self, body: bytes, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
