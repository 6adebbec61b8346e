"""Between vLLM's calls the plugin never waits for the device.

A CPU cannot show a wait, so the causes of waits fail while the plugin's own code runs. These are reads of a tensor's
values on the host, and operations whose result has a shape that depends on values. Kernel launches are left out, since
the interpreter reads all that a kernel does.
"""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor
from vllm.v1.worker.cpu import shm  # replaces torch's streams and events with ones that do not wait
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from tests.e2e.engines import engine, speculative
from tests.e2e.references import ask, config_of, stats
from tests.e2e.v2.engines import FEW, async_engine, tokens
from tests.runners.v2.suffix_engine import Engine, Event
from vllm_specplus.proposers.draft_widths import DraftWidths, Plan
from vllm_specplus.runners.v2 import adaptive, fillers
from vllm_specplus.runners.v2 import drafting as v2_drafting
from vllm_specplus.runners.v2 import states as v2_states
from vllm_specplus.runners.v2.adaptive import AdaptiveFiller
from vllm_specplus.runners.v2.drafting import Drafting
from vllm_specplus.runners.v2.host_tokens import TokenCopier
from vllm_specplus.runners.v2.requests import RequestTracker
from vllm_specplus.runners.v2.samplers import CountingRejectionSampler, StrategyRejectionSampler, StrategySampler
from vllm_specplus.runners.v2.speculator import HistorySpeculator, HybridMixin
from vllm_specplus.runners.v2.states import VariableLengthHandler
from vllm_specplus.runners.v2.suffix import SuffixFiller
from vllm_specplus.verify import checks

pytestmark = pytest.mark.interpreter

