"""Replays steps under Triton's interpreter, in processes of their own, and keeps what was counted.

A step's output is checked. Fewer requests than the step has may stand for all of them.
"""

import hashlib
import os
import pickle
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

from static.counts import LaunchCounts
from static.interpreter import counted_launches
from static.steps import DRAFTS, VLLM, Step

import vllm_specplus

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-specplus" / "static_cost"
_IN_REPLAYS = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
_BENCHMARKS, _PACKAGE = Path(__file__).parents[1], Path(vllm_specplus.__file__).parent
# What may change what is counted: in all steps, in vLLM's, in those of drafts, and in the others.
_COMMON = [_BENCHMARKS / "static" / f"{name}.py" for name in ("counts", "interpreter", "steps")]
_OF_VLLM = [_BENCHMARKS / name for name in ("verify_cases.py", "verify_peers.py")]
_OF_DRAFTS = [_BENCHMARKS / "static" / "drafts.py", _PACKAGE / "kernels", _PACKAGE / "sources.py"]
_OF_STRATEGIES = [_BENCHMARKS / "verify_cases.py", _PACKAGE / "kernels" / "verify", _PACKAGE / "strategies.py"]


def replayed(steps: Sequence[Step], num_reqs: int, jobs: int) -> dict[Step, list[LaunchCounts]]:
    """The counts of each launch of each step.

    Args:
        num_reqs: replay this many requests of each step, or as many as it has.
        jobs: processes at a time.

    Raises:
        Exception: a step failed, or its output was wrong.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    files = {step: CACHE / f"{_key(step, num_reqs)}.pickle" for step in steps}
    with (
        mock.patch.dict(os.environ, _IN_REPLAYS),
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
    ):
        futures = {pool.submit(replay, step, num_reqs): step for step, file in files.items() if not file.exists()}
        for future in as_completed(futures):
            unfinished = files[futures[future]].with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(pickle.dumps(future.result()))
            unfinished.replace(files[futures[future]])
    return {step: pickle.loads(file.read_bytes()) for step, file in files.items()}


def _key(step: Step, num_reqs: int) -> str:
    about = (step, step.num_replayed(num_reqs), step.folders, *map(version, ("triton", "torch", "vllm")))
    found = hashlib.sha256(repr(about).encode())
    sources = {VLLM: _OF_VLLM, DRAFTS: _OF_DRAFTS}.get(step.method, _OF_STRATEGIES)
    for source in (*_COMMON, *sources):
        for file in [source] if source.is_file() else sorted(source.rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()[:32]


def replay(step: Step, num_reqs: int) -> list[LaunchCounts]:
    """The counts of a step with this many of its requests at most, in this process; it needs the interpreter."""
    start = time.monotonic()
    num_reqs = step.num_replayed(num_reqs)
    call = step.call(num_reqs, "cpu")
    with counted_launches(step.folders, step.shape.vocab_size, num_reqs / step.shape.num_reqs) as launches:
        call.check(call.run())
    print(f"{step.name}: replayed in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return launches
