"""The widths of a step, by simulation: what is chosen is as good as the best fixed width, without knowing it."""

import time
from collections import deque
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from vllm_specplus.proposers.draft_widths import DraftWidths, Plan, make_widths

MOST = 16
WIDTHS = make_widths(MOST, 6)
NUM_STEPS = 3000
NUM_TOKENS = 20_000

Source = Callable[[np.random.Generator, int], np.ndarray]


def constant(chance: float) -> Source:
    return lambda rng, i: rng.random(NUM_TOKENS) < chance


def bursts(rng: np.random.Generator, i: int) -> np.ndarray:
    """Runs of 30 copied tokens between stretches in which no draft is right."""
    parts: list[np.ndarray] = []
    num = int(rng.integers(0, 60))
    while num < NUM_TOKENS:
        gap = int(rng.integers(20, 80))
        parts += [np.zeros(gap, bool), np.ones(30, bool)]
        num += gap + 30
    return np.concatenate(parts)[-NUM_TOKENS:]


def mixture(rng: np.random.Generator, i: int) -> np.ndarray:
    return constant((0.9, 0.5, 0.1, 0.0)[i % 4])(rng, i)


SOURCES: dict[str, Source] = {f"{c}": constant(c) for c in (0.9, 0.5, 0.1, 0.0)} | {
    "bursts": bursts,
    "mixture": mixture,
}


def run_lengths(rights: np.ndarray) -> list[int]:
    """For each place how many drafts in a row are right from there on."""
    places = np.arange(len(rights))
    misses = np.where(rights, len(rights), places)
    return (np.minimum.accumulate(misses[::-1])[::-1] - places).tolist()


