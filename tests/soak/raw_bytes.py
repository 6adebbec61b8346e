"""HTTP requests written to sockets byte by byte: of random bodies, cut, too long, in broken chunks."""

import asyncio
import random
from collections import Counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.fuzzing import HUGE_INTEGERS, to_json
from tests.requests.stand_ins import CHAT, INVOCATIONS, OTHER_ROUTES, TEXT
from vllm_specplus.requests.options import HANDOVER_ENTRY, KEYS, RESOLVED_ENTRY, SCOPE_ENTRY

_PATHS = (*(CHAT, TEXT, INVOCATIONS) * 4, *OTHER_ROUTES, "/specplus/stats")
_NAMES = [*KEYS, RESOLVED_ENTRY, HANDOVER_ENTRY, SCOPE_ENTRY, "x"]
_PREDICTION = {"type": "content", "content": "a = b"}
_NUM_AT_ONCE = 20
_SECONDS_TO_WAIT = 300.0  # for an answer; a server that hangs is a failure, not a long test
_SECONDS_OF_SILENCE = 20.0
CLOSED, SILENT = 0, 1
"""In place of a status: the server has closed the connection, or waits for the rest of the request."""


class _Request(NamedTuple):
    """The bytes of a request, and whether they are all that it needs for an answer."""

    data: bytes
    is_whole: bool


def _value(rng: random.Random, depth: int = 0) -> Any:
    kinds = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.randrange(-(2**65), 2**65),
        lambda: rng.random() * 10.0 ** rng.randrange(-300, 300),
        lambda: "".join(chr(rng.randrange(1, 0xD800)) for _ in range(rng.randrange(8))),
        lambda: _huge(rng),
        lambda: _PREDICTION,
        lambda: [_value(rng, depth + 1) for _ in range(rng.randrange(3))],
        lambda: {rng.choice(_NAMES): _value(rng, depth + 1) for _ in range(rng.randrange(3))},
    ]
    return rng.choice(kinds if depth < 3 else kinds[:6])()


def _huge(rng: random.Random) -> Any:
    """An integer of thousands of digits, or its digits."""
    integer = rng.choice(HUGE_INTEGERS)
    return rng.choice([integer, to_json(integer)])


def _body(rng: random.Random) -> bytes:
    # One of the two limits is left where a byte of the other's name is changed.
    body = {"model": "tiny", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    body |= {"max_tokens": 4, "max_completion_tokens": 4}
    for name in rng.sample(["prediction", "aux_info", "vllm_xargs", "stream", "stream_options", "n"], rng.randrange(4)):
        body[name] = _value(rng)
    if rng.random() < 0.1:
        body |= {"prediction": _PREDICTION, "n": _huge(rng)}
    data = bytearray(to_json(body).encode(rng.choice(["utf-8", "utf-8", "utf-16", "utf-32"])))
    for _ in range(rng.choice([0, 0, 1, 3])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _request(rng: random.Random) -> _Request:
    """A request, mostly one that HTTP allows."""
    body, path = _body(rng), rng.choice(_PATHS)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n".encode()
    form = rng.randrange(8)
    if form == 0:
        num_more = rng.choice([-3, 7])
        return _Request(head + b"Content-Length: %d\r\n\r\n" % (len(body) + num_more) + body, num_more < 0)
    if form == 1:
        whole = b"%x" % len(body)
        size = rng.choice([whole, b"zz", b"-1", b"fffffffffffffff"])
        chunks = size + b"\r\n" + body + b"\r\n0\r\n\r\n"
        return _Request(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, size == whole)
    if form == 2:
        return _Request(rng.randbytes(rng.randrange(1, 200)) + b"\r\n\r\n", False)
    return _Request(head + b"Content-Length: %d\r\n\r\n" % len(body) + body, True)


async def send_raw_bytes(address: str, number: int, rng: random.Random) -> Counter[int]:
    """Send some requests, each on a connection of its own; the statuses that they got, or `CLOSED` or `SILENT`.

    Each request that is whole gets a status.
    """
    url, turns = urlsplit(address), asyncio.Semaphore(_NUM_AT_ONCE)

    async def send(request: _Request) -> int:
        seconds = _SECONDS_TO_WAIT if request.is_whole else _SECONDS_OF_SILENCE
        async with turns:
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            try:
                writer.write(request.data)
                await writer.drain()
                line = await asyncio.wait_for(reader.readline(), seconds)
                await asyncio.wait_for(reader.read(), seconds)
            except TimeoutError:
                status = SILENT
            except ConnectionError:
                status = CLOSED
            else:
                status = int(line.split()[1]) if line.startswith(b"HTTP/") else CLOSED
            finally:
                writer.close()
        assert status not in (CLOSED, SILENT) or not request.is_whole, (status, request.data)
        return status

    return Counter(await asyncio.gather(*(send(_request(rng)) for _ in range(number))))
