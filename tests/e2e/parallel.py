"""The drafts of each worker of an engine, which all of them have to make alike."""

from types import SimpleNamespace
from typing import Any

from vllm.distributed.parallel_state import get_tp_group

from tests.e2e.engines import Engine
from vllm_specplus.proposers.costs import Costs


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


def measure_otherwise(worker: Any, shares_prices: bool) -> None:
    """Run in a worker of an adaptive engine: to the last one of a group drafts cost far more than they bring.

    Args:
        worker: vLLM's.
        shares_prices: whether all use the first worker's prices, as they should; otherwise each uses its own.
    """
    prices = worker._tracker.prices
    if get_tp_group().is_last_rank:
        prices._meter.costs = lambda num_reqs: Costs(1.0, 1.0, 8.0, 8.0)
    if not shares_prices:
        prices._group = SimpleNamespace(world_size=1)


def recorded_drafts(worker: Any) -> list[list[list[int]]]:
    """Run in a worker: the drafts of each step, by request."""
    return worker.drafts


def drafts_of_workers(e: Engine) -> list[list[list[list[int]]]]:
    """The drafts of each worker, by step and request, after `record_drafts`."""
    return e.llm.collective_rpc(recorded_drafts)
