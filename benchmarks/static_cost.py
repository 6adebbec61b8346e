"""What verification and drafting would cost on an H100: a static estimate, without a GPU.

    python benchmarks/static_cost.py [--replayed REQUESTS] [--only REGEX] [--json FILE]

Every kernel of every step (`static/steps.py`) is compiled for sm_90 by the installed Triton, and its machine code is
read (`static/sass.py`). The same launches run under Triton's interpreter on the benchmark's own rows, in processes of
their own. There it is counted how often each place of the source is executed (`static/counts.py`). What verification
puts out is checked; that of drafting is not. Small kernels that move a few numbers have no estimate, nor have those
that run in few steps (`docs/static_estimates.md` counts them). Instructions and counts together give the time of a
launch (`static/model.py`). The first table says what is assumed.

*vLLM* is the path of its V2 runner for the same rows, counted in the same way: a float32 copy, temperature, its filter
kernel, and the kernels of its rejection sampling. Operations of torch count as launches that move their arguments and
results. Ours has none here: the arguments are made beforehand in both.

*Slowest* is with each program's own time: a launch ends with its slowest request. *Mean* is as if all programs took
the mean time. *Floor* is one read of the logits.

All requests of all steps take two cores some hours, since the interpreter is slow. What is counted is kept in
`~/.cache` until code changes that it depends on. With `--replayed 8` eight requests stand for all. A slow path that one
request in sixty takes is then missed.
"""

import argparse
import hashlib
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import environment, write_json
from rich.console import Console
from static.counts import LaunchCounts
from static.machine import MACHINE, assumptions
from static.model import StepCost, cost_of_launch
from static.replay import CACHE, replayed
from static.sass import Kernel, read_kernel
from static.steps import OUR_KERNELS, Shape, Step, steps, vllm_folder
from static.tables import HEAD, goals, show
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_specplus.testing.ahead_of_time import Launch, recorded_launches


class DeviceOperations(TorchDispatchMode):
    """Notes the operations of torch that would launch a kernel, and the bytes of their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (func.is_view or "empty" in name or name in ("detach", "lift_fresh", "_local_scalar_dense")):
            tensors = {id(t): t for t in [*args, result] if isinstance(t, torch.Tensor)}.values()
            self.found.append((name, sum(t.numel() * t.element_size() for t in tensors)))
        return result


def recorded(step: Step) -> tuple[list[Launch], list[tuple[str, int]]]:
    """The launches and torch's operations of a step."""
    call = step.call(step.shape.num_reqs, "meta")
    with recorded_launches() as launches:
        call.run()  # what is done once per process
        launches.clear()
        with DeviceOperations() as operations:
            call.run()
    return launches, operations.found


def estimate(step: Step, counts: list[LaunchCounts], kernels: dict[str, Kernel]) -> StepCost:
    """The cost of a step. `kernels` keeps what has been compiled, by its hash.

    Raises:
        RuntimeError: the replay launched other kernels.
    """
    launches, operations = recorded(step)
    if [launch.name for launch in launches] != [counted.name for counted in counts]:
        raise RuntimeError(f"{step.name}: launches {[x.name for x in launches]}, replayed {[x.name for x in counts]}")
    costs = []
    for launch, counted in zip(launches, counts, strict=True):
        compiled = launch.compile()
        if compiled.hash not in kernels:
            kernels[compiled.hash] = read_kernel(compiled)
        costs.append(cost_of_launch(kernels[compiled.hash], launch.num_warps, launch.grid, counted, step.folders))
    return StepCost(step, costs, operations)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Static estimate of what verification and drafting cost on an H100.")
    parser.add_argument("--num-reqs", type=int, default=Shape.num_reqs)
    parser.add_argument("--rows", type=int, default=Shape.num_rows, help="of each request: its drafts and one")
    parser.add_argument("--vocab", type=int, default=Shape.vocab_size)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default=Shape.dtype)
    parser.add_argument("--only", type=re.compile, default="", help="steps whose name this pattern is found in")
    parser.add_argument("--replayed", type=int, help="requests that are replayed of each step; default all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="replays at a time")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("it compiles kernels: unset TRITON_INTERPRET")
    return args


def main(argv: list[str] | None = None) -> None:
    """Estimate, and print tables."""
    args = parse_args(argv)
    shape = Shape(args.num_reqs, args.rows, args.vocab, args.dtype)
    chosen = [step for step in steps(shape) if re.search(args.only, step.name)]
    # Machine code holds the paths of its source, which Triton's own cache does not tell apart.
    checkout = hashlib.sha256(f"{OUR_KERNELS} {vllm_folder()}".encode()).hexdigest()[:16]
    os.environ["TRITON_CACHE_DIR"] = str(CACHE / f"machine-code-{checkout}")
    num_reqs = args.replayed or shape.num_reqs
    counts = replayed(chosen, num_reqs, args.jobs)
    kernels: dict[str, Kernel] = {}
    costs = [estimate(step, counts[step], kernels) for step in chosen]
    show(Console(width=None if sys.stdout.isatty() else 240), shape, num_reqs, costs)
    if args.json:
        about = {"about": HEAD, "environment": environment("torch", "triton", "vllm"), "requests_replayed": num_reqs}
        about |= {"machine": asdict(MACHINE), "assumptions": assumptions()}
        found = [asdict(goal) | {"met": goal.met} for goal in goals(costs)]
        write_json(args.json, about | {"goals": found, "steps": [cost.record() for cost in costs]})


if __name__ == "__main__":
    main()
