"""Tokens per step and speed of every way of drafting, replayed on recorded texts: no engine and no model runs.

    python benchmarks/replay.py --traces FILE [--passes N ...] [--window N ...] [--draft-cost C ...] [--slot-cost C ...]
                                [--measure-costs] [--json FILE]

FILE is a JSON list of ``{"kind", "name", "prompt", "output", "drafts"}``, as `benchmarks/record.py` writes it. Prompt
and output are token ids. ``drafts[i]`` is what the draft model drafts once ``output[:i + 1]`` is known; only the last
entries may be shorter than the passes asked for, and the very last may be missing. A trace may have a ``"reference"``
in token ids, or null. One with a single output token has no steps and is left out.

A step verifies a list of drafts. It gives the longest prefix of them that the output confirms, and one token more; for
greedy text this is what an engine does. A step costs ``1 + draft-cost x passes + slot-cost x drafts``: the costs are
shares of a step of the target alone. ``speed`` is tokens per cost, so that of no speculation is 1. A row's ``passes``
are 0 for a way without the draft model, and otherwise the most that a step may make.

==========  ============================================================================================
way         what is drafted in each step, at most `--window` tokens
==========  ============================================================================================
none        nothing
model       the draft model's drafts alone; ``passes`` is their number, up to `--passes`
ngram       what followed an earlier match of the request's own text
suffix      what the suffix trees of this and the file's earlier traces say
append      the draft model's drafts, then a match that goes on from them (FastDeploy)
override    the same; a match of 4 tokens or more replaces the model's drafts (TensorRT-LLM)
reference   what the request's reference says, walked (`sp_edit` 1); traces without one are left out
adaptive    what the arbiter chooses among all of these; it learns from trace to trace, in the file's order
hindsight   for each step the best of these, and of a match behind each number of the model's drafts, with the best cut
            and the fewest passes: no drafter can do better
==========  ============================================================================================

The arbiter is told the costs, so that a setting shows what its choices are worth. With `--measure-costs` it measures
them from step to step in each setting, as an engine with one request on V1 does. That costs some steps without drafts.

An engine knows which tokens end a text. Here they are those that end several outputs of the file and stand within none.

The drafts are made by the product's own matchers. A replay that gives another text than the output ends the run.
"""

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from common import environment, first_problem, num_right, write_json
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.table import Table

from vllm_specplus.compare.command import number_from_0, positive
from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.proposers import History, HybridDrafter, Match, Matcher, NgramMatcher, SuffixMatcher
from vllm_specplus.proposers.adaptive import AdaptiveDrafter
from vllm_specplus.proposers.costs import CostMeter, Costs, Pace
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.sources import NGRAM, SUFFIX

OPTIONS = SpecPlusOptions(method="suffix", num_speculative_tokens=1)  # for its defaults
OVERRIDE_LEN = 4
ALL = "all"


class TraceError(ValueError):
    """A trace file that cannot be replayed; the message names the trace and what is wrong."""


_TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]


class TraceRow(BaseModel):
    """A trace as the file has it."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    kind: str
    name: str
    prompt: _TokenIds
    output: _TokenIds
    drafts: list[_TokenIds]
    reference: _TokenIds | None = None


@dataclass(frozen=True)
class Trace:
    """One recorded text.

    req_id: unlike the name, no other trace has it. text: [num_prompt_tokens + num_output_tokens] int32. drafts: the
    draft model's, one list for each output token.
    reference: [n] int32, or None.
    """

    req_id: str
    kind: str
    name: str
    text: np.ndarray
    num_prompt_tokens: int
    drafts: list[list[int]]
    reference: np.ndarray | None

    @property
    def output(self) -> np.ndarray:
        return self.text[self.num_prompt_tokens :]

    def confirmable(self, position: int) -> Sequence[int]:
        """The output after a position that drafts can be right about: all but the last token, which is no draft's."""
        return self._output_list[position + 1 : -1]

    @cached_property
    def _output_list(self) -> list[int]:
        return self.output.tolist()


@dataclass(frozen=True)
class Setting:
    """What a row is about; costs are shares of a step of the target alone."""

    passes: int
    width: int
    draft_cost: float
    slot_cost: float

    def cost(self, passes: int, num_drafts: int) -> float:
        """What a step costs, in steps of the target without drafts."""
        return 1 + self.draft_cost * passes + self.slot_cost * num_drafts


@dataclass(frozen=True)
class Row:
    """One row of the result; its fields are those of the JSON."""

    way: str
    kind: str
    passes: int
    window: int
    draft_cost: float
    slot_cost: float
    tokens_per_step: float
    speed: float


