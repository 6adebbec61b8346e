import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "propose.py"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Report of a quick run, and what it printed."""
    path = tmp_path_factory.mktemp("propose") / "new folder" / "report.json"
    done = run("--quick", "--json", str(path), "--suffix-max-tokens", "300")
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


def test_every_cell_is_measured(quick):
    report, printed = quick
    assert [(cell["context"], cell["batch"]) for cell in report["cells"]] == [(64, 1), (64, 3), (256, 1), (256, 3)]
    for cell in report["cells"]:
        for name in ("ours", "vllm", "arbiter"):
            timing = cell[name]
            assert 0 < timing["minimum"] <= timing["lower_quartile"] <= timing["median"] <= timing["upper_quartile"]
        assert f"{cell['ours']['median']:.2f}" in printed
    assert report["environment"]["packages"]["numba"]
    assert report["peak_rss_mb"] > 100
    arbiter = {row["name"]: row["met"] for row in report["goals"] if "arbiter" in row["name"]}
    slowest = [max(cell["arbiter"]["median"] for cell in report["cells"] if cell["batch"] == batch) for batch in (1, 3)]
    assert list(arbiter.values()) == [time <= 25 for time in slowest]


def test_a_cell_above_the_limit_says_why_it_is_left_out(quick):
    report, printed = quick
    small, *_, large = [cell["suffix"] for cell in report["cells"]]
    assert small["median"] > 0
    assert large.startswith("skipped:")
    assert "skipped:" in printed
