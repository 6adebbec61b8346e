"""What the parts of a step cost, measured while the engine runs, and their prices in tokens."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np

from vllm_specplus.proposers.arbiter import Prices

_YOUNG, _OLD = 8, 40  # steps that the pace remembers when a request has just begun, and at most
_USUAL = 400
_PRIOR_STEPS = 8  # of one token each, before the first: a lucky first step would make drafts dear for hundreds of steps
_COST_MEMORY = 256
_NUM_RECENT = 32
_MOST_TIMES_MEDIAN = 3.0  # what took longer, for its tokens, counts as this: a pause of the machine is no cost
_NUM_FIRST = 3  # measured before a step or a pass counts: each may have compiled something, or met a pause
_LINE_MEMORY = 64
_MOST_TIMES_USUAL = 2.0
_LINE_WEIGHT = 0.25  # of the usual cost of a slot, as of steps with a slot more for each request
_LEAST_SPREAD = 2.0
_MOST_SPREAD = 256.0
_PRIOR_SLOT = 0.02  # of a step, with a slot for each request
_PRIOR_PASS = 0.1
_PRIOR_WEIGHT = 64.0  # as that of steps whose drafts vary by so much, squared and summed
# Of their numbers, squared and summed: a batch that has just changed, or steps that all have drafts, tell nothing yet.
_LEAST_SPREAD_OF_REQS = _LEAST_SPREAD_OF_VERIFICATION = 1.0
_LINE_STEPS = 4  # that the line counts for, beside a single request's steps with so many drafts
_LEAST_COUNT = 0.1
_LEAST_LINE = 0.1  # of the usual time: a line may fall below nothing
_FIT_PERIOD = 32  # the most steps between two fits; fewer while few are known
_PAIRS = tuple(combinations_with_replacement(range(5), 2))  # of the numbers of a step


@dataclass(frozen=True)
class Costs:
    """The time of a step's parts, in any unit.

    step: of the target. slot: of one token more in it. first_pass, later_pass: of the draft model's passes.
    verification: of verifying any drafts at all, beside their slots. more: of one draft, of two and so on, beside all
    that. It may be less than nothing. The last one is that of larger numbers too.
    """

    step: float
    slot: float
    first_pass: float = 0.0
    later_pass: float = 0.0
    verification: float = 0.0
    more: tuple[float, ...] = ()


class Pace:
    """How many tokens a usual step's time brings a request, as it was lately. A new request may bring another pace."""

    def __init__(self) -> None:
        self._recent = self._usual = (1.0, 1.0)  # a request's tokens and the time of a step, on average
        self._num_steps = _PRIOR_STEPS
        self._memory = _YOUNG

    def begin_request(self, num_reqs: int) -> None:
        """Expect the usual pace of a new request, one of `num_reqs`, and forget what was before it sooner."""
        share = 1 / max(num_reqs, 1)
        self._recent = _mixed(self._recent, self._usual, share)
        self._memory = min(self._memory, _YOUNG * num_reqs)

    def add(self, num_tokens: float, time: float) -> None:
        """Add a step: the tokens of a request, on average, and how many usual steps of its batch the step took."""
        step = (num_tokens, time)
        self._num_steps = min(self._num_steps + 1, _USUAL)
        self._recent = _mixed(self._recent, step, 1 / self._memory)
        self._usual = _mixed(self._usual, step, 1 / self._num_steps)
        self._memory = min(self._memory + 1, _OLD)

    def prices(self, costs: Costs, num_reqs: int) -> Prices:
        """What slots and passes cost in tokens. Before the first step, each request is expected to get one token.

        Args:
            costs: of steps of `num_reqs` requests.
            num_reqs: the requests of the batch.
        """
        tokens, time = self._recent
        step = tokens / time
        per_time = step * num_reqs / costs.step
        return Prices(
            per_time * costs.slot,
            step,
            per_time * costs.first_pass,
            per_time * costs.later_pass,
            verification=per_time * costs.verification,
            more=tuple(per_time * more for more in costs.more),
        )


