"""examples/ray_batch.py: a run that dies goes on where it was, and a dead engine costs no row."""

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import alive
from tests.e2e.ray_runs import (
    BATCH_SIZE,
    EXAMPLES,
    NUM_TOKENS,
    ROWS,
    SECONDS,
    check_all_rows,
    check_rows,
    plain_texts,
    pq,
    started,
    wait_until_gone,
)

sys.path.append(str(EXAMPLES))
import ray_batch


def test_all_rows_are_answered(trained: Path, tmp_path: Path) -> None:
    check_all_rows(trained, tmp_path)


def test_no_row_is_lost_or_doubled(trained: Path, tmp_path: Path) -> None:
    """Two engines of a hybrid, which drafts by itself: no row has a prediction."""
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results"
    prompts.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in ROWS))
    hybrid = "--speculative-config", json.dumps(ray_batch.HYBRID | {"adaptive": False})

    with started(trained, prompts, results, tmp_path / "first.log", *hybrid) as run:
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

    with started(trained, prompts, results, tmp_path / "second.log", *hybrid) as run:
        run.wait_for_files(len(first) + 1)
        processes = run.descendants()
        run.busiest_worker().kill()
        assert len(ray_batch.finished_ids(results, ROWS)) < len(ROWS) - BATCH_SIZE
        assert run.process.wait(SECONDS) == 0, run.log()[-4000:]
        wait_until_gone(processes)
        assert run.drafts()[1] > 0
    assert f"{num_first} of {len(ROWS)} rows were there\n" in run.log()
    counts = [int(count) for count in re.findall(rf"^(\d+) of {len(ROWS)} rows$", run.log(), re.MULTILINE)]
    assert counts == sorted(counts)
    assert counts[0] > num_first
    assert counts[-1] == len(ROWS)
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
def test_results_of_other_prompts_are_refused(
    rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that was taken out would give each later one the answer of the line before."""
    ray_batch.save([{"id": 1, "prompt": "p1", "text": ""}], set(), tmp_path)
    with pytest.raises(SystemExit, match=r"^2$"):
        ray_batch.finished_ids(tmp_path, [{"prompt": prompt} for prompt in rows])
    assert capsys.readouterr().err == f"{tmp_path} is not allowed: its row 1 has another prompt than line 2\n"


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
def test_a_line_that_is_no_row(second: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    # A separator that JSON may hold and that ends no line.
    prompts.write_bytes('{"prompt": "a\u2028b"}\n'.encode() + second + b'\n{"prompt": "c"}\n')
    with pytest.raises(SystemExit, match=r"^2$"):
        ray_batch.read_rows(prompts, {})
    where = str(prompts) if "UTF-8" in message else f"{prompts}, line 2:"
    assert capsys.readouterr().err.startswith(f"{where} {message}")


def test_no_prompts_no_folder_and_no_json(tmp_path: Path) -> None:
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.touch()
    got = script("model", str(missing), str(tmp_path / "results"))
    assert (got.returncode, got.stderr) == (2, f"{missing} cannot be read: No such file or directory\n")
    got = script("model", str(file), str(file))
    assert (got.returncode, got.stderr) == (2, f"{file} is not allowed: a folder (File exists)\n")
    got = script("model", str(file), str(tmp_path), "--ray", "auto")
    assert got.returncode == 2
    assert got.stderr.splitlines()[-1].endswith("argument --ray: 'auto' is not allowed: a JSON object")
