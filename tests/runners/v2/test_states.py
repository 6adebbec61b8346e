"""How many drafts a step tells the scheduler of, and which event it waits for; CUDA's events are stand-ins."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runners.v2.suffix_engine import Event
from vllm_specplus.runners.v2.states import VariableLengthHandler


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.install(monkeypatch)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)


# vLLM copies the drafts themselves, with an event that sleeps, only where a grammar has to see them.
@pytest.mark.parametrize(
    ("is_async", "has_grammar", "waited"),
    [(False, False, [False]), (False, True, [True, False]), (True, False, []), (True, True, [True, True])],
)
def test_a_synchronous_step_waits_for_its_counts_without_sleeping(
    is_async: bool, has_grammar: bool, waited: list[bool]
) -> None:
    handler = VariableLengthHandler(torch.device("cpu"))
    drafting: Any = SimpleNamespace(is_async=is_async, latest=torch.tensor([1, 2], dtype=torch.int32))
    handler.set_drafting(drafting)
    batch = SimpleNamespace(req_ids=["a", "b"], has_structured_output_reqs=has_grammar)
    handler.set_draft_tokens(batch, torch.tensor([[5, 0, 0], [6, 7, 0]]))
    drafts = handler.get_draft_tokens()
    assert [Event.blocking[number] for number in Event.waited] == waited
    assert drafts is not None
    # With asynchronous scheduling the scheduler counts on all slots.
    counts = [3, 3] if is_async and not has_grammar else [1, 2]
    assert [len(row) for row in drafts.draft_token_ids] == counts
    if has_grammar:
        assert drafts.draft_token_ids == [[5], [6, 7]]
