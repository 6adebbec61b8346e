"""Every verification kernel against the specification on the device: called, then replayed from a CUDA graph.

    python ci/gpu/kernel_cases.py JSON [--dry]

A group is a kernel variant: its cases differ in numbers and in how many rows a request has, and are compiled for once.
Cases are made and judged by ``tests/verify/cases.py``. Outputs and scratch are poisoned before each run. A few cases
have the vocabularies of served models. The specification takes seconds for each row of these.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from jobs import run_jobs

from tests.verify.cases import ROW_KINDS, Shape, assert_same, make_case
from vllm_specplus.kernels.verify import Workspace
from vllm_specplus.kernels.verify import launch as kernels
from vllm_specplus.verify import STRATEGIES, reference
from vllm_specplus.verify.types import VerifyInputs

NUM_CASES, DRY_CASES = 5000, 8
MAX_ROWS, MAX_REQS = 8, 3
ROW_COUNTS = (1, 2, 3, 5, MAX_ROWS)
# Of each group with the vocabulary of a served model.
LARGE_CASES = 2
LARGE_VOCABS = ((151_936, "bfloat16"), (262_144, "float32"))
LARGE_ROW_COUNTS = (1, 2)
# Without rows whose tokens are so many and so alike that no parameter lies off all thresholds.
LARGE_ROW_KINDS = ("normal", "wide", "peaked", "masked", "one_left", "infinite")
# Blocks of small vocabularies are cut to this size, so that a row has several.
SMALL_BLOCK = 512
_FILTERS = ((), ("top_p",), ("top_p", "top_k"), ("min_p", "top_k", "top_p"))
_SIZES = ("BLOCK_SIZE", "TILE_SIZE", "SCAN_SIZE", "LIST_SIZE")


@dataclass(frozen=True)
class Group:
    """Cases that the same machine code runs."""

    strategy: str
    policy: str = "normal"
    filters: tuple[str, ...] = ()
    vocab_size: int = 320
    dtype: str = "bfloat16"
    verify_window: int = 0
    max_candidate_len: int | None = None
    with_draft_logits: bool = False
    with_draft_rows: bool = False

    @property
    def is_large(self) -> bool:
        return self.vocab_size >= LARGE_VOCABS[0][0]

    def shapes(self, count: int, seed: int) -> Iterator[Shape]:
        choose = random.Random(seed)
        counts, kinds = (LARGE_ROW_COUNTS, LARGE_ROW_KINDS) if self.is_large else (ROW_COUNTS, ROW_KINDS)
        for _ in range(count):
            num_reqs = choose.randint(2, MAX_REQS)
            yield Shape(
                counts=[choose.choice(counts) for _ in range(num_reqs)],
                kinds=choose.sample(kinds, choose.randint(1, 4)),
                seed=choose.randrange(2**40),
                filters=set(self.filters),
                dtype=getattr(torch, self.dtype),
                **{name: value for name, value in asdict(self).items() if name not in ("filters", "dtype")},
            )


def groups() -> list[Group]:
    """Every strategy, with each set of filters and the other options that it has."""
    variants: list[dict[str, Any]] = [{"strategy": "greedy"}, {"strategy": "greedy", "policy": "accept_all"}]
    for strategy in STRATEGIES:
        if strategy != "greedy":
            variants += [{"strategy": strategy, "filters": filters} for filters in _FILTERS]
    variants += [
        {"strategy": "topp", "filters": ("top_p",), "verify_window": 2, "max_candidate_len": 5},
        {"strategy": "topp", "filters": ("top_p",), "policy": "accept_all"},
        {"strategy": "target_match", "filters": ("top_p",), "policy": "reject_all"},
        {"strategy": "rejection", "policy": "reject_all"},
        {"strategy": "rejection", "with_draft_logits": True},
        {"strategy": "rejection", "with_draft_logits": True, "with_draft_rows": True, "filters": _FILTERS[2]},
    ]
    sizes = cycle(
        [
            (320, "bfloat16"),
            (1100, "float32"),
            (5, "float16"),
            (4000, "bfloat16"),
            (65, "float32"),
            (128, "float16"),
            (1000, "bfloat16"),
        ]
    )
    found = []
    for variant in variants * 2:
        vocab_size, dtype = next(sizes)
        found.append(Group(**variant, vocab_size=vocab_size, dtype=dtype))
    return found


def large_groups() -> list[Group]:
    """Every strategy with the vocabularies of served models; without draft logits, whose cases take minutes to make."""
    variants: list[dict[str, Any]] = [
        {"strategy": "greedy"},
        {"strategy": "topp", "filters": _FILTERS[1], "verify_window": 2, "max_candidate_len": 5},
        {"strategy": "target_match", "filters": _FILTERS[2]},
        {"strategy": "rejection", "filters": _FILTERS[1]},
    ]
    return [Group(**variant, vocab_size=size, dtype=dtype) for variant in variants for size, dtype in LARGE_VOCABS]


class Checker:
    """Runs cases, with the results of a group's calls in one place."""

    def __init__(self, device: str) -> None:
        self.device = device

    def wrong(self, shape: Shape) -> str | None:
        """What is wrong in a case; None if nothing is."""
        case = make_case(shape)
        inputs = replace(case, max_rows=MAX_ROWS)
        expected = reference.verify(inputs)
        moved = {field.name: self._moved(getattr(inputs, field.name)) for field in fields(inputs)}
        inputs = VerifyInputs(**moved)
        workspace = Workspace.allocate(
            inputs.num_rows, inputs.num_reqs, inputs.vocab_size, inputs.max_rows, inputs.logits.device
        )
        how = "called"
        try:
            poison(workspace)
            assert_same(kernels.verify(inputs, workspace), expected)
            if self.device == "cuda":
                how = "replayed"
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    output = kernels.verify(inputs, workspace)
                poison(workspace)
                graph.replay()
                assert_same(output, expected)
        except Exception as error:
            # Also what a compiler or a driver raises is the result of this case, and the others go on.
            return f"{how}: {shape}: {type(error).__name__}: {str(error)[:400]}"
        return None

    def _moved(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, torch.Tensor) else value


