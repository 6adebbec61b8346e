"""vLLM's features beside a hybrid, on the V1 model runner: docs/features.md says what is found here."""

from pathlib import Path

import pytest

from tests.e2e.features import FEATURES, cells, verdicts


@pytest.fixture(scope="module")
def found(trained: Path) -> dict[str, str]:
    return verdicts(trained)


@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str, found: dict[str, str]) -> None:
    assert found[name] == cells("V1")[name]


def test_every_row_is_a_feature() -> None:
    assert list(cells("V1")) == list(FEATURES)
