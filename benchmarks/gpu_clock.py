"""Times of calls on a GPU, and of a copy there; on a CPU one call, only so that a benchmark runs."""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

WARMUPS, MIN_CALLS, MAX_CALLS, SECONDS = 3, 10, 100, 0.3
HOST_CALLS = 20
FLUSH_BYTES, COPY_BYTES, CPU_COPY_BYTES = 1 << 28, 1 << 30, 1 << 24


class Clock:
    """Times replays of a CUDA graph of a call, or single calls.

    Before each call on a GPU, the L2 cache is filled by reading something else.
    """

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.flush = torch.zeros(FLUSH_BYTES // 4 if self.on_gpu else 1, device=device)
        size = COPY_BYTES if self.on_gpu else CPU_COPY_BYTES
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copies = self.calls(lambda: target.copy_(source))
        self.copy_gb_per_s = 2 * size / float(np.median(copies)) / 1e3  # bytes read and bytes written

    def replays(self, run: Callable[[], Any], check: Callable[[Any], Any]) -> list[float]:
        """Microseconds of each replay of a graph of the call; `check` is shown first what a replay has written.

        Raises:
            RuntimeError: it cannot be captured in a graph.
        """
        replay, output = capture(run)
        replay()
        check(output)
        return self.calls(replay)

    def calls(self, run: Callable[[], Any]) -> list[float]:
        """Microseconds of each call, with what of its launching the device waits for."""
        if not self.on_gpu:
            return [self._call(run)]
        warmups = [self._call(run) for _ in range(WARMUPS)]
        calls = int(np.clip(SECONDS / (np.median(warmups) * 1e-6), MIN_CALLS, MAX_CALLS))
        return [self._call(run) for _ in range(calls)]

    def host_us(self, run: Callable[[], Any]) -> float | None:
        """Median microseconds until a call returns, on an idle GPU that it need not wait for; None without a GPU."""
        if not self.on_gpu:
            return None
        times = []
        for _ in range(HOST_CALLS):
            torch.cuda.synchronize()
            before = time.perf_counter()
            run()
            times.append((time.perf_counter() - before) * 1e6)
        return float(np.median(times))

    def _call(self, run: Callable[[], Any]) -> float:
        if not self.on_gpu:
            before = time.perf_counter()
            run()
            return (time.perf_counter() - before) * 1e6
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Reading leaves nothing in the cache that would have to be written back during the call.
        self.flush.amax()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


def capture(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """The replay of a graph of the call, and where it leaves the call's output."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return graph.replay, output
