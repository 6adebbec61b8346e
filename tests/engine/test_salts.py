"""How the workers learn which requests have the same `cache_salt`."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.test_scheduler import vllm_config
from vllm_specplus.engine import scheduler as module
from vllm_specplus.engine.salts import salting
from vllm_specplus.engine.scheduler import make_salting_scheduler, make_scheduler
from vllm_specplus.requests.options import SCOPE_ENTRY
from vllm_specplus.runners.faults import Faults


class Stock:
    """In the place of vLLM's scheduler."""

    def __init__(self, vllm_config: Any) -> None:
        self.requests: dict[str, Any] = {}
        self.dynamic_sd_lookup = [0, 4]

    def add_request(self, request: Any) -> None:
        self.requests.setdefault(request.request_id, request)

    def schedule(self) -> SimpleNamespace:
        return SimpleNamespace()


class StockAsync(Stock):
    """In the place of vLLM's asynchronous scheduler."""


def scope(scheduler: Any, req_id: str, salt: str | None, **extra: Any) -> str:
    """The scope of a request in the scheduler's message."""
    params = SimpleNamespace(extra_args=extra or None)
    scheduler.add_request(SimpleNamespace(request_id=req_id, cache_salt=salt, sampling_params=params))
    assert params.extra_args.keys() == extra.keys() | {SCOPE_ENTRY}
    return params.extra_args[SCOPE_ENTRY]


def new_scheduler() -> Any:
    return salting(Stock)(vllm_config=None)  # type: ignore[arg-type]


def test_requests_of_one_salt_have_one_scope() -> None:
    scheduler = new_scheduler()
    salts = ["x", "y", None, "x", "", "\ud800", None]
    scopes = [scope(scheduler, f"{i}", salt) for i, salt in enumerate(salts)]
    assert [scopes.index(one) for one in scopes] == [0, 1, 2, 0, 2, 5, 2]


def test_no_salt_can_be_read_from_a_scope() -> None:
    """Not by trying salts either: each engine has a key of its own."""
    first, second = (scope(new_scheduler(), "a", "tenant-a") for _ in range(2))
    assert first != second
    assert "tenant" not in first


def test_what_a_client_writes_is_replaced() -> None:
    scheduler = new_scheduler()
    theirs = scope(scheduler, "a", "x")
    mine = {"my_key": 1, SCOPE_ENTRY: theirs}
    params = SimpleNamespace(extra_args=mine)
    scheduler.add_request(SimpleNamespace(request_id="b", cache_salt=None, sampling_params=params))
    assert params.extra_args == {"my_key": 1, SCOPE_ENTRY: ""}
    assert mine[SCOPE_ENTRY] == theirs


def test_a_session_keeps_the_salt_that_it_began_with() -> None:
    scheduler = new_scheduler()
    assert scope(scheduler, "a", "x") == scope(scheduler, "a", "y") == scope(scheduler, "a", None)


def test_a_salt_that_cannot_be_read_is_shared_with_none(log: pytest.LogCaptureFixture) -> None:
    """vLLM takes any value in a process of the user's own. The scheduler's errors end the engine."""
    scheduler = new_scheduler()
    params = SimpleNamespace(extra_args={"my_key": 1, SCOPE_ENTRY: ""})
    request = SimpleNamespace(request_id="a", cache_salt=5, sampling_params=params)
    scheduler.add_request(request)
    assert scheduler.requests == {"a": request}
    assert params.extra_args == {"my_key": 1}
    assert "AttributeError" in log.text
    workers = Faults(logs=False)
    workers.take_over(scheduler.schedule())
    assert workers.counts == {"requests": 1}


def test_a_request_without_sampling_is_left_alone() -> None:
    scheduler = new_scheduler()
    request = SimpleNamespace(request_id="a", cache_salt="x", sampling_params=None)
    scheduler.add_request(request)
    assert scheduler.requests == {"a": request}


@pytest.mark.parametrize(
    ("options", "salts"),
    [
        ({"suffix_decoding_scope": "salt"}, True),
        ({"suffix_decoding_scope": "request"}, False),
        ({"suffix_decoding_scope": "shared"}, False),
        ({"suffix_decoding_scope": "salt", "suffix_decoding_max_cached_requests": 0}, False),
        ({"suffix_decoding_scope": "salt", "method": "ngram"}, False),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_which_scheduler_runs(
    options: dict[str, Any], salts: bool, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Scheduler", Stock)
    monkeypatch.setattr(module, "AsyncScheduler", StockAsync)
    monkeypatch.setattr(module, "WidthScheduler", StockAsync)
    config = vllm_config(is_async=is_async, **options)
    for make in (make_salting_scheduler, make_scheduler):
        scheduler = make(config)
        assert isinstance(scheduler, StockAsync) == is_async
        assert (type(scheduler) not in (Stock, StockAsync)) == salts
