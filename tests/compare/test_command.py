"""The command with engines that count instead of computing: turns, files, failures, Ctrl-C, bad input."""

import csv
import errno
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.compare import stand_in
from vllm_specplus.cli import main
from vllm_specplus.compare import comparison, measure


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measure, "_SERVE", stand_in.NAME)
    monkeypatch.chdir(tmp_path)
    for name in ("model", "good"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path / "model"


def config(speed: int, fault: str = "good") -> str:
    """A config whose draft model is a folder that has the name of its fault."""
    Path(fault).mkdir(exist_ok=True)
    (Path(fault) / "config.json").write_text("{}")
    return json.dumps({"method": "draft_model", "num_speculative_tokens": speed, "model": fault})


def compare(model: Path, *configs: str, options: tuple[str, ...] = ()) -> int:
    chosen = [word for text in configs for word in ("--config", text)]
    workload = () if "--prompts" in options else ("--workload", "prose")
    return main(["compare", "--model", str(model), *workload, *chosen, "--out", str(model.parent / "out"), *options])


def results(model: Path) -> dict[str, Any]:
    return json.loads((model.parent / "out" / "results.json").read_text())


def test_a_comparison(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(model, config(2), config(3), options=("--concurrency", "1,16", "--repeat", "3")) == 0
    out, err = capsys.readouterr()
    data = results(model)
    assert out.splitlines()[-1] == data["recommendation"]
    assert data["recommendation"].startswith("Use draft_model num_speculative_tokens=3, 3.00 times as fast as none")
    assert len(data["measurements"]) == 6
    row = data["measurements"][1]
    assert (row["concurrency"], row["repeats"]) == (1, 3)
    assert row["ratio"] == pytest.approx(2)
    assert row["mean_accepted_length"] == 3  # 4 tokens of 2 steps, of which the prompt's step gave one
    assert row["wasted"] == 0.5
    assert "model 6 of 12" in out
    # Backwards in the second repeat.
    turns = [line.split(",")[0].rpartition("=")[2] for line in err.splitlines() if "concurrency 1," in line]
    assert turns == ["none", "2", "3", "3", "2", "none", "none", "2", "3"]
    with (model.parent / "out" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["tokens_per_second"]) for row in rows] == [r["tokens_per_second"] for r in data["measurements"]]
    assert {path.name for path in (model.parent / "out").iterdir()} >= {"results.json", "results.csv", "logs"}


SHARED_TREES = (
    {"method": "suffix", "num_speculative_tokens": 4},
    {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_scope": "shared", "adaptive": True},
)


@pytest.mark.parametrize("values", SHARED_TREES)
def test_no_prompt_is_drafted_from_its_own_answer(
    values: dict[str, Any], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--concurrency", "1,4", "--repeat", "1")
    assert compare(model, json.dumps(values), options=options) == 2
    assert capsys.readouterr().err == (
        "suffix drafts from all earlier answers, and at --concurrency 4 prompts come again: "
        'it needs 11 prompts, not 8, or "suffix_decoding_scope": "salt"\n'
    )
    assert compare(model, json.dumps(values), options=("--concurrency", "1,3", "--repeat", "1")) == 0
    prompts = model.parent / "prompts.txt"
    for number, code in ((10, 2), (11, 0)):
        prompts.write_text("a\n" * number)
        assert compare(model, json.dumps(values), options=(*options, "--prompts", str(prompts))) == code
    for sound in ({"suffix_decoding_scope": "salt"}, {"suffix_decoding_max_cached_requests": 0}):
        assert compare(model, json.dumps(values | sound), options=options) == 0


def test_a_refusal_behind_a_run_is_a_row(model: Path) -> None:
    assert compare(model, config(2, "refuses"), options=("--one-at-a-time", "--repeat", "2")) == 1
    none, refuses = results(model)["measurements"]
    assert (none["repeats"], refuses["repeats"]) == (2, 0)
    assert refuses["error"] == "a prompt has no token"


def test_one_at_a_time(model: Path) -> None:
    assert compare(model, config(2), options=("--one-at-a-time", "--repeat", "2")) == 0
    assert [row["repeats"] for row in results(model)["measurements"]] == [2, 2]


@pytest.mark.parametrize(
    ("fault", "said", "repeats"),
    [
        ("start", "ValueError: no memory; the engine's output is in ", 0),
        ("validation", "ValidationError: Input should be a valid integer, unable to parse string as an integer; ", 0),
        ("killed", "the engine ended with exit code -9", 1),
    ],
)
def test_a_crash_is_a_row(fault: str, said: str, repeats: int, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(model, config(2), config(3, fault), options=("--repeat", "3")) == 1
    out, err = capsys.readouterr()
    # At once, and not only in the tables.
    told = err.index(f"FAILED: draft_model num_speculative_tokens=3 model={fault}: {said}")
    assert told < err.index(f"draft_model num_speculative_tokens=3 model={fault} has failed: left out")
    none, good, bad = results(model)["measurements"]
    assert (none["repeats"], good["repeats"], bad["repeats"]) == (3, 3, repeats)
    assert bad["error"].startswith(said)
    assert f"FAILED: draft_model num_speculative_tokens=3 model={fault}: {said}" in out
    assert results(model)["recommendation"].startswith("Use draft_model num_speculative_tokens=2")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_keeps_what_was_measured(name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A process that a shell has put into the background ignores Ctrl-C otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert compare(model, config(2), config(3, name), options=("--repeat", "4")) == 130
    assert "Interrupted" in capsys.readouterr().out
    data = results(model)
    assert data["interrupted"]
    assert 1 <= data["measurements"][0]["repeats"] < 4


def interrupt(*args: Any) -> Any:
    raise KeyboardInterrupt


def test_a_signal_before_the_first_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "check_model", interrupt)
    assert compare(model, config(2)) == 130
    assert not (model.parent / "out").exists()


@pytest.mark.parametrize("phase", ["warm_up", "run"])
def test_a_signal_before_the_end_of_the_first_run_leaves_earlier_results(
    phase: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compare(model, config(2), options=("--repeat", "1")) == 0
    out = model.parent / "out"
    kept = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert kept
    call = measure.EngineProcess.call
    monkeypatch.setattr(
        measure.EngineProcess, "call", lambda engine, *words: (interrupt if words[0] == phase else call)(engine, *words)
    )
    assert compare(model, config(2)) == 130
    assert {path: path.read_bytes() for path in out.iterdir() if path.is_file()} == kept
    assert compare(model, config(2), options=("--out", "new")) == 130
    assert not Path("new").exists()


def test_the_folder_of_the_user_is_known_in_a_draft_models_path(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    draft_model = {"method": "draft_model", "num_speculative_tokens": 2, "model": "~/good"}
    assert compare(model, json.dumps(draft_model), options=("--repeat", "1")) == 0
    assert results(model)["configurations"][1]["config"] == draft_model | {"model": str(model.parent / "good")}


def test_a_refusal_hides_no_failure(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(model, config(2, "start"), config(3, "refuses"), options=("--repeat", "1")) == 1
    assert "FAILED: draft_model num_speculative_tokens=2 model=start: ValueError: no memory" in capsys.readouterr().out


def test_a_signal_while_the_page_is_made(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "write_report", interrupt)
    assert compare(model, config(2), options=("--repeat", "1")) == 130
    assert len(results(model)["measurements"]) == 2


def test_another_greedy_text_is_an_error_with_the_two_best_logits(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(model, config(2, "other text"), options=("--repeat", "2")) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "FAILED" in line)
    assert "prompt island, token 2: '<9>' instead of '<7>'" in line
    assert "'seven' 20.0000, 'nine' 19.9000" in line
    (difference,) = results(model)["differences"]
    assert (difference["position"], difference["is_near_tie"]) == (2, False)


@pytest.mark.parametrize("phase", ["profile", "best_two"])
def test_a_difference_found_before_a_signal_is_told(
    phase: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = measure.EngineProcess.call

    def interrupted(engine: measure.EngineProcess, *message: Any) -> Any:
        if message[0] == phase:
            raise KeyboardInterrupt
        return call(engine, *message)

    monkeypatch.setattr(measure.EngineProcess, "call", interrupted)
    assert compare(model, config(2, "other text"), options=("--repeat", "3")) == 130
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "NOT JUDGED" in line)
    assert "token 2: 'token 9' instead of 'token 7'; the two best logits there: not known" in line
    data = results(model)
    assert len(data["differences"]) == 1
    assert data["recommendation"].startswith("Use none")


def test_a_near_tie_is_no_error(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_BF16", "1")
    assert compare(model, config(2, "near tie"), options=("--repeat", "2")) == 0
    assert "NEAR-TIE" in capsys.readouterr().out


def test_a_near_tie_hides_no_defect(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_BF16", "1")
    assert compare(model, config(2, "near tie, then other text"), options=("--repeat", "2")) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "FAILED" in line)
    assert "prompt island, token 1: '<666>' instead of '<6>'" in line
    assert results(model)["recommendation"].startswith("Use none")


def test_texts_are_not_compared_where_they_are_sampled(model: Path) -> None:
    assert compare(model, config(2, "other text"), options=("--repeat", "1", "--temperature", "0.8")) == 0
    assert results(model)["differences"] == []


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_config_that_samples_wrongly_is_measured_but_not_recommended(temperature: str, model: Path) -> None:
    assert compare(model, config(9, "samples wrongly"), config(2), options=("--temperature", temperature)) == 0
    data = results(model)
    assert {row["configuration"] for row in data["measurements"]} == {row["name"] for row in data["configurations"]}
    best = "samples wrongly" if temperature == "0" else "good"
    assert re.match(rf"Use draft_model num_speculative_tokens=\d model={best}[,:]", data["recommendation"])


CASES = (
    *(
        "no such model",
        "no such draft model",
        "long folder",
        "empty",
        "not UTF-8",
        "not JSON",
        "long number",
        "not writable",
        "taken by a folder",
    ),
    *("equal", "equal by vLLM's rules", "engine args"),
)


def bad_inputs(folder: Path) -> dict[str, tuple[tuple[str, ...], str]]:
    """Options of each case, and what is said."""
    (folder / "empty.txt").touch()
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "bad.jsonl").write_text('{"prompt": "x"}\nnonsense\n')
    (folder / "long.jsonl").write_text(f'{{"prompt": {"9" * 5000}}}\n')
    (folder / "file").touch()
    (folder / "taken" / "results.csv").mkdir(parents=True)
    bounds = {"method": "ngram", "num_speculative_tokens": 3}
    equal_bounds = json.dumps(bounds), json.dumps(bounds | {"prompt_lookup_max": 5})
    return {
        "no such model": (("--model", "/nothing/here"), "the model does not exist"),
        "no such draft model": (
            ("--config", '{"method": "draft_model", "model": "/nothing", "num_speculative_tokens": 9}'),
            "num_speculative_tokens=9 model=nothing: the model does not exist: /nothing is no folder",
        ),
        "long folder": (("--out", "x" * 300), "File name too long"),
        "empty": (("--prompts", str(folder / "empty.txt")), "is empty"),
        "not UTF-8": (("--prompts", str(folder / "latin.txt")), "is not UTF-8"),
        "not JSON": (("--prompts", str(folder / "bad.jsonl")), "line 2 is not JSON"),
        "long number": (("--prompts", str(folder / "long.jsonl")), "line 1 is not a prompt"),
        "not writable": (("--out", str(folder / "file" / "out")), "cannot write to"),
        "taken by a folder": (("--out", str(folder / "taken")), "results.csv there is a folder"),
        "equal": (("--config", config(2)), "are equal"),
        "equal by vLLM's rules": (
            tuple(word for text in equal_bounds for word in ("--config", text)),
            "are equal",
        ),
        "engine args": (("--engine-args", "--nonsense"), "--engine-args: unrecognized arguments"),
    }


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_leaves_nothing(case: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, said = bad_inputs(model.parent)[case]
    before = sorted(model.parent.rglob("*"))
    assert compare(model, config(2), options=options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line = err.splitlines()[-1]
    assert said in line
    # Progress of the first engine's start comes before what that engine says.
    assert len(err.splitlines()) == (2 if case == "engine args" else 1)
    assert sorted(model.parent.rglob("*")) == before


def test_an_empty_folder_name_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare(model, config(2), options=("--out", ""))
    assert "argument --out: a folder needs a name" in capsys.readouterr().err


def test_what_cannot_be_written_is_shown(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("vllm_specplus.compare.results.os.replace", replace)
    assert compare(model, config(2), options=("--repeat", "1")) == 2
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == f"cannot write {model.parent / 'out' / 'results.json'}: No space left on device"
    assert "tokens/s" in out
    assert [path.name for path in (model.parent / "out").iterdir()] == ["logs"]


def test_a_refusal_leaves_earlier_results_alone(model: Path) -> None:
    assert compare(model, config(2), options=("--repeat", "1")) == 0
    out = model.parent / "out"
    (out / "logs" / "mine.txt").write_text("of the user")
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.suffix != ".log"}
    assert compare(model, config(2), options=("--engine-args", "--nonsense")) == 2
    assert {path: path.read_bytes() for path in kept if path.exists()} == kept


def test_a_refusal_takes_its_own_logs_away(model: Path) -> None:
    logs = model.parent / "out" / "logs"
    logs.mkdir(parents=True)
    (logs / "mine.txt").touch()
    assert compare(model, config(2), options=("--engine-args", "--nonsense")) == 2
    assert [path.name for path in logs.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--repeat", "0"), "argument --repeat: '0' is not a whole number above 0"),
        (("--max-tokens", "many"), "argument --max-tokens: 'many' is not a whole number above 0"),
        (("--concurrency", "1,,2"), "argument --concurrency: '' is not a whole number above 0"),
        (("--temperature", "nan"), "argument --temperature: 'nan' is not a number from 0"),
        (("--engine-args", "'"), 'argument --engine-args: "\'" is not a command line: No closing quotation'),
    ],
)
def test_options_that_are_none(
    options: tuple[str, ...], said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        compare(model, config(2), options=options)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"vllm-specplus compare: error: {said}"
