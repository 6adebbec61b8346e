"""A proxy in front of a prefill server and a decode server, both started by `vllm serve`.

A completion goes to the prefill server first, for one token, so that its KV cache lies where the decode server finds
it. Then it goes to the decode server as it came, and what that server answers goes to the client. All other requests
go to the decode server alone.
"""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
METHODS = ("GET", "POST", "PUT", "DELETE")
# They do not go with one token, no stream and one choice.
NOT_FOR_PREFILL = ("max_completion_tokens", "min_tokens", "n", "stream_options")
# They belong to one connection, and the clients set them anew.
OF_A_CONNECTION = ("host", "connection", "content-length", "transfer-encoding", "accept-encoding")


def create_app(prefill: httpx.AsyncClient, decode: httpx.AsyncClient) -> Starlette:
    """The proxy as an ASGI app; the clients have the servers' addresses as their `base_url`."""

    async def handle(request: Request) -> Response:
        body = await request.body()
        if request.url.path in COMPLETIONS:
            refusal = await _prefill(prefill, request, body)
            if refusal is not None:
                return refusal
        return await _decode(decode, request, body)

    return Starlette(routes=[Route("/{path:path}", handle, methods=list(METHODS))])


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request for the prefill server: the same, but for one token and no stream."""
    kept = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL}
    return kept | {"max_tokens": 1, "stream": False}


async def _prefill(client: httpx.AsyncClient, request: Request, body: bytes) -> Response | None:
    """Fill the KV cache of a request's prompt; what the client gets if that fails, otherwise None."""
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        # The decode server says what is wrong with it.
        return None
    headers = {**_passed_on(request.headers), "content-type": "application/json"}
    try:
        answer = await client.post(request.url.path, content=json.dumps(prefill_body(fields)), headers=headers)
    except httpx.HTTPError as error:
        return JSONResponse(_failure("prefill", error), 502)
    if answer.is_success:
        return None
    return Response(answer.content, answer.status_code, _passed_on(answer.headers))


async def _decode(client: httpx.AsyncClient, request: Request, body: bytes) -> Response:
    """The decode server's answer, streamed if it is a stream."""
    url = httpx.URL(request.url.path, query=request.url.query.encode())
    passed = client.build_request(request.method, url, content=body, headers=_passed_on(request.headers))
    try:
        answer = await client.send(passed, stream=True)
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return StreamingResponse(_events(answer), answer.status_code, _passed_on(answer.headers))
        content = await answer.aread()
    except httpx.HTTPError as error:
        return JSONResponse(_failure("decode", error), 502)
    return Response(content, answer.status_code, _passed_on(answer.headers))


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The events of a stream, whole ones only; an error event is the last one if the stream breaks off."""
    pending = b""
    try:
        async for part in answer.aiter_bytes():
            *events, pending = (pending + part).split(b"\n\n")
            for event in events:
                yield event + b"\n\n"
    except httpx.HTTPError as error:
        yield b"data: " + json.dumps(_failure("decode", error)).encode() + b"\n\n"
    finally:
        await answer.aclose()


def _failure(server: str, error: httpx.HTTPError) -> dict[str, Any]:
    """An error in the form of OpenAI's API."""
    message = f"the {server} server failed: {type(error).__name__}: {error}"
    return {"error": {"message": message, "type": "BadGatewayError", "param": None, "code": 502}}


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in OF_A_CONNECTION}
