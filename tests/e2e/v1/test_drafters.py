"""Hybrids of every kind of drafter on the V1 model runner: docs/features.md says what is found here."""

from pathlib import Path

import pytest

from tests.e2e.drafters import DRAFTERS, OTHER_HYBRIDS, check_hybrid, verdict
from tests.e2e.engines import marked
from tests.e2e.tables import Table, check_cell

# Those that run in CI; the others have the same parts of the plugin below them.
FAST = {"Medusa", "Qwen3-Next MTP"}


@pytest.mark.parametrize("name", marked(DRAFTERS, (), slow=DRAFTERS.keys() - FAST))
def test_drafter(name: str, tmp_path: Path) -> None:
    check_cell("drafter", name, "V1", verdict(name, tmp_path / "model", on_v2=False))


def test_every_row_is_a_drafter() -> None:
    assert list(Table("drafter").column("V1")) == list(DRAFTERS)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "strategy", "adaptive"), OTHER_HYBRIDS)
def test_other_hybrids(
    method: str, strategy: str, adaptive: bool, tiny: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # EAGLE 3 reads outputs of layers that vLLM's MiMo does not offer.
    check_hybrid(method, strategy, adaptive, draft if method == "eagle3" else tiny, draft, monkeypatch)