Drafts = list[list[int]]
"""What a way drafts once each output token of a trace is known, whatever the steps."""
Drafted = tuple[list[int], int]
"""The drafts of a step, and the passes that the draft model made for them."""


def read_traces(path: Path, passes: int) -> list[Trace]:
    """Read a trace file.

    Raises:
        TraceError: it is no list of traces, none has steps, or one lacks drafts for `passes`.
    """
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise TraceError(f"{path}: must be a list of one trace or more")
    traces = [_trace(row, number, passes) for number, row in enumerate(rows)]
    traces = [trace for trace in traces if len(trace.output) > 1]
    if not traces:
        raise TraceError(f"{path}: no trace has two output tokens or more")
    return traces


def _trace(row: Any, number: int, passes: int) -> Trace:
    try:
        given = TraceRow.model_validate(row)
    except ValidationError as error:
        problem = first_problem(error, "the trace")
        raise TraceError(f"trace {number}: needs kind, name, prompt, output and drafts: {problem}") from None
    kind, name, drafts = given.kind, given.name, given.drafts
    prompt, output = np.array(given.prompt, np.int32), np.array(given.output, np.int32)
    reference = None if given.reference is None else np.array(given.reference, np.int32)
    if kind == ALL:
        raise TraceError(f"trace {name!r}: kind {ALL!r} is not allowed: it stands for all kinds together")
    if len(drafts) == len(output) - 1:
        drafts = [*drafts, []]
    if not len(output) or len(drafts) != len(output):
        raise TraceError(f"trace {name!r}: needs output tokens, and as many lists of drafts")
    for i, row_drafts in enumerate(drafts):
        # Nothing behind the end of the output is ever verified.
        if len(row_drafts) < min(passes, len(output) - 1 - i):
            raise TraceError(f"trace {name!r}: drafts[{i}] has {len(row_drafts)} tokens, fewer than {passes} passes")
    return Trace(str(number), kind, name, np.concatenate((prompt, output)), len(prompt), drafts, reference)


def stop_token_ids(traces: Sequence[Trace]) -> list[int]:
    """The tokens that end a text, most frequent first: each ends several different outputs, and stands within none."""
    outputs = {tuple(trace.output.tolist()) for trace in traces}
    ends = Counter(output[-1] for output in outputs)
    within = {token_id for output in outputs for token_id in output[:-1]}
    return [
        token_id
        for token_id, number in sorted(ends.items(), key=lambda end: (-end[1], end[0]))
        if number > 1 and token_id not in within
    ]


def histories(trace: Trace) -> Iterator[History]:
    """The history of the trace as it stands when each output token is known."""
    for i in range(len(trace.output)):
        num_tokens = np.array([trace.num_prompt_tokens + i + 1])
        yield History([trace.req_id], trace.text[None], num_tokens, np.array([trace.num_prompt_tokens]))


def new_ngram_matcher(trace: Trace) -> NgramMatcher:
    return NgramMatcher(
        1, len(trace.text), min_ngram_size=OPTIONS.min_ngram_size, max_ngram_size=OPTIONS.max_ngram_size
    )


def new_suffix_matcher() -> SuffixMatcher:
    return SuffixMatcher(**OPTIONS.suffix_matcher)


def new_reference(trace: Trace) -> ReferenceText:
    assert trace.reference is not None
    return ReferenceText(
        trace.reference, edit=True, min_ngram_size=OPTIONS.min_ngram_size, max_ngram_size=OPTIONS.max_ngram_size
    )


def matched(matcher: Matcher, trace: Trace, width: int) -> Drafts:
    """What a matcher drafts from the history alone."""
    limit = np.array([width], np.int32)
    drafts = [matcher.match(history, None, limit).to_lists()[0] for history in histories(trace)]
    matcher.retain([])
    return drafts


def joined(trace: Trace, passes: int, width: int, override_len: int) -> Drafts:
    """What a hybrid of the draft model and the n-gram match drafts."""
    drafter = HybridDrafter(
        new_ngram_matcher(trace),
        num_model_steps=passes,
        num_speculative_tokens=width,
        match_override_len=override_len,
    )
    limit, drafts = np.array([width], np.int32), []
    for history, row in zip(histories(trace), trace.drafts, strict=True):
        model_drafts = np.array([(row + [0] * passes)[:passes]], np.int32)
        drafts.append(drafter.draft(history, model_drafts, limit).token_ids[0])
    return drafts