def _mixed(old: tuple[float, float], new: tuple[float, float], share: float) -> tuple[float, float]:
    return old[0] + (new[0] - old[0]) * share, old[1] + (new[1] - old[1]) * share


class _RecentTimes:
    """The last times of steps, each with its tokens."""

    def __init__(self) -> None:
        self._in_turn: deque[tuple[float, int]] = deque()
        self._in_order: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._in_turn)

    @property
    def least(self) -> float:
        """The shortest time."""
        return self._in_order[0][0]

    def bounded(self, time: float, num_tokens: int, most: float) -> float:
        """Add a time; return it as it counts beside the others: at most so many times the usual.

        A step with more tokens than usual may take longer in the same proportion.
        """
        self._in_turn.append((time, num_tokens))
        insort(self._in_order, (time, num_tokens))
        if len(self._in_turn) > _NUM_RECENT:
            del self._in_order[bisect_left(self._in_order, self._in_turn.popleft())]
        usual_time, usual_tokens = self._in_order[len(self._in_order) // 2]
        return min(time, most * usual_time * max(num_tokens / usual_tokens, 1.0))


class _Fit(NamedTuple):
    """The usual step, and what one more request adds, and a slot, and any drafts at all.

    time, num_reqs, num_drafts: of the usual step. share_with_drafts: of all steps. is_slot_known: whether its drafts
    varied.
    """

    time: float
    num_reqs: float
    num_drafts: float
    share_with_drafts: float
    request: float
    slot: float
    verification: float
    is_slot_known: bool

    def line(self, num_drafts: int) -> float:
        """The time of a step of the usual batch with so many drafts."""
        with_drafts = (num_drafts > 0) - self.share_with_drafts
        time = self.time + self.slot * (num_drafts - self.num_drafts) + self.verification * with_drafts
        return max(time, _LEAST_LINE * self.time)


class _Steps:
    """Steps of batches of about the same size, and what they tell."""

    def __init__(self) -> None:
        self.number = self._next_fit = 0
        self.fit: _Fit | None = None
        # Decayed sums over steps, of the products of each two of: 1, requests, drafts, whether there are any, time. As
        # numbers of Python: among the work of a step an operation of numpy takes several times as long as these.
        self.sums = [0.0] * len(_PAIRS)
        # Of a single request's steps, by their drafts: how many counted with the last one, their time on average, and
        # the number of that step.
        self.times: dict[int, tuple[float, float, int]] = {}

    def add(self, num_drafts: int, num_reqs: int, time: float) -> bool:
        """Add a step; whether it is time for another fit."""
        step = (1.0, num_reqs, num_drafts, num_drafts > 0, time)
        kept = 1 - 1 / _COST_MEMORY
        self.sums = [total * kept + step[i] * step[j] for total, (i, j) in zip(self.sums, _PAIRS, strict=True)]
        self.number += 1
        if num_reqs == 1 and self.fit is not None:
            time = min(time, _MOST_TIMES_USUAL * self.fit.line(num_drafts))
            count, usual = self._time(num_drafts)
            count += 1
            self.times[num_drafts] = count, usual + (time - usual) / count, self.number
        if self.number < self._next_fit:
            return False
        self._next_fit = self.number + min(1 + self.number // 4, _FIT_PERIOD)
        return True

    def _time(self, num_drafts: int) -> tuple[float, float]:
        """How many steps with so many drafts count now, and their time on average.

        What is not seen again is forgotten. Otherwise a number that once took long would never be tried again.
        """
        count, time, last = self.times.get(num_drafts, (0.0, 0.0, 0))
        count *= (1 - 1 / _LINE_MEMORY) ** (self.number - last)
        return (count, time) if count >= _LEAST_COUNT else (0.0, 0.0)

    def of_single_request(self) -> tuple[float, tuple[float, ...]]:
        """`Costs.verification` and `Costs.more`: the times may lie on no line.

        A processor may take longer for two tokens than for three. A number that was not seen lies between its
        neighbours.
        """
        fit = self.fit
        if fit is None:
            return 0.0, ()

        def longer(num_drafts: int) -> float:
            count, time = self._time(num_drafts)
            return (time - fit.line(num_drafts)) * count / (count + _LINE_STEPS)

        verification = fit.verification - longer(0)
        seen = sorted(known for known in self.times if known and self._time(known)[0])
        if not seen:
            return max(verification, 0.0), ()
        more = np.interp(range(1, seen[-1] + 1), seen, [longer(known) for known in seen]) + min(verification, 0.0)
        return max(verification, 0.0), tuple(more.tolist())


class CostMeter:
    """Measures the costs of steps and passes; what took far longer than is usual counts as three times the usual.

    Among batches of about the same size, a step's time is linear in its requests, its drafts, and whether it has any.
    So where requests and slots become fewer together, one is not taken for the other. Nor is the time to verify at all
    taken for that of many slots. Batches of 1, of 2 to 3, of 4 to 7 and so on are measured apart. A processor may take
    longer for one request than for four. A slot that is free in a small batch is not in a large one. For a single
    request the times with each number of drafts count too, as far as they are known.
    """

    def __init__(self) -> None:
        self._recent = _RecentTimes()
        self._steps_by_size: dict[int, _Steps] = {}
        # By size, and then by the number of passes: time and requests, of the first ones and on average.
        self._first_passes: dict[int, dict[int, list[tuple[float, int]]]] = {}
        self._passes: dict[int, dict[int, tuple[float, float]]] = {}
        self._recent_prompts = _RecentTimes()
        self._first_prompts = 0, 0  # passes and requests of the first passes over prompts

    def add_step(self, num_drafts: int, num_reqs: int, time: float) -> float:
        """Add a step of the target in which `num_reqs` requests had some drafts; return the time as it counts."""
        time = self._recent.bounded(time, num_reqs + num_drafts, _MOST_TIMES_MEDIAN)
        size = _size_of(num_reqs)
        if size not in self._steps_by_size:
            self._steps_by_size[size] = _Steps()
        steps = self._steps_by_size[size]
        if steps.add(num_drafts, num_reqs, time):
            steps.fit = _fitted(steps.sums, self._slot_elsewhere(size))
        return time

    def add_passes(self, num_passes: int, num_reqs: int, time: float) -> None:
        """Add some passes of the draft model for a batch, and the time that they took together."""
        size = _size_of(num_reqs)
        passes = self._passes.get(size, {})
        if num_passes in passes:
            time = min(time, _MOST_TIMES_MEDIAN * passes[num_passes][0])
            passes[num_passes] = _mixed(passes[num_passes], (time, num_reqs), 1 / _NUM_RECENT)
            return
        first = self._first_passes.setdefault(size, {}).setdefault(num_passes, [])
        first.append((time, num_reqs))
        if len(first) == _NUM_FIRST:
            self._passes.setdefault(size, {})[num_passes] = sorted(first)[_NUM_FIRST // 2]

    def add_prompt_passes(self, num_passes: int, num_reqs: int, time: float) -> float:
        """Add the time of a step's passes over prompts, for which all its requests wait.

        The first may have compiled something. So it counts with the second, and both as the shorter of the two.

        Returns:
            How much of it counts beyond the usual time of as many passes, once for each request.
        """
        time = self._recent_prompts.bounded(time, 1, _MOST_TIMES_MEDIAN)
        if len(self._recent_prompts) == 1:
            self._first_prompts = num_passes, num_reqs
            return 0.0
        counted = [(num_passes, num_reqs)]
        if len(self._recent_prompts) == 2:
            time = self._recent_prompts.least
            counted.append(self._first_prompts)
        return sum(max(time - self.passes_time(passes, reqs), 0.0) * reqs for passes, reqs in counted)

    @property
    def has_steps(self) -> bool:
        """Whether a step has been measured."""
        return bool(self._steps_by_size)

    def passes_time(self, num_passes: int, num_reqs: int) -> float:
        """The usual time of some passes for a batch; 0 where that is not known."""
        known = {size: passes[num_passes] for size, passes in self._passes.items() if num_passes in passes}
        if not known:
            return 0.0
        return self._scaled(*known[_nearest(known, _size_of(num_reqs))], num_reqs)

    def _scaled(self, time: float, usual_reqs: float, num_reqs: int) -> float:
        """The time of passes for another batch: a pass's share of a step of the same batch changes less than either."""
        if usual_reqs == num_reqs:
            return time
        return time * self.step_time(num_reqs) / self.step_time(usual_reqs)

    def step_time(self, num_reqs: float) -> float:
        """The `Costs.step` of a batch."""
        return self._step_and_slot(num_reqs)[0]

    def costs(self, num_reqs: int) -> Costs:
        """The costs of a batch as far as they are known, and else what is usual on a GPU."""
        step, slot = self._step_and_slot(num_reqs)
        first = later = _PRIOR_PASS * step
        if self._passes:
            # All from the same size.
            size = _nearest(self._passes, _size_of(num_reqs))
            times = {number: self._scaled(*usual, num_reqs) for number, usual in self._passes[size].items()}
            most = max(times)
            all_passes = times[most]
            first = times.get(1, all_passes / most)
            later = max(all_passes - first, 0.0) / (most - 1) if most > 1 else first
        fit = self._nearest_fit(_size_of(num_reqs))
        single = self._steps_by_size.get(1)
        if num_reqs == 1 and single is not None and fit is single.fit:
            return Costs(step, slot, first, later, *single.of_single_request())
        return Costs(step, slot, first, later, fit.verification if fit else 0.0)

    def _step_and_slot(self, num_reqs: float) -> tuple[float, float]:
        """The time of a step of some requests that have as many drafts as usual, and of one more slot in it."""
        fit = self._nearest_fit(_size_of(num_reqs))
        if fit is None:
            return 1.0, _PRIOR_SLOT / num_reqs
        time, usual_reqs, of_request, slot = fit.time, fit.num_reqs, fit.request, fit.slot
        # A larger batch takes no less time, and no more for each request.
        least, most = sorted((1.0, num_reqs / usual_reqs))
        return min(max(time + of_request * (num_reqs - usual_reqs), time * least), time * most), slot

    def _slot_elsewhere(self, size: int) -> tuple[float, float]:
        """The least and the most time of a slot, by batches of another size: in a larger one it takes no less."""
        fits = {at: steps.fit for at, steps in self._steps_by_size.items() if at != size and steps.fit is not None}
        slots = {at: fit.slot for at, fit in fits.items() if fit.is_slot_known}
        if not slots:
            return 0.0, math.inf
        nearest = _nearest(slots, size)
        return (0.0, slots[nearest]) if nearest > size else (slots[nearest], math.inf)

    def _nearest_fit(self, size: int) -> _Fit | None:
        """What batches of the nearest size tell that has more than a few steps, if any has."""
        own = self._steps_by_size.get(size)
        if own is not None and own.number >= _NUM_FIRST:
            return own.fit
        sizes = [(steps.number < _NUM_FIRST, abs(known - size), known) for known, steps in self._steps_by_size.items()]
        return self._steps_by_size[min(sizes)[-1]].fit if sizes else None


def _size_of(num_reqs: float) -> int:
    """Batches of the same number are of about the same size."""
    return int(num_reqs).bit_length()


def _nearest(sizes: Iterable[int], size: int) -> int:
    """Of several sizes the one nearest to another; of two the first."""
    return min(sizes, key=lambda known: abs(known - size))


def _fitted(sums_of_pairs: Sequence[float], prior_bounds: tuple[float, float]) -> _Fit:
    """Fit a step's time by the sums of `_Steps`; no slot, and no verification, costs less than nothing.

    Args:
        sums_of_pairs: see `_Steps`.
        prior_bounds: of a slot's time before anything is known; within them it is the usual share of a step.
    """
    sums = np.empty((5, 5))
    for (i, j), total in zip(_PAIRS, sums_of_pairs, strict=True):
        sums[i, j] = sums[j, i] = total
    means = sums[0] / sums[0, 0]
    _, num_reqs, num_drafts, share_with_drafts, time = means.tolist()
    prior_slot = min(max(_PRIOR_SLOT * time / num_reqs, prior_bounds[0]), prior_bounds[1])
    spread = sums - sums[0, 0] * means[:, None] * means
    products = spread[1:4, 4] + [0.0, _PRIOR_WEIGHT * prior_slot, 0.0]
    matrix = spread[1:4, 1:4] + np.diag([_LEAST_SPREAD_OF_REQS, _PRIOR_WEIGHT, _LEAST_SPREAD_OF_VERIFICATION])
    free = [0, 1, 2]
    while True:
        slopes = np.zeros(3)
        slopes[free] = np.linalg.solve(matrix[np.ix_(free, free)], products[free])
        least = 1 + int(np.argmin(slopes[1:]))
        if slopes[least] >= 0:
            break
        free.remove(least)
    request, slot, verification = slopes.tolist()
    # Each request has as many drafts as usual.
    slot, verification = min(slot, time), min(verification, time)
    of_request = request + slot * num_drafts / num_reqs
    is_slot_known = bool(spread[2, 2] >= _PRIOR_WEIGHT)
    return _Fit(time, num_reqs, num_drafts, share_with_drafts, of_request, slot, verification, is_slot_known)


class StepTimes:
    """The time of a step by its tokens: a line through the steps measured, which moves with them.

    Its slope is forgotten only as far as new steps tell of it. So it stays known while all steps are alike.
    """

    def __init__(self) -> None:
        self._recent = _RecentTimes()
        self._num_steps = 0
        self._tokens = self._time = 1.0  # of a step, on average
        self._spread = self._product = 0.0  # sums of squared deviations of tokens, and of those times that of the time

    @property
    def num_steps(self) -> int:
        """Steps measured."""
        return self._num_steps

    def is_sloped(self, num_reqs: int) -> bool:
        """Whether the steps measured differ enough to tell what a slot of `num_reqs` requests costs."""
        return self._spread >= _LEAST_SPREAD * num_reqs * num_reqs

    def add(self, num_tokens: int, num_reqs: int, time: float) -> None:
        """Add a step of `num_reqs` requests; the first ones only bound the next."""
        time = self._recent.bounded(time, num_tokens, _MOST_TIMES_USUAL)
        if len(self._recent) < _NUM_FIRST:
            return
        more, longer = num_tokens - self._tokens, time - self._time
        if not self._num_steps:
            more = longer = 0.0
            self._tokens, self._time = num_tokens, time
        self._num_steps += 1
        share = 1 / min(self._num_steps, _LINE_MEMORY)
        self._tokens += more * share
        self._time += longer * share
        self._spread += more * more * (1 - share)
        self._product += more * longer * (1 - share)
        most = _MOST_SPREAD * num_reqs * num_reqs
        if self._spread > most:
            self._product *= most / self._spread
            self._spread = most

    def times(self, token_counts: Sequence[int], num_reqs: int) -> list[float]:
        """The time of a step with each of `token_counts` tokens.

        Until it is known, a slot of all requests costs what is usual.
        """
        tokens, time = (self._tokens, self._time) if self._num_steps else (num_reqs, 1.0)
        weight = _LINE_WEIGHT * num_reqs * num_reqs
        slope = (self._product + weight * _PRIOR_SLOT * time / num_reqs) / (self._spread + weight)
        # No step takes less than no time.
        slope = min(max(slope, 0.0), time / tokens)
        return [time + slope * (num_tokens - tokens) for num_tokens in token_counts]
