"""The verification benchmark and its plot, tiny and under Triton's interpreter; and what it calls wrong."""

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm_specplus.verify import VerifyOutput
from vllm_specplus.verify.noise import gumbel_noise

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import verify  # noqa: E402
import verify_cases as cases  # noqa: E402

OURS = ["ours", "target_match", "topp", "torch"]
PEERS = ["vLLM", "FlashInfer chain", "FlashInfer rows"]

# Each of them makes one method of one setting wrong.
BUGS = {
    "ours": """
def wrong(*args, backend, **options):
    output = right(*args, backend=backend, **options)
    if backend == cases.BACKEND:
        output.token_ids[0, 0] = (output.token_ids[0, 0] + 1) % 320
    return output

right, cases.verify_draft_tokens = cases.verify_draft_tokens, wrong
""",
    "vLLM": """
def wrong(self, start, end):
    return right(self, start, end) * 0.5

right, peers.VllmPath._process = peers.VllmPath._process, wrong
""",
}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=300, env=env)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder with report.json and report.csv of a tiny run, and what it printed."""
    folder = tmp_path_factory.mktemp("verify") / "new folder"
    files = ("--json", str(folder / "report.json"), "--csv", str(folder / "report.csv"))
    done = run(str(BENCHMARKS / "verify.py"), "--tiny", "--batches", "2", "--drafts", "2", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_each_strategy_is_held_to_its_own_goal() -> None:
    cell = verify.Cell("flat", "top-p", *verify.GOAL_SIZE)
    results = [verify.Result(cell, name, 10.0, us, us, us) for name, us in (("ours", 26.0), ("target_match", 26.0))]
    results.append(verify.Result(cell, "vLLM", 10.0, 130.0, 130.0, 130.0))
    found = {goal["name"]: (goal["value"], goal["limit"], goal["met"]) for goal in verify.goals(results)}
    assert found == {
        "ours / floor, top-p, flat": (2.6, 2.5, False),
        "target_match / floor, top-p, flat": (2.6, 3.6, True),
        "vLLM / ours, top-p, flat": (5.0, 5.0, True),
        "vLLM / target_match, top-p, flat": (5.0, 5.0, True),
    }


def test_every_method_is_checked_and_timed_or_says_why_not(tiny):
    folder, printed = tiny
    report = json.loads((folder / "report.json").read_text())
    assert report["goals"] == []
    assert report["environment"]["gpu"] is None
    assert report["environment"]["packages"]["torch"]
    assert "times mean nothing" in printed
    by_cell = {
        (r["logits"], r["setting"], r["batch"], r["drafts"], r["vocab"], r["method"]): r for r in report["results"]
    }
    assert len(by_cell) == len(report["results"]) == 2 * 4 * len(OURS + PEERS)
    for (_, setting, _, _, _, method), result in by_cell.items():
        no_filter = setting in ("greedy", "T=0.8")
        expected = {"ours": True, "torch": True, "vLLM": no_filter}
        expected |= dict.fromkeys(["target_match", "topp"], setting != "greedy")
        if expected.get(method, False):
            assert 0 < result["lower_quartile_us"] <= result["median_us"] <= result["upper_quartile_us"]
            assert result["gb_per_s"] * result["median_us"] * 1e3 == pytest.approx(result["rows"] * 320 * 2)
            assert result["note"] == ""
            assert result["graph"] is False
            assert result["host_us"] is None
        else:
            assert result["median_us"] is result["gb_per_s"] is result["ratio_to_floor"] is None
            assert result["note"] in printed.replace("\n", " ")
            assert not result["note"].startswith("FAILED")


def test_the_csv_file_holds_the_same(tiny):
    folder, _ = tiny
    results = json.loads((folder / "report.json").read_text())["results"]
    with (folder / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{k: "" if v is None else str(v) for k, v in result.items()} for result in results]
    assert {"gpu", "torch", "triton", "vllm", "flashinfer", "git_commit"} < rows[0].keys()


@pytest.mark.parametrize("method", BUGS)
def test_a_wrong_method_gets_no_number(method, tmp_path):
    files = ["--json", str(tmp_path / "report.json"), "--csv", str(tmp_path / "report.csv")]
    args = ["--tiny", "--batches", "2", "--drafts", "2", "--settings", "T=0.8", "--methods", "vLLM,torch", *files]
    done = run(
        "-c",
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        f"import verify, verify_cases as cases, verify_peers as peers\n{BUGS[method]}\nsys.exit(verify.main({args!r}))",
    )
    assert done.returncode == 1, done.stderr
    assert "FAILED" in done.stdout
    for result in json.loads((tmp_path / "report.json").read_text())["results"]:
        failed = result["method"] == method
        assert result["note"].startswith("FAILED") == failed
        assert (result["median_us"] is None) == failed


def test_the_plot_names_its_axes_and_lines(tiny, tmp_path):
    folder, _ = tiny
    source = str(folder / "report.csv")
    for name in ("plot.svg", "plot.png"):
        out = tmp_path / "new folder" / name
        done = run(str(BENCHMARKS / "plot.py"), source, "--drafts", "2", "--logits", "flat", "--out", str(out))
        assert done.returncode == 0, done.stderr
        assert out.stat().st_size > 1000
    picture = (tmp_path / "new folder" / "plot.svg").read_text()
    for text in ("time per batch (µs)", "batch (requests)", "floor", "top-p+top-k, vocabulary 320", *OURS, "vLLM"):
        assert f">{text}</text>" in picture
    done = run(str(BENCHMARKS / "plot.py"), source, "--drafts", "3")
    assert done.returncode == 1
    assert "it has [(2, 'flat'), (2, 'peaked')]" in done.stderr


def static_step(method: str, rows: str, num_reqs: int, us: float) -> dict:
    shape = {"num_reqs": num_reqs, "num_rows": 3, "vocab_size": 320, "dtype": "bfloat16"}
    return {"method": method, "setting": "T=0.8", "rows": rows, "shape": shape, "us": us}


def test_estimates_stand_beside_what_was_measured(tiny, tmp_path):
    folder, _ = tiny
    steps = [static_step(*step) for step in (("rejection", "flat", 2, 5.0), ("vLLM", "peaked", 2, 8.0))]
    others = [static_step("rejection", "flat", 64, 9.0), static_step("drafts", "flat", 2, 9.0)]
    others.append(static_step("topp", "flat", 2, 9.0))
    others[-1]["shape"]["dtype"] = "float32"
    static, out = tmp_path / "static.json", tmp_path / "modelled.json"
    static.write_text(json.dumps({"steps": steps + others}))
    command = (str(BENCHMARKS / "modelled.py"), str(static), str(folder / "report.json"))
    done = run(*command, "--json", str(out))
    assert done.returncode == 0, done.stderr
    measured = {
        (r["method"], r["logits"]): r["median_us"]
        for r in json.loads((folder / "report.json").read_text())["results"]
        if r["setting"] == "T=0.8"
    }
    report = json.loads(out.read_text())
    found = {(s["method"], s["rows"]): (s["modelled_us"], s["measured_us"], s["ratio"]) for s in report["steps"]}
    ours, peer = measured["ours", "flat"], measured["vLLM", "peaked"]
    assert found == {("rejection", "flat"): (5.0, ours, ours / 5.0), ("vLLM", "peaked"): (8.0, peer, peer / 8.0)}
    assert report["median_ratio"] == pytest.approx((ours / 5.0 + peer / 8.0) / 2)
    assert "not on a GPU" in done.stdout
    static.write_text(json.dumps({"steps": others}))
    done = run(*command)
    assert done.returncode == 1
    assert "no step in common" in done.stderr


def test_a_gpu_is_timed_by_replays_of_a_graph():
    """The launching is a column of its own."""
    asked = []

    class FakeClock:
        on_gpu, copy_gb_per_s = True, 3000.0

        def replays(self, run, check):
            asked.append("replays")
            return [2.0, 3.0, 4.0]

        def calls(self, run):
            asked.append("calls")
            return [5.0]

        def host_us(self, run):
            return 60.0

    class Path:
        def __init__(self, case):
            pass

        def run(self):
            return None

        def check(self, output):
            return 0

    cell = verify.Cell("flat", "T=0.8", 16, 1, 320)
    ours = verify.measure(cell, "ours", Path, FakeClock())
    assert (ours.median_us, ours.host_us, ours.graph, ours.calls) == (3.0, 60.0, True, 3)
    eager = verify.measure(cell, "torch", Path, FakeClock())
    assert (eager.median_us, eager.graph) == (5.0, False)
    assert asked == ["replays", "calls"]


def test_rows_are_as_described():
    case = cases.make_case("peaked", cases.SETTINGS["T=0.8"], 64, 3, 4000, "cpu", seed=0)
    p = case.scaled().softmax(dim=1)
    drafted = case.draft_token_ids >= 0
    assert drafted.view(64, 4).tolist() == [[True, True, True, False]] * 64
    assert p[drafted, case.draft_token_ids[drafted]].mean() == pytest.approx(0.7, abs=0.05)
    nucleus = (p.sort(dim=1, descending=True).values.cumsum(dim=1) < 0.95).sum(dim=1)
    assert 10 < nucleus.median() < 200
    greedy = cases.make_case("peaked", cases.SETTINGS["greedy"], 64, 3, 4000, "cpu", seed=0)
    right = greedy.logits.argmax(dim=1) == greedy.draft_token_ids
    assert right[drafted].float().mean() == pytest.approx(0.7, abs=0.1)


def near_tie(gap):
    """A request without drafts whose tokens 2 and 5 score `gap` apart, and an output with the lower one."""
    case = cases.make_case("flat", cases.SETTINGS["T=0.8"], 1, 0, 8, "cpu", seed=0)
    noise = gumbel_noise(case.seeds, case.positions, 8)
    scores = torch.zeros(1, 8)
    scores[0, 2], scores[0, 5] = 9 + gap, 9
    case = replace(case, logits=(scores - noise) * 0.8)
    return case, "target_match", VerifyOutput(torch.tensor([[5]]), torch.tensor([1], dtype=torch.int32))


def test_only_a_difference_within_rounding_passes():
    assert cases.check_same(*near_tie(2e-6)) == 1
    with pytest.raises(cases.WrongOutputError, match="by more than rounding: request 0"):
        cases.check_same(*near_tie(1e-4))
    case, _, _ = near_tie(2e-6)
    case = replace(case, setting=cases.SETTINGS["greedy"])
    smallest = VerifyOutput(case.logits.argmin(dim=1, keepdim=True), torch.tensor([1], dtype=torch.int32))
    with pytest.raises(cases.WrongOutputError, match="0 may"):
        cases.check_same(case, "greedy", smallest)


@pytest.mark.parametrize("setting", ["top-p", "top-p+top-k", "T=0.8"])
def test_a_nucleus_too_small_or_too_large_is_wrong(setting):
    case = cases.make_case("flat", cases.SETTINGS[setting], 1, 1, 300, "cpu", seed=0)
    # Distinct logits, so that there is one right nucleus.
    case = replace(case, logits=torch.rand(2, 300, generator=torch.Generator().manual_seed(0)))
    order = case.logits.sort(dim=1, descending=True).indices
    weight = case.scaled().double().exp().gather(1, order)
    if case.setting.top_k:
        weight[:, case.setting.top_k :] = 0
    above = weight.cumsum(dim=1) - weight
    size = ((weight > 0) & (above < (case.setting.top_p or 1) * weight.sum(dim=1, keepdim=True))).sum(dim=1)

    def prefix_mask(more):
        return torch.zeros(2, 300, dtype=torch.bool).scatter_(1, order, torch.arange(300) < size[:, None] + more)

    cases.check_nucleus(case, prefix_mask(0))
    first = order[:, 0]
    for wrong in (prefix_mask(-1), prefix_mask(1), prefix_mask(0).index_fill(1, first[:1], False)):
        if bool((wrong != prefix_mask(0)).any()):
            with pytest.raises(cases.WrongOutputError):
                cases.check_nucleus(case, wrong)
    last = order[torch.arange(2), size - 1]
    cases.check_tokens(case, torch.arange(2), last)
    if setting != "T=0.8":
        with pytest.raises(cases.WrongOutputError, match="outside"):
            cases.check_tokens(case, torch.arange(2), order[torch.arange(2), size])
