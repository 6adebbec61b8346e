"""The response of an HTTP request: what became of the request's drafts is added to its usage, or to a stream's end."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import Message, Send
from vllm.logger import init_logger

from vllm_specplus.requests.body import decode_object
from vllm_specplus.requests.engine_client import ask_workers
from vllm_specplus.requests.faults import request_faults
from vllm_specplus.requests.steps import Steps

logger = init_logger("vllm.specplus")

JSON_TYPE, EVENTS_TYPE = "application/json", "text/event-stream"
count_tasks: set[asyncio.Task[Any]] = set()
"""Questions to workers that are under way. An event loop keeps no reference to its tasks, so they stay here."""


def error_response(status: HTTPStatus, kind: str, message: str, field: str | None = None) -> JSONResponse:
    """An error in the form in which vLLM's OpenAI server gives its own."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": field, "code": status}}, status)


def headers_of(message: Mapping[str, Any]) -> Headers:
    """The headers of an ASGI scope or message."""
    return Headers(raw=list(message.get("headers", ())))


def media_type_of(headers: Headers) -> str:
    """The content type in lower case, without parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _encode(value: dict[str, Any]) -> bytes:
    """JSON as vLLM's server writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass
class Report:
    """What a response tells about its request.

    Attributes:
        engine_client: vLLM's.
        key: the name under which the workers keep the request's counts.
        has_reference: whether the request brings a text that its output will resemble.
        aux_info: whether the response is to have RTP-LLM's ``aux_info``.
        arrival: when the request arrived, in seconds of `time.perf_counter`.
        steps: of the request, where vLLM drafts; None where the workers count.
    """

    engine_client: Any
    key: str
    has_reference: bool
    aux_info: bool
    arrival: float
    steps: Steps | None = None
    _counts: asyncio.Task[dict[str, Any] | None] | None = None

    def ask_for_counts(self) -> asyncio.Task[dict[str, Any] | None]:
        """Ask the workers for the counts, once. The task goes on if its waiter is cancelled."""
        if self._counts is None:
            self._counts = asyncio.create_task(
                ask_workers(self.engine_client, "specplus_collect_request_stats", self.key)
            )
            count_tasks.add(self._counts)
            self._counts.add_done_callback(_end_count_task)
        return self._counts

    async def add_to(self, payload: dict[str, Any]) -> None:
        """Add to a payload with usage; it stays as it is if the workers cannot be asked, or none knows the request."""
        with request_faults.caught("reporting counts", "a response goes without them"):
            payload |= await self._counted(payload["usage"])

    async def _counted(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The fields of a payload that tell the counts; its new usage is one of them."""
        num_tokens = usage.get("completion_tokens") or 0
        if self.steps is not None:
            self.steps.arrival = self.arrival
            return {"aux_info": self.steps.aux_info(num_tokens)}
        try:
            counts = await asyncio.shield(self.ask_for_counts())
        except Exception as error:
            logger.warning(
                "a response goes without its counts: the workers cannot be asked for them: %s", type(error).__name__
            )
            return {}
        if counts is None:
            return {}
        num_steps, fields = counts["num_steps"], {}
        if self.has_reference:
            # Each step gives one token of the target's own, but for a request's last step, which may have been cut.
            most = max(0, num_tokens - num_steps + counts["num_requests"])
            details = {
                **(usage.get("completion_tokens_details") or {}),
                "accepted_prediction_tokens": min(counts["accepted"], most),
                "rejected_prediction_tokens": counts["rejected"],
            }
            fields["usage"] = {**usage, "completion_tokens_details": details}
        if self.aux_info:
            fields["aux_info"] = Steps(None, num_steps, self.arrival).aux_info(num_tokens)
        return fields


def _end_count_task(task: asyncio.Task[Any]) -> None:
    count_tasks.discard(task)
    if not task.cancelled() and (error := task.exception()):
        logger.debug("the workers cannot be asked for the counts of a request: %s", type(error).__name__)


class ReportSender:
    """An ASGI `send` that adds a report to a response with usage; any other response passes unchanged.

    Args:
        send: the server's.
        report: what to add.
        hide_usage: whether to remove the usage at a stream's end, for which the client has not asked.
    """

    def __init__(self, send: Send, report: Report, *, hide_usage: bool) -> None:
        self._send = send
        self._report = report
        self._hide_usage = hide_usage
        self._media_type = ""
        self._start: Message = {}
        # The part of the body that has come and is not sent yet.
        self._pending = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = headers_of(message)
            if message["status"] == HTTPStatus.OK and "content-encoding" not in headers:
                self._media_type = media_type_of(headers)
            if self._media_type == JSON_TYPE:
                # Its content-length is known once the whole body has come.
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._media_type in (JSON_TYPE, EVENTS_TYPE):
            self._pending += message.get("body", b"")
            more = message.get("more_body", False)
            if self._media_type == EVENTS_TYPE:
                await self._send_events(more)
            elif not more:
                await self._send_json()
            return
        await self._send(message)

    async def _send_json(self) -> None:
        payload = decode_object(self._pending)
        if payload is not None and isinstance(payload.get("usage"), dict):
            await self._report.add_to(payload)
            self._pending = _encode(payload)
            MutableHeaders(scope=self._start)["content-length"] = str(len(self._pending))
        await self._send(self._start)
        await self._send_body(self._pending)

    async def _send_events(self, more: bool) -> None:
        *events, self._pending = self._pending.split(b"\n\n")
        for event in events:
            await self._send_body(await self._with_report(event) + b"\n\n", more=True)
        if not more:
            await self._send_body(self._pending)

    async def _with_report(self, event: bytes) -> bytes:
        """The event; with the report in it if it is the chunk with the whole stream's usage."""
        if b'"usage"' not in event:
            return event
        chunk = decode_object(event.removeprefix(b"data:"))
        if chunk is None or chunk.get("choices") != [] or not isinstance(chunk.get("usage"), dict):
            return event
        await self._report.add_to(chunk)
        if self._hide_usage:
            del chunk["usage"]
        return b"data: " + _encode(chunk)

    async def _send_body(self, body: bytes, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
