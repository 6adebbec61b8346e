"""One engine on Model Runner V2: its texts, and then, once it may have the machine to itself, what it costs.

    python ci/gpu/engine.py NAME MODEL FOLDER (--steps | --speed) [--dry]

It writes FOLDER/NAME.json. After the texts it makes FOLDER/NAME.ready and waits for FOLDER/NAME.go. `--steps`: launches
and copies of a decode step, and how long the runner's methods take the host. `--speed`: tokens/s.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs import CONFIGS
from torch.profiler import ProfilerActivity, profile

from examples.demo import counters, of_mtp
from tests.e2e.engines import PROMPTS, Engine, engine

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
    "gpu_memory_utilization": 0.3,  # several engines share the GPU
    "max_model_len": 4096,
    "kv_cache_memory_bytes": 512 << 20,
    "max_num_seqs": 16,
}
REPEATS, MAX_TOKENS, DRY_TOKENS = 2, 200, 6
STEP_TOKENS = 64


def texts(e: Engine, dry: bool, has_references: bool) -> list[list[int]]:
    """Greedy texts of prompts that run together, and again one by one; the latter perhaps with them as references."""
    some = PROMPTS[:2] if dry else PROMPTS
    limit = {"max_tokens": DRY_TOKENS} if dry else {}
    together = e.tokens(some, **limit)
    if dry and not has_references:
        return together
    extra = [{"sp_advice_prompt_token_ids": text} if has_references else {} for text in together]
    return together + [e.tokens([p], extra_args=more, **limit)[0] for p, more in zip(some, extra, strict=True)]


def speed(e: Engine, dry: bool) -> dict[str, Any]:
    """Of each prompt of the demo: tokens/s, the best of a few runs, and steps per 100 tokens."""
    found = {}
    for name, shown in list(of_mtp().prompts.items())[: 1 if dry else None]:
        prompt = list(shown.text.encode())[: 40 if dry else None]
        num_tokens = DRY_TOKENS if dry else MAX_TOKENS
        seconds = []
        before = counters(e.llm)[0]
        for _ in range(1 if dry else REPEATS):
            began = time.perf_counter()
            e.tokens([prompt], max_tokens=num_tokens)
            seconds.append(time.perf_counter() - began)
        steps = counters(e.llm)[0] - before
        found[name] = {
            "tokens_per_second": num_tokens / min(seconds),
            "steps_per_100_tokens": 100 * steps / (num_tokens * len(seconds)),
        }
    return found


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

    before = counters(e.llm)[0]
    activities = [ProfilerActivity.CPU] if dry else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiled:
        e.tokens(some, **limit)
    num_steps = counters(e.llm)[0] - before
    counts = Counter({event.key: event.count for event in profiled.key_averages()})
    return {
        "steps": num_steps,
        "launches_per_step": sum(counts[name] for name in _LAUNCHES) / num_steps,
        "copies_per_step": sum(counts[name] for name in _COPIES) / num_steps,
        "by_name_per_step": {name: counts[name] / num_steps for name in (*_LAUNCHES, *_COPIES) if counts[name]},
        "host_us": host_us,
    }


def wait_for(path: Path) -> None:
    """Return once the file is there; the parent process ends this one if it never is."""
    while not path.exists():
        time.sleep(0.05)


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
    with engine(args.model, CONFIGS[args.name], **({} if args.dry else ON_GPU)) as e:
        config = CONFIGS[args.name]
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
