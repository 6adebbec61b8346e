"""A mixture of experts in two tensor-parallel workers, on Model Runner V2."""

from pathlib import Path

import pytest

from tests.e2e.drafters import ADAPTIVE, MTP
from tests.e2e.engines import engine
from tests.e2e.families import make_family
from tests.e2e.faults import let_drafts_pay_in_worker
from tests.e2e.parallel import SAMPLED, TWO, bind_a_core_each, check_all_workers_alike
from tests.e2e.v2.engines import tokens

pytestmark = pytest.mark.interpreter


@pytest.mark.slow
def test_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = make_family(tmp_path / "mixture", "ernie")
    with engine(mixture) as e:
        plain = tokens(e, max_tokens=16)
    bind_a_core_each(monkeypatch)
    with engine(mixture, MTP | ADAPTIVE, **TWO) as e:
        e.llm.collective_rpc(let_drafts_pay_in_worker)
        counts = check_all_workers_alike(e, plain, 16, [each | {"max_tokens": 8} for each in SAMPLED])
        assert sum(counts["drafted"]["model"]) > 0
