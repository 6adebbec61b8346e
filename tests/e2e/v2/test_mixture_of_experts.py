"""A mixture of experts in two tensor-parallel workers, and in one with expert parallelism, on Model Runner V2."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.drafters import ADAPTIVE, APPEND, MTP
from tests.e2e.engines import engine
from tests.e2e.families import make_family
from tests.e2e.faults import let_drafts_pay, let_drafts_pay_in_worker
from tests.e2e.parallel import SAMPLED, TWO, bind_a_core_each, check_all_workers_alike, check_expert_parallelism
from tests.e2e.v2.engines import tokens

pytestmark = pytest.mark.interpreter


MAX_TOKENS = 16


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("mixture"), "ernie")


@pytest.fixture(scope="module")
def plain(mixture: Path) -> list[list[int]]:
    with engine(mixture) as e:
        return tokens(e, max_tokens=MAX_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("config", [ADAPTIVE, APPEND | {"verify_strategy": "rejection"}], ids=["adaptive", "append"])
def test_expert_parallelism_of_one_worker(
    config: dict[str, Any], mixture: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_drafts_pay(monkeypatch)
    check_expert_parallelism(mixture, MTP | config, plain)


@pytest.mark.slow
def test_two_workers(mixture: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    bind_a_core_each(monkeypatch)
    with engine(mixture, MTP | ADAPTIVE, **TWO) as e:
        e.llm.collective_rpc(let_drafts_pay_in_worker)
        counts = check_all_workers_alike(e, plain, MAX_TOKENS, [each | {"max_tokens": 8} for each in SAMPLED])
        assert sum(counts["drafted"]["model"]) > 0
