"""Hybrids of every kind of drafter on the V1 model runner: docs/features.md says what is found here."""

from pathlib import Path

import pytest

from tests.e2e.drafters import DRAFTERS, cells, verdict
from tests.e2e.engines import marked

# Those that run in CI; the others have the same parts of the plugin below them.
FAST = {"Medusa", "Qwen3-Next MTP"}


@pytest.mark.parametrize("name", marked(DRAFTERS, (), slow=DRAFTERS.keys() - FAST))
def test_drafter(name: str, tmp_path: Path) -> None:
    assert verdict(name, tmp_path / "model", on_v2=False) == cells("V1")[name]


def test_every_row_is_a_drafter() -> None:
    assert list(cells("V1")) == list(DRAFTERS)
