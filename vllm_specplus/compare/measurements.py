"""All runs, and what they say: speeds, ratios with their intervals, accepted drafts, differing texts."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_specplus.compare.configurations import Configuration
from vllm_specplus.compare.counts import Counts, total
from vllm_specplus.compare.runs import Best, Profile, Run

# Quantiles of Student's t at 0.975 for 1, 2, ... degrees of freedom, and the one of the normal distribution.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.960
# Gaps of logits, as shares of the larger one, that rounding explains.
_ROUNDING = {"float32": 1e-5, "float16": 2**-10, "bfloat16": 2**-7}

_SAMPLES_WRONGLY = (
    'is left out, as vLLM\'s own verification of sampled requests is wrong on a CPU: add "verify_strategy": "rejection"'
)


class Interval(NamedTuple):
    """A ratio and its 95% confidence interval, which is None where one repeat has no spread."""

    value: float
    low: float | None
    high: float | None

    def is_above(self, limit: float) -> bool:
        """Whether the whole interval is."""
        return self.low is not None and self.low > limit


@dataclass(frozen=True)
class Difference:
    """A place where a greedy answer leaves the baseline's.

    prompt: the prompt's name. position: the place in the answer, in tokens.
    expected, found: the tokens there, as text; "" for an answer that has ended.
    best: the baseline's two best tokens there; empty where they are not known.
    is_near_tie: whether rounding may decide between the two tokens.
    """

    configuration: str
    concurrency: int
    prompt: str
    position: int
    expected: str
    found: str
    best: list[Best]
    is_near_tie: bool


@dataclass
class Measurements:
    """What has been measured so far.

    runs: by configuration's name and concurrency, the run of each repeat by its number.
    failures: by configuration's name, the line that tells why it has no more runs.
    sample_wrongly: the names of those whose sampled answers are wrong.
    """

    configurations: list[Configuration]
    concurrency: list[int]
    runs: dict[tuple[str, int], dict[int, Run]] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    sample_wrongly: set[str] = field(default_factory=set)
    differences: list[Difference] = field(default_factory=list)
    is_interrupted: bool = False

    @property
    def baseline(self) -> str:
        """The name of the first configuration."""
        return self.configurations[0].name

    def add(self, name: str, concurrency: int, repeat: int, run: Run) -> None:
        """Add one repeat of a configuration at a concurrency."""
        self.runs.setdefault((name, concurrency), {})[repeat] = run

    def speeds(self, name: str, concurrency: int) -> dict[int, float]:
        """Tokens per second of each repeat."""
        return {repeat: run.tokens_per_second for repeat, run in self.runs.get((name, concurrency), {}).items()}

    def median(self, name: str, concurrency: int) -> float | None:
        """Median tokens per second; None if nothing was measured."""
        speeds = self.speeds(name, concurrency)
        return statistics.median(speeds.values()) if speeds else None

    def counts(self, name: str, concurrency: int) -> Counts:
        """Drafts of all repeats."""
        return total(run.counts for run in self.runs.get((name, concurrency), {}).values())

    def mean_accepted_length(self, name: str, concurrency: int) -> float | None:
        """Tokens of a step of a request, without the step of its prompt; None if there was no other."""
        runs = self.runs.get((name, concurrency), {}).values()
        steps = sum(run.num_steps for run in runs)
        return sum(run.num_step_tokens for run in runs) / steps if steps else None

    def ratio(self, name: str, other: str, concurrency: Sequence[int]) -> Interval | None:
        """How many times as fast a configuration is as another, repeat by repeat; None without a repeat of both.

        Of several levels of concurrency it is the geometric mean.
        """
        by_level = [(self.speeds(name, level), self.speeds(other, level)) for level in concurrency]
        common = set.intersection(*({*mine} & {*others} for mine, others in by_level)) if by_level else set()
        logs = [
            statistics.fmean(math.log(mine[repeat] / others[repeat]) for mine, others in by_level)
            for repeat in sorted(common)
        ]
        return interval(logs) if logs else None

    def defective(self) -> set[str]:
        """The configurations with a wrong text that rounding does not explain."""
        return {difference.configuration for difference in self.differences if not difference.is_near_tie}


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


def is_near_tie(best: Sequence[Best], token_ids: tuple[int | None, int | None], dtype: str) -> bool:
    """Whether two tokens are the two best, with logits that rounding may swap."""
    if len(best) < 2 or {row.token_id for row in best} != set(token_ids):
        return False
    first, second = (row.logit for row in best)
    return first - second <= _ROUNDING.get(dtype, _ROUNDING["float32"]) * max(abs(first), abs(second), 1.0)


def recommendation(measurements: Measurements, *, samples: bool) -> str:
    """One sentence: which configuration to use, and how sure that is.

    One whose text at temperature 0 is not the target's is for debugging, and never recommended. Nor is one whose
    sampled answers are wrong.

    Args:
        samples: whether the answers were sampled. Then a lossy configuration is said to be that.
    """
    named, said = _best(measurements)
    losses = {c.name: c.loss for c in measurements.configurations if c.loss and c.name in named and samples}
    notes = [f"{name} is lossy: {loss}" for name, loss in losses.items()]
    wrong = [c.name for c in measurements.configurations if c.name in measurements.sample_wrongly]
    notes += [f"{name} {_SAMPLES_WRONGLY}" for name in wrong]
    return "; ".join([said, *notes]) + "."


def _best(measurements: Measurements) -> tuple[list[str], str]:
    """The names of the configurations to use somewhere, and the sentence without its full stop."""
    # After Ctrl-C some levels may be missing.
    unfit = measurements.defective() | measurements.sample_wrongly | {*measurements.failures}
    sound = [c.name for c in measurements.configurations if c.name not in unfit and c.keeps_greedy_text]
    levels = [level for level in measurements.concurrency if any(measurements.speeds(name, level) for name in sound)]
    complete = [name for name in sound if levels and all(measurements.speeds(name, level) for level in levels)]
    if not complete:
        return [], "No configuration can be recommended: none that is fit ran to its end"
    ratios = {name: measurements.ratio(name, complete[0], levels) for name in complete}
    gains = {name: ratio.value for name, ratio in ratios.items() if ratio}
    ranked = sorted(gains, key=lambda name: -gains[name])
    if not ranked:
        return ranked, "No repeat is complete"
    if len(ranked) == 1:
        others = {c.name for c in measurements.configurations} - {*ranked}
        lack = "ran to its end" if others <= {*measurements.failures} else "is fit"
        return ranked, f"Use {ranked[0]}: no other configuration {lack}"
    best, second = ranked[:2]
    gain = measurements.ratio(best, measurements.baseline, levels)
    lead = measurements.ratio(best, second, levels)
    assert lead is not None
    worth = ""
    if gain is not None and measurements.baseline not in (best, second):
        worth = f", {gain.value:.2f} times as fast as {measurements.baseline}{_interval(gain)}"
    ahead = f"{lead.value:.2f} times as fast as {second}"
    if lead.low is None:
        return [best], f"Use {best}{worth}: it was {ahead}, but one repeat cannot tell how sure that is"
    repeats = f"{len(measurements.speeds(best, levels[0]))} repeats"
    if not lead.is_above(1.0):
        unsure = f"{repeats} cannot tell which is faster, {best} is {ahead}{_interval(lead)}"
        return [best, second], f"Use {best}{worth}, or {second}: {unsure}"
    fastest = {level: max(complete, key=lambda name: measurements.median(name, level) or 0.0) for level in levels}
    exceptions = [f"{name} is fastest at concurrency {level}" for level, name in fastest.items() if name != best]
    but = f"; but {' and '.join(exceptions)}" if exceptions else ""
    return [best, *fastest.values()], f"Use {best}{worth}: it is {ahead}{_interval(lead)}, in {repeats}{but}"


def _interval(ratio: Interval) -> str:
    return "" if ratio.low is None else f" (95% interval {ratio.low:.2f} to {ratio.high:.2f})"
