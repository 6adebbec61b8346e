"""Between vLLM's calls the plugin never waits for the device.

A CPU cannot show a wait, so what would cause one is made to fail while the plugin's own code runs: reading a tensor's
values on the host, and operations whose result's shape depends on values. Kernel launches are left out: the interpreter
reads everything that a kernel does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from tests.e2e.engines import engine, speculative
from tests.e2e_v2.engines import FEW, tokens
from tests.runners.suffix_engine import Engine, Event
from vllm_specplus.runners import v2, v2_requests, v2_verify
from vllm_specplus.runners.v2_host import TokenFeed
from vllm_specplus.runners.v2_suffix import SuffixFiller
from vllm_specplus.verify import checks

_READS = ("item", "tolist", "numpy", "cpu")
_WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
}


class _NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        picks = function is torch.ops.aten.index.Tensor and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        waits = picks or function in _WAITING
        assert not waits, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[int]]:
    """Guards a method: it fails where it would wait. Returns the list of its calls."""
    guarded = [False]

    @contextmanager
    def guarding(on: bool) -> Iterator[None]:
        before, guarded[0] = guarded[0], on
        try:
            yield
        finally:
            guarded[0] = before

    for name in _READS:
        read = getattr(torch.Tensor, name)

        def refuse(self, *args, read=read, name=name, **kwargs):
            assert not guarded[0], f"Tensor.{name} waits for the device"
            return read(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, refuse)

    launch = GridExecutor.__call__

    def launch_unguarded(self, *args, **kwargs):
        with guarding(False), torch.utils._python_dispatch._disable_current_modes():
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launch_unguarded)
    # On a CPU alone, arguments are checked by their values.
    for name in ("_check_values", "_check_range"):
        monkeypatch.setattr(checks, name, lambda *args: None)
    monkeypatch.setattr(checks, "_width", lambda cu, max_rows: max_rows)

    def guard_method(owner: Any, name: str) -> list[int]:
        method, calls = getattr(owner, name), []

        def guarded_method(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            with guarding(True), _NoWaiting():
                return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, guarded_method)
        return calls

    return guard_method


@pytest.mark.parametrize("strategy", ["topp", "target_match", "rejection"])
def test_hybrid_and_verification(strategy: str, guard: Any, trained: Path, draft: Path) -> None:
    drafted = guard(v2.Drafting, "fill")
    verified = guard(v2_verify.StrategySampler, "verify")
    rows = guard(v2_verify.StrategyRejectionSampler, "_rows_of")
    marked = guard(v2_verify.CountingRejectionSampler, "_unmeant")
    counted = guard(v2_requests.RequestTracker, "count_drafts")
    config = speculative("mtp_ngram_override", draft, verify_strategy=strategy, draft_sample_method="probabilistic")
    with engine(trained, config) as e:
        tokens(e, FEW[:2], temperature=0.8, top_p=0.9, top_k=20, max_tokens=8)
    assert drafted
    assert verified
    assert marked
    assert counted
    assert bool(rows) == (strategy == "rejection")


def test_vllms_verification(guard: Any, trained: Path, draft: Path) -> None:
    guarded = [
        guard(v2.Drafting, "fill"),
        guard(v2, "write_one_hot_rows"),
        guard(v2_verify.CountingRejectionSampler, "_unmeant"),
    ]
    with engine(trained, speculative("mtp_ngram", draft, draft_sample_method="probabilistic")) as e:
        tokens(e, FEW[:2], max_tokens=8)
    assert all(guarded)


def test_ngram(guard: Any, trained: Path, draft: Path) -> None:
    drafted = guard(v2.Drafting, "fill")
    with engine(trained, speculative("ngram", draft)) as e:
        tokens(e, FEW[:2], max_tokens=8)
    assert drafted


def test_suffix_trees_under_asynchronous_scheduling(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait in one place alone: for the tokens of the step before."""
    Event.install(monkeypatch)
    guarded = [guard(TokenFeed, "_send"), guard(SuffixFiller, "_continue")]
    stand_in = Engine(is_async=True)
    stand_in.add("a", 0, [1, 2, 3, 1, 2, 3])
    for token in (1, 2, 3):
        stand_in.step({"a": [token]})
    assert all(guarded)
    assert Event.waited == [0, 1]


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t.item(),
    "tolist": lambda t: t.tolist(),
    "int": int,
    "cpu": lambda t: t.cpu(),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
}


@pytest.mark.parametrize("waits", WAITS)
def test_power(waits: str, guard: Any) -> None:
    class Plugin:
        def step(self) -> Any:
            return WAITS[waits](torch.ones(1))

    guard(Plugin, "step")
    with pytest.raises(AssertionError, match="waits for the device"):
        Plugin().step()


def test_the_suffix_trees_wait_and_say_so(guard: Any, trained: Path, draft: Path) -> None:
    """Their tokens have to come to the host: the one place that waits."""
    guard(v2.Drafting, "fill")
    with (
        engine(trained, speculative("suffix", draft)) as e,
        pytest.raises(AssertionError, match=r"Tensor.numpy waits for the device"),
    ):
        tokens(e, FEW[:1], max_tokens=8)
