"""Five ways of drafting on three real prompts, in one table; `bash ci/demo.sh` runs it on a model of its own.

    python examples/demo.py MODEL [--json FILE]

Every way of drafting must give the text of the engine without speculation; the exit code says whether it did.
"""

import argparse
import bz2
import csv
import inspect
import json
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MAX_TOKENS = 400
REPEATS = 3
NGRAM = {"max_ngram_size": 5, "min_ngram_size": 2}
HYBRID = {"method": "mtp", "num_speculative_tokens": 5, "mtp_strategy": "with_ngram"} | NGRAM
CONFIGS: dict[str, dict[str, Any] | None] = {
    "no speculation": None,
    "mtp": {"method": "mtp", "num_speculative_tokens": 1},
    "ngram": {"method": "ngram", "num_speculative_tokens": 5} | NGRAM,
    "hybrid": HYBRID,
    "hybrid, override": HYBRID | {"match_override_len": 4},
}


def prompts() -> dict[str, str]:
    """A library file to continue, a file to repeat with one name changed, and a JSON list.

    The tiny model has not been trained on either of the two files.
    """
    function = inspect.getsource(bz2.open)
    renamed = function.replace("filename", "path")
    rows = [{"id": i, "name": f"item {i}", "price": 10 + i, "in_stock": True} for i in range(8)]
    return {
        "continue a file": inspect.getsource(csv)[:1500],
        "repeat, one name changed": f"{function}\n\n{renamed[:200]}",
        "a JSON list": json.dumps(rows, indent=1)[:-2] + ",\n",
    }


def run(model: str, config: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """One engine on all prompts; a process of its own, since numba may be loaded once per engine."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        speculative_config=config,
        dtype="float32",
        max_model_len=4096,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=False,
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    llm.generate(["warm up, warm up"], params, use_tqdm=False)

    results = {}
    for name, prompt in prompts().items():
        before, seconds = counters(llm), []
        for _ in range(REPEATS):
            start = time.perf_counter()
            output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
            seconds.append(time.perf_counter() - start)
        after = counters(llm)
        drafts, accepted, *by_position = (b - a for a, b in zip(before, after, strict=True))
        results[name] = {
            "token_ids": list(output.token_ids),
            "tokens_per_second": sorted(len(output.token_ids) / s for s in seconds),
            "mean_accepted_length": 1 + accepted / drafts if drafts else 1.0,
            "accepted_by_position": [n / drafts if drafts else 0.0 for n in by_position],
        }
    return results


def counters(llm: Any) -> list[int]:
    """vLLM's counts so far: verifications, accepted drafts, and accepted drafts by position."""
    found = {m.name.removeprefix("vllm:spec_decode_num_"): m for m in llm.get_metrics()}
    if "drafts" not in found:
        return [0, 0]
    by_position = found["accepted_tokens_per_pos"].values
    return [int(found["drafts"].value), int(found["accepted_tokens"].value), *by_position]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a model with an MTP head")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Wide enough for the table where the output is no terminal.
    console = Console() if sys.stdout.isatty() else Console(width=128)
    results = {}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for name, config in CONFIGS.items():
            console.print(f"running: {name}")
            results[name] = pool.submit(run, args.model, config).result()

    equal = report(results, console)
    if args.json:
        args.json.write_text(json.dumps({"configs": CONFIGS, "results": results}, indent=1) + "\n")
    return 0 if equal else 1


def report(results: dict[str, dict[str, dict[str, Any]]], console: Console) -> bool:
    """Print the table; return whether every text equals the one without speculation."""
    table = Table(title=f"greedy, {MAX_TOKENS} tokens, median (min to max) of {REPEATS} runs")
    for column in ("prompt", "drafting", "tokens/s", "mean length", "accepted by position", "same text"):
        table.add_column(column, justify="left" if column in ("prompt", "drafting") else "right", no_wrap=True)
    equal = True
    for prompt, plain in results["no speculation"].items():
        for name, result in results.items():
            mine = result[prompt]
            same = mine["token_ids"] == plain["token_ids"]
            equal &= same
            speeds = mine["tokens_per_second"]
            table.add_row(
                prompt if name == "no speculation" else "",
                name,
                f"{statistics.median(speeds):.0f} ({speeds[0]:.0f} to {speeds[-1]:.0f})",
                f"{mine['mean_accepted_length']:.2f}",
                " ".join(f"{share:.0%}" for share in mine["accepted_by_position"]) or "-",
                "yes" if same else "NO",
            )
        table.add_section()
    console.print(table)
    return equal


if __name__ == "__main__":
    raise SystemExit(main())
