"""examples/ray_batch.py: a run that dies goes on where it was, and a dead engine costs no row."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.engines import engine
from tests.e2e.processes import alive, ray_environment

pytest.importorskip("ray.data", reason="Ray is not installed: pip install '.[ray]'")
import pyarrow.parquet as pq

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.append(str(EXAMPLES))
import ray_batch  # noqa: E402

# Tokens are bytes.
ROWS: list[dict[str, Any]] = [
    {"prompt": f"def add(a, b):\n    return a + b\n\n# {k}\ndef sub(a, b):\n    return a"} for k in range(96)
]
for row in ROWS[::3]:
    row["prediction"] = "+ b\n\ndef mul(a, b):\n    return a * b\n"
NUM_TOKENS = 200
BATCH_SIZE = 2
SAMPLING = {"temperature": 0, "ignore_eos": True}
# Nothing but a prediction drafts.
NAIVE = {"method": "naive", "num_speculative_tokens": 8}
ENGINE = {
    "max_model_len": 512,
    "max_num_seqs": 2,
    "enforce_eager": True,
    "dtype": "float32",
    "kv_cache_memory_bytes": 64 << 20,
}
RAY = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 200_000_000}
SECONDS = 540


class Run:
    """A running script."""

    def __init__(self, process: subprocess.Popen[bytes], results: Path, log: Path, ray: Path):
        self.process = process
        self.results = results
        self._log = log
        self._ray = ray

    def log(self) -> str:
        return self._log.read_text()

    def drafts(self) -> tuple[int, int]:
        """The tokens that were drafted and accepted, by the workers' own logs: the script may show a part alone."""
        logs = "".join(path.read_text() for path in self._ray.glob("session_2*/logs/worker-*"))
        # A line for each batch that was verified.
        batches = re.findall(r"SpecDecoding metrics: .*Accepted: (\d+) tokens, Drafted: (\d+) tokens", logs)
        return sum(int(drafted) for _, drafted in batches), sum(int(accepted) for accepted, _ in batches)

    def wait_for_files(self, number: int) -> None:
        """Wait until the folder has as many files of results."""
        deadline = time.monotonic() + SECONDS
        while len(list(self.results.glob("*.parquet"))) < number:
            assert self.process.poll() is None, self.log()[-4000:]
            assert time.monotonic() < deadline, self.log()[-4000:]
            time.sleep(0.05)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def busiest_worker(self) -> psutil.Process:
        """The process of Ray whose engine has computed most."""

        def seconds(worker: psutil.Process) -> float:
            return sum(child.cpu_times().user for child in worker.children(recursive=True))

        workers = [p for p in self.descendants() if "".join(p.cmdline()).startswith("ray::MapWorker")]
        assert len(workers) == 2
        return max(workers, key=seconds)


@contextmanager
def started(
    model: Path,
    prompts: Path,
    results: Path,
    log: Path,
    *options: str,
    num_tokens: int = NUM_TOKENS,
    num_workers: int = 2,
) -> Iterator[Run]:
    command = [sys.executable, EXAMPLES / "ray_batch.py", model, prompts, results, "--batch-size", str(BATCH_SIZE)]
    command += ["--workers", str(num_workers), *options]
    sampling = SAMPLING | {"max_tokens": num_tokens}
    environment = ray_environment() | {"VLLM_LOGGING_LEVEL": "INFO"}
    # Its sockets' paths have to be short.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        for option, value in (
            ("sampling-params", sampling),
            ("engine-args", ENGINE),
            ("ray", RAY | {"_temp_dir": folder}),
        ):
            command += [f"--{option}", json.dumps(value)]
        with log.open("w") as out:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield Run(process, results, log, Path(folder))
        finally:
            process.kill()
            process.wait(60)


def wait_until_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 30
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(processes)


def plain_texts(model: Path, rows: list[dict[str, Any]], num_tokens: int) -> list[str]:
    """The text of plain vLLM for each row."""
    with engine(model) as e:
        results = e.generate([list(row["prompt"].encode()) for row in rows], max_tokens=num_tokens)
    return [result.outputs[0].text for result in results]


