import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import step_overhead as benchmark  # noqa: E402 (found by the line above)

METHODS = ["vLLM", "greedy", "target_match", "topp", "rejection"]

# A strategy that accepts every draft.
BUG = """
import torch
from vllm_specplus.runners.v1 import samplers

right = samplers.verify_draft_tokens
samplers.verify_draft_tokens = lambda *args, policy, **options: right(*args, policy="accept_all", **options)
"""


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Report of a tiny run, and what it printed."""
    path = tmp_path_factory.mktemp("step") / "new folder" / "report.json"
    done = run(str(BENCHMARKS / "step_overhead.py"), "--tiny", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text()), done.stdout


def test_every_method_is_measured(tiny):
    report, printed = tiny
    cells = {(t["setting"], t["batch"], t["method"]) for t in report["timings"]}
    assert len(cells) == len(report["timings"]) == 4 * 2 * len(METHODS)
    for timing in report["timings"]:
        assert timing["error"] is None
        assert 0 < timing["lower_quartile_us"] <= timing["median_us"] <= timing["upper_quartile_us"]
        assert timing["ratio_to_vllm"] == pytest.approx(1.0) or timing["method"] != "vLLM"
    assert [method in printed for method in METHODS] == [True] * len(METHODS)
    assert report["environment"]["threads"] == 1
    assert report["goals"] == []


def test_a_wrong_method_gets_no_number():
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\nimport step_overhead\n{BUG}\n"
        "sys.exit(step_overhead.main(['--tiny', '--batches', '2']))"
    )
    done = run("-c", code)
    assert done.returncode == 1, done.stderr
    assert "FAILED: T=0, batch 2, greedy: request" in done.stdout


def test_the_goals_are_of_greedy_requests_alone_and_in_a_batch():
    times = {
        (setting, batch, method): 800.0 * factor * batch
        for setting in ("T=0", "T=0.8")
        for batch in (1, 2, 8)
        for method, factor in (("vLLM", 1), ("target_match", 1), ("rejection", 1.5 if batch < 8 else 1.6))
    }
    timings = [benchmark.Timing("v1", *place, time) for place, time in times.items()]
    assert [(row["name"], row["value"], row["met"]) for row in benchmark.goals(timings, 49_152)] == [
        ("target_match, T=0, batch 1 (µs)", 800.0, True),
        ("rejection / target_match, T=0, batch 1", 1.5, True),
        ("target_match, T=0, batch 8 (µs)", 6400.0, False),
        ("rejection / target_match, T=0, batch 8", pytest.approx(1.6), False),
    ]
    assert benchmark.goals(timings, 500) == []
    wrong = [benchmark.Timing("v1", "T=0", 1, "target_match", error="other tokens"), timings[2]]
    assert benchmark.goals(wrong, 49_152) == []
