"""How many slots to schedule for the requests of a step, where every scheduled slot is verified, filled or not.

With asynchronous scheduling slots are scheduled before their drafts are made. All requests of a step get the same
number of them. It is one of a few widths, since CUDA graphs exist for these alone. The width is chosen by what
earlier slots brought. Their results come late: two steps lie between a result and the slots that it speaks for.

A request is described by its streak. That is how many slots in a row were accepted up to now, or how many steps in a
row brought nothing. The chance of its first slot is looked up by its streak when the width was chosen. So the delay
is in the chance. The chance of a later slot is looked up by the slots accepted before it. Streaks fall into classes.
All requests share the tables, in which old results count less.

The width with the most expected tokens per time wins. Where it is 0, nothing would be learned any more. So a single
slot is tried now and then, for a small share of the time.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_specplus.proposers.costs import StepTimes

# Classes of streaks: a request without results, then runs of accepted slots, then the steps since the last of them.
_NEW, _NUM_RUNS = 0, 7
_BROKEN = _NUM_RUNS + 1  # the last step brought a draft, and then a miss
_NUM_MISSES = 6
_NUM_CLASSES = _BROKEN + _NUM_MISSES + 1
_RUNNING, _UNSURE, _MISSING = range(3)  # kinds of streaks, for later slots

_PRIOR = 0.6
_WEIGHT = 2.0  # trials that a neighbouring class counts for
_MOST_TRIALS = 64.0
_PERIOD = 256  # steps after which half of all trials are forgotten, so that what looked bad is tried again
_SHORT_PERIOD, _LONG_PERIOD = 2, 32  # steps between two that measure what a slot costs
_LEAST_SURVIVAL = 1e-3
_TRIAL_SHARE = 0.01  # of the time, for trying a slot where none is worth its time


def make_widths(num_speculative_tokens: int, max_widths: int) -> list[int]:
    """0, powers of two and `num_speculative_tokens`, in rising order.

    Args:
        num_speculative_tokens: K, the largest, >= 1.
        max_widths: the most widths, >= 1. K stays first, then 0, then 1. Of the other powers those stay that leave
            neighbours much the same ratio.
    """
    powers = [1 << i for i in range(num_speculative_tokens.bit_length()) if 1 << i < num_speculative_tokens]
    if max_widths < 2:
        return [num_speculative_tokens]
    room = max_widths - 2
    if len(powers) > room:
        powers = [powers[(2 * i * len(powers) + room) // (2 * room)] for i in range(room)]
    return [0, *powers, num_speculative_tokens]


@dataclass(frozen=True)
class Plan:
    """The width that was chosen for a step, and the class of each request when it was chosen, by request id."""

    width: int
    classes: dict[str, int] = field(default_factory=dict)


class _Chances:
    """Hits and trials of slots, by class."""

    def __init__(self, num_classes: int) -> None:
        self._hits = [0.0] * num_classes
        self._trials = [0.0] * num_classes

    def add(self, index: int, num_hits: int, num_trials: int) -> None:
        self._hits[index] += num_hits
        self._trials[index] += num_trials
        if self._trials[index] > _MOST_TRIALS:
            self._halve(index)

    def forget_half(self) -> None:
        for index in range(len(self._hits)):
            self._halve(index)

    def chance(self, index: int, neighbour: float) -> float:
        """The chance of a slot, where `neighbour` is what is expected without any trial."""
        return (self._hits[index] + _WEIGHT * neighbour) / (self._trials[index] + _WEIGHT)

    def _halve(self, index: int) -> None:
        self._hits[index] /= 2
        self._trials[index] /= 2


class DraftWidths:
    """Chooses one of `widths` for each step; learns what slots bring and cost while it runs.

    Args:
        widths: the widths to choose from, in rising order.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = list(widths)
        self._times = StepTimes()
        self._streaks: dict[str, int] = {}  # > 0: slots accepted in a row; <= 0: steps in a row without any, negative
        self._classes: dict[str, int] = {}
        self._results: dict[tuple[int, int, int], int] = {}  # by class, slots and accepted slots; not learned yet
        self._first, self._any_first = _Chances(_NUM_CLASSES), _Chances(1)
        self._later = [_Chances(_NUM_RUNS + 1) for _ in range(3)]
        self._num_steps = 0
        self._allowance = 0.0  # time saved up for trying a slot, in steps without one

    @property
    def num_requests(self) -> int:
        """Requests that have state."""
        return len(self._classes)

    def choose(self, req_ids: Iterable[str]) -> Plan:
        """Choose the width for the next step of these requests; for none of them, that of a new one."""
        for result, count in self._results.items():
            self._learn(*result, count)
        self._results.clear()
        num_known = len(self._classes)
        class_of = self._classes.setdefault
        classes = {req_id: class_of(req_id, _NEW) for req_id in req_ids}
        num_begun = len(self._classes) - num_known
        counts = Counter(classes.values()) or {_NEW: 1}
        num_reqs = max(len(classes), 1)
        times = self._times.times([num_reqs * (1 + width) for width in self.widths], num_reqs)
        tokens = self._expected_tokens(counts, num_reqs)
        rates = [gain / time for gain, time in zip(tokens, times, strict=True)]
        # At first each step measures a longer one.
        best = max(range(min(len(rates), 2 + self._times.num_steps)), key=rates.__getitem__)
        if len(rates) > 1:
            self._num_steps += 1
            period = _LONG_PERIOD if self._times.is_sloped(num_reqs) else _SHORT_PERIOD
            if best == 0 and period == _LONG_PERIOD:
                best = self._try_sometimes(tokens, times, num_begun / num_reqs)
            elif self._num_steps % period == 0:
                # A width beside it tells what a slot costs.
                best = best - 1 if best else 1
        return Plan(self.widths[best], classes)

    def add_result(self, req_id: str, num_slots: int, num_accepted: int, plan: Plan) -> None:
        """Learn from a request's part in a step.

        Args:
            req_id: of the request.
            num_slots: slots that were verified, >= 1.
            num_accepted: drafts accepted in them.
            plan: the one by which they were scheduled.
        """
        index = plan.classes.get(req_id, _NEW)
        # Equal results of several requests are learned at once, which is cheaper.
        result = index, num_slots, num_accepted
        self._results[result] = self._results.get(result, 0) + 1
        streak = self._streaks.get(req_id, 0)
        if num_accepted == num_slots:
            streak = max(streak, 0) + num_slots
        elif num_accepted:
            streak = 0
        else:
            streak = min(streak, 0) - 1
        self._streaks[req_id] = streak
        self._classes[req_id] = _class_of(streak)

    def add_step(self, num_tokens: int, num_reqs: int, time: float) -> None:
        """Add a step in which all requests decode: the tokens computed in it, padding too, and its time in any unit."""
        self._times.add(num_tokens, num_reqs, time)
        if self._times.num_steps % _PERIOD == 0:
            for table in self._later:
                table.forget_half()

    def end(self, req_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        for req_id in req_ids:
            self._streaks.pop(req_id, None)
            self._classes.pop(req_id, None)

    def _learn(self, index: int, num_slots: int, num_accepted: int, count: int) -> None:
        """Learn from equal results of `count` requests of a class."""
        num_hits = count if num_accepted else 0
        self._first.add(index, num_hits, count)
        self._any_first.add(0, num_hits, count)
        if not num_accepted:
            return
        table, run = self._later[_kind_of(index)], _run_of(index)
        begin, end = run + 1, run + num_accepted
        while begin < end:
            after = _run_class(begin)
            stop = end if after == _NUM_RUNS else min(end, 1 << after)
            table.add(after, (stop - begin) * count, (stop - begin) * count)
            begin = stop
        if num_accepted < num_slots:
            table.add(_run_class(end), 0, count)

    def _expected_tokens(self, counts: Mapping[int, int], num_reqs: int) -> list[float]:
        """For each width the tokens that a step is expected to bring; `counts`: requests by class."""
        first = self._first_chances()
        tokens = [float(num_reqs)] * len(self.widths)
        for index, count in counts.items():
            for i, gain in enumerate(self._gains(index, first)):
                tokens[i] += count * gain
        return tokens

    def _first_chances(self) -> list[float]:
        """The chance of a first slot, by class; a class with few trials is taken to be like the one before it."""
        usual = self._any_first.chance(0, _PRIOR)
        chances: list[float] = []
        for index in range(_NUM_CLASSES):
            chances.append(self._first.chance(index, usual if index in (_NEW, 1, _BROKEN) else chances[-1]))
        return chances

    def _gains(self, index: int, first: list[float]) -> list[float]:
        """For each width the drafts of a request that are expected to be accepted."""
        table, run = self._later[_kind_of(index)], _run_of(index)
        gains, total, survival, num_slots = [], 0.0, first[index], 0
        chance, known = 0.0, -1
        for width in self.widths:
            while num_slots < width and survival > _LEAST_SURVIVAL:
                total += survival
                num_slots += 1
                after = _run_class(run + num_slots)
                if after != known:
                    chance, known = table.chance(after, first[after]), after
                survival *= chance
            gains.append(total)
        return gains

    def _try_sometimes(self, tokens: list[float], times: list[float], share_begun: float) -> int:
        """1, the index of the smallest width with a slot, where enough time was saved for it; else 0.

        A request that has just begun may be of another kind, so it brings its share of a trial.
        """
        cost = times[1] / times[0] - tokens[1] / tokens[0]
        self._allowance += _TRIAL_SHARE + share_begun * cost
        if self._allowance < cost:
            return 0
        self._allowance = 0.0
        return 1


def _class_of(streak: int) -> int:
    if streak > 0:
        return _run_class(streak)
    return _BROKEN + min((-streak).bit_length(), _NUM_MISSES)


def _run_class(run: int) -> int:
    return min(run.bit_length(), _NUM_RUNS)


def _run_of(index: int) -> int:
    """The slots accepted in a row in the middle of a class."""
    return 3 << index >> 2 if _NEW < index < _BROKEN else 0


def _kind_of(index: int) -> int:
    if index > _BROKEN + 1:
        return _MISSING
    return _RUNNING if _NEW < index < _BROKEN else _UNSURE
