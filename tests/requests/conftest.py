"""A fresh count of faults for each test."""

from collections import Counter

import pytest

from vllm_specplus.requests.faults import request_faults


@pytest.fixture(autouse=True)
def _no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_faults, "counts", Counter())
