"""Hybrids of every kind of drafter on Model Runner V2: docs/features.md says what is found here."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.drafters import (
    ADAPTIVE,
    APPEND,
    DRAFTERS,
    FEW,
    LINEAR,
    OTHER_HYBRIDS,
    check_drafts,
    check_each_strategy,
    check_hybrid,
    check_model_drafts,
    check_row,
)
from tests.e2e.engines import engine, marked
from tests.e2e.faults import let_drafts_pay
from tests.e2e.references import stats
from tests.e2e.v2.engines import async_engine, tokens, v1_tokens
from vllm_specplus.engine import refusals

pytestmark = pytest.mark.interpreter

# Those that run in CI; the others have the same parts of the plugin below them.
FAST = {"Medusa", "MiMo MTP of two layers"}


@pytest.mark.parametrize("name", marked(DRAFTERS, (), slow=DRAFTERS.keys() - FAST))
def test_drafter(name: str, tmp_path: Path) -> None:
    check_row(name, tmp_path / "model", on_v2=True)


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [APPEND | {"verify_strategy": "topp"}, ADAPTIVE])
def test_linear_attention_in_full_steps(
    hybrid: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is of steps with fewer drafts than slots, which asynchronous scheduling may do without."""
    drafter = DRAFTERS[LINEAR]
    target, args = drafter.make(tmp_path / "model"), drafter.engine
    others = [reason for reason in refusals._REASONS if reason is not refusals._linear_attention_error]
    monkeypatch.setattr(refusals, "_REASONS", others)
    let_drafts_pay(monkeypatch)
    with engine(target, **args) as e:
        plain = e.tokens(FEW, max_tokens=24)
    with async_engine(target, drafter.config | hybrid, **args) as e:
        assert e.tokens(FEW, max_tokens=24) == plain
        check_drafts(stats(e))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DRAFTERS if not DRAFTERS[name].differs_in_vllm])
def test_the_target_says_the_same_on_both_runners(name: str, tmp_path: Path) -> None:
    """Without speculation; on each runner the hybrids say what their target does."""
    model, args = DRAFTERS[name].make(tmp_path / "model"), DRAFTERS[name].engine
    with engine(model, **args) as e:
        assert tokens(e) == v1_tokens(model, None, **args)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ERNIE-4.5 MTP", "GLM-4.5 MTP"])
def test_each_strategy(name: str, tmp_path: Path) -> None:
    check_each_strategy(name, tmp_path / "model", on_v2=True)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "strategy", "adaptive"), OTHER_HYBRIDS)
def test_other_hybrids(
    method: str, strategy: str, adaptive: bool, tiny: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # EAGLE 3 reads outputs of layers that vLLM's MiMo does not offer.
    check_hybrid(method, strategy, adaptive, draft if method == "eagle3" else tiny, draft, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_the_models_drafts_are_vllms(method: str, tiny: Path, draft: Path) -> None:
    check_model_drafts(method, draft if method == "eagle3" else tiny, draft)
