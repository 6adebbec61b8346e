"""`target_match` gives the target's own text: the noise hangs on seed and position, not on the drafts."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chi2, chisquare

from tests.e2e.engines import PROMPTS, engine, speculative

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 11}


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits", "processed_logits"])
def test_logprobs_modes(mode: str, trained: Path, draft: Path) -> None:
    """The numbers are those of the engine without drafts."""
    values = []
    for name in ("naive", "mtp_ngram"):
        config = speculative(name, draft, verify_strategy="target_match")
        with engine(trained, config, logprobs_mode=mode) as e:
            results = e.generate(PROMPTS, logprobs=0, **SAMPLED)
        values.append(
            [
                row[token].logprob
                for r in results
                for token, row in zip(r.outputs[0].token_ids, r.outputs[0].logprobs, strict=True)
            ]
        )
    assert values[1] == pytest.approx(values[0], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(
    "proposer", ["mtp", "mtp_ngram_override", "mtp_suffix", "draft_model_ngram", "ngram", "suffix"]
)
def test_target_match_text_is_that_without_drafts(proposer: str, trained: Path, draft: Path) -> None:
    """The noise hangs on seed and position alone, so drafts only change how fast the text comes."""
    texts = []
    for name in ("naive", proposer):
        with engine(trained, speculative(name, draft, verify_strategy="target_match")) as e:
            texts.append(e.tokens(**SAMPLED))
    assert texts[0] == texts[1]


def test_target_match_keeps_the_distribution(trained: Path, draft: Path) -> None:
    """Chi-squared of the second and third token against the stock engine's own sampling of them.

    These are drafted positions. Measured: with the policy set to accept_all, which is the bug of taking
    drafts unseen, the p-value falls below 1e-300; without it, it is what chance gives.
    """
    sampling = {"temperature": 1.0, "top_k": 6, "max_tokens": 3, "n": 1500}

    def tails(config: dict[str, Any] | None) -> Counter[tuple[int, ...]]:
        with engine(trained, config, max_num_seqs=256, seed=5) as e:
            return Counter(tuple(t[1:]) for t in e.tokens([PROMPTS[0]], **sampling))

    stock = tails(None)
    assert _p_value(tails(speculative("mtp", draft, verify_strategy="target_match")), stock) > 1e-3
    broken = speculative("mtp", draft, verify_strategy="target_match", accept_policy="accept_all")
    assert _p_value(tails(broken), stock) < 1e-9


def _p_value(observed: Counter[tuple[int, ...]], reference: Counter[tuple[int, ...]]) -> float:
    """Two-sample chi-squared of equally many draws, over the outcomes seen at least ten times in all."""
    total = observed + reference
    common = [k for k, n in total.items() if n >= 10]
    rest = {k for k in total if k not in common}

    def bins(counts: Counter[tuple[int, ...]]) -> list[int]:
        return [counts[k] for k in common] + [sum(counts[k] for k in rest)]

    a, b = bins(observed), bins(reference)
    expected = [(x + y) / 2 for x, y in zip(a, b, strict=True) if x + y]
    seen = [x for x, y in zip(a, b, strict=True) if x + y]
    # Both samples are random, so the statistic of one against their mean is doubled.
    statistic = 2 * float(chisquare(seen, expected, sum_check=False).statistic)
    return float(chi2.sf(statistic, len(seen) - 1))
