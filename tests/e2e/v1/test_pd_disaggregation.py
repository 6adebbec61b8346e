"""Disaggregated prefill on the V1 model runner."""

from pathlib import Path

import pytest

from tests.e2e.engines import speculative, target
from tests.e2e.pd import check_draft_cache, check_hybrid, check_same_results, check_same_texts


@pytest.mark.every_version
def test_hybrid(trained: Path, draft: Path, tmp_path: Path) -> None:
    check_hybrid(trained, speculative("mtp_ngram", draft), tmp_path)


@pytest.mark.slow
def test_nixl(trained: Path, draft: Path, tmp_path: Path) -> None:
    """The cache goes from memory to memory, and the proxy says where it lies."""
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install nixl")
    config = speculative("mtp_ngram", draft)
    check_hybrid(trained, config, tmp_path, "--connector", "NixlConnector", handed_over=len)


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
    """The token that the prefill server samples takes nothing from the decode server's random numbers."""
    config = speculative("mtp_ngram", draft, verify_strategy="target_match")
    check_same_results(trained, config, tmp_path, temperature=0.8, seed=7)
