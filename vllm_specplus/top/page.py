"""The page: what a server has drafted in the last interval, and since its start."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from rich.console import Group
from rich.table import Table
from rich.text import Text

from vllm_specplus.sources import SOURCES, UNFILLED
from vllm_specplus.top.sample import ACCEPTED, DRAFTING_STEPS, RUNNING, STEPS, TOKENS, WAITING, Sample

_UNKNOWN = "-"
_NOTHING = Sample(0.0, Counter(), Counter(), Counter(), {})
_MOST_COLUMNS = 10


def page(url: str, total: Sample, last: Sample | None, problem: str = "") -> Group:
    """The page: 23 lines of 80 columns with four sources, the most that an engine has.

    Args:
        url: the server's.
        total: its counts since its start.
        last: those of the last interval; None if there are no two samples of one start.
        problem: why there is nothing newer; "" if these are the newest.
    """
    columns = _Column(last or _NOTHING, is_interval=True), _Column(total, is_interval=False)
    sources = [source for source in _sources(total) if source != SOURCES[UNFILLED]]
    return Group(
        _line(f"vllm-specplus top {url}", "bold"),
        _line(problem, "bold red") if problem else _requests(total),
        _faults(total, last),
        _line(),
        _speeds(columns, sources),
        _line(),
        _by_source(columns, _sources(total)),
        _line(),
        _by_position(columns, sources),
    )


def position_ranges(num_positions: int) -> list[range]:
    """Each position from 0; if they are more than ten, the first four, and then each time as many as before."""
    if num_positions <= _MOST_COLUMNS:
        return [range(i, i + 1) for i in range(num_positions)]
    ranges = [range(i, i + 1) for i in range(4)]
    while ranges[-1].stop < num_positions:
        ranges.append(range(ranges[-1].stop, min(2 * ranges[-1].stop, num_positions)))
    return ranges


@dataclass(frozen=True)
class _Column:
    """The counts of a stretch of time; those of an interval are shown a second."""

    sample: Sample
    is_interval: bool

    @property
    def title(self) -> str:
        if not self.is_interval:
            return "since start"
        return f"last {self.sample.time:.1f} s" if self.sample.time else "last interval"

    def amount(self, count: float | None) -> str:
        if not self.is_interval:
            return _count(count)
        return _UNKNOWN if count is None or not self.sample.time else f"{count / self.sample.time:,.1f}/s"

    def share(self, count: int, of: int) -> str:
        """An amount, and its percentage of another."""
        return f"{self.amount(count)}  {_percent(count, of):>4}"

    def drafts(self, sources: Collection[str], positions: range | None = None) -> tuple[int, int]:
        """Drafted and accepted tokens, at all positions by default."""
        drafted, accepted = (
            sum(n for (source, i), n in counts.items() if source in sources and (positions is None or i in positions))
            for counts in (self.sample.drafted, self.sample.accepted)
        )
        return drafted, accepted

    def metric(self, *names: str) -> float | None:
        """The sum of vLLM's metrics of these names; None if one is not known."""
        values = [self.sample.engine[name] for name in names if name in self.sample.engine]
        return sum(values) if len(values) == len(names) else None


def _sources(total: Sample) -> list[str]:
    """The sources that have drafted."""
    return list(dict.fromkeys(source for (source, _), count in total.drafted.items() if count))


def _requests(total: Sample) -> Text:
    running, waiting = (_count(total.engine.get(name)) for name in (RUNNING, WAITING))
    return _line(f"requests: {running} running, {waiting} waiting")


def _faults(total: Sample, last: Sample | None) -> Text:
    if not total.faults.total():
        return _line("faults: none")
    parts = ", ".join(f"{count:,} in {part}" for part, count in total.faults.items() if count)
    new = f" ({last.faults.total():,} new)" if last else ""
    return _line(f"faults: {parts}{new}", "bold red")


def _speeds(columns: tuple[_Column, ...], sources: list[str]) -> Table:
    table = _table("", *(column.title for column in columns))
    drafts = [(column, *column.drafts(sources)) for column in columns]
    table.add_row("tokens", *(c.amount(c.metric(TOKENS)) for c in columns))
    table.add_row("tokens per step", *(_ratio(c.metric(TOKENS), c.metric(*STEPS)) for c in columns))
    # A step gives one token beside its accepted drafts.
    lengths = (_ratio(c.metric(DRAFTING_STEPS, ACCEPTED), c.metric(DRAFTING_STEPS)) for c in columns)
    table.add_row("tokens per step with drafts", *lengths)
    table.add_row("drafts accepted", *(c.share(accepted, drafted) for c, drafted, accepted in drafts))
    table.add_row("drafts wasted", *(c.share(drafted - accepted, drafted) for c, drafted, accepted in drafts))
    return table


def _by_source(columns: tuple[_Column, ...], sources: list[str]) -> Table:
    table = _table("source", *("drafted", "accepted", "rate") * len(columns))
    for source in sources:
        drafts = [(column, *column.drafts([source])) for column in columns]
        cells = (
            (c.amount(drafted), c.amount(accepted), _percent(accepted, drafted)) for c, drafted, accepted in drafts
        )
        table.add_row(source, *chain.from_iterable(cells))
    return table


def _by_position(columns: tuple[_Column, ...], sources: list[str]) -> Table:
    """Shares of drafts accepted: of all sources in each stretch of time, then of each source since the start."""
    total = columns[-1]
    ranges = position_ranges(1 + max((i for _, i in total.sample.drafted), default=-1))
    names = (f"{r.start + 1}" if len(r) == 1 else f"{r.start + 1}-{r.stop}" for r in ranges)
    table = _table("accepted at position", *names)
    rows = [(column.title, column, sources) for column in columns] + [(f"  {s}", total, [s]) for s in sources]
    for name, column, chosen in rows:
        drafts = (column.drafts(chosen, positions) for positions in ranges)
        table.add_row(name, *(_percent(accepted, drafted) for drafted, accepted in drafts))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, no_wrap=True, justify="right")
    return table


def _line(text: str = "", style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _ratio(count: float | None, of: float | None) -> str:
    return f"{count / of:.2f}" if count is not None and of else _UNKNOWN


def _percent(count: int, of: int) -> str:
    return f"{count / of:.0%}" if of else _UNKNOWN


def _count(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:,.0f}" if value < 1e7 else f"{value / 1e6:,.1f}M"
