"""A proxy in front of a prefill server and a decode server, both started by `vllm serve`.

    python examples/pd_disaggregation/proxy.py --prefill http://HOST:PORT --decode http://HOST:PORT

A completion goes to the prefill server first, for one token. NixlConnector says in that answer where the KV cache lies;
ExampleConnector finds it by the prompt. Then the completion goes to the decode server, as it came but for that place.
The client gets that server's answer. An answer has one place, so requests with several prompts or choices go to the
decode server alone. So do all other requests.
"""

import argparse
import asyncio
import json
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

HEALTH = "/health"
COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# They do not go with one token and no stream.
NOT_FOR_PREFILL = ("max_completion_tokens", "min_tokens", "stream_options")
# Where a KV cache lies, in vLLM's requests and answers.
PLACE = "kv_transfer_params"
# They belong to one connection, or to how a body is sent over it; each side sets them anew.
OF_A_CONNECTION = (
    *(b"host", b"connection", b"content-length", b"transfer-encoding", b"accept-encoding", b"content-encoding"),
)
# What a web server logs of a client that has left.
CLIENT_LEFT = 499
# The system asks a silent server's machine for a sign of life, from the 15th second on, and gives it up after 15 more.
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
# How long the proxy, once told to end, waits for answers that are on their way.
STOP_SECONDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1", help="the proxy's (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    args = parser.parse_args()
    try:
        listener = socket.create_server((args.host, args.port))
    except (OSError, OverflowError) as error:
        parser.exit(2, f"--host {args.host} --port {args.port} is not allowed: an address that is free ({error})\n")
    run(args.prefill, args.decode, listener)


def run(prefill_address: str, decode_address: str, listener: socket.socket) -> None:
    """Answer what comes to a socket until a signal ends the process."""

    async def serve() -> None:
        async with client_of(prefill_address) as prefill, client_of(decode_address) as decode:
            app = create_app(prefill, decode)
            config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=STOP_SECONDS)
            await uvicorn.Server(config).serve([listener])

    with listener:
        asyncio.run(serve())


def client_of(address: str) -> httpx.AsyncClient:
    """A client of one server. It notices within half a minute that the server's machine is gone."""
    # A connection that is idle for 5 s is closed by the server, so the proxy is faster.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
    transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=KEEP_ALIVE)
    # A completion may take any time.
    return httpx.AsyncClient(base_url=address, transport=transport, timeout=httpx.Timeout(None, connect=10))


def create_app(prefill: httpx.AsyncClient, decode: httpx.AsyncClient) -> Starlette:
    """The proxy as an ASGI app; the clients have the servers' addresses as their `base_url`."""

    async def handle(request: Request) -> Response:
        return await _while_wanted(request, forward(request, await request.body()))

    async def forward(request: Request, body: bytes) -> Response:
        if request.url.path == HEALTH:
            answer = await _prefill(prefill, "GET", request)
            return await _decode(decode, request, body) if answer.is_success else _as_response(answer)
        fields = _completion(request.url.path, body)
        if fields is None:
            return await _decode(decode, request, body)
        answer = await _prefill(prefill, "POST", request, json.dumps(prefill_body(fields)))
        if not answer.is_success:
            return _as_response(answer)
        place = answer.json().get(PLACE)
        return await _decode(decode, request, json.dumps(fields | {PLACE: place}).encode() if place else body)

    return Starlette(routes=[Route("/{path:path}", handle, methods=list(METHODS))])


async def _while_wanted(request: Request, answering: Coroutine[Any, Any, Response]) -> Response:
    """The response, whose body may still come. If the client leaves before, both servers drop its request."""

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, leaving = asyncio.create_task(answering), asyncio.create_task(leave())
    try:
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else Response(status_code=CLIENT_LEFT)
    finally:
        answer.cancel()
        leaving.cancel()


def _completion(path: str, body: bytes) -> dict[str, Any] | None:
    """The fields of a completion with one prompt and one choice; None if it is anything else."""
    try:
        fields = json.loads(body) if path in COMPLETIONS else None
    except (ValueError, RecursionError):
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


async def _prefill(
    client: httpx.AsyncClient, method: str, request: Request, content: str | None = None
) -> httpx.Response:
    """The prefill server's answer, whole."""
    headers = _passed_on(request.headers.raw) | {b"content-type": b"application/json"}
    try:
        return await client.request(method, request.url.path, content=content, headers=headers)
    except httpx.HTTPError as error:
        return httpx.Response(502, json=_failure("prefill", error))


async def _decode(client: httpx.AsyncClient, request: Request, body: bytes) -> Response:
    """The decode server's answer, streamed if it is a stream."""
    url = httpx.URL(request.url.path, query=request.url.query.encode())
    passed = client.build_request(request.method, url, content=body, headers=_passed_on(request.headers.raw))
    try:
        answer = await client.send(passed, stream=True)
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return StreamingResponse(_events(answer), answer.status_code, _headers(answer))
        content = await answer.aread()
    except httpx.HTTPError as error:
        return JSONResponse(_failure("decode", error), 502)
    return Response(content, answer.status_code, _headers(answer))


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


def _as_response(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, _headers(answer))


def _failure(server: str, error: httpx.HTTPError) -> dict[str, Any]:
    """An error in the form of OpenAI's API."""
    message = f"the {server} server failed: {type(error).__name__}: {error}"
    return {"error": {"message": message, "type": "BadGatewayError", "param": None, "code": 502}}


def _headers(answer: httpx.Response) -> dict[str, str]:
    passed = _passed_on(answer.headers.raw)
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in passed.items()}


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Headers for the other side, as bytes: their texts may have any encoding."""
    return {name.lower(): value for name, value in headers if name.lower() not in OF_A_CONNECTION}


if __name__ == "__main__":
    main()
