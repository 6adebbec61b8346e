"""Runs of examples/ray_batch.py, and what has to come of them."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.engines import engine
from tests.e2e.processes import alive, ray_environment

pytest.importorskip("ray.data", reason="Ray is not installed: pip install '.[ray]'")
import pyarrow.parquet as pq

EXAMPLES = Path(__file__).parents[2] / "examples"
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

    def _worker_logs(self) -> str:
        """The workers' own logs: the script may show a part alone."""
        return "".join(path.read_text() for path in self._ray.glob("session_2*/logs/worker-*"))

    def is_runner_v2(self) -> bool:
        """Whether the workers' engines run vLLM's Model Runner V2."""
        return "Using V2 Model Runner" in self._worker_logs()

    def drafts(self) -> tuple[int, int]:
        """The tokens that were drafted and accepted."""
        logs = self._worker_logs()
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


def check_all_rows(model: Path, tmp_path: Path, *, is_runner_v2: bool = False) -> None:
    """Rows with and without predictions are answered on the runner asked for, and one that is too long is named."""
    prompts, results, num_tokens = tmp_path / "prompts.jsonl", tmp_path / "results", 24
    texts = plain_texts(model, ROWS[:8], num_tokens)
    rows = [row | ({"prediction": text} if "prediction" in row else {}) for row, text in zip(ROWS, texts, strict=False)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    too_long = json.dumps({"prompt": "a" * ENGINE["max_model_len"]}) + "\n"
    with prompts.open("a") as file:
        file.write(too_long)
    options = ("--speculative-config", json.dumps(NAIVE))
    with started(model, prompts, results, tmp_path / "log", *options, num_tokens=num_tokens, num_workers=1) as run:
        assert run.process.wait(SECONDS) == 1, run.log()[-4000:]
        drafted, accepted = run.drafts()
        assert run.is_runner_v2() == is_runner_v2
    assert re.search(r"^row 8: \w+: .*512", run.log(), re.MULTILINE), run.log()[-4000:]
    assert "1 rows have no answer: mend those that were refused, or start again\n" in run.log()
    # More than one row has of them.
    assert num_tokens < accepted <= drafted
    check_rows(rows, texts, results, num_tokens)
