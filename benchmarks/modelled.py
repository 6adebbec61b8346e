"""Estimates of `static_cost.py` beside the times that `verify.py` has measured for the same work.

    python benchmarks/modelled.py STATIC.json MEASURED.json [--json FILE]

Both files are what `--json` of the two benchmarks wrote. A line is a method, a setting and a kind of rows, where both
have the same size of step. *ours* of `verify.py` is strategy `rejection`. The estimate is of the slowest request.
A measured time also has the few operations of torch that bring a call's arguments into the kernels' form.
"""

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import write_json
from rich.console import Console
from rich.table import Table

_NAMES = {"ours": "rejection"}
_DTYPE = "bfloat16"  # of verify.py's logits


@dataclass(frozen=True)
class Line:
    """One step, in microseconds."""

    method: str
    setting: str
    rows: str
    batch: int
    drafts: int
    vocab: int
    modelled_us: float
    measured_us: float

    @property
    def ratio(self) -> float:
        return self.measured_us / self.modelled_us


def lines(static: dict[str, Any], measured: dict[str, Any]) -> list[Line]:
    """The steps that both files have.

    Args:
        static: what `static_cost.py --json` wrote.
        measured: what `verify.py --json` wrote.
    """
    modelled = {}
    for step in static["steps"]:
        shape = step["shape"]
        if shape["dtype"] == _DTYPE:
            size = (shape["num_reqs"], shape["num_rows"] - 1, shape["vocab_size"])
            modelled[(step["method"], step["setting"], step["rows"], *size)] = step["us"]
    found = []
    for result in measured["results"]:
        method = _NAMES.get(result["method"], result["method"])
        size = (result["batch"], result["drafts"], result["vocab"])
        key = (method, result["setting"], result["logits"], *size)
        if key in modelled and result["median_us"] is not None:
            found.append(Line(*key, modelled[key], result["median_us"]))
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 if the files have no step in common."""
    parser = argparse.ArgumentParser(description="Static estimates beside measured times.")
    parser.add_argument("static", type=Path, help="of static_cost.py --json")
    parser.add_argument("measured", type=Path, help="of verify.py --json")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args(argv)
    static, measured = (json.loads(path.read_text()) for path in (args.static, args.measured))
    found = lines(static, measured)
    if not found:
        print(f"error: {args.static} and {args.measured} have no step in common", file=sys.stderr)
        return 1
    table = Table(title="microseconds a step: static estimate and measured median")
    for name in ("method", "setting", "rows", "batch", "K", "vocab", "estimate", "measured", "measured / estimate"):
        table.add_column(name, justify="left" if name in ("method", "setting", "rows") else "right")
    for line in found:
        size = (str(line.batch), str(line.drafts), f"{line.vocab:,}")
        times = (f"{line.modelled_us:.1f}", f"{line.measured_us:.1f}", f"{line.ratio:.2f}")
        table.add_row(line.method, line.setting, line.rows, *size, *times)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    middle = statistics.median(line.ratio for line in found)
    console.print(f"median of measured / estimate: {middle:.2f}; {measured['environment']['gpu'] or 'not on a GPU'}")
    if args.json:
        rows = [asdict(line) | {"ratio": line.ratio} for line in found]
        write_json(args.json, {"environment": measured["environment"], "median_ratio": middle, "steps": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
