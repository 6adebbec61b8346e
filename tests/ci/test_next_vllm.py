"""ci/next_vllm.py: what another vLLM changes, on two small trees in vLLM's place."""

import sys
from pathlib import Path

import pytest

from vllm_specplus import compat

sys.path.append(str(Path(__file__).parents[2] / "ci"))
import next_vllm

OLD = """
class Runner:
    def gone(self): ...
    def changed(self, a): return a
    def same(self, a): return a
    def taken(self, a): ...
limit = 1
"""
NEW = """
class Runner:
    def changed(self, a): return a + 1
    def same(self, a):
        # The layout is another one.
        return a
    def taken(self, b): ...
limit = 2
"""


def write(root: Path, files: dict[str, str]) -> Path:
    root.mkdir()
    for name, text in files.items():
        (root / name).write_text(text)
    return root


def test_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {"gone": (), "changed": ("a",), "same": ("a",), "taken": ("a",)}
    seams = [compat.Seam("vllm.runner", f"Runner.{name}", "called", taken) for name, taken in names.items()]
    monkeypatch.setattr(compat, "LEDGER", (*seams, compat.Seam("vllm.runner", "limit", "read")))
    old = write(tmp_path / "old", {"runner.py": OLD})
    new = write(tmp_path / "new", {"runner.py": NEW, "other.py": "def gone(): ..."})
    assert list(next_vllm.page("2.0", new, "1.0", old)) == [
        "# vLLM 2.0 beside 1.0",
        "",
        "2 of 5 seams are broken.",
        "",
        "- vllm.runner:Runner.gone is gone (called); the name is defined in vllm.other",
        "- vllm.runner:Runner.taken has no parameter a (called); the name is defined in vllm.runner",
        "",
        "1 functions behind seams have another body, so look at them:",
        "",
        "- vllm.runner:Runner.changed (called)",
    ]


def test_nothing_new(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compat, "LEDGER", (compat.Seam("vllm.runner", "Runner.gone", "called"),))
    root = write(tmp_path / "old", {"runner.py": OLD})
    lines = list(next_vllm.page("1.1", root, "1.0", root))
    assert lines[2:] == ["0 of 1 seams are broken.", "", "0 functions behind seams have another body."]