def cited(trace: Trace, width: int) -> Drafts:
    """What the trace's reference drafts."""
    text = new_reference(trace)
    return [text.draft(trace.output[: i + 1], width).tolist() for i in range(len(trace.output))]


def replay(
    trace: Trace,
    draft: Callable[[int], Drafted],
    setting: Setting,
    note: Callable[[int, float], None] = lambda num_tokens, cost: None,
) -> tuple[int, float]:
    """Steps and cost of a trace; the first output token is there before the first step.

    Args:
        trace: the text.
        draft: what is drafted, and in how many passes, once the output token at a position is known.
        setting: the costs.
        note: takes each step's tokens and cost.

    Raises:
        RuntimeError: the steps gave another text than the output.
    """
    position, num_steps, cost, tokens = 0, 0, 0.0, [int(trace.output[0])]
    while position < len(trace.output) - 1:
        row, passes = draft(position)
        accepted = num_right(row, trace.confirmable(position))
        tokens += [*row[:accepted], int(trace.output[position + accepted + 1])]
        step = setting.cost(passes, len(row))
        note(accepted + 1, step)
        cost += step
        num_steps += 1
        position += accepted + 1
    if tokens != trace.output.tolist():
        raise RuntimeError(f"{trace.name}: the replay gave another text than the output")
    return num_steps, cost


class RememberedMatcher:
    """A matcher that has found each match of all traces beforehand, as they do not depend on the steps."""

    match_len_cap = 0

    def __init__(self, traces: Sequence[Trace], new_matcher: Callable[[Trace], Matcher], passes: int, width: int):
        self._matches: dict[tuple[str, int, int], Match] = {}
        limit = np.array([width], np.int32)
        for trace in traces:
            matcher = new_matcher(trace)
            for history, drafts in zip(histories(trace), trace.drafts, strict=True):
                for start in range(min(passes, len(drafts)) + 1):
                    model_drafts = np.array([drafts[:start]], np.int32) if start else None
                    key = trace.req_id, int(history.num_tokens[0]), start
                    self._matches[key] = matcher.match(history, model_drafts, limit)
            matcher.retain([])

    def match(self, history: History, model_drafts: np.ndarray | None, max_drafts: np.ndarray) -> Match:
        start, limit = 0 if model_drafts is None else model_drafts.shape[1], int(max_drafts[0])
        match = self._matches[history.req_ids[0], int(history.num_tokens[0]), start]
        return Match(match.token_ids[:, :limit], np.minimum(match.num_tokens, limit), match.match_len)

    def retain(self, req_ids: Collection[str]) -> None:
        """Do nothing: the matches stay for the next setting."""


def new_matchers(traces: Sequence[Trace], passes: int, width: int) -> dict[int, Matcher]:
    """The matchers of the way `adaptive`, by source."""
    suffix = new_suffix_matcher()
    return {
        NGRAM: RememberedMatcher(traces, new_ngram_matcher, passes, width),
        SUFFIX: RememberedMatcher(traces, lambda trace: suffix, passes, width),
    }


def replay_adaptive(
    traces: Sequence[Trace], matchers: dict[int, Matcher], setting: Setting, meter: CostMeter | None = None
) -> list[tuple[int, float]]:
    """Steps and cost of each trace with the arbiter, which learns from one to the next.

    Args:
        traces: what is replayed.
        matchers: by source.
        setting: the costs.
        meter: measures the costs from step to step, as in an engine; None: they are known from the start.
    """
    drafter = AdaptiveDrafter(
        matchers,
        max_num_reqs=1,
        num_model_steps=setting.passes,
        num_speculative_tokens=setting.width,
        stop_token_ids=dict.fromkeys((trace.req_id for trace in traces), stop_token_ids(traces)),
    )
    pace, costs = Pace(), Costs(1.0, setting.slot_cost, setting.draft_cost, setting.draft_cost)
    limit = np.array([setting.width])

    def note(num_tokens: int, cost: float) -> None:
        pace.add(num_tokens, cost / (costs if meter is None else meter.costs(1)).step)

    results = []
    for trace in traces:
        reference = None if trace.reference is None else new_reference(trace)
        known = list(histories(trace))

        def draft(position: int, trace: Trace = trace, reference: Any = reference, known: Any = known) -> Drafted:
            if meter is None:
                # Verification costs nothing here, so no step goes without drafts to find out.
                drafter.set_prices(replace(pace.prices(costs, 1), verification=None))
            else:
                drafter.set_prices(pace.prices(meter.costs(1), 1))
            history = known[position]
            passes = min(drafter.plan(history, limit, [reference]), len(trace.drafts[position]))
            model_drafts = np.array([trace.drafts[position][:passes]], np.int32).reshape(1, passes)
            drafts = drafter.draft(history, limit, model_drafts).to_lists()[0]
            if meter is not None:
                in_passes = setting.draft_cost * passes
                meter.add_step(len(drafts), 1, setting.cost(passes, len(drafts)) - in_passes)
                if passes:
                    meter.add_passes(passes, 1, in_passes)
            return drafts, passes

        pace.begin_request(1)
        results.append(replay(trace, draft, setting, note))
        drafter.retain([])
    return results


