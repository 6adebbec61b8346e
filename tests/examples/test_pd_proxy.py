"""The proxy of disaggregated prefill; both servers are stand-ins."""

import asyncio
import contextlib
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "pd_disaggregation"
sys.path.append(str(FOLDER))
from proxy import KEEP_ALIVE, PLACE, client_of, create_app, prefill_body  # noqa: E402

Respond = Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
EVENT = b'data: {"id":"1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"a"}]}\n\n'
REFUSAL = {
    "error": {"message": "aux_info=3 is not allowed", "type": "BadRequestError", "param": "aux_info", "code": 400}
}
ALL_FIELDS = {
    "prompt": "a",
    "max_tokens": 9,
    "temperature": 0.5,
    "seed": 3,
    "prediction": {"type": "content", "content": "ü"},
    "aux_info": True,
    "spec_tokens": 2,
}
OF_PREFILL = {"max_tokens": 1, "stream": False, PLACE: {"do_remote_decode": True}}


class Pd:
    """A proxy with stand-ins for its servers; it keeps the requests that come to each."""

    def __init__(self, prefill: Respond | None = None, decode: Respond | None = None):
        self.at_prefill: list[httpx.Request] = []
        self.at_decode: list[httpx.Request] = []
        self.app = create_app(self._client(self.at_prefill, prefill), self._client(self.at_decode, decode))

    def _client(self, kept: list[httpx.Request], respond: Respond | None) -> httpx.AsyncClient:
        async def handle(request: httpx.Request) -> httpx.Response:
            kept.append(request)
            answer = httpx.Response(200, json={"ok": True}) if respond is None else respond(request)
            return answer if isinstance(answer, httpx.Response) else await answer

        return httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(handle))

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url="http://proxy", transport=httpx.ASGITransport(app=self.app))

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with self.client() as client:
                return await client.request(method, path, **request)

        return asyncio.run(ask())

    def stream(self) -> list[Any]:
        """The chunks of a streamed completion, as the stock client reads them; an error is the last entry."""

        async def read() -> list[Any]:
            chunks: list[Any] = []
            async with self.client() as http:
                client = openai.AsyncOpenAI(base_url="http://proxy/v1", api_key="k", http_client=http, max_retries=0)
                try:
                    async for chunk in await client.completions.create(model="m", prompt="a", stream=True):
                        chunks.append(chunk.choices[0].text)
                except openai.APIError as error:
                    chunks.append(error)
            return chunks

        return asyncio.run(read())


async def broken_after(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    raise httpx.ReadError("gone")


def events(content: Any) -> Respond:
    return lambda request: httpx.Response(200, headers={"content-type": "text/event-stream"}, content=content)


def fails(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def test_the_prefill_server_makes_one_token() -> None:
    body = {"prompt": "a", "max_tokens": 9, "max_completion_tokens": 9, "min_tokens": 4, "seed": 1}
    asked = prefill_body(body | {"stream": True, "stream_options": {"include_usage": True}, "aux_info": True})
    assert asked == {"prompt": "a", "seed": 1, "aux_info": True} | OF_PREFILL


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_completion_goes_to_both(path: str) -> None:
    """The decode server gets each byte of the request, and the client each of its answer."""
    answer = httpx.Response(200, content=b'{"usage": {"x": 1}, "aux_info":{}}', headers={"x-of-server": "1"})
    pd = Pd(decode=lambda request: answer)
    body = json.dumps(ALL_FIELDS, indent=3).encode()
    headers = {"authorization": "Bearer key", "content-type": "application/json"}
    got = pd.ask("POST", f"{path}?a=b", content=body, headers=headers)
    assert (got.status_code, got.content, got.headers["x-of-server"]) == (200, answer.content, "1")
    (prefilled,), (decoded,) = pd.at_prefill, pd.at_decode
    assert json.loads(prefilled.content) == ALL_FIELDS | OF_PREFILL
    assert decoded.content == body
    assert str(decoded.url) == f"http://server{path}?a=b"
    for request in (prefilled, decoded):
        assert request.url.path == path
        assert request.headers["authorization"] == "Bearer key"
        assert request.headers["host"] == "server"
        assert request.headers["content-type"] == "application/json"


def test_the_decode_server_is_told_where_the_cache_lies() -> None:
    place = {"do_remote_prefill": True, "remote_block_ids": [[3, 4]], "remote_host": "h"}
    pd = Pd(prefill=lambda request: httpx.Response(200, json={"choices": [], PLACE: place}))
    pd.ask("POST", TEXT, json=ALL_FIELDS)
    (decoded,) = pd.at_decode
    assert json.loads(decoded.content) == ALL_FIELDS | {PLACE: place}


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}, {"prompt": [[1, 2], [3]]}])
def test_several_prompts_or_choices_are_of_the_decode_server(fields: dict[str, Any]) -> None:
    """The prefill server's answer has one place, so the others would get a wrong cache."""
    pd = Pd()
    pd.ask("POST", TEXT, json=ALL_FIELDS | fields)
    assert not pd.at_prefill
    assert json.loads(pd.at_decode[0].content) == ALL_FIELDS | fields


