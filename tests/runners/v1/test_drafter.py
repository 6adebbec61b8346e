"""The rows of probabilities that the V1 adapter makes; engines test its other parts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specplus.proposers.adaptive import AdaptiveDrafter
from vllm_specplus.proposers.hybrid import Drafts
from vllm_specplus.runners.faults import Faults
from vllm_specplus.runners.v1 import drafter as module
from vllm_specplus.runners.v1.drafter import hybrid_class, with_one_hot_rows


def test_one_hot_rows_follow_the_models_own() -> None:
    model_probs = torch.tensor([[[0.2, 0.8, 0.0], [0.5, 0.1, 0.4]]]).repeat(4, 1, 1)
    drafts = Drafts(
        # Two of the model's and a match; a match instead of the model's; one of the model's; none.
        token_ids=[[1, 0, 2], [2, 2, 0], [1], []],
        num_model=np.array([2, 0, 1, 0], np.int32),
    )
    zero = [0.0, 0.0, 0.0]
    assert torch.equal(
        with_one_hot_rows(model_probs, drafts, 3),
        torch.tensor(
            [
                [[0.2, 0.8, 0.0], [0.5, 0.1, 0.4], [0.0, 0.0, 1.0]],
                [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]],
                [[0.2, 0.8, 0.0], zero, zero],
                [zero, zero, zero],
            ]
        ),
    )


class Model:
    """In the place of vLLM's proposer."""

    def propose(self, *args: Any) -> torch.Tensor:
        return torch.tensor([[7, 8]])

    def take_last_draft_probs(self) -> torch.Tensor:
        return torch.full((1, 2, 9), 1 / 9)


class Adaptive(AdaptiveDrafter):
    """Chooses what `_choose` says."""

    def __init__(self) -> None: ...

    def retain(self, req_ids: Any) -> None: ...


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_fault_in_the_rows_costs_the_drafts(is_adaptive: bool, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier would take the drafts for sampled ones."""
    drafts = Drafts([[7, 8, 3]], np.array([2], np.int32))
    hybrid = hybrid_class(Model)
    drafter = hybrid.__new__(hybrid)
    prices = SimpleNamespace(add_passes=lambda *args: None)
    vars(drafter).update(
        _steps=2,
        _is_one_hot_to_the_verifier=False,
        _is_asleep=False,
        _inputs_time=0.0,
        _sampled_tokens=[[5]],
        _tokens_on_host=False,
        _faults=Faults(logs=False),
        _tracker=SimpleNamespace(put_references_first=lambda *args: None, prices=prices),
        _history=SimpleNamespace(
            req_ids=lambda number: ["a"],
            drop_idle_state=lambda retain: None,
            write_and_read=lambda *args: (None, None),
        ),
        _drafter=Adaptive()
        if is_adaptive
        else SimpleNamespace(matcher=SimpleNamespace(retain=lambda req_ids: None), draft=lambda *args: drafts),
    )
    choice = SimpleNamespace(to_lists=lambda: drafts.token_ids, num_model=drafts.num_model)
    monkeypatch.setattr(module, "_set_prices", lambda *args: None)
    monkeypatch.setattr(module, "_plan_passes", lambda *args: 2)
    monkeypatch.setattr(module, "_choose", lambda *args: choice)
    if fails:
        monkeypatch.setattr(module, "with_one_hot_rows", None)
    assert drafter.propose(3) == ([[]] if fails else drafts.token_ids)
    assert (drafter.take_last_draft_probs() is None) == fails
    assert drafter._faults.counts == ({"drafting": 1} if fails else {})
