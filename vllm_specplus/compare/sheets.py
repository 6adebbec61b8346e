"""What the tables of the terminal and of the report hold."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_specplus.compare.runs import PARTS

_UNKNOWN = "-"


@dataclass(frozen=True)
class Column:
    """A column's name, and whether it holds numbers."""

    name: str
    is_number: bool = True


@dataclass(frozen=True)
class Row:
    """A row's cells.

    is_best: whether it is the fastest of its group.
    ends_group: whether the next row is of another concurrency.
    """

    cells: list[str]
    is_best: bool = False
    ends_group: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table as text."""

    title: str
    columns: list[Column]
    rows: list[Row]


def speeds(data: dict[str, Any]) -> Sheet:
    """Speeds, ratios and lengths; a row for each configuration at each concurrency, failed ones too."""
    columns = [Column("concurrency"), Column("configuration", is_number=False), Column("tokens/s")]
    columns += [Column(f"times {data['baseline']} (95% interval)"), Column("mean accepted length")]
    rows = []
    for level, found in _by_level(data):
        fastest = max((row["tokens_per_second"] or 0 for row in found), default=0)
        for row in found:
            speed, is_fastest = _UNKNOWN, False
            if row["tokens_per_second"]:
                speed = f"{row['tokens_per_second']:,.1f} ({row['lowest']:,.1f} to {row['highest']:,.1f})"
                is_fastest = row["tokens_per_second"] == fastest
            ratio = _number(row["ratio"])
            if row["ratio_low"] is not None:
                ratio += f" ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
            name = f"{row['configuration']}{' FAILED' if row['error'] else ''}"
            cells = [str(level), name, speed, ratio, _number(row["mean_accepted_length"])]
            rows.append(Row(cells, is_fastest, row is found[-1]))
    return Sheet("tokens/s: median (lowest to highest)", columns, rows)


def drafts(data: dict[str, Any]) -> Sheet:
    """What was drafted and accepted; a row for each configuration that drafted, at each concurrency."""
    texts = ("configuration", "accepted of drafted, by source", "% accepted by position")
    columns = [Column("concurrency"), *(Column(name, is_number=False) for name in texts), Column("wasted")]
    rows = []
    for level, every in _by_level(data):
        found = [row for row in every if row["drafted"]]
        for row in found:
            sources = ", ".join(
                f"{source} {sum(row['accepted_by_source'][source])} of {drafted}"
                for source, drafted in row["drafted_by_source"].items()
                if drafted
            )
            positions = " ".join(f"{100 * share:.0f}" for share in row["accepted_by_position"])
            cells = [str(level), row["configuration"], sources, positions, f"{100 * row['wasted']:.0f}%"]
            rows.append(Row(cells, ends_group=row is found[-1]))
    return Sheet("drafts", columns, rows)


def times(data: dict[str, Any]) -> Sheet:
    """The time of a token by a step's parts; a row for each configuration whose time was split."""
    rows = []
    for configuration in data["configurations"]:
        if configuration["seconds"]:
            whole = sum(configuration["seconds"].values())
            num_tokens = sum(map(len, data["texts"][configuration["name"]].values()))
            parts = (configuration["seconds"][part] for part in PARTS)
            cells = (f"{1000 * part / num_tokens:.1f} ({100 * part / whole:.0f}%)" for part in parts)
            rows.append(Row([configuration["name"], *cells]))
    columns = [Column("configuration", is_number=False), *map(Column, PARTS)]
    return Sheet("where the time goes, one request at a time: ms a token, and share", columns, rows)


def problems(data: dict[str, Any]) -> Iterator[str]:
    """A line for each configuration that ended early and each text that differs, and one for an interrupt."""
    for configuration in data["configurations"]:
        if configuration["error"]:
            yield f"FAILED: {configuration['name']}: {configuration['error']}"
    yield from map(_difference_line, data["differences"])
    if data["interrupted"]:
        yield "Interrupted: the tables hold what was measured before."


def _difference_line(d: dict[str, Any]) -> str:
    best = ", ".join(f"{row['text']!r} {row['logit']:.4f}" for row in d["best"]) or "not known"
    expected, found = (repr(text) if text else "its end" for text in (d["expected"], d["found"]))
    kind, why = "FAILED", "a lossless configuration must give the same greedy text"
    if d["is_near_tie"]:
        kind, why = "NEAR-TIE", "rounding may decide there"
    elif not d["best"]:
        kind, why = "NOT JUDGED", "without them rounding cannot be told from a defect"
    return (
        f"{kind}: {d['configuration']}, concurrency {d['concurrency']}, prompt {d['prompt']}, token {d['position']}: "
        f"{found} instead of {expected}; the two best logits there: {best}; {why}"
    )


def _by_level(data: dict[str, Any]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for level in data["settings"]["concurrency"]:
        yield level, [row for row in data["measurements"] if row["concurrency"] == level]


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.2f}"
