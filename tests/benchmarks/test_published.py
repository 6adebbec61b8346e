"""The simulation of FastDeploy's published speeds."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "published.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_costs_explain_the_speeds_and_what_adaptive_reaches(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = run("--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "A simulation" in done.stdout
    rows = json.loads(out.read_text())["rows"]
    slot_costs = {row["slot_cost"] for row in rows}
    assert len(slot_costs) == 3
    for slot_cost in slot_costs:
        found = [row for row in rows if row["slot_cost"] == slot_cost]
        fixed = {row["way"]: row["simulated"] for row in found if row["published"] is not None}
        adaptive = {row["way"]: row["simulated"] for row in found if row["published"] is None}
        assert len(fixed) == 5
        assert adaptive["adaptive, up to 3 passes, 4 slots"] > max(fixed.values())
        # The fifth slot makes a step of six tokens a request, which is dear. Append pays that price.
        assert adaptive["adaptive, up to 3 passes, 5 slots"] > 1.25 * fixed["MTP-3 + 2 n-gram"]


def test_costs_that_cannot_be_are_told() -> None:
    """Slots this dear leave nothing for a pass."""
    done = run("--slot-cost", "0.2")
    assert done.returncode == 1
    assert "pass" in done.stdout.partition("FAILED")[2]
