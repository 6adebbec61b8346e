"""The tables of `static_cost.py`, and the goals that its estimates are compared with."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from static.machine import MACHINE, assumptions
from static.model import LaunchCost, StepCost
from static.steps import DRAFTS, MANY_DRAFTS, ROWS, STRATEGIES, VLLM, Shape
from verify_cases import MOST_READS, SETTINGS

HEAD = "static estimate"
LEAST_SPEEDUP = 5.0  # over vLLM's path, where filters apply
ACCEPTING = "accept_greedy_kernel", "judge_kernel", "emit_kernel"
MOST_ACCEPT_US = 5.0  # of each of them, at 16 drafts
MOST_PATH_US = 100.0  # of any program of a narrow kernel, whatever the row and the setting


@dataclass(frozen=True)
class Goal:
    """A number, and its limit: the most it may be, or the least."""

    name: str
    limit: float
    value: float
    is_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.is_least else self.value <= self.limit


def goals(costs: list[StepCost]) -> Iterator[Goal]:
    """The goals, as far as the steps that were estimated tell."""
    of_rows = [cost for cost in costs if cost.step.rows in ROWS and not cost.step.has_many_drafts]
    for method, limits in MOST_READS.items():
        for setting, limit in limits.items():
            # Of the slowest request, and of the worse of both kinds of rows.
            found = [cost for cost in of_rows if _stands_for(cost, method, setting)]
            if found:
                yield Goal(f"{method}, {setting}: times the floor", limit, max(map(_ratio, found)))
    peers = {(cost.step.setting, cost.step.rows): cost.us for cost in of_rows if cost.step.method == VLLM}
    for method in STRATEGIES:
        for setting in (name for name, setting in SETTINGS.items() if setting.top_p is not None):
            found = [cost for cost in of_rows if _stands_for(cost, method, setting)]
            ratios = [peers[setting, cost.step.rows] / cost.us for cost in found if (setting, cost.step.rows) in peers]
            if ratios:
                yield Goal(f"vLLM / {method}, {setting}", LEAST_SPEEDUP, min(ratios), is_least=True)
    for cost in costs:
        if cost.step.rows == "certain":
            name = f"{cost.step.method}, {cost.step.setting}: us of each kernel that accepts, {MANY_DRAFTS} drafts"
            yield Goal(name, MOST_ACCEPT_US, max(launch.us for launch in cost.launches if launch.name in ACCEPTING))
    paths = [
        (launch.us, cost.step.name) for cost in costs if cost.step.method in STRATEGIES for launch in _narrow(cost)
    ]
    if paths:
        longest, name = max(paths)
        yield Goal(f"us of the longest narrow kernel: {name}", MOST_PATH_US, longest)


def _stands_for(cost: StepCost, method: str, setting: str) -> bool:
    step = cost.step
    return step.setting == setting and (step.method == method or (step.is_of_all_strategies and method in STRATEGIES))


def _ratio(cost: StepCost) -> float:
    return cost.us / cost.floor_us


def _narrow(cost: StepCost) -> list[LaunchCost]:
    return [launch for launch in cost.launches if not launch.per_logit]


def show(console: Console, shape: Shape, num_replayed: int, costs: list[StepCost]) -> None:
    """Print all tables."""
    size = f"{shape.num_reqs} requests x {shape.num_rows} rows x {shape.vocab_size:,} {shape.dtype}"
    size += f", {min(num_replayed, shape.num_reqs)} requests replayed"
    floor = f"the floor is {MACHINE.memory_us(shape.logits_bytes):.1f} us"
    console.print(_table("assumptions", 2, (), assumptions().items(), show_header=False))
    console.print(f"{HEAD}: {size}; {floor}", highlight=False)
    found = (
        [goal.name, f"{goal.limit:g}", f"{goal.value:.2f}", "met" if goal.met else "not met"] for goal in goals(costs)
    )
    console.print(_table("goals", 1, ("goal", "limit", "estimate", ""), found))
    console.print(_table("steps", 1, _STEP_COLUMNS, _step_lines(costs)))
    console.print(_table(_KERNELS, 2, _KERNEL_COLUMNS, _kernel_lines(costs)))


_STEP_COLUMNS = ("step", "launches", "us, mean", "us, slowest", "x floor", "vLLM / this")
_KERNELS = "launches, instructions of a thread per logit by pipe, and microseconds"
_PIPES = ("fma", "imad", "alu", "xu", "lsu")
_KERNEL_COLUMNS = (
    *("step", "kernel", "programs", "warps", "regs", "spilled", "per SM", "MB", "per logit", *_PIPES, "rest"),
    *("memory", "issue", "pipe", "latency", "(mean)", "us"),
)


def _table(
    title: str, num_words: int, columns: tuple[str, ...], lines: Iterable[Iterable[str]], show_header: bool = True
) -> Table:
    """A table whose first columns hold words, and all others numbers."""
    table = Table(title=f"{HEAD}: {title}", show_header=show_header)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < num_words else "right")
    for line in lines:
        table.add_row(*line)
    return table


def _step_lines(costs: list[StepCost]) -> Iterator[list[str]]:
    peers = {(cost.step.setting, cost.step.rows): cost.us for cost in costs if cost.step.method == VLLM}
    for cost in costs:
        line = [cost.step.name, str(cost.num_launches), f"{cost.mean_us:.1f}", f"{cost.us:.1f}"]
        ratio = "" if cost.step.method == DRAFTS else f"{_ratio(cost):.2f}"
        peer = peers.get((cost.step.setting, cost.step.rows)) if cost.step.method != VLLM else None
        yield [*line, ratio, f"{peer / cost.us:.1f}" if peer else ""]


def _kernel_lines(costs: list[StepCost]) -> Iterator[list[str]]:
    """A line for each launch; of equal kernels in one setting only that of the slower rows."""
    slower: dict[tuple[str, str, int, int], tuple[StepCost, LaunchCost]] = {}
    for cost in costs:
        for i, launch in enumerate(cost.launches):
            key = cost.step.method, cost.step.setting, cost.step.shape.num_rows, i
            if key not in slower or launch.us > slower[key][1].us:
                slower[key] = cost, launch
    for cost, launch in slower.values():
        parts = [launch.per_logit.get(pipe, 0.0) for pipe in _PIPES]
        total = sum(launch.per_logit.values())
        per_logit = [f"{x:.1f}" for x in (total, *parts, total - sum(parts))] if launch.per_logit else ["-"] * 7
        sizes = (launch.programs, launch.num_warps, launch.registers, launch.spilled_bytes, launch.programs_per_sm)
        times = (
            launch.memory_us,
            launch.issue_us,
            launch.pipe_us,
            launch.latency_us,
            launch.mean_latency_us,
            launch.us,
        )
        cells = [f"{x:.1f}" for x in times]
        cells[2] += f" {launch.busiest_pipe}"
        yield [cost.step.name, launch.name, *map(str, sizes), f"{launch.num_bytes / 1e6:.1f}", *per_logit, *cells]
