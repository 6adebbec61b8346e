"""A simulation of FastDeploy's published speeds: which costs give them, and what adaptive drafting would make of those.

    python benchmarks/published.py [--slot-cost C ...] [--json FILE]

FastDeploy's developers have published the speed of five ways of drafting over none, with 100 requests at a time. They
also tell how often each draft of the MTP head is accepted where the one before it was. No model and no text is here.
Drafts are right at random, as often as published, and `replay.py` takes the steps.

The five speeds are solved for five unknowns. All but two of them are shares of a step of the target.

============  ==========================================================================================
fixed         what a step costs more as soon as anything is drafted in the engine
pass_cost     a pass of the head, beside the slot of its draft
right_behind  how often an n-gram draft is right behind right drafts, of the head or of its own match
matched       how often the text alone has a match
jump          what a step of six tokens a request costs more than the line through the others
============  ==========================================================================================

The speeds do not tell a slot from a pass, so the cost of a slot is an option. The run exits with 1 where a cost is not
positive, or where the simulated speeds are not the published ones. Adaptive drafting measures the costs while it runs,
as in an engine with 100 requests on V1. It pays `fixed` too. In such an engine a step's time counts as linear in its
tokens. So the arbiter learns of `jump` only what a line can tell.
"""

import argparse
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from common import environment, write_json
from replay import Setting, Trace, replay, replay_adaptive
from rich.console import Console
from rich.table import Table

from vllm_specplus.compare.command import number_from_0
from vllm_specplus.proposers import History, Match
from vllm_specplus.proposers.costs import CostMeter, Costs
from vllm_specplus.sources import NGRAM

RATES = (0.817, 0.675, 0.619)
SPEEDS = {"MTP-1": 1.21, "MTP-3": 1.66, "MTP-1 + 2 n-gram": 1.57, "MTP-3 + 2 n-gram": 1.29, "n-gram 3": 0.83}
DRAFTED = {"MTP-1": (1, 0), "MTP-3": (3, 0), "MTP-1 + 2 n-gram": (1, 2), "MTP-3 + 2 n-gram": (3, 2), "n-gram 3": (0, 3)}
MOST_SLOTS_ON_THE_LINE = 4
TOLERANCE = 0.03  # of a simulated speed
NUM_TRACES, NUM_TOKENS = 30, 600
MATCH_LEN = 3
NUM_REQS = 100


@dataclass(frozen=True)
class Solved:
    """What the published speeds say, given the cost of a slot."""

    slot: float
    fixed: float
    pass_cost: float
    right_behind: float
    matched: float
    jump: float

    @classmethod
    def of(cls, slot: float) -> "Solved":
        """Solve the five speeds."""
        accepted = np.cumprod(RATES)
        one, three = ((1 + accepted[:n].sum()) / SPEEDS[f"MTP-{n}"] for n in (1, 3))
        pass_cost = (three - one) / 2 - slot
        fixed = one - 1 - pass_cost - slot
        # Two n-gram drafts behind one of the head: accepted[0] x (q + q x q) more tokens.
        more = SPEEDS["MTP-1 + 2 n-gram"] * (one + 2 * slot) - 1 - accepted[0]
        right = (np.sqrt(1 + 4 * more / accepted[0]) - 1) / 2
        alone = SPEEDS["n-gram 3"] * (1 + fixed + 3 * slot) - 1
        tokens = 1 + accepted.sum() + accepted[2] * (right + right**2)
        jump = tokens / SPEEDS["MTP-3 + 2 n-gram"] - three - 2 * slot
        matched = alone / (right + right**2 + right**3)
        return cls(slot, fixed, pass_cost, float(right), float(matched), float(jump))


@dataclass(frozen=True)
class PublishedSetting(Setting):
    """The solved costs."""

    fixed: float
    jump: float

    def cost(self, passes: int, num_drafts: int) -> float:
        """What a step costs, with what it costs more than a line through the other steps."""
        return super().cost(passes, num_drafts) + self.fixed + self.jump * (num_drafts > MOST_SLOTS_ON_THE_LINE)


class BatchMeter(CostMeter):
    """Measures one request's steps as those of a batch of `NUM_REQS`, which all draft alike."""

    def add_step(self, num_drafts: int, num_reqs: int, time: float) -> float:
        """See `CostMeter.add_step`; the request's share of the time."""
        return super().add_step(NUM_REQS * num_drafts, NUM_REQS * num_reqs, NUM_REQS * time) / NUM_REQS

    def add_passes(self, num_passes: int, num_reqs: int, time: float) -> None:
        """See `CostMeter.add_passes`; the request's share of the time."""
        super().add_passes(num_passes, NUM_REQS * num_reqs, NUM_REQS * time)

    def costs(self, num_reqs: int) -> Costs:
        """The request's share of the batch's costs; a slot is one request's in any case."""
        costs = super().costs(NUM_REQS * num_reqs)
        shares = (time / NUM_REQS for time in (costs.first_pass, costs.later_pass, costs.verification))
        return Costs(costs.step / NUM_REQS, costs.slot, *shares)