@pytest.mark.parametrize("fields", [{"n": 1}, {"n": None}, {"prompt": ["a"]}, {"prompt": [1, 2]}, {"prompt": [[1, 2]]}])
def test_one_prompt_and_one_choice_go_to_both(fields: dict[str, Any]) -> None:
    pd = Pd()
    pd.ask("POST", TEXT, json=ALL_FIELDS | fields)
    assert len(pd.at_prefill) == len(pd.at_decode) == 1


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("OPTIONS", TEXT), ("POST", "/tokenize")])
def test_other_requests_go_to_the_decode_server(method: str, path: str) -> None:
    pd = Pd(decode=lambda request: httpx.Response(418, content=b"tea"))
    got = pd.ask(method, path)
    assert (got.status_code, got.content) == (418, b"tea")
    assert not pd.at_prefill
    assert [(request.method, request.url.path) for request in pd.at_decode] == [(method, path)]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_body_that_is_no_object_is_refused_by_the_decode_server(content: bytes) -> None:
    pd = Pd(decode=lambda request: httpx.Response(400, json=REFUSAL))
    assert pd.ask("POST", TEXT, content=content).status_code == 400
    assert not pd.at_prefill
    assert pd.at_decode[0].content == content


def test_a_body_that_is_nested_too_deep_is_refused_by_the_decode_server() -> None:
    pd = Pd()
    assert pd.ask("POST", TEXT, content=b"[" * 100_000).status_code == 200
    assert (pd.at_prefill, len(pd.at_decode)) == ([], 1)


def test_headers_may_have_any_bytes() -> None:
    pd = Pd(decode=lambda request: httpx.Response(200, headers={b"x-user": dict(request.headers.raw)[b"x-user"]}))
    name = "Jörg".encode()
    got = pd.ask("POST", TEXT, headers={b"content-type": b"text/plain", b"x-user": name}, content=b'{"prompt": "a"}')
    sent = [dict(requests[0].headers.raw) for requests in (pd.at_prefill, pd.at_decode)]
    assert [headers[b"x-user"] for headers in sent] == [name] * 2
    assert [headers[b"content-type"] for headers in sent] == [b"application/json", b"text/plain"]
    assert dict(got.headers.raw)[b"x-user"] == name


def test_a_compressed_answer_comes_as_it_is_said_to() -> None:
    text = b'{"error": {}}' * 9
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    pd = Pd(decode=lambda request: httpx.Response(200, headers=headers, content=gzip.compress(text)))
    got = pd.ask("POST", TEXT, json={"prompt": "a"})
    assert (got.content, got.headers["content-type"]) == (text, "application/json")


