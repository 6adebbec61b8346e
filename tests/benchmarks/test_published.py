"""The simulation of FastDeploy's published speeds."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "published.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_costs_explain_the_speeds_and_adaptive_is_no_slower(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = run("--slot-cost", "0.02", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A simulation" in done.stdout
    rows = json.loads(out.read_text())["rows"]
    fixed = {row["way"]: row["simulated"] for row in rows if row["published"] is not None}
    adaptive = {row["way"]: row["simulated"] for row in rows if row["published"] is None}
    assert len(fixed) == 5
    # The append of three passes and two matches falls to 1.29; the arbiter has the same five slots.
    assert min(speed for way, speed in adaptive.items() if "3 passes" in way) > max(fixed.values())


def test_costs_that_cannot_be_are_told() -> None:
    """Slots this dear leave nothing for a pass."""
    done = run("--slot-cost", "0.2")
    assert done.returncode == 1
    assert "pass" in done.stdout.partition("FAILED")[2]