class RandomMatcher:
    """Offers the true tokens as often as n-gram matches are right, and a wrong token after them."""

    match_len_cap = MATCH_LEN

    def __init__(self, traces: list[Trace], solved: Solved, rng: np.random.Generator):
        self._traces = {trace.req_id: trace for trace in traces}
        shape = len(traces), NUM_TOKENS, len(RATES) + 1
        self._num_right = dict(zip(self._traces, rng.geometric(1 - solved.right_behind, shape) - 1, strict=True))
        self._is_matched = dict(zip(self._traces, rng.random(shape[:2]) < solved.matched, strict=True))

    def match(self, history: History, model_drafts: np.ndarray | None, max_drafts: np.ndarray) -> Match:
        """What follows the history and `model_drafts`; without those, a match is there only as often as `matched`."""
        trace, start = self._traces[history.req_ids[0]], 0 if model_drafts is None else model_drafts.shape[1]
        num_tokens, limit = int(history.num_tokens[0]), int(max_drafts[0])
        if not start and not self._is_matched[trace.req_id][num_tokens - 1]:
            limit = 0
        chain = chain_of(trace, num_tokens + start, int(self._num_right[trace.req_id][num_tokens - 1, start]), limit)
        lengths = np.array([len(chain)], np.int32)
        return Match(np.array([chain], np.int32), lengths, np.minimum(lengths, 1) * np.int32(MATCH_LEN))

    def retain(self, req_ids: Collection[str]) -> None:
        """Do nothing."""


def chain_of(trace: Trace, position: int, num_right: int, length: int) -> list[int]:
    """`length` drafts from a position of the text, of which the first `num_right` are right."""
    truth = trace.text[position : position + length].tolist()
    return [token if n < num_right else -1 - token for n, token in enumerate(truth)]


def make_traces(rng: np.random.Generator) -> list[Trace]:
    """Texts in which no token repeats, and the head's drafts at each position."""
    traces = []
    for number in range(NUM_TRACES):
        text = np.arange(NUM_TOKENS, dtype=np.int32)
        rights = np.cumprod(rng.random((NUM_TOKENS, len(RATES))) < RATES, axis=1).sum(axis=1)
        trace = Trace(str(number), "simulated", str(number), text, 0, [], None)
        trace.drafts.extend(chain_of(trace, i + 1, int(right), len(RATES)) for i, right in enumerate(rights))
        traces.append(trace)
    return traces


def history_of(trace: Trace, position: int) -> History:
    return History([trace.req_id], trace.text[None], np.array([position + 1]), np.array([0]))


def speed_of(traces: list[Trace], matcher: RandomMatcher, num_model: int, num_ngram: int, setting: Setting) -> float:
    """Tokens per cost of drafts of fixed numbers, all slots of which are paid for."""
    cost, limit = 0.0, np.array([num_ngram])

    def draft(position: int) -> tuple[list[int], int]:
        model = trace.drafts[position][:num_model]
        behind = matcher.match(history_of(trace, position), np.array([model]) if model else None, limit)
        drafts = model + behind.to_lists()[0]
        # FastDeploy verifies empty slots as well.
        return drafts + [-1] * (num_model + num_ngram - len(drafts)), num_model

    for trace in traces:
        cost += replay(trace, draft, setting)[1]
    return sum(len(trace.output) - 1 for trace in traces) / cost


def adaptive_speed(traces: list[Trace], matcher: RandomMatcher, setting: Setting) -> float:
    """Tokens per cost of the arbiter, which measures the costs of its steps."""
    results = replay_adaptive(traces, {NGRAM: matcher}, setting, BatchMeter())
    return sum(len(trace.output) - 1 for trace in traces) / sum(cost for _, cost in results)


def simulate(slot: float, console: Console) -> tuple[list[dict], list[str]]:
    """The rows of one slot cost, and what is wrong."""
    solved = Solved.of(slot)
    wrong = [f"slot {slot}: {name} = {value:.3f}" for name, value in asdict(solved).items() if value <= 0]
    rng = np.random.default_rng(0)
    traces = make_traces(rng)
    matcher = RandomMatcher(traces, solved, rng)
    found = ", ".join(f"{name} {value:.3f}" for name, value in asdict(solved).items())
    table = Table(caption=f"A simulation. {found}")
    for name in ("way", "published", "simulated"):
        table.add_column(name, justify="left" if name == "way" else "right")
    rows = []

    def add(way: str, speed: float) -> None:
        published = SPEEDS.get(way)
        table.add_row(way, "-" if published is None else f"{published:.2f}", f"{speed:.2f}")
        rows.append({"way": way, "slot_cost": slot, "published": published, "simulated": speed})
        if published is not None and abs(speed / published - 1) > TOLERANCE:
            wrong.append(f"slot {slot}: {way} is {speed:.3f}, published {published}")

    def setting(passes: int, width: int) -> Setting:
        return PublishedSetting(passes, width, solved.pass_cost, slot, solved.fixed, solved.jump)

    for way, (num_model, num_ngram) in DRAFTED.items():
        add(way, speed_of(traces, matcher, num_model, num_ngram, setting(num_model, num_model + num_ngram)))
    for passes, width in ((1, 3), (3, 4), (3, 5)):
        speed = adaptive_speed(traces, matcher, setting(passes, width))
        add(f"adaptive, up to {passes} passes, {width} slots", speed)
    console.print(table)
    return rows, wrong


def main(argv: list[str] | None = None) -> int:
    """Run the simulation; 1 if the costs do not explain the published speeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slot-cost", type=number_from_0, nargs="+", default=[0.01, 0.02, 0.05], metavar="C")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    rows, wrong = [], []
    for slot in args.slot_cost:
        more, faults = simulate(slot, console)
        rows += more
        wrong += faults
    for line in wrong:
        console.print(f"FAILED: {line}", markup=False)
    if args.json:
        write_json(args.json, {"environment": environment("vllm-specplus", "numpy"), "rows": rows, "wrong": wrong})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
