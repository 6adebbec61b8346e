"""Disaggregated prefill on Model Runner V2."""

from pathlib import Path

import pytest

from tests.e2e.engines import speculative, target
from tests.e2e.pd import check_hybrid, check_texts, one_engine, started

pytestmark = pytest.mark.interpreter


@pytest.mark.every_version
def test_hybrid(trained: Path, draft: Path, tmp_path: Path) -> None:
    check_hybrid(trained, speculative("mtp_ngram", draft), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["suffix", "eagle_ngram"])
def test_other_drafters(proposer: str, tiny: Path, trained: Path, draft: Path, tmp_path: Path) -> None:
    model, config = target(proposer, tiny, trained), speculative(proposer, draft)
    expected = one_engine(model, config)
    with started(model, config, tmp_path) as pd:
        check_texts(pd, expected)


@pytest.mark.slow
def test_a_seed_with_target_match(trained: Path, draft: Path, tmp_path: Path) -> None:
    config = speculative("mtp_ngram", draft, verify_strategy="target_match")
    expected = one_engine(trained, config, temperature=0.8, seed=7)
    with started(trained, config, tmp_path) as pd:
        check_texts(pd, expected, temperature=0.8, seed=7)
