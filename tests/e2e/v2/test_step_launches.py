"""How many kernels and copies the plugin launches in a decode step, counted where its own code issues them.

An operation of torch that only makes a view or takes memory does not count. Indexing by an int32 tensor counts twice:
torch converts the index first. Copies to the device are counted where the plugin makes them, as pinning hides on a CPU.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

import vllm_specplus
from tests.e2e.engines import Engine, engine, speculative
from tests.e2e.references import ask
from tests.e2e.v2.engines import FEW, async_engine
from vllm_specplus.kernels.ngram import NgramSearch
from vllm_specplus.proposers.arbiter import Prices
from vllm_specplus.runners.step_prices import StepPrices
from vllm_specplus.runners.v2.host_tokens import TokenCopier

pytestmark = pytest.mark.interpreter

_OURS = str(Path(vllm_specplus.__file__).parent) + os.sep
_VLLM = os.sep + "vllm" + os.sep
_NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_local_scalar_dense"}
_MAY_BE_VIEW = {"to", "contiguous", "reshape", "expand_as", "view_as", "flatten"}


def _issuer() -> str | None:
    """The line that issued an operation, if the innermost frame of vLLM and the plugin is the plugin's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OURS):
            return f"{name.removeprefix(_OURS)}:{frame.f_lineno}"
        if _VLLM in name:
            return None
        frame = frame.f_back
    return None


class Counts(TorchDispatchMode):
    """Counts of one step, by line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def add(self, what: str, number: int = 1) -> None:
        issuer = _issuer()
        if issuer is not None:
            self.lines[f"{issuer} {what}"] += number

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        # Of these torch says that they are views, even where they copy.
        may_be_view = name in _MAY_BE_VIEW
        is_view = result.data_ptr() == args[0].data_ptr() if may_be_view else function.is_view
        if not is_view and name not in _NO_LAUNCH and isinstance(result, torch.Tensor):
            is_index = name in ("index", "index_put", "index_put_", "_index_put_impl_")
            casts = sum(i is not None and i.dtype == torch.int32 for i in args[1]) if is_index else 0
            self.add(name, 1 + casts)
        return result


@contextmanager
def counted_steps(e: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, Counter[str]]]]:
    """A list of each step's number of running requests, 0 where one begins or ends, and its counts."""
    steps: list[tuple[int, Counter[str]]] = []
    current = Counts()
    runner = e.runner
    call_kernel, to_device = GridExecutor.__call__, TokenCopier.to_device

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        current.add(self.fn.__name__)
        with _disable_current_modes():
            return call_kernel(self, *args, **kwargs)

    def copy_to_device(self: Any, array: Any) -> Any:
        current.add("copy to the device")
        with _disable_current_modes():
            return to_device(self, array)

    def counting(method: Any, begins: bool = False) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal current
            if begins:
                scheduled = args[0]
                is_steady = not scheduled.scheduled_new_reqs and not scheduled.finished_req_ids
                current = Counts()
                steps.append((len(scheduled.num_scheduled_tokens) if is_steady else 0, current.lines))
            with current:
                return method(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch)
        patch.setattr(TokenCopier, "to_device", copy_to_device)
        patch.setattr(runner, "execute_model", counting(runner.execute_model, begins=True))
        for name in ("sample_tokens", "take_draft_token_ids"):
            patch.setattr(runner, name, counting(getattr(runner, name)))
        yield steps


_PRICES = Prices(0.02, 1.0, 0.1, 0.1)
_SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 3}


# `most` is exactly what the dearest step takes.
@pytest.mark.parametrize(
    ("proposer", "is_async", "has_reference", "options", "most"),
    [
        ("mtp_ngram", False, False, {}, 4),
        ("mtp_ngram", True, False, {}, 4),
        ("mtp_suffix", False, False, {}, 5),
        ("mtp_suffix", True, False, {}, 5),
        ("suffix", True, False, {}, 5),
        ("mtp_ngram", True, True, {}, 8),
        # Four kernels that verify, and one that makes their arguments.
        ("mtp_ngram", False, False, {"verify_strategy": "topp"}, 9),
        ("mtp_ngram", False, False, {"verify_strategy": "target_match"}, 9),
        ("mtp_ngram", False, False, {"verify_strategy": "rejection", "draft_sample_method": "probabilistic"}, 9),
        ("adaptive", False, False, {}, 4),
        ("adaptive", False, False, {"mtp_strategy": "with_suffix"}, 7),
        # What the trees forecast goes on behind the tokens that have come.
        ("adaptive", True, False, {"mtp_strategy": "with_suffix"}, 8),
        ("adaptive", False, True, {}, 8),
        ("adaptive", True, True, {}, 8),
    ],
)
def test_launches_of_a_step(
    proposer: str,
    is_async: bool,
    has_reference: bool,
    options: dict[str, Any],
    most: int,
    trained: Path,
    draft: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # New prices take one more copy, and when they come depends on times.
    monkeypatch.setattr(StepPrices, "agree", lambda self, num_reqs: _PRICES)
    start = async_engine if is_async else engine
    extra: list[dict[str, Any]] = [{} for _ in FEW]
    if has_reference:
        extra[0] = {"sp_advice_prompt_token_ids": FEW[0], "sp_edit": 1}
    with start(trained, speculative(proposer, draft, **options)) as e, counted_steps(e, monkeypatch) as steps:
        ask(e, FEW, extra, max_tokens=9, ignore_eos=True, **(_SAMPLED if "verify_strategy" in options else {}))
    steady = [lines for number, lines in steps if number == len(FEW)]
    slowest = max(steady, key=lambda lines: lines.total())
    assert slowest.total() == most, sorted(slowest.items())


def test_the_host_knows_a_bound_of_the_texts_that_are_searched(
    trained: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the drafts of two steps for accepted, as the host does not know yet how they fared."""
    found, fill = [], NgramSearch.fill

    def note(self: Any, idx_mapping: Any, drafts: Any, model_drafts: Any, limits: Any, longest: int) -> Any:
        found.append((longest, int(self._num_tokens[idx_mapping].max()) + model_drafts.shape[1]))
        return fill(self, idx_mapping, drafts, model_drafts, limits, longest)

    monkeypatch.setattr(NgramSearch, "fill", note)
    with async_engine(trained, speculative("mtp_ngram", draft)) as e:
        ask(e, FEW[:1], [{}], max_tokens=12, ignore_eos=True)
    assert len(found) > 2
    width = 5
    assert all(searched <= longest <= searched + 2 * width for longest, searched in found), found
