"""A proxy in front of a prefill server and a decode server, both started by `vllm serve`.

A completion goes to the prefill server first, for one token. NixlConnector says in that answer where the KV cache lies;
ExampleConnector finds it by the prompt. Then the completion goes to the decode server, as it came but for that place.
The client gets that server's answer. An answer has one place, so requests with several prompts or choices go to the
decode server alone. So do all other requests.
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
# They do not go with one token and no stream.
NOT_FOR_PREFILL = ("max_completion_tokens", "min_tokens", "stream_options")
# Where a KV cache lies, in vLLM's requests and answers.
PLACE = "kv_transfer_params"
# They belong to one connection, and the clients set them anew.
OF_A_CONNECTION = ("host", "connection", "content-length", "transfer-encoding", "accept-encoding")


def create_app(prefill: httpx.AsyncClient, decode: httpx.AsyncClient) -> Starlette:
    """The proxy as an ASGI app; the clients have the servers' addresses as their `base_url`."""

    async def handle(request: Request) -> Response:
        body = await request.body()
        fields = _completion(request.url.path, body)
        if fields is not None:
            answer = await _prefill(prefill, request, fields)
            if not answer.is_success:
                return Response(answer.content, answer.status_code, _passed_on(answer.headers))
            place = answer.json().get(PLACE)
            if place:
                body = json.dumps(fields | {PLACE: place}).encode()
        return await _decode(decode, request, body)

    return Starlette(routes=[Route("/{path:path}", handle, methods=list(METHODS))])


def _completion(path: str, body: bytes) -> dict[str, Any] | None:
    """The fields of a completion with one prompt and one choice; None if it is anything else."""
    try:
        fields = json.loads(body) if path in COMPLETIONS else None
    except ValueError:
        fields = None
    # The decode server says what is wrong with other bodies.
    if not isinstance(fields, dict) or fields.get("n") not in (None, 1):
        return None
    prompt = fields.get("prompt")
    # A list of numbers is one prompt.
    has_several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return None if has_several else fields


def prefill_body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The request for the prefill server: the same, but for one token and no stream."""
    kept = {key: value for key, value in fields.items() if key not in NOT_FOR_PREFILL}
    return kept | {"max_tokens": 1, "stream": False, PLACE: {"do_remote_decode": True}}


async def _prefill(client: httpx.AsyncClient, request: Request, fields: Mapping[str, Any]) -> httpx.Response:
    """Fill the KV cache of a request's prompt; the prefill server's answer."""
    headers = {**_passed_on(request.headers), "content-type": "application/json"}
    try:
        return await client.post(request.url.path, content=json.dumps(prefill_body(fields)), headers=headers)
    except httpx.HTTPError as error:
        return httpx.Response(502, json=_failure("prefill", error))


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
