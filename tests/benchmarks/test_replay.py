"""The replay of traces: costs, choices and messages, on texts whose result is known."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "replay.py"
sys.path.append(str(SCRIPT.parent))
import replay  # noqa: E402

PERIOD = [5, 6, 7, 8, 9]


def trace(**changes: Any) -> dict[str, Any]:
    """Twenty tokens that repeat with the prompt's period; the draft model's first draft is right, its second wrong."""
    output = PERIOD * 4
    drafts = [[*output[i + 1 : i + 2], 99][:2] for i in range(len(output))]
    return {"kind": "period", "name": "one", "prompt": PERIOD * 2, "output": output, "drafts": drafts} | changes


def run(tmp_path: Path, traces: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "traces.json"
    file.write_text(traces if isinstance(traces, str) else json.dumps(traces))
    command = [sys.executable, str(SCRIPT), "--traces", str(file), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def rows(tmp_path: Path, traces: Any, *arguments: str) -> dict[tuple[str, str, int], dict[str, Any]]:
    out = tmp_path / "rows.json"
    done = run(tmp_path, traces, *arguments, "--json", str(out))
    assert done.returncode == 0, done.stderr
    return {(row["way"], row["kind"], row["passes"]): row for row in json.loads(out.read_text())["rows"]}


def test_steps_and_costs(tmp_path: Path) -> None:
    """19 tokens come in steps; a step costs 1 + .1 a pass + .05 a draft."""
    reference = {"reference": PERIOD * 4, "name": "two", "kind": "cited"}
    settings = ("--passes", "2", "--window", "4", "--draft-cost", ".1", "--slot-cost", ".05")
    found = rows(tmp_path, [trace(), trace(**reference)], *settings)
    one = {
        way: row
        for (way, kind, passes), row in found.items()
        if kind == "period" and (way, passes) != ("model", 2) and way != "adaptive"
    }
    steps = {way: 19 / row["tokens_per_step"] for way, row in one.items()}
    # One draft of the model's is right, and four of a match. What is joined behind the wrong one is lost.
    assert steps == pytest.approx(
        {"none": 19, "model": 10, "ngram": 4, "suffix": 4, "append": 10, "override": 4, "hindsight": 4}
    )
    assert one["none"]["speed"] == 1
    assert one["model"]["speed"] == pytest.approx(19 / (10 * (1 + 0.1 + 0.05)))
    assert one["ngram"]["speed"] == pytest.approx(19 / (4 * (1 + 4 * 0.05)))
    assert one["hindsight"]["speed"] == pytest.approx(19 / (4 + 15 * 0.05))
    assert found["reference", "cited", 0]["tokens_per_step"] == pytest.approx(19 / 4)
    assert ("reference", "period", 0) not in found
    assert found["model", "all", 2]["tokens_per_step"] == pytest.approx(19 / 10)
    assert all(row["speed"] <= found["hindsight", kind, 2]["speed"] + 1e-9 for (_, kind, _), row in found.items())


def test_adaptive_learns_which_way_pays(tmp_path: Path) -> None:
    """Of forty texts alike, with a useless draft model, the last ones come nearly at the speed of the match alone."""
    output = PERIOD * 30
    drafts = [[99, 99]] * len(output)
    traces = [trace(name=f"t{i}", output=output, drafts=drafts) for i in range(40)]
    found = rows(tmp_path, traces, "--passes", "2", "--window", "8", "--draft-cost", ".3", "--slot-cost", ".02")
    speed = {way: row["speed"] for (way, kind, _), row in found.items() if kind == "all"}
    assert 0.97 * speed["ngram"] < speed["adaptive"] <= speed["hindsight"]
    assert speed["append"] < 0.5 * speed["ngram"]


def test_measured_costs_are_learned(tmp_path: Path) -> None:
    """A slot costs ten times what is usual, and a match is right in one of two texts."""
    output = PERIOD * 30
    noise = np.random.default_rng(0).integers(0, 9, len(output)).tolist()
    traces = [
        trace(name=f"t{i}", kind=kind, output=text, drafts=[[99, 99]] * len(output))
        for i in range(20)
        for kind, text in (("period", output), ("noise", noise))
    ]
    settings = ("--passes", "2", "--window", "8", "--draft-cost", ".3", "--slot-cost", ".2")
    told = rows(tmp_path, traces, *settings)
    measured = rows(tmp_path, traces, *settings, "--measure-costs")
    assert measured["none", "all", 0] == told["none", "all", 0]
    ratio = measured["adaptive", "all", 2]["speed"] / told["adaptive", "all", 2]["speed"]
    assert 0.95 < ratio < 1.02
    assert ratio != 1


def test_two_traces_of_one_name(tmp_path: Path) -> None:
    other = trace(output=[9, 8, 7, 6, 5] * 4, drafts=[[1, 1]] * 20)
    found = rows(tmp_path, [trace(), other], "--passes", "1", "--window", "4")
    assert found["adaptive", "all", 1]["tokens_per_step"] > 1


def test_traces_of_others_are_taken(tmp_path: Path) -> None:
    """Without a list behind the end, with no reference by name, and beside a text that has no steps."""
    usual = trace()
    others = [
        trace(drafts=usual["drafts"][:-1], reference=None),
        trace(name="short", kind="short", output=[5], drafts=[]),
    ]
    settings = ("--passes", "1", "--window", "4")
    assert rows(tmp_path, others, *settings) == rows(tmp_path, [usual], *settings)


def test_several_values_are_taken(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    options = ("--passes", "1", "2", "--window", "2", "6", "--draft-cost", "0", ".2", "--slot-cost", "0", ".1")
    assert run(tmp_path, [trace()], *options, "--json", str(out)).returncode == 0
    report = json.loads(out.read_text())["rows"]
    assert {(row["window"], row["draft_cost"], row["slot_cost"]) for row in report} == {
        (window, draft, slot) for window in (2, 6) for draft in (0, 0.2) for slot in (0, 0.1)
    }


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        ("{", "cannot be read"),
        ([], "must be a list of one trace or more"),
        ([{"kind": "k"}], "trace 0: needs kind, name, prompt, output and drafts"),
        ([5], "trace 0: needs kind, name, prompt, output and drafts"),
        ([trace(drafts=5)], "drafts: Input should be a valid list"),
        ([trace(drafts=[["x"], [1]])], "drafts.0.0: Input should be a valid integer"),
        ([trace(drafts=[None])], "drafts.0: Input should be a valid list"),
        ([trace(output=[2**31])], "output.0: Input should be less than 2147483648"),
        ([trace(kind="all")], "kind 'all' is not allowed"),
        ([trace(drafts=[[1, 2]])], "needs output tokens, and as many lists of drafts"),
        ([trace(output=[], drafts=[])], "needs output tokens, and as many lists of drafts"),
        ([trace(output=[5], drafts=[[]])], "no trace has two output tokens or more"),
        ([trace(drafts=[[1]] * 20)], r"drafts[0] has 1 tokens, fewer than 2 passes"),
    ],
)
def test_a_bad_file_gets_one_line(traces: Any, message: str, tmp_path: Path) -> None:
    done = run(tmp_path, traces, "--passes", "2", "--window", "4")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--passes", "0"], "--passes: '0' is not a whole number above 0"),
        (["--slot-cost", "nan"], "--slot-cost: 'nan' is not a number from 0"),
        (["--draft-cost", "-1"], "--draft-cost: '-1' is not a number from 0"),
        (
            ["--passes", "3", "--window", "2", "8"],
            "--window 2 is not allowed with --passes 3: it must be at least as large",
        ),
    ],
)
def test_bad_options_are_named(options: list[str], message: str, tmp_path: Path) -> None:
    done = run(tmp_path, [trace()], *options)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]


def test_what_ends_a_text_is_read_off_the_outputs() -> None:
    """7 ends two of them. 6 stands within one, 5 ends one alone, and the same text twice counts once."""

    def traces_of(*outputs: list[int]) -> list[replay.Trace]:
        return [replay.Trace(str(i), "kind", "name", np.array(output), 0, [], None) for i, output in enumerate(outputs)]

    assert replay.stop_token_ids(traces_of([1, 2, 7], [2, 6, 7], [3, 6], [4, 6], [1, 5])) == [7]
    assert replay.stop_token_ids(traces_of([1, 2, 7], [1, 2, 7], [3, 5])) == []
