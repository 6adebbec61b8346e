"""What benchmarks share: how far drafts are right, and of a report the machine, the versions and the JSON file."""

import json
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_specplus.compare.environment import machine


def environment(*packages: str) -> dict[str, Any]:
    """The machine, the versions of `packages` (null = not installed) and the git commit."""
    return machine(*packages) | {"git_commit": _git_commit()}


def gpu_environment() -> dict[str, Any]:
    """The GPU that torch uses and its CUDA version, null where there is none."""
    import torch

    if not torch.cuda.is_available():
        return {"gpu": None, "cuda": None}
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def peak_rss_mb() -> float:
    """The largest resident memory of this process so far, in MB (Linux counts KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def num_right(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """How many leading drafts the truth confirms: a greedy model accepts as many."""
    right = 0
    for draft, token in zip(drafts, truth, strict=False):
        if draft != token:
            break
        right += 1
    return right


def first_problem(error: ValidationError, whole: str) -> str:
    """Where the first problem is and what it is, in one line; `whole` stands for what was read."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write `report` to `path`, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def _git_commit() -> str | None:
    root = Path(__file__).parent
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
