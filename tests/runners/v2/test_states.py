"""How many drafts a step tells the scheduler of, and which event it waits for; CUDA's events are stand-ins."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from vllm_specplus.runners.v2.states import VariableLengthHandler


class Event:
    """Notes whether it sleeps while it waits, and that something has waited for it, once it has been recorded."""

    waited: ClassVar[list[bool]] = []

    def __init__(self, blocking: bool = False):
        self._blocking = blocking
        self._is_recorded = False

    def record(self) -> None:
        self._is_recorded = True

    def synchronize(self) -> None:
        assert self._is_recorded
        Event.waited.append(self._blocking)


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.waited = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
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
    drafting = SimpleNamespace(is_async=is_async, latest=torch.tensor([1, 2], dtype=torch.int32))
    handler.set_drafting(drafting)  # type: ignore[arg-type]
    batch = SimpleNamespace(req_ids=["a", "b"], has_structured_output_reqs=has_grammar)
    handler.set_draft_tokens(batch, torch.tensor([[5, 0, 0], [6, 7, 0]]))
    drafts = handler.get_draft_tokens()
    assert Event.waited == waited
    assert drafts is not None
    # With asynchronous scheduling the scheduler counts on all slots.
    counts = [3, 3] if is_async and not has_grammar else [1, 2]
    assert [len(row) for row in drafts.draft_token_ids] == counts
    if has_grammar:
        assert drafts.draft_token_ids == [[5], [6, 7]]
