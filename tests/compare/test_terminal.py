"""The progress bar, and the tables."""

import io

import pytest
from rich.console import Console

from vllm_specplus.compare import sheets, tables, terminal


def test_time_left_is_known_though_a_part_takes_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shown = [0.0], io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, get_time=lambda: now[0])
    monkeypatch.setattr(terminal, "Console", lambda **_: console)
    with terminal.progress(10) as advance:
        for i in range(4):
            advance(f"part {i}")
            now[0] += 120
    assert "0:14:00" in shown.getvalue()


def test_a_name_is_never_cut() -> None:
    text = io.StringIO()
    name = "eagle3+ngram adaptive=false match_override_len=4"
    columns = [sheets.Column("configuration", is_number=False), sheets.Column("tokens/s")]
    sheet = sheets.Sheet("speeds", columns, [sheets.Row([name, "1234.5"])])
    Console(file=text, width=40).print(tables._table(sheet))
    lines = [line.strip() for line in text.getvalue().splitlines()]
    assert "…" not in text.getvalue()
    shown = "".join(line.replace("1234.5", "").strip() for line in lines[4:])
    assert shown.replace(" ", "") == name.replace(" ", "")
