"""Cost of verifying drafts on a GPU: our kernel, vLLM's V2 path, FlashInfer, plain torch.

    python benchmarks/verify.py [--vllm FOLDER] [--batches 1,...] [--json FILE] [--csv FILE]
    TRITON_INTERPRET=1 python benchmarks/verify.py --tiny    # on a CPU: does it run, is it right

One cell is a batch of requests with K drafts each, so batch x (K + 1) rows of bfloat16 logits. All requests have the
same sampling parameters, with temperature 0.8 unless greedy. `verify_cases.py` makes rows and drafts, and checks
outputs; `verify_peers.py` calls vLLM and FlashInfer. The default is `peaked` rows everywhere, and `flat` ones too in
the goals' cell.

*Ours* is strategy `rejection`, the rule of vLLM's path; `target_match` and `topp` are our other
rules for the same rows. *torch* is our torch backend, `rejection`. Under greedy all strategies are one.

Every method is checked before it is timed, on batches of 16 requests in all (on a CPU on one batch). A method
that fails shows FAILED and no number, and the run exits with 1. A method that cannot run here shows a dash and a
footnote.

*Times.* Median and quartiles of replays of a captured CUDA graph, each between two CUDA events. So the device is
timed, not the launching from Python. The torch backend waits for the device, which no graph can hold; it is called
instead. Before each replay or call a read of 256 MiB fills the L2 cache with something else. On a CPU one call is timed
by a plain clock, which means nothing.

*Host.* Median time until a call returns, with the device idle before it: Python and the launches. An engine pays it in
each step, unless it runs ahead of the device. The torch backend's includes its waiting.

*Floor*: rows x vocabulary x element size over the device's bandwidth. A copy of 1 GiB within the device measures it in
the same run (bytes read plus bytes written). GB/s is the same bytes over the method's time.
"""

import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import environment, gpu_environment, write_json
from gpu_clock import DEVICE, INTERPRETED, Clock
from rich.console import Console
from rich.table import Table
from verify_cases import BACKEND, MOST_READS, SETTINGS, Case, WrongOutputError, check_same, make_case, ours
from verify_peers import FlashInferPath, UnavailableError, find_vllm, vllm_path, vllm_version

HEADLINE, VLLM = "ours", "vLLM"
STRATEGIES = {HEADLINE: "rejection", "target_match": "target_match", "topp": "topp"}
OURS = (*STRATEGIES, "torch")
# The table's last columns, and how their numbers are written.
LAST_COLUMNS = {
    "GB/s": "{:,.0f}",
    "x floor": "{:.2f}",
    "vLLM / ours": "{:.1f}x",
    "ours, host": "{:.0f}",
    "vLLM, host": "{:.0f}",
}
GOAL_SPEEDUP = 5.0
GOAL_SIZE = (64, 4, 151_936)
CHECKED_REQUESTS = 16
RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    *("gpu", "cuda", "torch", "triton", "vllm", "flashinfer", "git_commit", "copy_gb_per_s", "logits"),
    *("setting", "batch", "drafts", "vocab", "rows", "method", "median_us", "lower_quartile_us", "upper_quartile_us"),
    *("graph", "calls", "host_us", "gb_per_s", "floor_us", "ratio_to_floor", "rounded", "note"),
)


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    logits: str
    setting: str
    batch: int
    drafts: int
    vocab: int

    @property
    def rows(self) -> int:
        return self.batch * (self.drafts + 1)

    def case(self, device: str, seed: int) -> Case:
        return make_case(self.logits, SETTINGS[self.setting], self.batch, self.drafts, self.vocab, device, seed)


@dataclass(frozen=True)
class Result:
    """One method in one cell; without a median, `note` says why."""

    cell: Cell
    method: str
    floor_us: float
    median_us: float | None = None
    lower_quartile_us: float | None = None
    upper_quartile_us: float | None = None
    graph: bool = False  # whether replays of a CUDA graph were timed, and not calls
    calls: int = 0
    host_us: float | None = None
    rounded: int = 0  # requests that were checked and differed by rounding
    note: str = ""

    @property
    def ratio_to_floor(self) -> float | None:
        return None if self.median_us is None else self.median_us / self.floor_us

    def gb_per_s(self, copy_gb_per_s: float) -> float | None:
        return None if self.median_us is None else copy_gb_per_s * self.floor_us / self.median_us

    @property
    def has_failed(self) -> bool:
        return self.note.startswith("FAILED")


class OurPath:
    """`verify_draft_tokens` with one strategy and backend."""

    def __init__(self, case: Case, strategy: str, backend: str) -> None:
        self.case, self.strategy = case, "greedy" if case.setting.is_greedy else strategy
        if case.setting.is_greedy and strategy != "rejection":
            raise UnavailableError("under greedy every strategy is one")
        self.run = ours(case, self.strategy, backend)

    def check(self, output: Any) -> int:
        return check_same(self.case, self.strategy, output)


