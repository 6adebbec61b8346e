"""vLLM's features beside a hybrid, on the V2 model runner: docs/features.md says what is found here."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import engine
from tests.e2e.faults import let_drafts_pay
from tests.e2e.features import server
from tests.e2e.features.table import FEATURES, Group, groups
from tests.e2e.tables import check_cell
from tests.e2e.v2.engines import async_engine, asynchronous

pytestmark = pytest.mark.interpreter


def ask_async_server(model: Path, config: dict[str, Any] | None, names: Iterable[str]) -> dict[str, Any]:
    with asynchronous():
        return server.ask(model, config, names, server.ASYNCHRONOUS)


COLUMNS = {"V2": (engine, server.ask), "V2, asynchronous scheduling": (async_engine, ask_async_server)}


@pytest.fixture(scope="module")
def found(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Group]]]:
    with pytest.MonkeyPatch.context() as patch:
        let_drafts_pay(patch)
        yield {
            column: groups(trained, tmp_path_factory.mktemp("features"), *starts) for column, starts in COLUMNS.items()
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("column", COLUMNS)
def test_feature(column: str, name: str, found: dict[str, dict[str, Group]]) -> None:
    check_cell("feature", name, column, found[column][name].verdicts[name])
