"""The static estimate: what it reads of machine code, what it counts, and what the kernels cost by it.

`static_cost.json` holds what they cost when it was written. After a change that is meant:

    python tests/benchmarks/test_static_cost.py
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))
from static import sass  # noqa: E402

RECORDED = Path(__file__).with_name("static_cost.json")
MARGIN = 0.03  # of instructions per logit
SIZE = ("--num-reqs", "2")
ONLY = r"^(rejection, (greedy|T=0.8|top-p|top-p\+top-k)|target_match, (T=0.8|top-p\+top-k)), peaked$"

# An end under a condition, a load, a loop of two instructions that wait for it, and the end.
LISTING = """
        .size           kernel,(.L_x_2 - kernel)
.text.kernel:
	//## File "/k/a.py", line 6
        /*0000*/               @P1 EXIT ;                                /* 0x000000000000194d */
                                                                         /* 0x000fea0003800000 */
	//## File "/k/a.py", line 7
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;      /* 0x0000000402047981 */
                                                                         /* 0x000ea2000c1e1d00 */
.L_x_0:
	//## File "/k/b.py", line 3 inlined at "/k/a.py", line 9
	//## File "/k/a.py", line 9
        /*0020*/                   FADD R8, R8, R4 ;                     /* 0x0000000408087221 */
                                                                         /* 0x004fca0000000000 */
	//## File "/k/a.py", line 8
        /*0030*/              @!P0 BRA `(.L_x_0) ;                       /* 0xfffffffc00e88947 */
                                                                         /* 0x000fea000383ffff */
	//## File "/k/a.py", line 10
        /*0040*/                   EXIT ;                                /* 0x000000000000794d */
                                                                         /* 0x000fea0003800000 */
.L_x_1:
        /*0050*/                   BRA `(.L_x_1);                        /* 0xfffffffc00fc7947 */
                                                                         /* 0x000fc0000383ffff */
.L_x_2:
"""

# Counts and costs of `looping_kernel`, whose source is the same for both processes.
COUNT = """
import pickle, sys
from pathlib import Path
from static.interpreter import counted_launches
from tests.benchmarks import looping_kernel
with counted_launches((Path(looping_kernel.__file__).parent,), vocab_size=4096, share=1.0) as launches:
    out = looping_kernel.launch(4, 4, "cpu")
assert out.tolist() == [i * 4 * 1024 * 8.0 for i in range(4)]
Path(sys.argv[1]).write_bytes(pickle.dumps(launches))
"""
COST = """
import json, pickle, sys
from pathlib import Path
from static.model import ProgramCosts
from static.sass import read_kernel
from tests.benchmarks import looping_kernel
from vllm_specplus.testing.ahead_of_time import recorded_launches
with recorded_launches() as launches:
    looping_kernel.launch(4, 4, "meta")
(launch,), (counts,) = launches, pickle.loads(Path(sys.argv[1]).read_bytes())
costs = ProgramCosts(read_kernel(launch.compile()), launch.num_warps, counts, (Path(looping_kernel.__file__).parent,))
found = [costs.of(counts.profiles[i]) for i in counts.programs]
print(json.dumps({
    "cycles": [cycles for cycles, _ in found],
    "instructions": [sum(pipes.values()) for _, pipes in found],
    "logits": counts.logits_read,
    "bytes": [counts.bytes_read, counts.bytes_written],
}))
"""
LAUNCHES = """
import json
from static_cost import recorded
from static.steps import VLLM, Shape, steps
print(json.dumps({s.name: sum(map(len, recorded(s))) for s in steps(Shape()) if s.method != VLLM}))
"""


def run(*args: str, **env: str) -> str:
    """What Python prints, in a process that may compile."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), str(BENCHMARKS)])
    env = inherited | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"} | env
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def estimate(folder: Path) -> tuple[dict[str, Any], str]:
    """The report on a few small steps, and what was printed."""
    path = folder / "report.json"
    printed = run(
        *(str(BENCHMARKS / "static_cost.py"), *SIZE, "--only", ONLY, "--json", str(path)), XDG_CACHE_HOME=str(folder)
    )
    return json.loads(path.read_text()), printed


def kernels_of(report: dict[str, Any]) -> dict[str, Any]:
    """Of each step, its kernels: the bytes that they spill, and the instructions for a logit of those that read all."""
    found: dict[str, Any] = {}
    for step in report["steps"]:
        kernels = found[step["name"]] = {}
        for launch in step["launches"]:
            kernels[launch["name"]] = {"spilled_bytes": launch["spilled_bytes"]}
            if launch["per_logit"]:
                kernels[launch["name"]]["per_logit"] = round(sum(launch["per_logit"].values()), 1)
    return found


def launches() -> dict[str, int]:
    """Launches of each step, torch's included."""
    return json.loads(run("-c", LAUNCHES))


@pytest.fixture(scope="module")
def estimated(tmp_path_factory) -> tuple[dict[str, Any], str]:
    return estimate(tmp_path_factory.mktemp("static"))


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found = json.loads(RECORDED.read_text())
    assert found["triton"] == version("triton"), "another Triton makes other machine code: write static_cost.json anew"
    return found


