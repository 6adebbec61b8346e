"""A server under the load of many clients: no answer is wrong, nothing stays behind, and no memory grows.

In the environment SPECPLUS_SOAK_SECONDS sets how long each server is under load. SPECPLUS_SOAK_SEED sets other lengths
and turns of the clients, and SPECPLUS_FUZZ_SEED other raw requests.
"""

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

import tests
from tests import fuzzing
from tests.e2e.serving import Server, python_path, serve
from tests.soak.census import CountingWorker
from tests.soak.load import Clients, Kind, answers_alone, kinds, soak, with_references
from tests.soak.raw_bytes import send_raw_bytes
from tests.soak.server_state import CENSUS_PATH, PATH, ServerState

# Torch keeps a compiled matrix product for each size of a batch, up to 1,024 of them: 300 MiB in ten minutes.
_SMALL_CACHE = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
_STAND_IN = Path(tests.__file__).parent / "triton_cpu"
_NUM_CACHED = 16
_NUM_TIMES = 32
_PRICES_PERIOD = 8
_MOST = {
    "SuffixMatcher._cached": _NUM_CACHED,
    "_Response": _NUM_CACHED,
    "SuffixMatcher._shared": _NUM_CACHED,
    # Times of the latest steps and passes.
    "StepPrices._postponed": _NUM_TIMES,
    # One for each step since the latest prices, by its passes and requests.
    "StepPrices._usual_passes": _PRICES_PERIOD,
    "_RecentTimes._in_turn": 3 * _NUM_TIMES,
    "_RecentTimes._in_order": 3 * _NUM_TIMES,
    # One for each size of a batch.
    "CommonAccount._credits": 8,
    "CostMeter._first_passes": 8,
    "CostMeter._passes": 8,
    "CostMeter._steps_by_size": 8,
    "_Steps": 8,
    "_Steps.sums": 8 * 15,
    # One for each number of drafts.
    "_Steps.times": 6,
    "_Fit": 8,
    "_Passes": 2,
    "Clock": 4,
}
"""What the plugin keeps by design of requests and steps that are over, by the names of the `census`, and its bounds."""


@dataclass(frozen=True)
class Case:
    """A server.

    config: its speculative config. environment: of its processes. max_tokens: the most tokens of an answer.
    repeats_samples: whether a seed has one right answer, whatever else is in its batches.
    """

    config: dict[str, Any]
    environment: dict[str, str]
    max_tokens: int
    repeats_samples: bool

    @property
    def options(self) -> list[str]:
        options = ["--speculative-config", json.dumps(self.config), "--max-num-seqs", "64"]
        options += ["--max-num-batched-tokens", "256", "--max-model-len", "4096"]
        # With vLLM's routes that only render a prompt.
        options += ["--enable-scale-out", "--middleware", f"{ServerState.__module__}.{ServerState.__name__}"]
        return [*options, "--worker-extension-cls", f"{CountingWorker.__module__}.{CountingWorker.__name__}"]


