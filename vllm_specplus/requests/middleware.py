"""Requests with options over HTTP: OpenAI's ``prediction``, RTP-LLM's `aux_info`, and the keys of ``vllm_xargs``.

`PredictedOutputs` stands between the client and vLLM's OpenAI server. It takes the plugin's fields out of a request's
body (`body`), and adds what became of the request's drafts to the response (`response`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar
from uuid import uuid4

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX
from vllm.logger import init_logger

from vllm_specplus.requests.api_key import lacks_api_key
from vllm_specplus.requests.body import RequestBody, check_other_route, read_body, without_fields
from vllm_specplus.requests.check import handover, no_drafter_error
from vllm_specplus.requests.engine_client import check_of_engine, has_drafter, speculates
from vllm_specplus.requests.faults import request_faults
from vllm_specplus.requests.options import HANDOVER_ENTRY, RequestError, ResolvedOptions
from vllm_specplus.requests.response import (
    JSON_TYPE,
    Report,
    ReportSender,
    error_response,
    headers_of,
    media_type_of,
)
from vllm_specplus.requests.steps import step_counter

logger = init_logger("vllm.specplus")

# SageMaker's ``/invocations`` takes the bodies of the other two.
_PATHS = ("/v1/chat/completions", "/v1/completions", "/invocations")
# Those that end in "render" turn a request into tokens and parameters, for another server to run.
_OTHER_PATHS_WITH_XARGS = (
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
)
# vLLM reads no ``vllm_xargs`` there.
_OTHER_PATHS_WITHOUT_XARGS = (
    "/v1/systemone",
    "/v1/decisions",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
)
_OTHER_PATHS = _OTHER_PATHS_WITH_XARGS + _OTHER_PATHS_WITHOUT_XARGS
# In a scope: another PredictedOutputs, further out, takes care of the request.
_SCOPE_MARK = "specplus"
_LARGE_BODY = 1 << 20
_T = TypeVar("_T")


class PredictedOutputs:
    """ASGI middleware for ``vllm serve --middleware vllm_specplus.requests.PredictedOutputs``.

    It acts on POSTs of JSON to the chat completions, completions and ``/invocations``. Outside of ``vllm_xargs`` it
    refuses the plugin's fields at vLLM's batch of chat completions, Responses, Messages, structured decisions and
    Cohere's chat. So it does at the route for token ids, and at those that render requests.

    The plugin's fields do not go to vLLM: their meaning waits in `check.handover`. A request with a reference gets
    ``accepted_prediction_tokens`` and ``rejected_prediction_tokens`` in its usage. A request with ``aux_info: true``
    gets RTP-LLM's ``aux_info`` (``cost_time`` in milliseconds), a stream in its last chunk. A field that is not allowed
    is answered with HTTP 400, and so is one that needs the plugin's drafter in an engine without it; OpenAI's
    ``prediction`` is ignored there. So is a reference for which there is no memory at the moment.
    Requests that ask nothing of the plugin pass through unchanged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_generation(scope) or _SCOPE_MARK in scope:
            return await self.app(scope, receive, send)
        arrival = time.perf_counter()
        scope = {**scope, _SCOPE_MARK: True}
        engine_client = getattr(_state(scope), "engine_client", None)
        if engine_client is None:
            return await self.app(scope, receive, send)
        if _lacks_api_key(scope):
            # vLLM refuses it. Where this stands outside vLLM's check of keys, nothing is read before.
            return await self.app(scope, receive, send)
        key = uuid4().hex
        try:
            receive, asked = await _read(scope, receive, engine_client, key)
        except ClientDisconnect:
            return None
        except RequestError as error:
            refusal = error_response(HTTPStatus.BAD_REQUEST, "BadRequestError", str(error), error.field)
            return await refusal(scope, receive, send)
        if asked is None:
            return await self.app(scope, receive, send)
        handover.put(key, asked.resolved, asked.num_bytes)
        report = Report(engine_client, key, asked.has_reference, asked.aux_info, arrival)
        try:
            return await self._run(asked, report, scope, receive, send)
        finally:
            handover.drop(key)

    async def _run(self, asked: "_Asked", report: Report, scope: Scope, receive: Receive, send: Send) -> None:
        """Have vLLM answer the rest of the body."""
        if asked.aux_info and asked.resolved.counts_key is None:
            with request_faults.caught("counting steps", "counts are incomplete"):
                report.steps = step_counter.watch(report.key)
        if asked.has_reference or asked.aux_info:
            send = ReportSender(send, report, hide_usage=asked.hides_usage)
        try:
            await self.app(scope, receive, send)
        finally:
            if asked.resolved.counts_key is not None:
                # The workers keep a request's counts until they are collected.
                report.ask_for_counts()
            elif report.steps is not None:
                step_counter.forget(report.key)


@dataclass(frozen=True)
class _Asked:
    """What a request asks of the plugin, without its texts, which would take memory until it is answered.

    Attributes:
        resolved: its options.
        num_bytes: what its reference takes, see `Handover.put`.
        has_reference, aux_info: see `Report`.
        hides_usage: see `ReportSender`.
    """

    resolved: ResolvedOptions
    num_bytes: int
    has_reference: bool
    aux_info: bool
    hides_usage: bool


