"""HTTP requests written to sockets byte by byte: of random bodies, cut, too long, in broken chunks."""

import asyncio
import json
import random
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

from tests.requests.stand_ins import CHAT, INVOCATIONS, OTHER_ROUTES, TEXT
from vllm_specplus.requests.options import HANDOVER_ENTRY, KEYS, RESOLVED_ENTRY, SCOPE_ENTRY

_PATHS = (CHAT, TEXT, INVOCATIONS, *OTHER_ROUTES, "/specplus/stats")
_NAMES = [*KEYS, RESOLVED_ENTRY, HANDOVER_ENTRY, SCOPE_ENTRY, "x"]
_NUM_AT_ONCE = 20
_SECONDS_TO_WAIT = 20.0
CLOSED, SILENT = 0, 1
"""In place of a status: the server has closed the connection, or waits for the rest of the request."""


def _value(rng: random.Random, depth: int = 0) -> Any:
    kinds = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.randrange(-(2**65), 2**65),
        lambda: rng.random() * 10.0 ** rng.randrange(-300, 300),
        lambda: "".join(chr(rng.randrange(1, 0xD800)) for _ in range(rng.randrange(8))),
        lambda: {"type": "content", "content": "a = b"},
        lambda: [_value(rng, depth + 1) for _ in range(rng.randrange(3))],
        lambda: {rng.choice(_NAMES): _value(rng, depth + 1) for _ in range(rng.randrange(3))},
    ]
    return rng.choice(kinds if depth < 3 else kinds[:5])()


def _body(rng: random.Random) -> bytes:
    body = {"model": "tiny", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    for name in rng.sample(["prediction", "aux_info", "vllm_xargs", "stream", "stream_options", "n"], rng.randrange(4)):
        body[name] = _value(rng)
    data = bytearray(json.dumps(body).encode(rng.choice(["utf-8", "utf-8", "utf-16", "utf-32"])))
    for _ in range(rng.choice([0, 0, 1, 3])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _request(rng: random.Random) -> bytes:
    """A whole request, mostly one that HTTP allows."""
    body, path = _body(rng), rng.choice(_PATHS)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n".encode()
    form = rng.randrange(8)
    if form == 0:
        return head + b"Content-Length: %d\r\n\r\n" % (len(body) + rng.choice([-3, 7])) + body
    if form == 1:
        size = rng.choice([b"%x" % len(body), b"zz", b"-1", b"fffffffffffffff"])
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\n" + body + b"\r\n0\r\n\r\n"
    if form == 2:
        return rng.randbytes(rng.randrange(1, 200)) + b"\r\n\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def send_raw_bytes(address: str, number: int, rng: random.Random) -> Counter[int]:
    """Send some requests, each on a connection of its own; the statuses that they got, or `CLOSED` or `SILENT`."""
    url, turns = urlsplit(address), asyncio.Semaphore(_NUM_AT_ONCE)

    async def send(data: bytes) -> int:
        async with turns:
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            try:
                writer.write(data)
                await writer.drain()
                line = await asyncio.wait_for(reader.readline(), _SECONDS_TO_WAIT)
                await asyncio.wait_for(reader.read(), _SECONDS_TO_WAIT)
            except TimeoutError:
                return SILENT
            except ConnectionError:
                return CLOSED
            finally:
                writer.close()
            return int(line.split()[1]) if line.startswith(b"HTTP/") else CLOSED

    return Counter(await asyncio.gather(*(send(_request(rng)) for _ in range(number))))
