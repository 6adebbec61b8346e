"""A fresh log of faults for each test."""

import pytest

from vllm_specplus.requests.faults import request_faults


@pytest.fixture(autouse=True)
def _no_faults_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_faults, "_logged", set())
