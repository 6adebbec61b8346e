"""What a worker answers when it is asked for counts, and what it counts."""

import pickle
from types import SimpleNamespace
from typing import Any

from vllm_specplus.engine.worker import SpecPlusWorkerMixin
from vllm_specplus.runners.faults import Faults


class Tracker:
    """Answers while it `is_well`."""

    def __init__(self) -> None:
        self.live_requests = SimpleNamespace(faults=Faults(logs=False))
        self.is_well = True

    def before_step(self, scheduler_output: Any) -> None:
        assert scheduler_output.is_valid

    def stats(self) -> dict[str, Any]:
        return {"entries": {"requests": 1 // self.is_well}}

    def collect_request_stats(self, key: str) -> dict[str, int]:
        return {key: 1 // self.is_well}


def ask(worker: SpecPlusWorkerMixin) -> tuple[Any, Any]:
    return worker.specplus_stats(), worker.specplus_collect_request_stats("key")


def test_a_fault_is_counted_and_not_raised() -> None:
    """Of several workers vLLM would mistake the others' answers for those to its next question."""
    worker = SpecPlusWorkerMixin()
    assert ask(worker) == (None, None)
    tracker = worker._tracker = Tracker()  # type: ignore[assignment]
    assert ask(worker) == ({"entries": {"requests": 1}}, {"key": 1})
    tracker.is_well = False
    assert ask(worker) == (None, None)
    assert tracker.live_requests.faults.counts == {"counting": 2}


class StockWorker:
    """In the place of vLLM's worker."""

    def execute_model(self, scheduler_output: Any) -> str:
        return "a step"


class Worker(SpecPlusWorkerMixin, StockWorker):
    """The plugin's worker."""


def test_a_worker_counts_the_faults_of_its_scheduler_and_its_own() -> None:
    tracker = Tracker()
    worker: Any = Worker()
    worker._tracker = tracker
    scheduler = Faults(logs=False)
    scheduler.note("requests", ValueError())
    for is_valid in (True, False):
        output = SimpleNamespace(is_valid=is_valid)
        scheduler.hand_over(output)
        # Messages to other processes are pickled.
        assert worker.execute_model(pickle.loads(pickle.dumps(output))) == "a step"
    assert tracker.live_requests.faults.counts == {"requests": 2}