def check_rows(rows: list[dict[str, Any]], texts: list[str], results: Path, num_tokens: int) -> None:
    """Each row has come once, with its text."""
    found = [row for file in results.glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert Counter(row["id"] for row in found) == Counter(range(len(rows)))
    expected = {
        number: (row["prompt"], text, num_tokens) for number, (row, text) in enumerate(zip(rows, texts, strict=True))
    }
    assert {row["id"]: (row["prompt"], row["text"], row["num_tokens"]) for row in found} == expected


def test_all_rows_are_answered(trained: Path, tmp_path: Path) -> None:
    prompts, results, num_tokens = tmp_path / "prompts.jsonl", tmp_path / "results", 24
    texts = plain_texts(trained, ROWS[:8], num_tokens)
    rows = [row | ({"prediction": text} if "prediction" in row else {}) for row, text in zip(ROWS, texts, strict=False)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    too_long = json.dumps({"prompt": "a" * ENGINE["max_model_len"]}) + "\n"
    with prompts.open("a") as file:
        file.write(too_long)
    options = ("--speculative-config", json.dumps(NAIVE))
    with started(trained, prompts, results, tmp_path / "log", *options, num_tokens=num_tokens, num_workers=1) as run:
        assert run.process.wait(SECONDS) == 1, run.log()[-4000:]
        drafted, accepted = run.drafts()
    assert re.search(r"^row 8: \w+: .*512", run.log(), re.MULTILINE), run.log()[-4000:]
    assert "1 rows have no answer: mend those that were refused, or start again\n" in run.log()
    # More than one row has of them.
    assert num_tokens < accepted <= drafted
    check_rows(rows, texts, results, num_tokens)


@pytest.mark.slow
def test_no_row_is_lost_or_doubled(trained: Path, tmp_path: Path) -> None:
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    with started(trained, prompts, results, tmp_path / "first.log") as run:
        run.wait_for_files(1)
        processes = run.descendants()
        run.process.kill()
    # Nothing that outlives a killed script may answer for the next one.
    for process in alive(processes):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    first = {file: file.stat().st_mtime_ns for file in results.glob("*.parquet")}
    num_first = len(ray_batch.finished_ids(results, ROWS))
    assert 0 < num_first < len(ROWS) // 2

    with started(trained, prompts, results, tmp_path / "second.log") as run:
        run.wait_for_files(len(first) + 1)
        processes = run.descendants()
        run.busiest_worker().kill()
        assert len(ray_batch.finished_ids(results, ROWS)) < len(ROWS) - BATCH_SIZE
        assert run.process.wait(SECONDS) == 0, run.log()[-4000:]
        wait_until_gone(processes)
        assert run.drafts()[1] > 0
    assert f"{num_first} of {len(ROWS)} rows were there" in run.log()
    assert "A worker died or was killed while executing a task" in run.log()
    assert {file: file.stat().st_mtime_ns for file in first} == first
    check_rows(ROWS, plain_texts(trained, ROWS, NUM_TOKENS), results, NUM_TOKENS)


def test_what_comes_twice_is_saved_once(tmp_path: Path) -> None:
    done, rows = {7}, [{"prompt": f"p{number}"} for number in range(9)]
    for ids in ([7], [3, 2], [3, 4, 7, 2]):
        answers = [{"id": number, "text": str(number)} | rows[number] for number in ids]
        ray_batch.save(answers, done, tmp_path)
    (tmp_path / "000000009.unfinished").write_bytes(b"half a file")
    assert sorted(file.name for file in tmp_path.glob("*.parquet")) == ["000000002.parquet", "000000004.parquet"]
    assert done == {2, 3, 4, 7}
    assert ray_batch.finished_ids(tmp_path, rows) == {2, 3, 4}
    assert [row["text"] for row in pq.read_table(tmp_path / "000000002.parquet").to_pylist()] == ["2", "3"]


@pytest.mark.parametrize("rows", [[], ["p0"], ["p0", "p2", "p1"]])
def test_results_of_other_prompts_are_refused(rows: list[str], tmp_path: Path) -> None:
    """A line that was taken out would give each later one the answer of the line before."""
    ray_batch.save([{"id": 1, "prompt": "p1", "text": ""}], set(), tmp_path)
    with pytest.raises(SystemExit, match="is not allowed: its row 1 has another prompt than line 2"):
        ray_batch.finished_ids(tmp_path, [{"prompt": prompt} for prompt in rows])


def test_rows_have_the_same_columns(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "prediction": "b"}\n{"prompt": "c"}\n')
    rows = ray_batch.read_rows(prompts, {"max_tokens": 2, "extra_args": {"spec_tokens": 3}})
    assert [row["id"] for row in rows] == [0, 1]
    assert [row["prompt"] for row in rows] == ["a", "c"]
    params = [row["sampling_params"] for row in rows]
    assert [each["max_tokens"] for each in params] == [2, 2]
    assert params[0]["extra_args"] == {"spec_tokens": 3, "prediction": {"type": "content", "content": "b"}}
    assert params[1]["extra_args"] == {"spec_tokens": 3, "prediction": None}


def script(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / "ray_batch.py", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (b'{"prompt": 5}', "prompt: Input should be a valid string"),
        (b'{"prompt": "a", "prediction": [1]}', "prediction: Input should be a valid string"),
        (b'{"prompt": "a", "predicton": "b"}', "predicton: Extra inputs are not permitted"),
        (b"{}", "prompt: Field required"),
        (b"", "Invalid JSON: EOF"),
        (b"[]", "Input should be an object"),
        (b'{"prompt": "\xff"}', "is not UTF-8"),
    ],
)
def test_a_line_that_is_no_row(second: bytes, message: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    # A separator that JSON may hold and that ends no line.
    prompts.write_bytes('{"prompt": "a\u2028b"}\n'.encode() + second + b'\n{"prompt": "c"}\n')
    with pytest.raises(SystemExit) as ended:
        ray_batch.read_rows(prompts, {})
    where = str(prompts) if "UTF-8" in message else f"{prompts}, line 2:"
    assert str(ended.value).startswith(f"{where} {message}")


def test_no_prompts_no_folder_and_no_json(tmp_path: Path) -> None:
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.touch()
    got = script("model", str(missing), str(tmp_path / "results"))
    assert (got.returncode, got.stderr) == (1, f"{missing} cannot be read: No such file or directory\n")
    got = script("model", str(file), str(file))
    assert (got.returncode, got.stderr) == (1, f"{file} is not allowed: a folder (File exists)\n")
    got = script("model", str(file), str(tmp_path), "--ray", "auto")
    assert got.returncode == 2
    assert got.stderr.splitlines()[-1].endswith("argument --ray: 'auto' is not allowed: a JSON object")
