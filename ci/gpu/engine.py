"""One engine on Model Runner V2: its texts, and then, once it may have the machine to itself, what it costs.

    python ci/gpu/engine.py NAME MODEL FOLDER (--steps | --speed) [--dry]

It writes FOLDER/NAME.json. After the texts it makes FOLDER/NAME.ready and waits for FOLDER/NAME.go. `--steps`: launches
and copies of a decode step, and how long the runner's methods take the host. `--speed`: tokens/s by batch.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs import BATCHES, CONFIGS, DRY_BATCHES, RANDOM_HEAD
from torch.profiler import ProfilerActivity, profile

from examples.demo import counters, of_mtp
from tests.e2e.eagle_heads import make_eagle_head
from tests.e2e.engines import PROMPTS, Engine, engine
from vllm_specplus.compare.engine import Session
from vllm_specplus.compare.prompts import Prompt
from vllm_specplus.compare.runs import Run
from vllm_specplus.testing.tiny_model import make_draft_model

# As the CUDA runtime and driver name what puts work on the device.
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
_COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")
_METHODS = ("execute_model", "sample_tokens", "take_draft_token_ids")
ON_GPU: dict[str, Any] = {
    "async_scheduling": True,
    "enforce_eager": False,
    "attention_backend": "TRITON_ATTN",
    # No compiler of torch's: only what vLLM launches is captured.
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "custom_ops": ["none"]},
    # vLLM's own kernels are compiled parts, which are not there.
    "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
    "gpu_memory_utilization": 0.3,  # several engines share the GPU
    "max_model_len": 4096,
    "kv_cache_memory_bytes": 512 << 20,
    "max_num_seqs": 16,
}
# Of an engine whose speed is measured: requests at once, and the memory of their texts.
OF_BATCHES: dict[str, Any] = {"max_num_seqs": BATCHES[-1], "kv_cache_memory_bytes": 1 << 30}
REPEATS, MAX_TOKENS, DRY_TOKENS = 2, 128, 6
SPEED_SECONDS = 6.0  # no run begins later
DRY_BYTES = 40  # of a prompt
STEP_TOKENS = 64
MIXED = "all"


def texts(e: Engine, dry: bool, has_references: bool) -> list[list[int]]:
    """Greedy texts of prompts that run together, and again one by one; the latter perhaps with them as references."""
    some = PROMPTS[:2] if dry else PROMPTS
    limit = {"max_tokens": DRY_TOKENS} if dry else {}
    together = e.tokens(some, **limit)
    if dry and not has_references:
        return together
    extra = [{"sp_advice_prompt_token_ids": text} if has_references else {} for text in together]
    return together + [e.tokens([p], extra_args=more, **limit)[0] for p, more in zip(some, extra, strict=True)]


def some_prompts(number: int, dry: bool) -> list[Prompt]:
    """The prompts of the demo in turn, each time with more of the end cut off, so that no two are the same."""
    shown = list(of_mtp().prompts.values())[: 1 if dry else None]
    found = []
    for i in range(number):
        prompt = shown[i % len(shown)]
        text = (prompt.text or "")[: DRY_BYTES if dry else None]
        found.append(Prompt(prompt.name, text[: len(text) - 4 * (i // len(shown))]))
    return found


def speed(e: Engine, dry: bool) -> list[dict[str, Any]]:
    """By batch: tokens/s, steps of a request per 100 tokens, and the texts, all of the best of a few runs.

    One request at a time runs each prompt of the demo by itself. A larger batch has all of them, and two requests for
    each place. A run is timed as long as all places are taken. Where no time was left there are nulls.
    """
    batches = DRY_BATCHES if dry else BATCHES
    prompts = some_prompts(2 * batches[-1], dry)
    kinds = dict.fromkeys(prompt.name for prompt in prompts)
    orders: dict[tuple[int, str], range] = {(1, kind): range(i, i + 1) for i, kind in enumerate(kinds)}
    orders |= {(batch, MIXED): range(2 * batch) for batch in batches[1:]}
    session = Session(e.llm.llm_engine, prompts, DRY_TOKENS if dry else MAX_TOKENS)
    best: dict[tuple[int, str], Run] = {}
    end = time.monotonic() + (math.inf if dry else SPEED_SECONDS)
    for _ in range(1 if dry else REPEATS):
        for (batch, kind), order in orders.items():
            if time.monotonic() < end:
                run = session.run(order, batch, temperature=0.0)
                best[batch, kind] = max(run, best.get((batch, kind), run), key=lambda each: each.tokens_per_second)
    return [{"batch": batch, "prompts": kind} | shown_run(best.get((batch, kind)), session) for batch, kind in orders]


def shown_run(run: Run | None, session: Session) -> dict[str, Any]:
    """What the results have of a run; None: there was none."""
    if run is None:
        return {"tokens_per_second": None, "steps_per_100_tokens": None, "texts": None}
    return {
        "tokens_per_second": run.tokens_per_second,
        "steps_per_100_tokens": 100 * run.num_steps / run.num_tokens,
        "texts": [session.text(token_ids) for token_ids in run.token_ids],
    }


def timed(method: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """The method, which notes its microseconds."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = method(*args, **kwargs)
        times.append((time.perf_counter() - began) * 1e6)
        return result

    return call


