"""A mixture of experts in two tensor-parallel workers, on Model Runner V2."""

from pathlib import Path

import pytest

from tests.e2e.engines import engine
from tests.e2e.families import make_family
from tests.e2e.faults import let_drafts_pay_in_worker
from tests.e2e.parallel import MIXTURE_CONFIGS, SAMPLED, TWO, bind_a_core_each, check_all_workers_alike
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
@pytest.mark.parametrize("name", MIXTURE_CONFIGS)
def test_two_workers(name: str, mixture: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    bind_a_core_each(monkeypatch)
    with engine(mixture, MIXTURE_CONFIGS[name], **TWO) as e:
        e.llm.collective_rpc(let_drafts_pay_in_worker)
        check_all_workers_alike(e, plain, MAX_TOKENS, [each | {"max_tokens": 8} for each in SAMPLED])
