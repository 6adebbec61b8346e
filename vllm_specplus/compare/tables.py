"""The tables that the command prints."""

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_specplus.compare.measurements import Difference
from vllm_specplus.compare.runs import PARTS

_UNKNOWN = "-"


def show(console: Console, data: dict[str, Any], differences: list[Difference]) -> None:
    """Print the tables of speeds, of drafts and of times, then what went wrong, then the recommendation."""
    console.print(_speeds(data))
    if any(row["drafted"] for row in data["measurements"]):
        console.print(_drafts(data))
    if any(configuration["seconds"] for configuration in data["configurations"]):
        console.print(_times(data))
    for line in problems(data, differences):
        console.print(line, style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print(data["recommendation"], highlight=False, markup=False, soft_wrap=True)


def problems(data: dict[str, Any], differences: list[Difference]) -> Iterator[str]:
    """A line for each configuration that ended early and each text that differs, and one for an interrupt."""
    for configuration in data["configurations"]:
        if configuration["error"]:
            yield f"FAILED: {configuration['name']}: {configuration['error']}"
    yield from map(_described, differences)
    if data["interrupted"]:
        yield "Interrupted: the tables hold what was measured before."


def _described(d: Difference) -> str:
    best = ", ".join(f"{row.text!r} {row.logit:.4f}" for row in d.best) or "not known"
    expected, found = (repr(text) if text else "its end" for text in (d.expected, d.found))
    kind = "NEAR-TIE" if d.is_near_tie else "FAILED"
    why = "rounding may decide there" if d.is_near_tie else "a lossless configuration must give the same greedy text"
    return (
        f"{kind}: {d.configuration}, concurrency {d.concurrency}, prompt {d.prompt}, token {d.position}: {found} "
        f"instead of {expected}; the two best logits there: {best}; {why}"
    )


def _speeds(data: dict[str, Any]) -> Table:
    table = Table(title="tokens/s: median (lowest to highest)", box=SIMPLE)
    table.add_column("concurrency", justify="right")
    table.add_column("configuration")
    for name in ("tokens/s", f"times {data['baseline']} (95% interval)", "mean accepted length"):
        table.add_column(name, justify="right")
    for level, rows in _by_level(data):
        fastest = max((row["tokens_per_second"] or 0 for row in rows), default=0)
        for row in rows:
            speed, is_fastest = _UNKNOWN, row["tokens_per_second"] and row["tokens_per_second"] == fastest
            if row["tokens_per_second"]:
                speed = f"{row['tokens_per_second']:,.1f} ({row['lowest']:,.1f} to {row['highest']:,.1f})"
            ratio = _number(row["ratio"])
            if row["ratio_low"] is not None:
                ratio += f" ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
            length = _number(row["mean_accepted_length"])
            name = f"{escape(row['configuration'])}{' FAILED' if row['error'] else ''}"
            table.add_row(str(level), name, speed, ratio, length, style="bold" if is_fastest else None)
        table.add_section()
    return table


def _drafts(data: dict[str, Any]) -> Table:
    table = Table(title="drafts", box=SIMPLE)
    table.add_column("concurrency", justify="right")
    for name in ("configuration", "accepted of drafted, by source", "% accepted by position"):
        table.add_column(name)
    table.add_column("wasted", justify="right")
    for level, rows in _by_level(data):
        for row in rows:
            if row["drafted"]:
                sources = ", ".join(
                    f"{source} {sum(row['accepted_by_source'][source])} of {drafted}"
                    for source, drafted in row["drafted_by_source"].items()
                    if drafted
                )
                positions = " ".join(f"{100 * share:.0f}" for share in row["accepted_by_position"])
                wasted = f"{100 * row['wasted']:.0f}%"
                table.add_row(str(level), escape(row["configuration"]), sources, positions, wasted)
        table.add_section()
    return table


def _times(data: dict[str, Any]) -> Table:
    table = Table(title="where the time goes, one request at a time", box=SIMPLE)
    table.add_column("configuration")
    for part in PARTS:
        table.add_column(part, justify="right")
    for configuration in data["configurations"]:
        if configuration["seconds"]:
            whole = sum(configuration["seconds"].values())
            shares = (f"{100 * configuration['seconds'][part] / whole:.0f}%" for part in PARTS)
            table.add_row(escape(configuration["name"]), *shares)
    return table


def _by_level(data: dict[str, Any]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for level in data["settings"]["concurrency"]:
        yield level, [row for row in data["measurements"] if row["concurrency"] == level]


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.2f}"