V1 = Case(
    {
        "method": "mtp",
        "num_speculative_tokens": 5,
        "num_model_steps": 2,
        "mtp_strategy": "with_suffix",
        "adaptive": True,
        "verify_strategy": "target_match",
        # What the trees may hold is reached soon, so that nothing grows afterwards.
        "suffix_decoding_max_cached_requests": _NUM_CACHED,
    },
    _SMALL_CACHE | {"VLLM_PLUGINS": "specplus", "VLLM_USE_V2_MODEL_RUNNER": "0", "PYTHONPATH": python_path()},
    max_tokens=96,
    repeats_samples=True,
)
V2 = Case(
    {
        "method": "mtp",
        "num_speculative_tokens": 4,
        "num_model_steps": 2,
        "mtp_strategy": "with_ngram",
        "verify_strategy": "target_match",
    },
    V1.environment | {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": python_path(_STAND_IN)},
    max_tokens=12,
    repeats_samples=True,
)
# With `rejection` a seeded text depends on the drafts.
V2_SUFFIX = replace(
    V2,
    config=V2.config
    | {
        "mtp_strategy": "with_suffix",
        "verify_strategy": "rejection",
        "suffix_decoding_max_cached_requests": _NUM_CACHED,
    },
    repeats_samples=False,
)
# No stream comes to its end before the server's. Each step has room for fifty of them with so few drafts.
LONG = Kind(
    "a long answer",
    {"prompt": "def add(a, b):\n", "max_tokens": 4000, "temperature": 0.0},
    {"ignore_eos": True, "vllm_xargs": {"spec_tokens": 2}},
)
NUM_LONG = 50
NUM_RAW = 300
SECONDS = float(os.environ.get("SPECPLUS_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("SPECPLUS_SOAK_SEED", "0"))
SECONDS_TO_END = 20.0
MOST_SECONDS_BETWEEN_SAMPLES = 30.0


class Memory:
    """Measures the resident memory of a server's processes, by name, while the block runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.samples: list[dict[int, int]] = []
        self._times: list[float] = []
        self._is_over = threading.Event()

    def __enter__(self) -> "Memory":
        self._times.append(time.monotonic())
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *args: Any) -> None:
        self._is_over.set()
        self._thread.join()
        self._times.append(time.monotonic())

    def _watch(self) -> None:
        while not self._is_over.wait(1.0):
            self.samples.append(memory_of(self._pid))
            self._times.append(time.monotonic())

    def growth(self) -> dict[int, float]:
        """The growth of each process over the second half, as a share of what it had."""
        # The thread may have died.
        assert max(end - begin for begin, end in pairwise(self._times)) < MOST_SECONDS_BETWEEN_SAMPLES, self._times
        half = len(self.samples) // 2
        lasting = self.samples[half].keys() & self.samples[-1].keys()
        # The least of several: memory is taken and given back all the time.
        before = {pid: min(s[pid] for s in self.samples[half : half + 5] if pid in s) for pid in lasting}
        after = {pid: min(s[pid] for s in self.samples[-5:] if pid in s) for pid in lasting}
        return {pid: after[pid] / before[pid] - 1 for pid in lasting}


def memory_of(pid: int) -> dict[int, int]:
    """The resident memory of a process and of those below it, each of which may end at any time."""
    found = {}
    for process in processes(pid):
        with suppress(psutil.NoSuchProcess):
            found[process.pid] = process.memory_info().rss
    return found


def processes(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def engine_process(pid: int) -> psutil.Process:
    found = [p for p in processes(pid) if "EngineCore" in " ".join(p.cmdline() or [p.name()])]
    assert len(found) == 1, [p.cmdline() for p in processes(pid)]
    return found[0]


def wait_until_idle(server: Server) -> None:
    """Wait until no request is left, in vLLM or in the plugin, in the workers or in the server's process."""
    deadline = time.monotonic() + 60
    while True:
        left = json.loads(server.get("/specplus/stats"))["entries"] | json.loads(server.get(PATH))
        left["requests of vLLM"] = server.metric("vllm:num_requests_running") + server.metric(
            "vllm:num_requests_waiting"
        )
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


def take_census(server: Server) -> dict[str, int]:
    """The plugin's objects while no request runs; rows of requests that are over go when another one begins."""
    server.client().completions.create(model="tiny", prompt="x", max_tokens=2, temperature=0.0)
    wait_until_idle(server)
    assert not json.loads(server.get("/specplus/stats"))["faults"]
    return json.loads(server.get(CENSUS_PATH))


def check_census(server: Server, before: dict[str, int]) -> None:
    """Wait until no request is left: the plugin has no more objects than before, nor more in its containers."""
    after = take_census(server)
    most = {name: max(before.get(name, 0), _MOST.get(name, 0)) for name in after}
    assert {name: (most[name], number) for name, number in after.items() if number > most[name]} == {}


def check_counts(server: Server, tally: Counter[str], num_drafts: int) -> None:
    """The plugin's counts are vLLM's, but for the last step of each request that the engine did not end itself."""
    stats = json.loads(server.get("/specplus/stats"))
    assert not stats["faults"]
    for what, name in (("drafted", "draft"), ("accepted", "accepted")):
        ours = sum(row[what] for row in stats["totals"].values())
        vllms = server.metric(f"vllm:spec_decode_num_{name}_tokens_total")
        most_uncounted = num_drafts * (tally["gone early"] + tally["gone amid"] + tally["overrun"])
        print(f"{what}: {ours} by our count, {vllms:.0f} by vLLM's, which may lack {most_uncounted}")
        assert vllms <= ours <= vllms + most_uncounted


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(V1, id="v1"),
        pytest.param(V2, id="v2"),
        pytest.param(V2_SUFFIX, id="v2-suffix", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(1200 + SECONDS)
def test_soak(case: Case, trained: Path, tmp_path: Path) -> None:
    with serve(trained, tmp_path, *case.options, **case.environment) as server:
        asyncio.run(_soak(server, case, num_clients=200))


@pytest.mark.parametrize("case", [pytest.param(V1, id="v1"), pytest.param(V2, id="v2")])
def test_an_engine_that_is_told_to_end(case: Case, trained: Path, tmp_path: Path) -> None:
    """vLLM aborts its requests, and says so to each client in place of an error."""
    # So no stream waits for another.
    room = ["--kv-cache-memory-bytes", str(256 << 20)]
    with serve(trained, tmp_path, *case.options, *room, **case.environment) as server:
        engine = engine_process(server.pid)
        losing = Clients(server.address).lose_the_server(
            LONG, NUM_LONG, lambda: engine.send_signal(signal.SIGTERM), SECONDS_TO_END
        )
        assert asyncio.run(losing) == {"abort": NUM_LONG}


@pytest.mark.slow
@pytest.mark.timeout(1200 + SECONDS)
def test_raw_requests(trained: Path, tmp_path: Path) -> None:
    """Each round has other requests; in between the server has to come to rest."""
    print("raw requests of SPECPLUS_FUZZ_SEED", fuzzing.SEED)
    statuses, rng = Counter[int](), random.Random(fuzzing.SEED)
    with serve(trained, tmp_path, *V1.options, **V1.environment) as server:
        before, end = take_census(server), time.monotonic() + SECONDS
        while time.monotonic() < end:
            statuses += asyncio.run(send_raw_bytes(server.address, NUM_RAW, rng))
            check_census(server, before)
    print("raw requests:", dict(statuses))
    assert not [status for status in statuses if status >= 500]
    assert statuses[200] > 0 < statuses[400]


async def _soak(server: Server, case: Case, num_clients: int) -> None:
    print("requests of SPECPLUS_SOAK_SEED", SEED, "and raw ones of SPECPLUS_FUZZ_SEED", fuzzing.SEED)
    clients, asked = Clients(server.address), kinds(case.max_tokens, SEED)
    answers = await answers_alone(clients, asked)
    asked += with_references(asked, answers)
    if not case.repeats_samples:
        answers = {kind.name: answers[kind.name] for kind in asked if not kind.is_sampled}
    before = await asyncio.to_thread(take_census, server)
    with Memory(server.pid) as memory:
        tally = await soak(clients, asked, answers, num_clients, SECONDS, SEED)
    print(dict(tally.ends), "memory grew over the second half by", memory.growth())
    assert tally.differences == []
    # A slow server may not have come to a stop string.
    assert set(tally.ends) - {"overrun"} == {"answered", "refused", "gone early", "gone amid"}
    await asyncio.to_thread(wait_until_idle, server)
    check_counts(server, tally.ends, case.config["num_speculative_tokens"])
    # Other caches of kernels fill for some minutes, so only a long run can tell that nothing leaks.
    assert max(memory.growth().values()) < (0.1 if SECONDS < 300 else 0.03)
    # The same server again, alone.
    again = [kind for kind in asked if kind.name in answers][:3]
    assert await answers_alone(clients, again) == {kind.name: answers[kind.name] for kind in again}
    await asyncio.to_thread(check_census, server, before)

    statuses = await send_raw_bytes(server.address, NUM_RAW, random.Random(fuzzing.SEED))
    print("raw requests:", dict(statuses))
    assert not [status for status in statuses if status >= 500]
    assert statuses[200] > 0 < statuses[400]
    await asyncio.to_thread(check_census, server, before)

    engine = engine_process(server.pid)
    assert await clients.lose_the_server(LONG, NUM_LONG, engine.kill, SECONDS_TO_END) == {"error": NUM_LONG}
