"""The drafts of each worker of an engine, which all of them have to make alike."""

from typing import Any

from tests.e2e.engines import Engine


def record_drafts(worker: Any) -> None:
    """Run in a worker: keep the drafts of each step from now on."""
    runner = worker.model_runner
    drafter = getattr(runner, "speculator", None) or runner.drafter
    propose, worker.drafts = drafter.propose, []

    def propose_and_record(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        worker.drafts.append(drafts if isinstance(drafts, list) else drafts.tolist())
        return drafts

    drafter.propose = propose_and_record


def recorded_drafts(worker: Any) -> list[list[list[int]]]:
    """Run in a worker: the drafts of each step, by request."""
    return worker.drafts


def drafts_of_workers(e: Engine) -> list[list[list[list[int]]]]:
    """The drafts of each worker, by step and request, after `record_drafts`."""
    return e.llm.collective_rpc(recorded_drafts)
