"""Disaggregated prefill on Model Runner V2."""

from pathlib import Path

import pytest

from tests.e2e.engines import speculative, target
from tests.e2e.pd import check_hybrid, check_same_text

pytestmark = pytest.mark.interpreter


@pytest.mark.every_version
def test_hybrid(trained: Path, draft: Path, tmp_path: Path) -> None:
    check_hybrid(trained, speculative("mtp_ngram", draft), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["suffix", "eagle_ngram"])
def test_other_drafters(proposer: str, tiny: Path, trained: Path, draft: Path, tmp_path: Path) -> None:
    check_same_text(target(proposer, tiny, trained), speculative(proposer, draft), tmp_path)


@pytest.mark.slow
def test_a_seed_with_target_match(trained: Path, draft: Path, tmp_path: Path) -> None:
    config = speculative("mtp_ngram", draft, verify_strategy="target_match")
    check_same_text(trained, config, tmp_path, temperature=0.8, seed=7)