def steps(e: Engine, dry: bool) -> dict[str, Any]:
    """Launches and copies per step, and microseconds of the runner's methods; both over requests that decode."""
    some, limit = PROMPTS[:4], {"max_tokens": DRY_TOKENS if dry else STEP_TOKENS}
    times: dict[str, list[float]] = {name: [] for name in _METHODS if hasattr(e.runner, name)}
    for name, noted in times.items():
        setattr(e.runner, name, timed(getattr(e.runner, name), noted))
    e.tokens(some, **limit)
    host_us = {name: statistics.median(noted) for name, noted in times.items() if noted}
    for name in times:
        delattr(e.runner, name)

    all_steps, of_all = launched(e, some, dry, **limit)
    # No graph is replayed for prompts, so they launch far more.
    prompt_steps, of_prompts = launched(e, some, dry, max_tokens=1)
    num_steps, counts = all_steps - prompt_steps, of_all - of_prompts
    return {
        "steps": num_steps,
        "launches_per_step": sum(counts[name] for name in _LAUNCHES) / num_steps,
        "copies_per_step": sum(counts[name] for name in _COPIES) / num_steps,
        "by_name_per_step": {name: counts[name] / num_steps for name in (*_LAUNCHES, *_COPIES) if counts[name]},
        "host_us": host_us,
    }


def launched(e: Engine, some: list[Any], dry: bool, max_tokens: int) -> tuple[int, Counter[str]]:
    """The steps of some requests, and how often they launched and copied, by name."""
    before = counters(e.llm)[0]
    activities = [ProfilerActivity.CPU] if dry else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiled:
        e.tokens(some, max_tokens=max_tokens)
    counts = Counter({event.key: event.count for event in profiled.key_averages()})
    return counters(e.llm)[0] - before, counts


def wait_for(path: Path) -> None:
    """Return once the file is there; the parent process ends this one if it never is."""
    while not path.exists():
        time.sleep(0.05)


def config_of(name: str, model: Path, folder: Path) -> dict[str, Any] | None:
    """A config of `CONFIGS` with its draft model's folder, which is made in `folder`."""
    config = CONFIGS[name]
    if config is None or "model" not in config:
        return config
    made = folder / f"{name}-drafter"
    if config["model"] == RANDOM_HEAD:
        target = json.loads((model / "config.json").read_text())
        sizes = {"width": target["hidden_size"], "num_heads": target["num_attention_heads"]}
        make_eagle_head(made, "eagle", **sizes, vocab_size=target["vocab_size"])
    else:
        make_draft_model(made)
    return config | {"model": str(made)}


def main() -> None:
    """Write the results."""
    parser = argparse.ArgumentParser(description="One engine, for ci/gpu/engines.py.")
    parser.add_argument("name", choices=CONFIGS)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    options = ON_GPU | (OF_BATCHES if args.speed else {})
    config = config_of(args.name, args.model, args.folder)
    with engine(args.model, config, **({} if args.dry else options)) as e:
        # Without a reference this method drafts nothing.
        has_references = config is not None and config["method"] == "naive"
        found: dict[str, Any] = {"texts": texts(e, args.dry, has_references)}
        # Of the few tokens of a dry run a random model may accept none.
        if config is not None and not args.dry:
            found["accepted"] = e.counts().accepted
        (args.folder / f"{args.name}.ready").touch()
        wait_for(args.folder / f"{args.name}.go")
        if args.steps:
            found["steps"] = steps(e, args.dry)
        if args.speed:
            found["speed"] = speed(e, args.dry)
        # Whole or not at all.
        part = args.folder / f"{args.name}.part"
        part.write_text(json.dumps(found))
        part.rename(args.folder / f"{args.name}.json")


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  # vLLM's engine in this process

    sys.exit(main())
