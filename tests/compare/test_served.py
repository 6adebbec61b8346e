"""``vllm-specplus compare --serve``, at a server that answers as it is told."""

import csv
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_specplus.cli import main
from vllm_specplus.compare import served, served_command
from vllm_specplus.compare.prompts import Prompt
from vllm_specplus.compare.served import Answer, draft_fields, fields_of
from vllm_specplus.compare.served_command import ServedPlan
from vllm_specplus.compare.workloads import workload

PAUSE = 0.02


class Served(ThreadingHTTPServer):
    """Answers each request by three parts of two tokens, `PAUSE` seconds before each."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []
        self.lock = threading.Lock()
        self.running = self.most_running = 0
        self.fails_from = 10**9  # the number of the first request that breaks off
        self.shows_metrics = True
        self.text, self.names = "ab", ["content"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Served

    def do_GET(self) -> None:
        if not self.server.shows_metrics:
            self.send_error(404)
            return
        num = sum(body["max_tokens"] > 8 for _, body, _ in self.server.requests)
        lines = []
        for name, count in (("drafts", 4), ("draft_tokens", 12), ("accepted_tokens", 6)):
            lines.append(f"# TYPE vllm:spec_decode_num_{name} counter")
            lines += [f'vllm:spec_decode_num_{name}_total{{engine="{i}"}} {num * count / 2}' for i in range(2)]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        lines.append(f"# TYPE {name} counter")
        lines += [f'{name}_total{{position="{i}"}} {num * count}' for i, count in enumerate((4, 2, 0))]
        self._send(200, "\n".join([*lines, ""]).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.requests.append((self.path, body, self.headers["authorization"]))
            number = len(self.server.requests)
            self.server.running += 1
            self.server.most_running = max(self.server.most_running, self.server.running)
        try:
            if body["model"] != "tiny":
                self._send(404, json.dumps({"error": {"message": f"no model {body['model']}"}}).encode())
                return
            self._stream(number)
        finally:
            with self.server.lock:
                self.server.running -= 1

    def _stream(self, number: int) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        text = self.server.text
        keys = itertools.cycle([{"delta": {name: text}} for name in self.server.names])
        for _ in range(3):
            key = next(keys) if "chat" in self.path else {"text": text}
            time.sleep(PAUSE)
            self._event({"choices": [key]})
            if number >= self.server.fails_from:
                self._event({"error": {"message": "the engine has died"}})
                return
        self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 6}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def running() -> Iterator[Served]:
    server = Served()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def server() -> Iterator[Served]:
    with running() as served:
        yield served


def compare(out: Path, *urls: str, model: str = "tiny", kind: str = "edit", options: tuple[str, ...] = ()) -> int:
    words = ["compare", "--model", model, "--workload", kind, "--max-tokens", "16", "--out", str(out)]
    return main([*words, *(word for url in urls for word in ("--serve", url)), *options])


def test_fields_of_a_run() -> None:
    answers = [
        Answer(0.0, [0.1, 0.2, 0.4], 10, 7),
        Answer(1.0, [1.3], 20, 1),
        Answer(1.0, [1.5], error="the engine has died"),
    ]
    fields = fields_of(answers, 2.0)
    assert (fields["completed"], fields["failed"], fields["errors"]) == (2, 1, ["", "", "the engine has died"])
    assert (fields["total_input_tokens"], fields["total_output_tokens"]) == (30, 8)
    assert (fields["request_throughput"], fields["output_throughput"], fields["total_token_throughput"]) == (1, 4, 19)
    times = {
        "mean_ttft_ms": 200,
        "median_ttft_ms": 200,
        "std_ttft_ms": 100,
        "p99_ttft_ms": 298,
        "mean_tpot_ms": 50,
        "median_itl_ms": 150,
        "p90_itl_ms": 190,
        "mean_e2el_ms": 350,
        "median_e2el_ms": 350,
    }
    assert {name: fields[name] for name in times} == pytest.approx(times)


def test_fields_without_an_answer() -> None:
    fields = fields_of([Answer(0.0, error="no answer")], 1.0)
    assert (fields["completed"], fields["failed"], fields["mean_ttft_ms"], fields["p99_itl_ms"]) == (0, 1, 0, 0)


def test_drafts_of_a_run() -> None:
    before = {"drafts": 2, "draft_tokens": 6, "accepted_tokens": 1, "accepted_tokens_per_pos": {0: 1, 1: 0}}
    after = {"drafts": 6, "draft_tokens": 18, "accepted_tokens": 7, "accepted_tokens_per_pos": {0: 5, 1: 2}}
    fields = draft_fields(before, after)
    assert fields["spec_decode_acceptance_rate"] == 50
    assert fields["spec_decode_acceptance_length"] == 2.5
    assert fields["spec_decode_per_position_acceptance_rates"] == [1, 0.5]
    assert draft_fields(after, after) == draft_fields({}, {}) == {}
    # What a server counted before the run is not the run's; nor is anything known of one that was started anew.
    assert draft_fields({}, after) == draft_fields(before, {}) == draft_fields(after, before) == {}


def test_field_names_are_those_of_vllm_bench_serve(server: Served, tmp_path: Path) -> None:
    from vllm.benchmarks import serve

    assert compare(tmp_path, server.url, options=("--repeat", "1")) == 0
    data = json.loads((tmp_path / "results.json").read_text())
    (run,) = data["runs"]
    source = Path(serve.__file__).read_text()
    for name in ("model_id", "num_prompts"):
        assert name in data["settings"]
        assert f'"{name}"' in source
    for name in set(run) - {"server", "repeat"}:
        # Those of times are put together from a measure and the time's name.
        of_time = re.fullmatch(r"([a-z]+|p\d+)_(ttft|tpot|itl|e2el)_ms", name)
        if of_time is not None:
            measure, metric = of_time.groups()
            assert f'process_one_metric("{metric}"' in source
            name = re.sub(r"p\d+", "p{p_word}", measure) + "_{metric_attribute_name}_ms"
        assert f'"{name}"' in source, name


def test_two_servers(server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    for earlier in ("report.html", "speed.png"):
        (tmp_path / "out" / earlier).touch()
    with running() as other:
        other.shows_metrics = False
        options = ("--concurrency", "1,4", "--repeat", "2", "--api-key", "secret", "--temperature", "0.5")
        assert compare(tmp_path / "out", server.url, f"{other.url}/", options=options) == 0
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    order = [(each["repeat"], each["max_concurrency"], each["server"]) for each in data["runs"]]
    one, two = server.url, other.url
    assert order == [
        *((0, 1, one), (0, 1, two), (0, 4, one), (0, 4, two)),
        *((1, 1, two), (1, 1, one), (1, 4, two), (1, 4, one)),
    ]
    for run in data["runs"]:
        assert (run["completed"], run["failed"], run["total_output_tokens"]) == (8, 0, 48)
        assert run["median_ttft_ms"] >= 1000 * PAUSE
        assert run["median_e2el_ms"] >= 3000 * PAUSE
        assert run["median_itl_ms"] > 0
        assert ("spec_decode_acceptance_length" in run) == (run["server"] == one)
    assert data["runs"][0]["spec_decode_acceptance_length"] == 2.5
    assert data["runs"][0]["spec_decode_per_position_acceptance_rates"] == [1, 0.5, 0]
    assert server.most_running == 4
    path, body, key = server.requests[-1]
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert (body["temperature"], body["max_tokens"], body["prediction"]["type"]) == (0.5, 16, "content")
    assert "secret" not in (tmp_path / "out" / "results.json").read_text()
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    assert [row["output_throughput"] for row in rows] == [str(run["output_throughput"]) for run in data["runs"]]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "results.csv"}
    out = capsys.readouterr().out
    assert "2.50" in out
    assert out.splitlines()[-1] == data["recommendation"]


def runs(*speeds: tuple[str, float], failed: int = 0) -> list[dict[str, Any]]:
    """A run a speed; each server's are its repeats. The last one has failed requests."""
    found: list[dict[str, Any]] = []
    for server, speed in speeds:
        repeat = sum(each["server"] == server for each in found)
        row = {"server": server, "max_concurrency": 1, "repeat": repeat, "output_throughput": speed, "failed": 0}
        found.append(row)
    found[-1]["failed"] = failed
    return found


