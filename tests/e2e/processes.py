"""Processes that tests start, kill and wait for."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that run. A container may keep what has ended as zombies."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def of_group(group: int) -> list[psutil.Process]:
    """The processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group:
                found.append(process)
    return found


def wait_for(holds: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until something holds; the test fails, and says what it waited for, if that takes too long."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.1)


def ray_environment() -> dict[str, str]:
    """The environment of a script that starts Ray, whose engines get processes of their own, as a user's do."""
    inherited = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    # By default Ray's processes give way to all others, so another test would starve them.
    return inherited | {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
