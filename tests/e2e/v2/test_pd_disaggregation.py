"""Disaggregated prefill on Model Runner V2."""

from pathlib import Path

import pytest

from tests.e2e.engines import speculative, target
from tests.e2e.pd import check_draft_cache, check_hybrid, check_same_results, check_same_texts

pytestmark = pytest.mark.interpreter


def test_hybrid(trained: Path, draft: Path, tmp_path: Path) -> None:
    check_hybrid(trained, speculative("mtp_ngram", draft), tmp_path)


@pytest.mark.slow
def test_an_adaptive_hybrid(trained: Path, draft: Path, tmp_path: Path) -> None:
    check_same_texts(trained, speculative("adaptive", draft), tmp_path)


@pytest.mark.slow
def test_suffix(trained: Path, draft: Path, tmp_path: Path) -> None:
    check_same_results(trained, speculative("suffix", draft), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["mtp_ngram", "eagle_ngram"])
def test_the_draft_models_cache(proposer: str, tiny: Path, trained: Path, draft: Path, tmp_path: Path) -> None:
    check_draft_cache(target(proposer, tiny, trained), speculative(proposer, draft), tmp_path)


@pytest.mark.slow
def test_a_seed_with_target_match(trained: Path, draft: Path, tmp_path: Path) -> None:
    config = speculative("mtp_ngram", draft, verify_strategy="target_match")
    check_same_results(trained, config, tmp_path, temperature=0.8, seed=7)
