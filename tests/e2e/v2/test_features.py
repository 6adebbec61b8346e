"""vLLM's features beside a hybrid, on the V2 model runner: docs/features.md says what is found here."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.engines import engine
from tests.e2e.faults import let_drafts_pay
from tests.e2e.features.table import FEATURES, IN_PROCESS, Group, groups
from tests.e2e.tables import Table, check_cell
from tests.e2e.v2.engines import async_engine

pytestmark = pytest.mark.interpreter

STARTS = {"V2": engine, "V2, asynchronous scheduling": async_engine}
CELLS = [("V2", name) for name in FEATURES] + [("V2, asynchronous scheduling", name) for name in IN_PROCESS]


@pytest.fixture(scope="module")
def found(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Group]]]:
    with pytest.MonkeyPatch.context() as patch:
        let_drafts_pay(patch)
        yield {column: groups(trained, tmp_path_factory.mktemp("features"), start) for column, start in STARTS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("column", "name"), CELLS)
def test_feature(column: str, name: str, found: dict[str, dict[str, Group]]) -> None:
    check_cell("feature", name, column, found[column][name].verdicts[name])


def test_what_the_server_does_is_not_seen_with_asynchronous_scheduling() -> None:
    column = Table("feature").column("V2, asynchronous scheduling")
    assert [name for name in column if column[name] != "not seen"] == [n for n in FEATURES if n in IN_PROCESS]
