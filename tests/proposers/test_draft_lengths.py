"""The lengths of a step, by simulation: what is chosen is as good as the best fixed length, without knowing it."""

from collections import deque
from collections.abc import Callable
from functools import cache

import numpy as np

from vllm_specplus.proposers.draft_lengths import DraftLengths, Plan, make_lengths

MOST = 16
LENGTHS = make_lengths(MOST, 6)
NUM_STEPS = 3000
NUM_TOKENS = 40_000

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
    runs = np.zeros(len(rights) + 1, int)
    for i in range(len(rights) - 1, -1, -1):
        runs[i] = runs[i + 1] + 1 if rights[i] else 0
    return runs[:-1].tolist()


class Simulation:
    """Requests whose text says at each place whether a draft would be right there.

    A step costs 1 and `slot_cost` for each of its tokens. Results reach the chooser as with asynchronous scheduling.
    """

    def __init__(self, source: Source, num_reqs: int, slot_cost: float, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.runs = [run_lengths(source(self.rng, i)) for i in range(num_reqs)]
        self.places = [0] * num_reqs
        self.slot_cost = slot_cost

    def step(self, length: int) -> tuple[list[int], float]:
        """The drafts that each request accepts, and the step's time."""
        accepted = []
        for i, runs in enumerate(self.runs):
            num = min(runs[self.places[i]], length)
            accepted.append(num)
            self.places[i] = (self.places[i] + num + 1) % len(runs)
        return accepted, 1 + self.slot_cost * len(accepted) * (1 + length)

    def rate(self, lengths: DraftLengths | int, num_steps: int = NUM_STEPS) -> float:
        """Tokens per time, at a fixed length or those that are chosen."""
        num_tokens, total, self.chosen = 0, 0.0, []
        ids = [str(i) for i in range(len(self.runs))]
        plan = Plan(0)
        late: deque[tuple[Plan, list[int], float]] = deque()
        for k in range(num_steps):
            this, plan = plan, Plan(lengths) if isinstance(lengths, int) else lengths.choose(ids)
            accepted, seconds = self.step(this.length)
            num_tokens += sum(accepted) + len(ids)
            total += seconds
            self.chosen.append(this.length)
            late.append((this, accepted, seconds))
            if len(late) > 1 and isinstance(lengths, DraftLengths):
                done, accepted, seconds = late.popleft()
                for req_id, num in zip(ids, accepted, strict=True) if done.length else ():
                    lengths.add_result(req_id, done.length, num, done)
                noise = self.rng.normal(1, 0.03) + 4 * (k % 200 == 199)
                lengths.add_step(len(ids) * (1 + done.length), len(ids), seconds * noise)
        return num_tokens / total


@cache
def best_fixed(name: str, num_reqs: int, slot_cost: float, num_steps: int, seed: int = 0) -> float:
    return max(Simulation(SOURCES[name], num_reqs, slot_cost, seed).rate(length, num_steps) for length in LENGTHS)
