"""benchmarks/host_time.py: the Python time of a step on Model Runner V2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Accepts every draft.
BUG = """
from dataclasses import replace
import host_time
from vllm_specplus.runners.v2 import samplers

right = samplers.verify
samplers.verify = lambda inputs, workspace: right(replace(inputs, policy="accept_all"), workspace)
sys.exit(host_time.main(["--tiny"]))
"""


@pytest.mark.slow
def test_each_part_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, BENCHMARKS / "host_time.py", "--tiny", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    cells = {(t["part"], t["method"], t["temperature"]): t for t in report["timings"]}
    verification = {("verification", method, t) for method in ("vLLM", "rejection") for t in (0.0, 0.8)}
    assert set(cells) == verification | {("filling", method, 0.0) for method in ("append", "adaptive")}
    assert cells["verification", "rejection", 0.8]["kernels"] == 5
    assert cells["filling", "adaptive", 0.0]["kernels"] == 3
    assert all(0 < t["lower_quartile_us"] <= t["median_us"] <= t["upper_quartile_us"] for t in cells.values())
    assert len(report["goals"]) == 4


@pytest.mark.slow
def test_a_wrong_text_is_told() -> None:
    code = f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\n{BUG}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stderr
    assert "FAILED: rejection has another greedy text" in done.stdout
