"""The progress bar."""

import io

import pytest
from rich.console import Console

from vllm_specplus.compare import terminal


def test_time_left_is_known_though_a_part_takes_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shown = [0.0], io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, get_time=lambda: now[0])
    monkeypatch.setattr(terminal, "Console", lambda **_: console)
    with terminal.progress(10) as advance:
        for i in range(4):
            advance(f"part {i}")
            now[0] += 120
    assert "0:14:00" in shown.getvalue()
