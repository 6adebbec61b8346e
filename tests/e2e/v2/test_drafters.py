"""Hybrids of every kind of drafter on Model Runner V2: docs/features.md says what is found here."""

from pathlib import Path

import pytest

from tests.e2e.drafters import DRAFTERS, cells, verdict
from tests.e2e.engines import marked

pytestmark = pytest.mark.interpreter

# Those that run in CI; the others have the same parts of the plugin below them.
FAST = {"Medusa", "MiMo MTP of two layers"}


@pytest.mark.parametrize("name", marked(DRAFTERS, (), slow=DRAFTERS.keys() - FAST))
def test_drafter(name: str, tmp_path: Path) -> None:
    assert verdict(name, tmp_path / "model", on_v2=True) == cells("V2")[name]