def poison(workspace: Workspace) -> None:
    """Make every element wrong until it is written."""
    for field in fields(workspace):
        tensor = getattr(workspace, field.name)
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -99)


def check_group(job: tuple[int, Group, int, str]) -> dict[str, Any]:
    """Run the cases of a group; `first_wrong` has the first few that fail."""
    seed, group, count, device = job
    began = time.perf_counter()
    sizes = {name: getattr(kernels, name) for name in _SIZES}
    if group.vocab_size < 4 * SMALL_BLOCK:
        for name in _SIZES:
            setattr(kernels, name, SMALL_BLOCK)
    try:
        checker = Checker(device)
        wrong = [text for shape in group.shapes(count, seed) if (text := checker.wrong(shape))]
    finally:
        for name, size in sizes.items():
            setattr(kernels, name, size)
    seconds = time.perf_counter() - began
    return asdict(group) | {"cases": count, "wrong": len(wrong), "first_wrong": wrong[:3], "seconds": seconds}


def main() -> int:
    """Write the results as they come; 1 if a case fails."""
    parser = argparse.ArgumentParser(description="Verification kernels against the specification.")
    parser.add_argument("json", type=Path)
    parser.add_argument("--dry", action="store_true", help="a few cases, under Triton's interpreter")
    args = parser.parse_args()
    chosen, device, total = groups(), "cuda", NUM_CASES
    if args.dry:
        chosen, device, total = chosen[:2] + chosen[-2:], "cpu", DRY_CASES
    per_group = -(-total // len(chosen))
    # The longest first.
    large = [] if args.dry else large_groups()
    counted = [(group, LARGE_CASES) for group in large] + [(group, per_group) for group in chosen]
    jobs = [(seed, group, count, device) for seed, (group, count) in enumerate(counted)]
    results = []
    for result in run_jobs(check_group, jobs, device):
        results.append(result)
        done = {name: sum(r[name] for r in results) for name in ("cases", "wrong")}
        args.json.write_text(json.dumps(done | {"groups_left": len(jobs) - len(results), "groups": results}, indent=1))
        print(f"{done['cases']} cases, {done['wrong']} wrong; {result}", flush=True)
    return int(any(result["wrong"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