def test_a_refusal_of_the_prefill_server_is_the_answer() -> None:
    pd = Pd(prefill=lambda request: httpx.Response(400, json=REFUSAL))
    got = pd.ask("POST", TEXT, json=ALL_FIELDS)
    assert (got.status_code, got.json()) == (400, REFUSAL)
    assert not pd.at_decode


@pytest.mark.parametrize("server", ["prefill", "decode"])
def test_a_server_that_is_gone(server: str) -> None:
    got = Pd(**{server: fails}).ask("POST", TEXT, json=ALL_FIELDS)
    assert got.status_code == 502
    assert got.json()["error"]["message"] == f"the {server} server failed: ConnectError: refused"


def test_a_decode_server_that_dies_before_the_whole_answer() -> None:
    pd = Pd(decode=lambda request: httpx.Response(200, content=broken_after([b'{"choices"'])))
    got = pd.ask("POST", TEXT, json=ALL_FIELDS)
    assert got.status_code == 502
    assert got.json()["error"]["message"] == "the decode server failed: ReadError: gone"


def test_a_whole_stream() -> None:
    assert Pd(decode=events(EVENT * 3 + b"data: [DONE]\n\n")).stream() == ["a"] * 3


@pytest.mark.parametrize("parts", [[EVENT * 2], [EVENT, EVENT[:30], EVENT[30:], EVENT[:30]]])
def test_a_decode_server_that_dies_in_a_stream(parts: list[bytes]) -> None:
    """The client reads the whole events that came, then an error."""
    *texts, error = Pd(decode=events(broken_after(parts))).stream()
    assert texts == ["a"] * 2
    assert isinstance(error, openai.APIError)
    assert "the decode server failed: ReadError: gone" in str(error)


@pytest.mark.parametrize("server", ["prefill", "decode"])
def test_a_client_that_leaves(server: str) -> None:
    """The server's request is dropped, so it makes no more tokens."""
    asked, dropped = asyncio.Event(), []

    async def never(request: httpx.Request) -> httpx.Response:
        asked.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            dropped.append(server)

    body = iter([{"type": "http.request", "body": json.dumps(ALL_FIELDS).encode()}])

    async def receive() -> dict[str, Any]:
        for message in body:
            return message
        await asked.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        pass

    async def leave() -> None:
        scope = {"type": "http", "method": "POST", "path": TEXT, "query_string": b"", "headers": []}
        await Pd(**{server: never}).app(scope, receive, send)

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert dropped == [server]


@pytest.mark.parametrize("server", ["prefill", "decode"])
def test_health_is_that_of_both(server: str) -> None:
    assert Pd().ask("GET", "/health").status_code == 200
    assert Pd(**{server: lambda request: httpx.Response(503)}).ask("GET", "/health").status_code == 503
    assert Pd(**{server: fails}).ask("GET", "/health").status_code == 502


