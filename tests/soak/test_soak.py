"""A server under the load of many clients: no answer is wrong, nothing stays behind, and no memory grows.

SPECPLUS_SOAK_SECONDS in the environment sets how long each server is under load.
"""

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

import tests
from tests.e2e.serving import Server, serve
from tests.soak.load import Clients, Kind, answers_alone, kinds, soak, with_references
from tests.soak.raw_bytes import send_raw_bytes

NUM_DRAFTS = 5
CONFIG = {
    "method": "mtp",
    "num_speculative_tokens": NUM_DRAFTS,
    "num_model_steps": 2,
    "mtp_strategy": "with_suffix",
    "adaptive": True,
    "verify_strategy": "target_match",
    # What the trees may hold is reached soon, so that nothing grows afterwards.
    "suffix_decoding_max_cached_requests": 16,
}
_STAND_IN = Path(tests.__file__).parent / "triton_cpu"
OPTIONS = ["--speculative-config", json.dumps(CONFIG), "--max-num-seqs", "64", "--max-num-batched-tokens", "256"]
LONG = Kind(
    "a long answer", {"prompt": "def add(a, b):\n", "max_tokens": 400, "temperature": 0.0}, {"ignore_eos": True}
)
# Torch keeps a compiled matrix product for each size of a batch, up to 1,024 of them: 300 MiB in ten minutes.
_SMALL_CACHE = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
_V1 = _SMALL_CACHE | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
_V2 = _SMALL_CACHE | {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": str(_STAND_IN)}
NUM_RAW = 300
SECONDS = float(os.environ.get("SPECPLUS_SOAK_SECONDS", "60"))


class Memory:
    """Measures the resident memory of a server's processes, by name, while the block runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.samples: list[dict[int, int]] = []
        self._is_over = threading.Event()

    def __enter__(self) -> "Memory":
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *args: Any) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(1.0):
            self.samples.append({p.pid: p.memory_info().rss for p in processes(self._pid)})

    def growth(self) -> dict[int, float]:
        """The growth of each process over the second half, as a share of what it had."""
        half, last = len(self.samples) // 2, self.samples[-1]
        # The least of several: memory is taken and given back all the time.
        before = {pid: min(s[pid] for s in self.samples[half : half + 5] if pid in s) for pid in last}
        after = {pid: min(s[pid] for s in self.samples[-5:] if pid in s) for pid in last}
        return {pid: after[pid] / before[pid] - 1 for pid in last}


def processes(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def engine_process(pid: int) -> psutil.Process:
    found = [p for p in processes(pid) if "EngineCore" in " ".join(p.cmdline() or [p.name()])]
    assert len(found) == 1, [p.cmdline() for p in processes(pid)]
    return found[0]


def wait_until_idle(server: Server) -> None:
    """Wait until no request is left, in vLLM or in the plugin."""
    deadline = time.monotonic() + 60
    while True:
        entries = json.loads(server.get("/specplus/stats"))["entries"]
        busy = server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")
        if not busy and not any(entries.values()):
            return
        assert time.monotonic() < deadline, (entries, busy)
        time.sleep(0.5)


def check_counts(server: Server, tally: Counter[str]) -> None:
    """The plugin's counts are vLLM's, but for the last step of each request that the engine did not end itself."""
    stats = json.loads(server.get("/specplus/stats"))
    assert not stats["faults"]
    for what, name in (("drafted", "draft"), ("accepted", "accepted")):
        ours = sum(row[what] for row in stats["totals"].values())
        vllms = server.metric(f"vllm:spec_decode_num_{name}_tokens_total")
        most_uncounted = NUM_DRAFTS * (tally["gone early"] + tally["gone amid"] + tally["overrun"])
        print(f"{what}: {ours} by our count, {vllms:.0f} by vLLM's, which may lack {most_uncounted}")
        assert vllms <= ours <= vllms + most_uncounted


@pytest.mark.parametrize(
    ("environment", "max_tokens"), [pytest.param(_V1, 96, id="v1"), pytest.param(_V2, 12, id="v2")]
)
@pytest.mark.timeout(1200 + SECONDS)
def test_soak(environment: dict[str, str], max_tokens: int, trained: Path, tmp_path: Path) -> None:
    with serve(trained, tmp_path, *OPTIONS, VLLM_PLUGINS="specplus", **environment) as server:
        asyncio.run(_soak(server, num_clients=200, max_tokens=max_tokens))


@pytest.mark.parametrize("environment", [pytest.param(_V1, id="v1"), pytest.param(_V2, id="v2")])
def test_an_engine_that_is_told_to_end(environment: dict[str, str], trained: Path, tmp_path: Path) -> None:
    """vLLM aborts its requests; each stream says so."""
    with serve(trained, tmp_path, *OPTIONS, VLLM_PLUGINS="specplus", **environment) as server:
        engine = engine_process(server.pid)
        losing = Clients(server.address).lose_the_server(LONG, 50, lambda: engine.send_signal(signal.SIGTERM))
        ends = asyncio.run(losing)
    assert ends["silence"] == 0


@pytest.mark.slow
@pytest.mark.timeout(1200 + SECONDS)
def test_raw_requests(trained: Path, tmp_path: Path) -> None:
    """Each round has other requests; in between the server has to come to rest."""
    statuses: Counter[int] = Counter()
    with serve(trained, tmp_path, *OPTIONS, VLLM_PLUGINS="specplus", **_V1) as server:
        end, seed = time.monotonic() + SECONDS, 0
        while time.monotonic() < end:
            seed += 1
            statuses += asyncio.run(send_raw_bytes(server.address, NUM_RAW, seed))
            wait_until_idle(server)
    print("raw requests:", dict(statuses))
    assert not [status for status in statuses if status >= 500]
    assert statuses[200] > 0 < statuses[400]


async def _soak(server: Server, num_clients: int, max_tokens: int) -> None:
    clients, asked = Clients(server.address), kinds(max_tokens)
    answers = await answers_alone(clients, asked)
    asked += with_references(asked, answers)
    with Memory(server.pid) as memory:
        tally = await soak(clients, asked, answers, num_clients, SECONDS)
    print(dict(tally.ends), "memory grew over the second half by", memory.growth())
    assert tally.differences == []
    # A slow server may not have come to a stop string.
    assert set(tally.ends) - {"overrun"} == {"answered", "refused", "gone early", "gone amid"}
    await asyncio.to_thread(wait_until_idle, server)
    check_counts(server, tally.ends)
    # Other caches of kernels fill for some minutes, so only a long run can tell that nothing leaks.
    assert max(memory.growth().values()) < (0.1 if SECONDS < 300 else 0.03)
    # The same server again, alone.
    assert await answers_alone(clients, asked[:3]) == {kind.name: answers[kind.name] for kind in asked[:3]}

    statuses = await send_raw_bytes(server.address, NUM_RAW)
    print("raw requests:", dict(statuses))
    assert not [status for status in statuses if status >= 500]
    assert statuses[200] > 0 < statuses[400]
    await asyncio.to_thread(wait_until_idle, server)

    engine = engine_process(server.pid)
    ends = await clients.lose_the_server(LONG, 50, engine.kill)
    # The first may have ended before the last began, on a slow machine.
    assert set(ends) - {"answered"} == {"error"}
