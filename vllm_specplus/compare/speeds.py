"""Speeds of several contestants in turns: their ratios with intervals, and which of them to use."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Quantiles of Student's t at 0.975 for 1, 2, ... degrees of freedom, and the one of the normal distribution.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.960


class Interval(NamedTuple):
    """A ratio and its 95% confidence interval, which is None where one repeat has no spread."""

    value: float
    low: float | None
    high: float | None

    def is_above(self, limit: float) -> bool:
        """Whether the whole interval is."""
        return self.low is not None and self.low > limit


class Advice(NamedTuple):
    """Those to use somewhere, and a sentence about it without its full stop."""

    names: list[str]
    said: str


class Speeds:
    """Tokens per second of each repeat, by its number, of each name at each concurrency."""

    def __init__(self, by_setting: Mapping[tuple[str, int], Mapping[int, float]]) -> None:
        self._by_setting = by_setting

    def repeats(self, name: str, concurrency: int) -> Mapping[int, float]:
        """Tokens per second of each repeat; {} if nothing was measured."""
        return self._by_setting.get((name, concurrency), {})

    def median(self, name: str, concurrency: int) -> float | None:
        """Median tokens per second; None if nothing was measured."""
        repeats = self.repeats(name, concurrency)
        return statistics.median(repeats.values()) if repeats else None

    def ratio(self, name: str, other: str, concurrency: Sequence[int]) -> Interval | None:
        """How many times as fast one is as another, repeat by repeat; None without a repeat of both.

        Of several levels of concurrency it is the geometric mean.
        """
        by_level = [(self.repeats(name, level), self.repeats(other, level)) for level in concurrency]
        common = set.intersection(*({*mine} & {*others} for mine, others in by_level)) if by_level else set()
        logs = [
            statistics.fmean(math.log(mine[repeat] / others[repeat]) for mine, others in by_level)
            for repeat in sorted(common)
        ]
        return interval(logs) if logs else None

    def complete(self, names: Sequence[str], concurrency: Sequence[int]) -> tuple[list[int], list[str]]:
        """The levels of concurrency that were measured, before an interruption perhaps, and who ran at all of them."""
        levels = [level for level in concurrency if any(self.repeats(name, level) for name in names)]
        return levels, [name for name in names if levels and all(self.repeats(name, level) for level in levels)]

    def advice(self, fit: Sequence[str], concurrency: Sequence[int], baseline: str) -> Advice | None:
        """The fastest of those that are `fit`, and how sure that is; None if no two of them are complete."""
        levels, complete = self.complete(fit, concurrency)
        ratios = {name: self.ratio(name, complete[0], levels) for name in complete}
        gains = {name: ratio.value for name, ratio in ratios.items() if ratio}
        ranked = sorted(gains, key=lambda name: -gains[name])
        if len(ranked) < 2:
            return None
        best, second = ranked[:2]
        gain = self.ratio(best, baseline, levels)
        lead = self.ratio(best, second, levels)
        assert lead is not None
        worth = ""
        if gain is not None and baseline not in (best, second):
            worth = f", {gain.value:.2f} times as fast as {baseline}{_shown(gain)}"
        ahead = f"{lead.value:.2f} times as fast as {second}"
        if lead.low is None:
            return Advice([best], f"Use {best}{worth}: it was {ahead}, but one repeat cannot tell how sure that is")
        repeats = f"{len(self.repeats(best, levels[0]))} repeats"
        is_sure = lead.is_above(1.0)
        named = [best] if is_sure else [best, second]
        fastest = {level: max(complete, key=lambda name: self.median(name, level) or 0.0) for level in levels}
        exceptions = [f"{name} is fastest at concurrency {at}" for at, name in fastest.items() if name not in named]
        but = f"; but {' and '.join(exceptions)}" if exceptions else ""
        if is_sure:
            said = f"Use {best}{worth}: it is {ahead}{_shown(lead)}, in {repeats}"
        else:
            unsure = f"{repeats} cannot tell which is faster, {best} is {ahead}{_shown(lead)}"
            said = f"Use {best}{worth}, or {second}: {unsure}"
        return Advice([*named, *fastest.values()], said + but)


def interval(logs: Sequence[float]) -> Interval:
    """The mean of logarithms of ratios as a ratio, with Student's 95% interval."""
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Interval(math.exp(mean), None, None)
    degrees = len(logs) - 1
    # Beyond the table they fall to the normal distribution's nearly as 1 / degrees does.
    most = len(_T)
    quantile = _T[degrees - 1] if degrees <= most else _NORMAL + (_T[-1] - _NORMAL) * most / degrees
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _shown(ratio: Interval) -> str:
    return "" if ratio.low is None else f" (95% interval {ratio.low:.2f} to {ratio.high:.2f})"
