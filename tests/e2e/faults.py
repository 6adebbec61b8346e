"""Faults put into the plugin's own code while an engine serves."""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from vllm.distributed.parallel_state import get_tp_group

from tests.e2e.engines import PROMPTS, Engine
from tests.e2e.references import ask, stats
from vllm_specplus.proposers.arbiter import Prices
from vllm_specplus.proposers.costs import CostMeter, Pace
from vllm_specplus.proposers.history import History
from vllm_specplus.runners.live_requests import LiveRequests

SECRET = "tokens 120 120 120"
# The prompt whose drafting fails, and the others.
FAULTY, OTHERS = PROMPTS[5], PROMPTS[:4]


class InjectedError(Exception):
    """A fault; its message has what must not be logged."""

    def __init__(self) -> None:
        super().__init__(SECRET)


@contextmanager
def fault(owner: Any, name: str, is_hit: Callable[..., bool]) -> Iterator[list[int]]:
    """Let a function raise where `is_hit` says so of its arguments; the list has an entry for each time it did."""
    hits: list[int] = []
    function = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if is_hit(*args, **kwargs):
            hits.append(len(hits))
            raise InjectedError
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, faulty)
        yield hits


def at_calls(*numbers: int) -> Callable[..., bool]:
    """Hit at these calls, counted from 0."""
    count = iter(range(10**9))
    return lambda *args, **kwargs: next(count) in numbers


def check_faults(e: Engine, part: str, log: pytest.LogCaptureFixture) -> None:
    """The faults are counted, and logged once with their stack and without the client's tokens."""
    assert stats(e)["faults"][part] >= 1
    said = [record.getMessage() for record in log.records if f"a fault in {part}" in record.getMessage()]
    assert len(said) == 1
    assert "InjectedError" in said[0]
    assert "in faulty" in said[0]
    assert SECRET not in log.text


def check_alive(e: Engine, expected: list[list[int]], max_tokens: int = 48) -> None:
    """Requests that come afterwards get their texts and their drafts; `expected`: the texts of `OTHERS`."""
    before = sum(map(sum, stats(e)["drafted"].values()))
    assert ask(e, OTHERS, [{}] * 4, max_tokens=max_tokens) == expected[:4]
    assert sum(map(sum, stats(e)["drafted"].values())) > before
    assert stats(e)["entries"]["requests"] == 0


def check_faults_in_accepting_all(
    e: Engine, prompts: list[list[int]], expected: list[list[int]], max_tokens: int
) -> None:
    """Requests whose drafts are all to be accepted have their texts while nobody can tell which they are.

    Args:
        e: an engine with `allow_force_accept`.
        prompts: of the requests.
        expected: their texts without it.
        max_tokens: the length of each text.
    """
    forced = [{"force_sp_accept": True}] * len(prompts)
    with fault(LiveRequests, "accept_all_mask", lambda *args: True) as hits:
        assert ask(e, prompts, forced, max_tokens=max_tokens) == expected
    assert hits
    assert ask(e, prompts, forced, max_tokens=max_tokens) != expected


def reads_the_faulty(matcher: Any, history: History, *args: Any) -> bool:
    """Whether a matcher is given the text of the faulty prompt."""
    texts = (history.tokens(i)[: len(FAULTY)] for i in range(len(history.req_ids)) if history.num_tokens[i])
    return any(np.array_equal(text, FAULTY) for text in texts)


CHEAP = Prices(0.02, 1.0, 0.02, 0.02)


def let_drafts_pay(patch: pytest.MonkeyPatch, prices: Prices = CHEAP) -> None:
    """On a busy machine the clock may say that no drafts pay, and the places under test are not reached."""
    patch.setattr(Pace, "prices", lambda self, costs, num_reqs: prices)
    patch.setattr(CostMeter, "has_steps", False)


def let_drafts_pay_in_worker(worker: Any) -> None:
    """Run in a worker, to its end."""
    let_drafts_pay(pytest.MonkeyPatch())


class PayingWorker:
    """vLLM adds this class to a server's worker."""

    def let_drafts_pay(self) -> None:
        """Let drafts pay to its end."""
        let_drafts_pay_in_worker(self)


def fail_in_worker(worker: Any, place: str) -> None:
    """Run in a worker: let a function fail until `recover_in_worker`.

    Matching fails for the faulty prompt, any other function at one of its calls.

    Args:
        worker: vLLM's.
        place: the function's full name.
    """
    _begin_fault(worker, place, reads_the_faulty if place.endswith(".match") else at_calls(1))


def fail_in_first_worker(worker: Any, place: str) -> None:
    """Run in a worker: let a function fail in the first one of the group until `recover_in_worker`.

    Args:
        worker: vLLM's.
        place: the function's full name.
    """
    _begin_fault(worker, place, lambda *args, **kwargs: get_tp_group().is_first_rank)


def _begin_fault(worker: Any, place: str, is_hit: Callable[..., bool]) -> None:
    owner, name = place.rsplit(".", 1)
    worker.fault = fault(pkgutil.resolve_name(owner), name, is_hit)
    worker.hits = worker.fault.__enter__()


def recover_in_worker(worker: Any) -> int:
    """Run in a worker: let the function work again, and say how often it has failed."""
    worker.fault.__exit__(None, None, None)
    return len(worker.hits)