def recommended(found: list[dict[str, Any]], *urls: str) -> str:
    plan = ServedPlan([*urls], "tiny", "", [], [1], 16, 0.0, 2)
    return served_command.recommendation(plan, found, texts_differ=False)


def test_it_ends_with_the_server_to_use() -> None:
    found = runs(("a", 100.0), ("b", 200.0), ("a", 101.0), ("b", 203.0))
    said = "Use b: it is 2.00 times as fast as a (95% interval 1.94 to 2.07), in 2 repeats."
    assert recommended(found, "a", "b") == said
    assert recommended(found[:1], "a", "b").startswith("No server can be recommended")
    assert recommended(found[:1], "a").startswith("One server has no rival")
    assert recommended(runs(("a", 100.0), ("b", 200.0), failed=1), "a", "b").startswith("No server can be recommended")


def test_servers_that_give_other_texts_are_told(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.text = "[ab]"
    with running() as other:
        urls = server.url, other.url
        other.text = "[ab]"
        assert compare(tmp_path, *urls, options=("--repeat", "1")) == 0
        assert json.loads((tmp_path / "results.json").read_text())["differing_texts"] == []
        other.text = "[ac]"
        assert compare(tmp_path, *urls, options=("--repeat", "1")) == 0
        data = json.loads((tmp_path / "results.json").read_text())
        (line,) = data["differing_texts"]
        assert line == (
            f"{other.url} gives other greedy texts than {server.url} at concurrency 1: 8 of 8, "
            f"first for prompt {workload('edit')[0].name}, behind '[a': 'c][ac][ac]' and not 'b][ab][ab]'"
        )
        *_, last = printed = capsys.readouterr().out.splitlines()
        assert line in printed
        assert last.endswith("; their greedy texts differ.")
        assert data["runs"][1]["generated_texts"] == ["[ac][ac][ac]"] * 8
        assert compare(tmp_path, *urls, options=("--repeat", "1", "--temperature", "0.5")) == 0
        assert json.loads((tmp_path / "results.json").read_text())["differing_texts"] == []


def test_texts_that_the_first_server_gave_once_are_no_others() -> None:
    """Rounding may decide a greedy text another way in each repeat; a failed request has none."""

    def row(server: str, *texts: str, errors: tuple[str, ...] = ("",)) -> dict[str, Any]:
        return {"server": server, "max_concurrency": 1, "generated_texts": [*texts], "errors": [*errors]}

    plan = ServedPlan(["a", "b"], "tiny", "", [Prompt("p", "")], [1], 16, 0.0, 2)
    found = [row("a", "x"), row("b", "y"), row("a", "y")]
    assert served_command.differing_texts(plan, found) == []
    assert served_command.differing_texts(plan, [*found, row("b", "z", errors=("gone",))]) == []
    (line,) = served_command.differing_texts(plan, [*found, row("b", "z")])
    assert line.endswith("1 of 1, first for prompt p, behind '': 'z' and not 'x'")


def test_texts_are_continued(server: Served, tmp_path: Path) -> None:
    assert compare(tmp_path, server.url, kind="prose", options=("--repeat", "1")) == 0
    path, body, _ = server.requests[-1]
    assert path == "/v1/completions"
    assert body["prompt"].startswith("There is an island")
    assert "prediction" not in body


def test_reasoning_and_tool_calls_are_text(server: Served, tmp_path: Path) -> None:
    server.names = ["reasoning", "reasoning_content", "tool_calls"]
    assert compare(tmp_path, server.url, options=("--repeat", "1")) == 0
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert run["completed"] == 8
    assert run["median_itl_ms"] > 0


def test_an_answer_may_have_no_text(server: Served, tmp_path: Path) -> None:
    server.text = ""
    assert compare(tmp_path, server.url, options=("--repeat", "1")) == 0
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert (run["completed"], run["median_itl_ms"]) == (8, 0)
    assert run["median_ttft_ms"] >= 3000 * PAUSE


def test_characters_that_end_a_line_elsewhere_may_stand_in_a_text(server: Served, tmp_path: Path) -> None:
    server.text = "a\u2028b\u2029c\u0085d"
    assert compare(tmp_path, server.url, options=("--repeat", "1")) == 0


def test_no_run_finds_what_another_left(server: Served, tmp_path: Path) -> None:
    options = ("--repeat", "2", "--concurrency", "8")
    assert compare(tmp_path, server.url, options=options) == 0
    asked = [body for _, body, _ in server.requests if body["max_tokens"] == 16]
    keys = [(json.dumps(body["messages"]), body["cache_salt"]) for body in asked]
    assert len(keys) == len(set(keys)) == 32
    # Within a run other prompts share caches, as they do for any client.
    assert len({salt for _, salt in keys}) == 4


def test_requests_that_fail_are_counted(server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.fails_from = 6
    assert compare(tmp_path, server.url, options=("--repeat", "1")) == 1
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert (run["completed"], run["failed"]) == (4, 4)
    assert sorted(run["errors"]) == [""] * 4 + ["the engine has died"] * 4
    assert "a request failed: the engine has died" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_measured(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_specplus.compare.served import ServedModel

    run, number = ServedModel.run, 0

    async def interrupted(*args: Any) -> dict[str, Any]:
        nonlocal number
        number += 1
        if number == 2:
            raise KeyboardInterrupt
        return await run(*args)

    monkeypatch.setattr(ServedModel, "run", interrupted)
    assert compare(tmp_path, server.url) == 130
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["interrupted"]
    assert len(data["runs"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--serve", "localhost:8000"), "--serve: 'localhost:8000' is no URL such as http://localhost:8000"),
        (("--serve", "http://a:b"), "--serve: 'http://a:b' is no URL such as http://localhost:8000"),
        (("--serve", "http://a", "--api-key", "ä"), "--serve: the API key has characters that no HTTP header may have"),
        (("--serve", "http://a", "--serve", "http://a/"), "--serve names the same server twice"),
        (("--serve", "http://a", "--config", "{}"), "--config is not allowed with --serve"),
        (("--serve", "http://a", "--one-at-a-time"), "--one-at-a-time is not allowed with --serve"),
        ((), "--config is needed: a speculative config, or --serve for a running server"),
    ],
)
def test_refused(options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path / "out", options=options) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_server_and_no_model(server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path / "out", server.url, model="huge") == 2
    assert "HTTP 404: no model huge" in capsys.readouterr().err
    server.shutdown()
    server.server_close()
    assert compare(tmp_path / "out", server.url) == 2
    assert "no answer: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>\n  <b>no</b>\n</html>\n", "HTTP 501: <html> <b>no</b> </html>"),
        (b'{"error": {"message": "no model\\nhuge"}}', "HTTP 501: no model huge"),
        (b"x" * 999, f"HTTP 501: {'x' * 200}"),
    ],
)
def test_what_a_server_says_is_one_line(body: bytes, said: str) -> None:
    assert served._reason(501, body) == said