async def _read(scope: Scope, receive: Receive, engine_client: Any, key: str) -> tuple[Receive, _Asked | None]:
    """Read a request and take the plugin's fields out of its body.

    Args:
        scope: the request's, whose headers are changed to suit the rest of the body.
        receive: the server's.
        engine_client: vLLM's.
        key: the request's, under which its options are going to wait.

    Returns:
        A `receive` that gives vLLM the rest of the body, and what the request asks; None if it asks nothing.

    Raises:
        ClientDisconnect: the client has gone before its whole body came.
        RequestError: a field is not allowed.
    """
    received = await Request(scope, receive).body()
    taken = None
    with request_faults.caught("reading a request", "it goes on without its options"):
        taken = await _take_fields(received, scope, engine_client, key)
    body, asked = taken or (without_fields(received), None)
    if body is not received:
        headers = MutableHeaders(scope=scope)
        headers["content-length"] = str(len(body))
        del headers["transfer-encoding"]
    return _replay(body, receive), asked


async def _take_fields(received: bytes, scope: Scope, engine_client: Any, key: str) -> tuple[bytes, _Asked | None]:
    """The body without the plugin's fields, and what they ask; None if they ask nothing. The rest is as in `_read`."""
    max_model_len = engine_client.vllm_config.model_config.max_model_len
    if scope["path"].endswith(_OTHER_PATHS):
        reads_xargs = scope["path"].endswith(_OTHER_PATHS_WITH_XARGS) and check_of_engine(engine_client) is not None
        drafts = _drafts(engine_client)
        await _off_loop(len(received), check_other_route, received, max_model_len, drafts, reads_xargs)
        return received, None
    read = await _off_loop(len(received), read_body, received, max_model_len)
    body = _without_ignored_prediction(read, engine_client)
    if body is None:
        return received, None
    resolved = await _resolve(body, engine_client, key)
    num_bytes = _reference_bytes(body, resolved)
    hides_usage = body.aux_info and not _is_usage_forced(scope) and body.add_usage()
    encoded = await _off_loop(len(received), body.encode, HANDOVER_ENTRY, key)
    return encoded, _Asked(resolved, num_bytes, body.has_reference, body.aux_info, hides_usage)


def _reference_bytes(body: RequestBody, resolved: ResolvedOptions) -> int:
    """What the reference takes: once in `handover`, and in a message to the engine for each answer.

    Raises:
        RequestError: it takes more than that of one request may.
    """
    if resolved.token_ids is None:
        return 0
    num_bytes = resolved.token_ids.nbytes * (1 + body.num_answers)
    if num_bytes > handover.max_bytes_of_request:
        field = body.options.field
        raise RequestError(
            field,
            f"{field} is not allowed for so many answers: it takes {resolved.token_ids.nbytes} bytes for each, and at "
            f"most {handover.max_bytes_of_request} are allowed",
        )
    return num_bytes


def _is_generation(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] == "POST"
        and scope["path"].endswith(_PATHS + _OTHER_PATHS)
        and media_type_of(headers_of(scope)) == JSON_TYPE
    )


async def _off_loop(num_bytes: int, function: Callable[..., _T], *args: Any) -> _T:
    """Call a function whose cost grows with a body: in a thread where the body is large."""
    if num_bytes > _LARGE_BODY:
        return await run_in_threadpool(function, *args)
    return function(*args)


def _lacks_api_key(scope: Scope) -> bool:
    """Whether vLLM is going to refuse the request, which does not bring the server's API key."""
    is_guarded = scope["path"].removeprefix(scope.get("root_path", "")).startswith(GUARDED_PREFIX)
    return is_guarded and lacks_api_key(_state(scope), headers_of(scope))


def _state(scope: Scope) -> Any:
    """The server's state; None where a scope has none."""
    return getattr(scope.get("app"), "state", None)


def _is_usage_forced(scope: Scope) -> bool:
    """Whether vLLM's server ends each stream with its usage."""
    return getattr(getattr(_state(scope), "args", None), "enable_force_include_usage", False)


def _drafts(engine_client: Any) -> bool:
    """Whether the plugin drafts in the engine, and requests can be checked."""
    return has_drafter(engine_client) and check_of_engine(engine_client) is not None


def _without_ignored_prediction(body: RequestBody | None, engine_client: Any) -> RequestBody | None:
    """The body without OpenAI's ``prediction`` where nothing can use it; None if it asks nothing else."""
    if body is None or body.options.prediction is None or _drafts(engine_client):
        return body
    logger.warning_once(
        "PredictedOutputs ignores predictions: the engine's speculative config has no method of vllm-specplus, or its "
        "requests cannot be checked",
        scope="process",
    )
    options = body.options.model_copy(update={"prediction": None})
    return RequestBody(body.vllm_body, options) if options.stated_keys else None


async def _resolve(body: RequestBody, engine_client: Any, key: str) -> ResolvedOptions:
    """Resolve a request's options; the workers keep its counts under `key` if the response needs them.

    Raises:
        RequestError: a field is not allowed.
    """
    check, drafts = check_of_engine(engine_client), _drafts(engine_client)
    counts_key = key if body.needs_counts and drafts else None
    if check is not None:
        # In a thread, so that the server goes on while text becomes tokens; once for all prompts of the request.
        return await run_in_threadpool(check.resolve, body.options, counts_key)
    refused = [name for name in body.options.stated_keys if name != "aux_info"]
    if not speculates(engine_client):
        # Nothing drafts anyway.
        refused = [name for name in refused if name != "force_disable_sp_run"]
    if refused:
        raise no_drafter_error(refused[0])
    return ResolvedOptions()


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body again, then what the client still sends: that it has gone."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replayed() -> Message:
        return next(messages, None) or await receive()

    return replayed
