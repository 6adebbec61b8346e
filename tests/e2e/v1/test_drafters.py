"""Hybrids of every kind of drafter on the V1 model runner: docs/features.md says what is found here."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.drafters import (
    APPEND,
    DRAFTERS,
    FEW,
    HAS_DEFECT_OF_LINEAR_ATTENTION,
    LINEAR,
    OTHER_HYBRIDS,
    check_each_strategy,
    check_hybrid,
    check_model_drafts,
    check_row,
)
from tests.e2e.engines import engine, marked
from tests.e2e.tables import Table
from vllm_specplus.config import SpecPlusConfigError

# Those that run in CI; the others have the same parts of the plugin below them.
FAST = {"Medusa", LINEAR}


@pytest.mark.parametrize("name", marked(DRAFTERS, (), slow=DRAFTERS.keys() - FAST))
def test_drafter(name: str, tmp_path: Path) -> None:
    check_row(name, tmp_path / "model", on_v2=False)


def test_every_row_is_a_drafter() -> None:
    assert list(Table("drafter").column("V1")) == list(DRAFTERS)


@pytest.mark.every_version
def test_a_vllm_without_medusa_refuses_it(tiny: Path) -> None:
    if find_spec("vllm.v1.spec_decode.medusa"):
        pytest.skip("this vLLM has Medusa")
    config = APPEND | {"method": "medusa", "model": "heads"}
    with (
        pytest.raises(SpecPlusConfigError, match='method="medusa" is not allowed: expected one of'),
        engine(tiny, config),
    ):
        pass


@pytest.mark.slow
def test_vllms_own_ngrams_for_linear_attention(tmp_path: Path) -> None:
    """Without keys of the plugin too, drafts of varying number end vLLM 0.32 on a CPU: docs/features.md says so."""
    drafter = DRAFTERS[LINEAR]
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    model = drafter.make(tmp_path / "model")
    words = r"The size of tensor a .* must match the size of tensor b"
    with engine(model, config, **drafter.engine) as e:
        if HAS_DEFECT_OF_LINEAR_ATTENTION:
            with pytest.raises(RuntimeError, match=words):
                e.tokens(FEW, max_tokens=24)
        else:
            e.tokens(FEW, max_tokens=24)
            assert e.counts().drafted > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ERNIE-4.5 MTP", "GLM-4.5 MTP"])
def test_each_strategy(name: str, tmp_path: Path) -> None:
    check_each_strategy(name, tmp_path / "model", on_v2=False)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "strategy", "adaptive"), OTHER_HYBRIDS)
def test_other_hybrids(
    method: str, strategy: str, adaptive: bool, tiny: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # EAGLE 3 reads outputs of layers that vLLM's MiMo does not offer.
    check_hybrid(method, strategy, adaptive, draft if method == "eagle3" else tiny, draft, monkeypatch)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_the_models_drafts_are_vllms(method: str, tiny: Path, draft: Path) -> None:
    check_model_drafts(method, draft if method == "eagle3" else tiny, draft)
