"""Lossless strategies keep the distribution of the target."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chi2, chisquare

from tests.e2e.engines import PROMPTS, engine, speculative
from vllm_specplus.proposers.arbiter import Arbiter, Prices
from vllm_specplus.runners.step_prices import StepPrices

SAMPLING = {"temperature": 1.0, "top_k": 6, "max_tokens": 3, "n": 1500}
SAMPLED_DRAFTS = {"draft_sample_method": "probabilistic"}


def tails(model: Path, config: dict[str, Any] | None) -> Counter[tuple[int, ...]]:
    """Counts of each pair of second and third tokens; both are at drafted positions."""
    with engine(model, config, max_num_seqs=256, seed=5) as e:
        return Counter(tuple(t[1:]) for t in e.tokens([PROMPTS[0]], **SAMPLING))


@pytest.fixture(scope="module")
def stock(trained: Path) -> Counter[tuple[int, ...]]:
    return tails(trained, None)


@pytest.mark.parametrize(
    ("proposer", "options"),
    [
        ("mtp", {"verify_strategy": "target_match"}),
        ("mtp_ngram", {"verify_strategy": "rejection"} | SAMPLED_DRAFTS),
        pytest.param("mtp", {"verify_strategy": "rejection"}, marks=pytest.mark.slow),
        pytest.param("mtp", {"verify_strategy": "rejection"} | SAMPLED_DRAFTS, marks=pytest.mark.slow),
    ],
)
def test_lossless(proposer: str, options: dict[str, Any], trained: Path, draft: Path, stock: Any) -> None:
    """Chi-squared against the stock engine, which samples without drafts."""
    assert _p_value(tails(trained, speculative(proposer, draft, **options)), stock) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["target_match", "rejection"])
def test_power(strategy: str, trained: Path, draft: Path, stock: Any) -> None:
    """Bug: all drafts are accepted. The p-value falls below 1e-300 (target_match)."""
    broken = speculative("mtp", draft, verify_strategy=strategy, accept_policy="accept_all")
    assert _p_value(tails(trained, broken), stock) < 1e-9


def test_sampled_drafts_that_are_chosen(
    trained: Path, draft: Path, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By chances that would drop a sampled draft wherever history contradicts it; the model stays awake.

    tests/kernels/arbiter/test_distribution.py has the bug: a choice that looks at what was sampled.
    """
    begin_step, prices = Arbiter.begin_step, Prices(slot=0.02, step=1.0, first_pass=0.01, later_pass=0.01)

    def begin_with_fixed_chances(arbiter: Arbiter, *args: Any) -> None:
        begin_step(arbiter, *args)
        names, chances = arbiter._compiled, arbiter.table.chances
        chances[:] = names.ONE * 3 // 4
        chances[names.ALONE : names.AGREED] = names.ONE * 7 // 8
        chances[names.DIFFERED : names.CONTRARY] = names.ONE // 9

    monkeypatch.setattr(Arbiter, "begin_step", begin_with_fixed_chances)
    monkeypatch.setattr(StepPrices, "agree", lambda self, num_reqs: prices)
    options = {"adaptive": True, "min_ngram_size": 1, "verify_strategy": "rejection"} | SAMPLED_DRAFTS
    assert _p_value(tails(trained, speculative("mtp_ngram", draft, **options)), stock) > 1e-3


def _p_value(observed: Counter[tuple[int, ...]], reference: Counter[tuple[int, ...]]) -> float:
    """Two-sample chi-squared of equally many draws, over the outcomes that came at least ten times in all."""
    total = observed + reference
    common = [k for k, n in total.items() if n >= 10]
    rare = {k for k in total if k not in common}

    def bins(counts: Counter[tuple[int, ...]]) -> list[int]:
        return [counts[k] for k in common] + [sum(counts[k] for k in rare)]

    a, b = bins(observed), bins(reference)
    expected = [(x + y) / 2 for x, y in zip(a, b, strict=True) if x + y]
    counts = [x for x, y in zip(a, b, strict=True) if x + y]
    # Both samples are random, so the statistic of one against their mean is doubled.
    statistic = 2 * float(chisquare(counts, expected, sum_check=False).statistic)
    return float(chi2.sf(statistic, len(counts) - 1))
