"""vLLM's features beside a hybrid, on the V1 model runner: docs/features.md says what is found here."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.faults import let_drafts_pay
from tests.e2e.features.table import FEATURES, Group, groups
from tests.e2e.tables import Table, check_cell


@pytest.fixture(scope="module")
def found(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Group]]:
    with pytest.MonkeyPatch.context() as patch:
        let_drafts_pay(patch)
        yield groups(trained, tmp_path_factory.mktemp("features"))


@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, found: dict[str, Group]) -> None:
    check_cell("feature", name, "V1", found[name].verdicts[name])


def test_every_row_is_a_feature() -> None:
    assert list(Table("feature").column("V1")) == list(FEATURES)