class Simulation:
    """Requests whose text says at each place whether a draft would be right there.

    A step costs 1 and `slot_cost` for each of its tokens. Results reach the chooser as with asynchronous scheduling.
    """

    def __init__(self, source: Source, num_reqs: int, slot_cost: float, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.runs = [run_lengths(source(self.rng, i)) for i in range(num_reqs)]
        self.places = [0] * num_reqs
        self.slot_cost = slot_cost

    def step(self, width: int) -> tuple[list[int], float]:
        """The drafts that each request accepts, and the step's time."""
        accepted = []
        for i, runs in enumerate(self.runs):
            num = min(runs[self.places[i]], width)
            accepted.append(num)
            self.places[i] = (self.places[i] + num + 1) % len(runs)
        return accepted, 1 + self.slot_cost * len(accepted) * (1 + width)

    def rate(self, widths: DraftWidths | int, num_steps: int = NUM_STEPS) -> float:
        """Tokens per time, at a fixed width or those that are chosen."""
        num_tokens, total, self.chosen = 0, 0.0, []
        ids = [str(i) for i in range(len(self.runs))]
        plan = Plan(0)
        late: deque[tuple[Plan, list[int], float]] = deque()
        for k in range(num_steps):
            this, plan = plan, Plan(widths) if isinstance(widths, int) else widths.choose(ids)
            accepted, seconds = self.step(this.width)
            num_tokens += sum(accepted) + len(ids)
            total += seconds
            self.chosen.append(this.width)
            late.append((this, accepted, seconds))
            if len(late) > 1 and isinstance(widths, DraftWidths):
                done, accepted, seconds = late.popleft()
                for req_id, num in zip(ids, accepted, strict=True) if done.width else ():
                    widths.add_result(req_id, done.width, num, done)
                noise = self.rng.normal(1, 0.03) + 4 * (k % 200 == 199)
                widths.add_step(len(ids) * (1 + done.width), len(ids), seconds * noise)
        return num_tokens / total


@cache
def best_fixed(name: str, num_reqs: int, slot_cost: float, num_steps: int, seed: int = 0) -> float:
    return max(Simulation(SOURCES[name], num_reqs, slot_cost, seed).rate(width, num_steps) for width in WIDTHS)


# The longer runs are where a step of many requests is dear, so that what is tried at first weighs most.
NUM_STEPS_OF = {1: 1500, 16: 600, 64: 600}
CASES = [(name, num_reqs, cost) for name in SOURCES for num_reqs in NUM_STEPS_OF for cost in (0.01, 0.05, 0.2)]


@pytest.mark.parametrize(("name", "num_reqs", "slot_cost"), CASES)
def test_the_choice_keeps_up_with_the_best_fixed_width(name: str, num_reqs: int, slot_cost: float) -> None:
    num_steps = NUM_STEPS_OF[num_reqs]
    simulation = Simulation(SOURCES[name], num_reqs, slot_cost)
    rate = simulation.rate(DraftWidths(WIDTHS), num_steps)
    assert rate >= 0.97 * best_fixed(name, num_reqs, slot_cost, num_steps)


@pytest.mark.parametrize(("slot_cost", "gain"), [(0.05, 1.02), (0.2, 1.08)])
def test_bursts_are_used_where_slots_are_dear(slot_cost: float, gain: float) -> None:
    rates = [Simulation(bursts, 1, slot_cost, seed).rate(DraftWidths(WIDTHS)) for seed in range(3)]
    best = [best_fixed("bursts", 1, slot_cost, NUM_STEPS, seed) for seed in range(3)]
    assert sum(rates) >= gain * sum(best)


@pytest.mark.parametrize("num_reqs", [1, 16])
def test_a_source_that_turns_bad_is_followed_and_back(num_reqs: int) -> None:
    """A few hundred tokens of each; in each part the slots of the first steps are left out."""
    num_steps = 200
    simulation = Simulation(constant(0.9), num_reqs, 0.05)
    widths = DraftWidths(WIDTHS)
    good, bad = simulation.runs, Simulation(constant(0.0), num_reqs, 0.05).runs
    for runs in (good, bad, good, bad, good):
        simulation.runs = runs
        best = 0 if runs is bad else 4 if num_reqs > 1 else 8
        simulation.rate(widths, 50)
        simulation.rate(widths, num_steps)
        mean = np.mean(simulation.chosen)
        assert mean >= best / 2 if runs is good else mean <= 0.3


@pytest.mark.parametrize("slot_cost", [0.2, 3.0])
def test_a_source_without_hope_costs_a_hundredth(slot_cost: float) -> None:
    simulation = Simulation(constant(0.0), 16, slot_cost)
    widths = DraftWidths(WIDTHS)
    simulation.rate(widths, 100)
    assert simulation.rate(widths, 1000) >= 0.985 * simulation.rate(0, 10)


def test_a_pause_hardly_changes_what_slots_cost() -> None:
    widths = DraftWidths([0, 4])
    for k in range(200):
        num_tokens = 5 if k % 2 else 1
        widths.add_step(num_tokens, 1, 1.0 + 0.1 * num_tokens + (100.0 if k in (0, 100) else 0.0))
    none, four = widths._times.times([1, 5], 1)
    assert (four - none) / none == pytest.approx(0.4 / 1.1, rel=0.2)


def test_a_new_request_is_tried_at_once() -> None:
    """What came before it may have been of another kind."""
    simulation = Simulation(constant(0.0), 1, 0.2)
    widths = DraftWidths(WIDTHS)
    simulation.rate(widths, 300)
    assert widths.choose(["0"]).width == 0
    widths.end(["0"])
    assert widths.choose(["another"]).width == 1


def test_requests_that_ended_are_forgotten() -> None:
    widths = DraftWidths([0, 2])
    plan = widths.choose(["a", "b"])
    for req_id in ("a", "b"):
        widths.add_result(req_id, 2, 2, plan)
    assert widths.num_requests == 2
    widths.end(["a", "unknown"])
    assert widths.num_requests == 1


def test_without_a_request_the_choice_is_for_a_new_one() -> None:
    assert DraftWidths([0, 2]).choose([]) == Plan(DraftWidths([0, 2]).choose(["a"]).width)


@pytest.mark.parametrize(
    ("num_speculative_tokens", "max_widths", "expected"),
    [
        (1, 6, [0, 1]),
        (3, 6, [0, 1, 2, 3]),
        (8, 6, [0, 1, 2, 4, 8]),
        (16, 6, [0, 1, 2, 4, 8, 16]),
        (20, 6, [0, 1, 2, 8, 16, 20]),
        (20, 3, [0, 1, 20]),
        (20, 2, [0, 20]),
        (20, 1, [20]),
    ],
)
def test_widths(num_speculative_tokens: int, max_widths: int, expected: list[int]) -> None:
    assert make_widths(num_speculative_tokens, max_widths) == expected


def test_a_choice_is_cheap() -> None:
    """Some microseconds a step and about one a request; the bound allows for a machine that does other things."""
    ids = [str(i) for i in range(256)]
    widths = DraftWidths(WIDTHS)
    rng = np.random.default_rng(0)
    accepted = rng.integers(0, 5, (50, len(ids))).tolist()
    took = []
    for k in range(50):
        begin = time.perf_counter()
        plan = widths.choose(ids)
        for req_id, num in zip(ids, accepted[k], strict=True):
            widths.add_result(req_id, 4, num, plan)
        widths.add_step(len(ids) * 5, len(ids), 1.0)
        took.append(time.perf_counter() - begin)
    assert sorted(took)[len(took) // 2] < 10e-6 * len(ids)
