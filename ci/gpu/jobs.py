"""Runs jobs of a stage side by side."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

_BUSY = 2  # processors that are left to this process and the system


def run_jobs(function: Callable[[Any], dict[str, Any]], jobs: list[Any], device: str) -> Iterator[dict[str, Any]]:
    """The results of all jobs as they end: in processes side by side on a GPU, since compiling takes longest."""
    if device == "cpu":
        yield from map(function, jobs)
        return
    workers = max(1, (os.cpu_count() or 1) - _BUSY)
    with multiprocessing.get_context("spawn").Pool(min(workers, len(jobs))) as pool:
        yield from pool.imap_unordered(function, jobs)