def best_in_hindsight(trace: Trace, offers: Sequence[tuple[Drafts, int | None]], setting: Setting) -> tuple[int, float]:
    """Steps and cost of the cheapest sequence of steps whose drafts are all right.

    Args:
        trace: the text.
        offers: drafts at each position, with the passes that they need; None = one for each draft.
        setting: the costs.
    """
    last = len(trace.output) - 1
    cost, steps = [0.0] * (last + 1), [0] * (last + 1)
    for position in range(last - 1, -1, -1):
        truth = trace.confirmable(position)
        choices = {0: 0}  # accepted drafts -> fewest passes
        for drafts, passes in offers:
            for n in range(1, num_right(drafts[position], truth) + 1):
                needed = n if passes is None else passes
                choices[n] = min(needed, choices.get(n, needed))
        best = min((setting.cost(passes, n) + cost[position + n + 1], n) for n, passes in choices.items())
        cost[position], steps[position] = best[0], 1 + steps[position + best[1] + 1]
    return steps[0], cost[0]


def offers_of(traces: Sequence[Trace], passes: int, width: int) -> dict[str, list[Drafts | None]]:
    """By way, what it drafts on each trace; None where it has nothing to say. `model` drafts as often as it passes."""
    suffix = new_suffix_matcher()
    return {
        "model": [[row[:passes] for row in trace.drafts] for trace in traces],
        "ngram": [matched(new_ngram_matcher(trace), trace, width) for trace in traces],
        "suffix": [matched(suffix, trace, width) for trace in traces],
        "append": [joined(trace, passes, width, 0) for trace in traces],
        "override": [joined(trace, passes, width, OVERRIDE_LEN) for trace in traces],
        "reference": [None if trace.reference is None else cited(trace, width) for trace in traces],
    }


def rows_of(
    traces: Sequence[Trace],
    offers: dict[str, list[Drafts | None]],
    matchers: dict[int, Matcher],
    setting: Setting,
    meter: CostMeter | None = None,
) -> list[Row]:
    """The rows of one setting, those of `hindsight` last.

    Args:
        traces: what is replayed.
        offers: of `offers_of`, for the setting's passes and width.
        matchers: of `new_matchers`, likewise.
        setting: passes, width and costs.
        meter: see `replay_adaptive`.
    """
    rows = rows_of_drafters(traces, offers, matchers, setting, meter)
    passes = setting.passes
    # Of the model's drafts each costs a pass of its own, so fewer may do; what joins them needs all of them.
    needs = {"model": None, "ngram": 0, "suffix": 0, "append": passes, "override": passes, "reference": 0}
    best: list[tuple[int, float] | None] = []
    for i, trace in enumerate(traces):
        found = [(drafts, needs[way]) for way in needs if (drafts := offers[way][i]) is not None]
        found += spliced(trace, matchers, setting)
        best.append(best_in_hindsight(trace, found, setting))
    return rows + summed("hindsight", passes, setting, traces, best)


def rows_of_drafters(
    traces: Sequence[Trace],
    offers: dict[str, list[Drafts | None]],
    matchers: dict[int, Matcher],
    setting: Setting,
    meter: CostMeter | None = None,
) -> list[Row]:
    """The rows of one setting without `hindsight`; for the arguments see `rows_of`."""
    passes = setting.passes
    nothing: list[Drafts | None] = [[[]] * len(trace.output) for trace in traces]
    ways = [("none", 0, nothing)]
    for length in range(1, passes + 1):
        ways.append(("model", length, [[row[:length] for row in drafts or ()] for drafts in offers["model"]]))
    ways += [(way, 0, offers[way]) for way in ("ngram", "suffix", "reference")]
    ways += [(way, passes, offers[way]) for way in ("append", "override")]

    rows = []
    for way, num_passes, drafts in ways:
        results = [
            # `replay` calls the function before the loops go on.
            None if one is None else replay(trace, lambda position: (one[position], num_passes), setting)  # noqa: B023
            for trace, one in zip(traces, drafts, strict=True)
        ]
        rows += summed(way, num_passes, setting, traces, results)
    return rows + summed("adaptive", passes, setting, traces, replay_adaptive(traces, matchers, setting, meter))


