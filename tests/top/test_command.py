"""The command ``vllm-specplus top``, beside a stand-in for the server."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.top.stand_in import STATS, StandIn, scaled, serving
from vllm_specplus.cli import main

COMMAND = "import sys; from vllm_specplus.cli import main; sys.exit(main(sys.argv[1:]))"
CTRL_C = b"\x03"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(StandIn()) as running:
        running.show(STATS)
        yield running


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["top", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_once(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    for url in (server.url, f"{server.url}/"):
        assert main(["top", url, "--once"]) == 0
        out, err = capsys.readouterr()
        assert "requests: 3 running, 4 waiting" in out
        assert "\x1b" not in out
        assert err == ""
    assert server.headers == [("/specplus/stats", None), ("/metrics", None)] * 2


@pytest.mark.parametrize("place", ["option", "environment"])
def test_api_key(place: str, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key" if place == "environment" else "other")
    options = ["--api-key", "key"] if place == "option" else []
    assert main(["top", server.url, "--once", *options]) == 0
    assert {key for _, key in server.headers} == {"Bearer key"}


def test_another_server_does_not_get_the_key(server: StandIn) -> None:
    with serving(StandIn()) as other:
        other.show(STATS)
        server.answers["/specplus/stats"] = (302, f"{other.url}/specplus/stats".encode())
        assert main(["top", server.url, "--once", "--api-key", "key"]) == 0
        assert other.headers == [("/specplus/stats", None)]


def test_a_server_without_metrics(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    del server.answers["/metrics"]
    assert main(["top", server.url, "--once"]) == 0
    assert "requests: - running, - waiting" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, b'{"error": "Unauthorized"}'), "asks for its API key: set --api-key or OPENAI_API_KEY"),
        ((404, b'{"detail": "Not Found"}'), "without VLLM_PLUGINS=specplus"),
        ((500, b""), "HTTP status 500"),
        ((200, b'{"object": "list"}'), "something else than the counts"),
        ((200, b"<html>"), "something else than the counts"),
    ],
)
def test_answers_without_counts(
    answer: tuple[int, bytes], said: str, server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers["/specplus/stats"] = answer
    assert said in refusal(capsys, server.url, "--once")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "localhost", "", "ftp://localhost", "http://", "http://[::1", "http://a:b", "http://a b"]
)
def test_what_is_no_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, url, "--once") == f"{url!r} is no URL such as http://localhost:8000\n"


def test_no_such_server(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(StandIn()) as gone:
        pass
    assert refusal(capsys, gone.url, "--once") == f"no answer from {gone.url}: Connection refused\n"


def test_a_key_that_no_header_may_have(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, server.url, "--once", "--api-key", "secret\r\nX: y")
    assert "secret" not in said


def test_no_terminal(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert "use --once" in refusal(capsys, server.url)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x", "1e9"])
def test_bad_intervals(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["top", "http://localhost:8000", f"--interval={seconds}"])
    assert left.value.code == 2
    assert f"{seconds} is not a number from 0.1 to 3600" in capsys.readouterr().err


def test_in_a_terminal(server: StandIn) -> None:
    """The counts grow; the server goes away, comes back, starts anew; Ctrl-C ends the command."""
    screen, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-c", COMMAND, "top", server.url, "--interval", "0.2"]
    # A session of its own, whose terminal sends Ctrl-C as a signal. It is ignored where a shell runs pytest behind it.
    attach = "\n".join(
        [
            "import fcntl, os, signal, termios",
            "signal.signal(signal.SIGINT, signal.SIG_DFL)",
            "fcntl.ioctl(0, termios.TIOCSCTTY, 0)",
            f"os.execv({command[0]!r}, {command!r})",
        ]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", attach],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        start_new_session=True,
    )
    os.close(terminal)
    shown = ""

    def wait_for(*texts: str) -> None:
        nonlocal shown
        shown = ""
        while not all(text in shown for text in texts):
            shown = (shown + os.read(screen, 4096).decode(errors="replace"))[-20_000:]

    try:
        wait_for("last interval", "since start")
        server.show(scaled(1000))
        wait_for("/s   50%", "11,000")
        answers, server.answers = server.answers, {"/specplus/stats": (503, b"")}
        wait_for("answers with HTTP status 503", "11,000")
        server.answers = answers
        wait_for("requests: 3 running")
        server.show(STATS | {"faults": {"drafting": 7}})
        wait_for("last interval", "faults: 7 in drafting")
        os.write(screen, CTRL_C)
        wait_for("\x1b[?1049l", "faults: 7 in drafting")
        assert process.wait(30) == 130
        assert "Traceback" not in shown
    finally:
        process.kill()
        process.wait()
        os.close(screen)