def script(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / name, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.mark.parametrize("option", ["--port", "--prefill-port", "--decode-port"])
def test_a_port_in_use(option: str, taken: str) -> None:
    """An older server would answer in place of the new one."""
    got = script("serve.py", "no-model", option, taken)
    assert (got.returncode, got.stdout) == (2, "")
    (line,) = got.stderr.splitlines()
    assert line.startswith(f"{option} {taken} is not allowed: a free port, and another for each (")


def test_two_equal_ports() -> None:
    got = script("serve.py", "no-model", "--prefill-port", "8131", "--decode-port", "8131")
    assert (got.returncode, got.stdout) == (2, "")
    assert got.stderr.startswith("--decode-port 8131 is not allowed")


@pytest.mark.parametrize("connector", ["ExampleConnector", "NixlConnector"])
def test_a_kv_transfer_config(connector: str) -> None:
    got = script("serve.py", "no-model", "--connector", connector, "--kv-transfer-config={}")
    assert (got.returncode, got.stdout) == (2, "")
    assert got.stderr == f"--kv-transfer-config is not allowed: with --connector {connector} this script sets it\n"


@pytest.mark.parametrize("option", ["--kv-transfer-config.kv_role", "--kv_transfer_conf"])
def test_a_part_of_a_kv_transfer_config(option: str) -> None:
    got = script("serve.py", "no-model", "--connector", "NixlConnector", option, "kv_both")
    assert (got.returncode, got.stdout) == (2, "")
    assert got.stderr.startswith("--kv-transfer-conf")


@pytest.mark.parametrize("option", ["--enable-prefix-caching", "--no_enable_chunked_prefill", "--block-size"])
def test_an_option_that_the_example_connector_needs_otherwise(option: str, taken: str) -> None:
    got = script("serve.py", "no-model", option, "32")
    assert (got.returncode, got.stdout) == (2, "")
    name = option.replace("_", "-")
    assert got.stderr == f"{name} is not allowed: with --connector ExampleConnector this script sets it\n"
    # The next error is that of the port: of another connector's servers the option is allowed.
    got = script("serve.py", "no-model", "--connector", "NixlConnector", option, "32", "--port", taken)
    assert got.stderr.startswith(f"--port {taken} is not allowed")


def test_a_host_that_this_machine_has_not() -> None:
    got = script("serve.py", "no-model", "--host", "192.0.2.1", "--max-num-seqs", "32")
    assert (got.returncode, got.stdout) == (2, "")
    (line,) = got.stderr.splitlines()
    assert line.startswith("--host 192.0.2.1 --port 8000 is not allowed: a free port, and another for each (")


@pytest.mark.parametrize("entry", ["FOO", "=1"])
def test_an_environment_without_a_name_or_value(entry: str) -> None:
    got = script("serve.py", "no-model", "--prefill-env", entry)
    assert got.returncode == 2
    assert got.stderr.splitlines()[-1].endswith(f"argument --prefill-env: '{entry}' is not allowed: NAME=VALUE")


def test_the_proxy_alone(taken: str) -> None:
    """For servers on two machines."""
    got = script("proxy.py", "--prefill", "http://a:1", "--decode", "http://b:1", "--port", taken)
    assert (got.returncode, got.stdout) == (2, "")
    assert got.stderr.startswith(f"--host 127.0.0.1 --port {taken} is not allowed")


def test_a_machine_that_is_gone_is_noticed() -> None:
    """A cut network cannot be had here: the connection has the system's options, which make it fail."""

    async def options() -> list[int]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, client_of(f"http://127.0.0.1:{port}") as client, client.stream("GET", "/") as response:
            connection = response.extensions["network_stream"].get_extra_info("socket")
            return [connection.getsockopt(level, option) for level, option, _ in KEEP_ALIVE]

    assert asyncio.run(options()) == [value for _, _, value in KEEP_ALIVE]


# It is found in place of the real one, and answers whatever it is asked.
STAND_IN = """#!{python}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{{}}")

    do_POST = do_GET

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
# The signal comes in the task of a request, where uvicorn catches every exception.
HUNG_UP = """
import os
import signal
import proxy
import serve

answer = proxy._while_wanted

async def hung_up(*given):
    os.kill(os.getpid(), signal.SIGHUP)
    return await answer(*given)

proxy._while_wanted = hung_up
serve.main()
"""


def test_a_terminal_that_is_closed_in_a_request(tmp_path: Path) -> None:
    stand_in = tmp_path / "vllm"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        port, prefill, decode = (str(listener.getsockname()[1]) for listener in listeners)
    command = [sys.executable, "-c", HUNG_UP, "model", "--port", port]
    command += ["--prefill-port", prefill, "--decode-port", decode]
    paths = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(FOLDER)}
    with subprocess.Popen(command, env={**os.environ, **paths}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(3)]
            assert lines[2].startswith("proxy: http"), lines
            asked = httpx.post(f"http://127.0.0.1:{port}{TEXT}", json={"prompt": "a"}, timeout=60)
            assert (asked.status_code, process.wait(60)) == (200, 128 + signal.SIGTERM)
        finally:
            process.kill()
    for ended in (prefill, decode):
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{ended}/health")