_READS = ("item", "tolist", "numpy", "cpu")
_aten = torch.ops.aten
_WAITING = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.equal.default,
    _aten._unique.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.unique_dim_consecutive.default,
}
_INDEX_PUT = {_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


def _waits(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether torch reads values on the host for this operation."""
    # `tensor[i] = number` copies the number from the host and waits for it; `fill_` does not.
    if function is _aten.copy_.default:
        return args[0].dim() == 0
    if function is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    # torch puts a single value in by `masked_fill`.
    if function is _aten.index.Tensor or (function in _INDEX_PUT and args[2].numel() != 1):
        return any(i is not None and i.dtype == torch.bool for i in args[1])
    return function in _WAITING


class WaitsError(BaseException):
    """The host waits for the device. Faults of the plugin's own code are caught, and this must not be."""


class _NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _waits(function, args, kwargs):
            raise WaitsError(f"{function} waits for the device")
        # In inference mode a composite operation comes in one piece.
        with self:
            result = function.decompose(*args, **kwargs)
        return function(*args, **kwargs) if result is NotImplemented else result


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _to_cpu(tensor: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> bool:
    return isinstance(device, str) and device == "cpu"


class Guard:
    """Makes guarded methods fail where they would wait, except inside the paused methods that they call.

    Methods are given by their class or module and their name. The result is a list that grows with each call.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._patch = monkeypatch.setattr
        self._is_on = False
        for name in _READS:
            self._refuse(torch.Tensor, name, f"Tensor.{name}")
        self._refuse(torch.Tensor, "to", "Tensor.to", _to_cpu)
        for module in (torch.cuda, torch.accelerator):
            self._refuse(module, "synchronize", f"{module.__name__}.synchronize")
        self._refuse_of_instances(shm._EventPlaceholder, "synchronize", "Event.synchronize")
        self._refuse_of_instances(shm._StreamPlaceholder, "synchronize", "Stream.synchronize")
        self.pause(GridExecutor, "__call__")
        # Only on a CPU are the values of arguments checked.
        for name in ("_check_values", "_check_range"):
            monkeypatch.setattr(checks, name, lambda *args: None)
        monkeypatch.setattr(checks, "_num_columns", lambda cu, max_rows: max_rows)

    def method(self, owner: Any, name: str) -> list[int]:
        return self._wrap(owner, name, True, _NoWaiting)

    def pause(self, owner: Any, name: str) -> list[int]:
        return self._wrap(owner, name, False, _disable_current_modes)

    def _wrap(self, owner: Any, name: str, is_on: bool, mode: Callable[[], Any]) -> list[int]:
        method, calls = getattr(owner, name), []

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            before, self._is_on = self._is_on, is_on
            try:
                with mode():
                    return method(*args, **kwargs)
            finally:
                self._is_on = before

        self._patch(owner, name, wrapped)
        return calls

    def _refuse(self, owner: Any, name: str, label: str, waits: Callable[..., bool] = _always) -> None:
        function = getattr(owner, name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            # An `assert` would make pytest read the tensors for its message.
            if self._is_on and waits(*args, **kwargs):
                raise WaitsError(f"{label} waits for the device")
            return function(*args, **kwargs)

        self._patch(owner, name, refuse)

    def _refuse_of_instances(self, owner: type, name: str, label: str) -> None:
        """As `_refuse`, of a method that instances set for themselves when they are made."""
        init = owner.__init__

        def init_refusing(instance: Any, *args: Any, **kwargs: Any) -> None:
            init(instance, *args, **kwargs)
            self._refuse(instance, name, label)

        self._patch(owner, "__init__", init_refusing)


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Guard:
    return Guard(monkeypatch)


def guard_all(guard: Guard, speculator: type) -> dict[str, list[int]]:
    """Guard the plugin's part of a step, and pause the methods of vLLM that it extends or calls."""
    guard.pause(TargetDependentARSpeculator, "propose")
    guard.pause(RejectionSampler, "__call__")
    guard.pause(Sampler, "apply_sampling_params")
    for name in ("apply_temperature", "apply_min_p", "apply_top_k_top_p"):
        guard.pause(SamplingStates, name)
    guard.pause(DraftTokensHandler, "set_draft_tokens")
    guard.pause(v2_states, "async_copy_to_np")
    for module in (fillers, adaptive):
        # vLLM makes the bound of the texts' lengths from an array of the host.
        guard.pause(module, "longest_text")
    methods: list[tuple[Any, str]] = [
        (speculator, "propose"),
        (Drafting, "begin"),
        (Drafting, "fill"),
        (VariableLengthHandler, "set_draft_tokens"),
        (CountingRejectionSampler, "__call__"),
        (RequestTracker, "limits_of"),
        (RequestTracker, "put_references_first"),
        (RequestTracker, "count_drafts"),
    ]
    return {name: guard.method(owner, name) for owner, name in methods}


@pytest.mark.parametrize("strategy", ["topp", "target_match", "rejection"])
def test_hybrid_and_verification(strategy: str, guard: Guard, trained: Path, draft: Path) -> None:
    calls = guard_all(guard, HybridMixin)
    calls |= {name: guard.method(StrategyRejectionSampler, name) for name in ("_verify", "_sampled_from")}
    calls |= {name: guard.method(StrategySampler, name) for name in ("sample", "logits_to_report")}
    config = speculative("mtp_ngram_override", draft, verify_strategy=strategy, draft_sample_method="probabilistic")
    with engine(trained, config, logprobs_mode="processed_logprobs") as e:
        tokens(e, FEW[:2], temperature=0.8, top_p=0.9, top_k=20, max_tokens=8)
    assert bool(calls.pop("_sampled_from")) == (strategy == "rejection")
    assert all(calls.values())


def test_vllms_verification(guard: Guard, trained: Path, draft: Path) -> None:
    calls = guard_all(guard, HybridMixin) | {"one_hot": guard.method(v2_drafting, "write_one_hot_rows")}
    with engine(trained, speculative("mtp_ngram", draft, draft_sample_method="probabilistic")) as e:
        tokens(e, FEW[:2], max_tokens=8)
    assert all(calls.values())


def test_ngram(guard: Guard, trained: Path, draft: Path) -> None:
    calls = guard_all(guard, HistorySpeculator)
    with engine(trained, speculative("ngram", draft)) as e:
        tokens(e, FEW[:2], max_tokens=8)
    assert all(calls.values())


def check_requests(e: Any) -> None:
    """Run requests that ask for nothing, for few drafts, and for those of a reference."""
    (text,) = tokens(e, FEW[:1], max_tokens=12)
    extra = [{"sp_advice_prompt_token_ids": text, "sp_edit": 1}, {"spec_tokens": 1}, {}]
    assert ask(e, [*FEW[:1] * 2, FEW[1]], extra, max_tokens=12)[:2] == [text] * 2
    assert sum(stats(e)["accepted"]["reference"]) > 0


@pytest.mark.parametrize(
    ("proposer", "speculator"),
    [("mtp_ngram", HybridMixin), ("suffix", HistorySpeculator), ("naive", HistorySpeculator)],
)
def test_asynchronous_scheduling(proposer: str, speculator: type, guard: Guard, trained: Path, draft: Path) -> None:
    """References and suffix trees wait in one place only, for the tokens of the step before."""
    calls = guard_all(guard, speculator) | {"_receive": guard.pause(TokenCopier, "_receive")}
    calls["end"] = guard.method(Drafting, "end")
    with async_engine(trained, config_of(proposer, draft)) as e:
        check_requests(e)
    assert all(calls.values())


@pytest.mark.parametrize("proposer", ["mtp_ngram", "mtp_suffix"])
def test_adaptive(proposer: str, guard: Guard, trained: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arbiter waits in one place more, for its report of two steps before; with slots, and in a step without."""
    calls = guard_all(guard, HybridMixin) | {"_receive": guard.pause(TokenCopier, "_receive")}
    del calls["put_references_first"]
    calls |= {"_read": guard.pause(AdaptiveFiller, "_read"), "end": guard.method(Drafting, "end")}
    calls |= {name: guard.method(AdaptiveFiller, name) for name in ("fill", "skip")}
    config = config_of(proposer, draft, adaptive=True)
    widths = itertools.cycle([config["num_speculative_tokens"]] * 3 + [0])
    monkeypatch.setattr(DraftWidths, "choose", lambda self, req_ids: Plan(next(widths)))
    with async_engine(trained, config, chooses_widths=True) as e:
        check_requests(e)
    assert all(calls.values())


def test_suffix_trees_wait_for_the_step_before(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    Event.install(monkeypatch)
    guarded = [guard.method(TokenCopier, "_send"), guard.method(SuffixFiller, "_continue")]
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
    "bool": lambda t: 1 if t > 0 else 0,
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "to_device": lambda t: t.to(device="cpu", non_blocking=True),
    "array": np.asarray,
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "put_by_mask": lambda t: t.expand(2).clone().index_put_((t.expand(2) > 0,), torch.zeros(2)),
    "put_a_number": lambda t: t.expand(2).clone().__setitem__(0, 1.0),
    "unique": lambda t: t.unique(),
    "unique_rows": lambda t: t[None].unique(dim=0),
    "unique_consecutive": lambda t: t.unique_consecutive(),
    "unique_consecutive_rows": lambda t: t[None].unique_consecutive(dim=0),
    "repeat_interleave": lambda t: t.repeat_interleave(t.long()),
    "device": lambda t: torch.cuda.synchronize(),
    "accelerator": lambda t: torch.accelerator.synchronize(),
    "current_stream": lambda t: torch.cuda.current_stream().synchronize(),
    "stream": lambda t: torch.cuda.Stream().synchronize(),
    "event": lambda t: torch.cuda.Event().synchronize(),
}
DOES_NOT_WAIT: dict[str, Callable[[torch.Tensor], Any]] = {
    "to": lambda t: t.to(torch.int32).to(t),
    "fill": lambda t: t.expand(2).clone()[0].fill_(1.0),
    "put_one_by_mask": lambda t: t.clone().index_put_((t > 0,), torch.zeros(())),
    "repeat_interleave": lambda t: t.repeat_interleave(t.long(), output_size=1),
    "record": lambda t: torch.cuda.Event().record(),
    "wait_stream": lambda t: torch.cuda.Stream().wait_stream(torch.cuda.current_stream()),
}


class Plugin:
    """Waits in a method of vLLM that it calls, then runs `step` itself."""

    def __init__(self, step: Callable[[torch.Tensor], Any]):
        self._step = step

    def run(self, in_inference_mode: bool) -> Any:
        with torch.inference_mode(in_inference_mode):
            self.vllm_method()
            return self._step(torch.ones(1))

    def vllm_method(self) -> Any:
        return torch.ones(1).item(), torch.ones(1).nonzero()


@pytest.mark.parametrize("in_inference_mode", [False, True])
@pytest.mark.parametrize("waits", WAITS)
def test_power(waits: str, in_inference_mode: bool, guard: Guard) -> None:
    guard.method(Plugin, "run")
    guard.pause(Plugin, "vllm_method")
    with pytest.raises(WaitsError, match="waits for the device"):
        Plugin(WAITS[waits]).run(in_inference_mode)


@pytest.mark.parametrize("in_inference_mode", [False, True])
@pytest.mark.parametrize("lets", DOES_NOT_WAIT)
def test_operations_that_do_not_wait_pass(lets: str, in_inference_mode: bool, guard: Guard) -> None:
    calls = [guard.method(Plugin, "run"), guard.pause(Plugin, "vllm_method")]
    Plugin(DOES_NOT_WAIT[lets]).run(in_inference_mode)
    assert calls == [[1], [1]]


def test_the_suffix_trees_wait_and_say_so(
    guard: Guard, trained: Path, draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They wait in one place only: until their tokens have come to the host."""
    caplog.set_level(logging.INFO, "vllm.specplus")
    guard.method(Drafting, "fill")
    with (
        engine(trained, speculative("suffix", draft)) as e,
        pytest.raises(WaitsError, match=r"Event.synchronize waits for the device"),
    ):
        tokens(e, FEW[:1], max_tokens=8)
    assert "suffix trees are on the host: each step waits for the tokens of its own" in caplog.text