def methods(vllm_root: Path | str) -> dict[str, Callable[[Case], Any]]:
    """Each column's name and factory: of a case it makes an object with `run` and `check`."""
    return {
        **{name: partial(OurPath, strategy=strategy, backend=BACKEND) for name, strategy in STRATEGIES.items()},
        VLLM: vllm_path(vllm_root),
        "FlashInfer chain": lambda case: FlashInferPath(case, chain=True),
        "FlashInfer rows": lambda case: FlashInferPath(case, chain=False),
        "torch": lambda case: OurPath(case, "rejection", "torch"),
    }


def measure(cell: Cell, method: str, make: Callable[[Case], Any], clock: Clock) -> Result:
    """Check one method in one cell, then time it."""
    rounded, floor = 0, cell.rows * cell.vocab * torch.bfloat16.itemsize / clock.copy_gb_per_s / 1e3
    try:
        for seed in range(max(1, CHECKED_REQUESTS // cell.batch) if clock.on_gpu else 1):
            path = make(cell.case(DEVICE, seed))
            rounded += path.check(path.run())
        host_us = clock.host_us(path.run)
        in_graph = clock.on_gpu and method != "torch"
        times = clock.replays(path.run, path.check) if in_graph else clock.calls(path.run)
    except UnavailableError as error:
        return Result(cell, method, floor, note=str(error))
    except WrongOutputError as error:
        return Result(cell, method, floor, note=f"FAILED: {error}")
    except Exception as error:
        # A peer of another version or one that cannot be compiled here; of ours, any error is a failure.
        return Result(cell, method, floor, note=f"{'FAILED' if method in OURS else 'it'} raised {error!r}")
    low, median, high = np.percentile(times, [25, 50, 75]).tolist()
    return Result(cell, method, floor, median, low, high, in_graph, len(times), host_us, rounded)


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    for vocab in args.vocabs:
        for drafts in args.drafts:
            for batch in args.batches:
                at_goal = (batch, drafts, vocab) == GOAL_SIZE or args.tiny
                for logits in args.logits or (("peaked", "flat") if at_goal else ("peaked",)):
                    for setting in args.settings:
                        yield Cell(logits, setting, batch, drafts, vocab)


def goals(results: list[Result]) -> list[dict[str, Any]]:
    """The goals, as far as what was measured allows: name, value, limit, met."""
    by_method = {(r.cell, r.method): r for r in results if r.median_us is not None}
    rows = []
    for (cell, method), result in by_method.items():
        if method not in STRATEGIES or (cell.batch, cell.drafts, cell.vocab) != GOAL_SIZE:
            continue
        where = f"{cell.setting}, {cell.logits}"
        ratio, limit = result.ratio_to_floor, MOST_READS[STRATEGIES[method]][cell.setting]
        rows.append({"name": f"{method} / floor, {where}", "value": ratio, "limit": limit, "met": ratio <= limit})
        peer = by_method.get((cell, VLLM))
        if peer and SETTINGS[cell.setting].top_p is not None:
            ratio = peer.median_us / result.median_us
            name = f"vLLM / {method}, {where}"
            rows.append({"name": name, "value": ratio, "limit": GOAL_SPEEDUP, "met": ratio >= GOAL_SPEEDUP})
    return rows


def show(console: Console, results: list[Result], clock: Clock) -> None:
    """Print a line for each cell, and the reasons for what is missing."""
    names = list(dict.fromkeys(r.method for r in results))
    on = "replays of CUDA graphs" if clock.on_gpu else "interpreter: times mean nothing"
    table = Table(title=f"microseconds per batch: median (quartiles), {on}")
    for name in ("logits", "setting", "batch", "K", "vocab", "floor", *names, *LAST_COLUMNS):
        table.add_column(name, justify="left" if name in ("logits", "setting") else "right")
    notes: list[str] = []
    by_cell: dict[Cell, dict[str, Result]] = {}
    for result in results:
        by_cell.setdefault(result.cell, {})[result.method] = result
        if result.note and result.note not in notes:
            notes.append(result.note)
    for cell, row in by_cell.items():
        main, peer = row[HEADLINE], row.get(VLLM)
        size = (f"{cell.batch}", f"{cell.drafts}", f"{cell.vocab:,}", f"{main.floor_us:.1f}" if clock.on_gpu else "-")
        gb = ratio = against = None
        if clock.on_gpu and main.median_us is not None:
            gb, ratio = main.gb_per_s(clock.copy_gb_per_s), main.ratio_to_floor
            against = peer.median_us / main.median_us if peer and peer.median_us is not None else None
        values = (gb, ratio, against, main.host_us, peer.host_us if peer else None)
        ratios = [
            "-" if value is None else text.format(value)
            for text, value in zip(LAST_COLUMNS.values(), values, strict=True)
        ]
        table.add_row(cell.logits, cell.setting, *size, *(entry(row.get(name), notes) for name in names), *ratios)
    console.print(table)
    for i, note in enumerate(notes, 1):
        console.print(f"[{i}] {note}", markup=False)


def entry(result: Result | None, notes: list[str]) -> str:
    if result is None:
        return ""
    if result.median_us is None:
        return f"{'FAILED' if result.has_failed else '-'} ({notes.index(result.note) + 1})"
    return f"{result.median_us:.1f} ({result.lower_quartile_us:.1f}-{result.upper_quartile_us:.1f})"


def records(results: list[Result], about: dict[str, Any], clock: Clock) -> list[dict[str, Any]]:
    """One flat row for each result, with the columns of the CSV file."""
    shared = {name: about["packages"].get(name) for name in ("torch", "triton", "vllm")}
    shared |= {"flashinfer": about["packages"]["flashinfer-python"]}
    shared |= {name: about[name] for name in ("gpu", "cuda", "git_commit", "copy_gb_per_s")}
    rows = []
    for r in results:
        own = asdict(r) | asdict(r.cell) | {"rows": r.cell.rows, "ratio_to_floor": r.ratio_to_floor}
        own["gb_per_s"] = r.gb_per_s(clock.copy_gb_per_s)
        rows.append({name: (shared | own)[name] for name in COLUMNS})
    return rows


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def choice(allowed: list[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            if unknown := set(text.split(",")) - set(allowed):
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; allowed: {', '.join(allowed)}")
            return text.split(",")

        return parse

    parser = argparse.ArgumentParser(description="Cost of verifying drafts.")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--batches", type=sizes, help="default 1,8,64,256")
    parser.add_argument("--drafts", type=sizes, help="drafts per request; default 1,4,8")
    parser.add_argument("--vocabs", type=sizes, help="default 32000,128256,151936")
    parser.add_argument("--settings", type=choice(list(SETTINGS)), default=list(SETTINGS), help=", ".join(SETTINGS))
    parser.add_argument("--logits", type=choice(["peaked", "flat"]), help="default peaked, at the goals' size both")
    parser.add_argument("--methods", type=choice(list(methods(""))), help="default all; the first is always run")
    parser.add_argument("--vllm", type=Path, help="folder that holds vLLM's files, vllm/...; default the installed")
    parser.add_argument("--git-commit", help="where the tree is a copy without git")
    parser.add_argument("--csv", type=Path, help="default on a GPU: benchmarks/results/verify-GPU.csv")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args(argv)
    args.batches = args.batches or ([1, 2] if args.tiny else [1, 8, 64, 256])
    args.drafts = args.drafts or ([1, 2] if args.tiny else [1, 4, 8])
    args.vocabs = args.vocabs or ([320] if args.tiny else [32_000, 128_256, 151_936])
    if DEVICE == "cpu" and not INTERPRETED:
        parser.error("there is no GPU: set TRITON_INTERPRET=1, and take --tiny")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a method is wrong."""
    args = parse_args(argv)
    about = environment("torch", "triton", "vllm", "flashinfer-python") | gpu_environment()
    try:
        vllm_root: Path | str = find_vllm(args.vllm)
        about["packages"]["vllm"] = vllm_version(vllm_root)
    except UnavailableError as error:
        vllm_root = str(error)
    clock = Clock(DEVICE)
    about |= {"git_commit": args.git_commit or about["git_commit"], "copy_gb_per_s": clock.copy_gb_per_s}
    chosen = {name: make for name, make in methods(vllm_root).items() if name in (HEADLINE, *(args.methods or [name]))}
    slug = re.sub(r"[^a-z0-9]+", "-", (about["gpu"] or "").lower()).strip("-")
    csv_path = args.csv or (RESULTS / f"verify-{slug}.csv" if clock.on_gpu else None)
    results: list[Result] = []
    for cell in cells(args):
        print(*asdict(cell).values(), file=sys.stderr, flush=True)
        results += [measure(cell, name, make, clock) for name, make in chosen.items()]
        # As they grow, so that a run that is cut off leaves what it measured.
        rows = records(results, about, clock)
        if csv_path:
            write_csv(csv_path, rows)
        if args.json:
            write_json(args.json, {"environment": about, "goals": goals(results), "results": rows})

    console = Console(width=None if sys.stdout.isatty() else 240)
    show(console, results, clock)
    for row in goals(results):
        verdict = "met" if row["met"] else "not met"
        console.print(f"{row['name']}: {row['value']:.2f} (goal {row['limit']}): {verdict}")
    console.print(f"{about['gpu'] or about['cpu']}; copy {clock.copy_gb_per_s:,.0f} GB/s; {about['packages']}")
    return int(any(r.has_failed for r in results))


if __name__ == "__main__":
    sys.exit(main())
