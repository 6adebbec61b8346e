"""Reports on their way to the host, where the device sees the host's memory and where it does not."""

from typing import Any

import pytest
import torch

from tests.runners.v2.suffix_engine import Event
from vllm_specplus.runners.v2 import reports
from vllm_specplus.runners.v2.reports import Reports

GPU = torch.device("cuda")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """All memory is the host's; a list of whether each piece is pinned."""
    Event.install(monkeypatch)
    empty, pinned = torch.empty, []

    def make(size: int, *, dtype: torch.dtype, pin_memory: bool = False, device: Any = None) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(reports, "get_accelerator_view_from_cpu_tensor", lambda tensor: tensor)
    return pinned


@pytest.mark.parametrize(
    ("device", "sees_host", "pinned"),
    [(torch.device("cpu"), True, [False]), (GPU, True, [True]), (GPU, False, [False, False])],
)
def test_what_was_sent_is_read(
    device: torch.device, sees_host: bool, pinned: list[bool], memory: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "is_uva_available", lambda: sees_host)
    report = Reports(4, torch.int64, device, number=1, sleeps=False).take()
    assert memory == pinned
    report.tensor.copy_(torch.arange(4))
    report.send(3)
    read = report.read(3)
    report.tensor.fill_(9)
    assert read.tolist() == [0, 1, 2]
    assert Event.waited == [0]


def test_memory_is_used_again(memory: list[bool]) -> None:
    made = Reports(4, torch.int64, torch.device("cpu"), number=2, sleeps=True)
    first, second, third = made.take(), made.take(), made.take()
    assert first is third
    assert first is not second