def test_kernels_cost_what_they_did(estimated, recorded):
    found = kernels_of(estimated[0])
    assert found.keys() == recorded["kernels"].keys()
    for step, kernels in recorded["kernels"].items():
        for kernel, costs in kernels.items():
            assert found[step][kernel] == pytest.approx(costs, rel=MARGIN), (step, kernel, __doc__)


def test_row_statistics_and_the_race_read_every_logit(estimated):
    wide = [launch for step in estimated[0]["steps"] for launch in step["launches"] if launch["per_logit"]]
    assert {launch["name"] for launch in wide} == {"row_stats_kernel", "race_kernel"}


def test_no_kernel_spills(estimated):
    spilled = {
        f"{step['name']}: {launch['name']}": launch["spilled_bytes"]
        for step in estimated[0]["steps"]
        for launch in step["launches"]
        if launch["spilled_bytes"]
    }
    assert not spilled


def test_a_step_launches_what_it_did(recorded):
    assert launches() == recorded["launches"], __doc__


def test_everything_printed_says_that_it_is_an_estimate(estimated):
    report, printed = estimated
    assert report["about"] == "static estimate"
    titles = [line for line in printed.splitlines() if line.strip() and line.strip()[0] not in "┏┃┡│├└┌"]
    assert len(titles) == 5
    assert all("static estimate" in title for title in titles)


def test_a_step_is_the_sum_of_its_launches_and_gaps(estimated):
    report, _ = estimated
    for step in report["steps"]:
        launches = step["launches"]
        gaps = report["machine"]["gap_us"] * (step["num_launches"] - 1)
        assert step["us"] == pytest.approx(sum(launch["us"] for launch in launches) + gaps)
        assert step["mean_us"] <= step["us"] + 1e-9
        for launch in launches:
            bounds = [launch[f"{bound}_us"] for bound in ("memory", "issue", "pipe", "latency")]
            assert launch["us"] == max(bounds) > 0


def test_goals_are_held_against_the_estimates(estimated):
    report, _ = estimated
    us = {step["name"]: step["us"] / step["floor_us"] for step in report["steps"]}
    found = {goal["name"]: goal for goal in report["goals"]}
    goal = found["rejection, top-p: times the floor"]
    assert goal["value"] == us["rejection, top-p, peaked"]
    assert (goal["limit"], goal["met"]) == (2.5, goal["value"] <= 2.5)
    # Under greedy all strategies are one.
    assert found["target_match, greedy: times the floor"]["value"] == us["rejection, greedy, peaked"]


def test_parse_finds_blocks_loops_and_places():
    kernel = sass.Kernel(sass.parse(LISTING), registers=16, spilled_bytes=0, shared_bytes=0)
    assert [[i.opcode for i in block.instructions] for block in kernel.blocks] == [
        ["EXIT"],
        ["LDG"],
        ["FADD", "BRA"],
        ["EXIT"],
        ["BRA"],
    ]
    assert [block.successors for block in kernel.blocks] == [[1], [2], [3, 2], [], [4]]
    assert sorted(kernel.predecessors) == [0, 1, 2, 3]  # nothing leads to what stands behind the end
    assert kernel.loops == [sass.Loop((("/k/a.py", 8),), frozenset({2}))]
    load, add = kernel.blocks[1].instructions[0], kernel.blocks[2].instructions[0]
    assert (load.place, add.place) == ((("/k/a.py", 7),), (("/k/a.py", 9), ("/k/b.py", 3)))
    assert (load.pipe, add.pipe, kernel.blocks[2].instructions[1].predicate) == ("lsu", "fma", "!P0")
    assert (load.sets_result, load.stall, add.wait, add.stall) == (2, 1, 0b100, 5)


def test_a_block_waits_for_a_load_of_the_block_before():
    """Only the first of ten iterations does, so each takes a part of the wait."""
    kernel = sass.Kernel(sass.parse(LISTING), registers=16, spilled_bytes=0, shared_bytes=0)
    times = {0: 1.0, 1: 1.0, 2: 10.0, 3: 1.0}
    cycles = sass.cycles_of_blocks(kernel, lambda i: 300 if i.opcode == "LDG" else 0, times)
    assert cycles == {0: 5, 1: 1, 2: pytest.approx(299 / 11 + 5 + 5), 3: 5}


def test_machine_code_counts_as_often_as_its_source(tmp_path):
    """Loops by their iterations, unrolled ones once, and nothing behind an early end."""
    counts = str(tmp_path / "counts")
    run("-c", COUNT, counts, TRITON_INTERPRET="1")
    found = json.loads(run("-c", COST, counts, TRITON_CACHE_DIR=str(tmp_path)))
    for costs in (found["cycles"], found["instructions"]):
        nothing, once, twice, thrice = costs
        assert 0 < nothing < once
        assert thrice - twice == pytest.approx(twice - once)
    # A program reads 1024 numbers 4 times; a warp's instruction does 32 of them.
    per_number = 32 * (found["instructions"][3] - found["instructions"][2]) / 4096
    assert 4 < per_number < 12
    # All programs read the same row, and the last three write a number each, in one sector.
    assert (found["logits"], found["bytes"]) == (4096, [4 * 4096, 32])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        kernels = kernels_of(estimate(Path(name))[0])
    now = {"triton": version("triton"), "launches": launches(), "kernels": kernels}
    RECORDED.write_text(json.dumps(now, indent=2) + "\n")
