"""What was drafted and accepted in a run, by source."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_specplus.sources import SOURCES, UNFILLED


@dataclass(frozen=True)
class Counts:
    """Counts that only grow; the difference of two is what happened between them.

    num_drafts: how often drafts of a request were verified.
    drafted: draft tokens by source.
    accepted: accepted draft tokens by source, each a list by position among a step's slots.
    """

    num_drafts: int = 0
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, list[int]] = field(default_factory=dict)

    def __add__(self, other: "Counts") -> "Counts":
        return self._sum(other, 1)

    def __sub__(self, other: "Counts") -> "Counts":
        return self._sum(other, -1)

    def _sum(self, other: "Counts", sign: int) -> "Counts":
        drafted = {s: self.drafted.get(s, 0) + sign * other.drafted.get(s, 0) for s in (self.drafted | other.drafted)}
        accepted = {}
        for source in self.accepted | other.accepted:
            rows = self.accepted.get(source, []), other.accepted.get(source, [])
            length = max(map(len, rows))
            mine, others = ([*row, *[0] * (length - len(row))] for row in rows)
            accepted[source] = [a + sign * b for a, b in zip(mine, others, strict=True)]
        return Counts(self.num_drafts + sign * other.num_drafts, drafted, accepted)

    @property
    def num_drafted(self) -> int:
        """Draft tokens of all sources."""
        return sum(self.drafted.values())

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens of all sources."""
        return sum(map(sum, self.accepted.values()))

    @property
    def wasted(self) -> float | None:
        """The share of draft tokens that were rejected; None if nothing was drafted."""
        return 1 - self.num_accepted / self.num_drafted if self.num_drafted else None

    def accepted_by_position(self) -> list[float]:
        """How often the draft at each position was accepted, as a share of `num_drafts`."""
        length = max(map(len, self.accepted.values()), default=0)
        if not self.num_drafts:
            return []
        return [sum(row[i] for row in self.accepted.values() if i < len(row)) / self.num_drafts for i in range(length)]


def of_plugin(num_drafts: int, stats: dict[str, dict[str, list[int]]]) -> Counts:
    """Counts from the answer of a worker's ``specplus_stats``; slots that hold no draft are left out."""
    real = [source for source in stats["drafted"] if source != SOURCES[UNFILLED]]
    drafted = {source: sum(stats["drafted"][source]) for source in real}
    return Counts(num_drafts, drafted, {source: list(stats["accepted"][source]) for source in real})


def total(counts: Iterable[Counts]) -> Counts:
    """The sum of some counts."""
    return sum(counts, Counts())