def spliced(trace: Trace, matchers: dict[int, Matcher], setting: Setting) -> list[tuple[Drafts, int | None]]:
    """What each matcher drafts behind each number of the model's drafts, with the passes that it needs."""
    known, limit = list(histories(trace)), np.array([setting.width])
    found: list[tuple[Drafts, int | None]] = []
    for matcher in matchers.values():
        for passes in range(1, setting.passes + 1):
            lists = [
                [*row[:passes], *matcher.match(known[position], np.array([row[:passes]]), limit).to_lists()[0]]
                if len(row) >= passes
                else []
                for position, row in enumerate(trace.drafts)
            ]
            found.append(([row[: setting.width] for row in lists], passes))
    return found


def summed(
    way: str,
    passes: int,
    setting: Setting,
    traces: Sequence[Trace],
    results: Sequence[tuple[int, float] | None],
) -> list[Row]:
    """The rows of a way, one for each kind and one for all, from the steps and the cost of each trace."""
    rows = []
    for kind in (*dict.fromkeys(trace.kind for trace in traces), ALL):
        of_kind = [
            (len(trace.output) - 1, *result)
            for trace, result in zip(traces, results, strict=True)
            if result is not None and kind in (trace.kind, ALL)
        ]
        if of_kind:
            tokens, steps, cost = (sum(column) for column in zip(*of_kind, strict=True))
            width, draft_cost, slot_cost = setting.width, setting.draft_cost, setting.slot_cost
            rows.append(Row(way, kind, passes, width, draft_cost, slot_cost, tokens / steps, tokens / cost))
    return rows


def print_table(rows: Sequence[Row], setting: Setting, console: Console) -> None:
    """Print one setting's rows: a line for each way, a column for each kind."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    title = (
        f"window {setting.width}, passes {setting.passes} of {setting.draft_cost:g}, slots of {setting.slot_cost:g}: "
        "speed (tokens per step)"
    )
    table = Table(title=title)
    table.add_column("way", no_wrap=True)
    for kind in kinds:
        table.add_column(kind, justify="right", no_wrap=True)
    for (way, passes), group in itertools.groupby(rows, key=lambda row: (row.way, row.passes)):
        cells = {row.kind: f"{row.speed:.2f} ({row.tokens_per_step:.2f})" for row in group}
        table.add_row(f"{way} {passes}" if way == "model" else way, *(cells.get(kind, "-") for kind in kinds))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, metavar="FILE", help="what benchmarks/record.py wrote")
    parser.add_argument("--passes", type=positive, nargs="+", default=[1, 3], metavar="N", help="default: 1 3")
    parser.add_argument("--window", type=positive, nargs="+", default=[5, 10], metavar="N", help="default: 5 10")
    parser.add_argument("--draft-cost", type=number_from_0, nargs="+", default=[0.08], metavar="C", help="default: .08")
    parser.add_argument("--slot-cost", type=number_from_0, nargs="+", default=[0.02], metavar="C", help="default: .02")
    parser.add_argument("--measure-costs", action="store_true", help="the arbiter measures the costs from step to step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args()
    if min(args.window) < max(args.passes):
        parser.error(
            f"--window {min(args.window)} is not allowed with --passes {max(args.passes)}: it must be at least as large"
        )
    try:
        traces = read_traces(args.traces, max(args.passes))
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    console = Console() if sys.stdout.isatty() else Console(width=160)
    rows = []
    for passes, width in itertools.product(args.passes, args.window):
        offers, matchers = offers_of(traces, passes, width), new_matchers(traces, passes, width)
        for draft_cost, slot_cost in itertools.product(args.draft_cost, args.slot_cost):
            setting = Setting(passes, width, draft_cost, slot_cost)
            meter = CostMeter() if args.measure_costs else None
            found = rows_of(traces, offers, matchers, setting, meter)
            print_table(found, setting, console)
            rows += found
    if args.json:
        report = {"environment": environment("vllm-specplus", "numpy", "arctic-inference"), "traces": args.traces.name}
        write_json(args.json, report | {"rows": [asdict(row) for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
