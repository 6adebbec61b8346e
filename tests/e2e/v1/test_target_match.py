"""`target_match` gives the target's text: the noise depends on seed and position, not on the drafts."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import PROMPTS, engine, marked, speculative

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 11}
# vLLM numbers the seeds of a request's completions.
SEVERAL = SAMPLED | {"n": 3, "max_tokens": 24}
TWO = PROMPTS[:2]


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits", "processed_logits"])
def test_logprobs_modes(mode: str, trained: Path, draft: Path) -> None:
    """The logprobs are those of the engine without drafts."""
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


@pytest.fixture(scope="module")
def without_drafts(trained: Path, draft: Path) -> tuple[list[list[int]], list[list[int]]]:
    """One text of each prompt, and several of two prompts."""
    with engine(trained, speculative("naive", draft, verify_strategy="target_match")) as e:
        return e.tokens(**SAMPLED), e.tokens(TWO, **SEVERAL)


@pytest.mark.parametrize(
    "proposer",
    marked(["mtp", "mtp_ngram_override", "mtp_suffix", "draft_model_ngram", "ngram", "suffix"], ["mtp_ngram_override"]),
)
def test_target_match_text_is_that_without_drafts(
    proposer: str, trained: Path, draft: Path, without_drafts: tuple[list[list[int]], list[list[int]]]
) -> None:
    """Drafts change only how fast the text comes, also where a request has several completions."""
    text, several = without_drafts
    with engine(trained, speculative(proposer, draft, verify_strategy="target_match")) as e:
        assert e.tokens(**SAMPLED) == text
        before = e.counts()
        for _ in range(2):
            assert e.tokens(TWO, **SEVERAL) == several
        after = e.counts()
    assert 0 < after.accepted - before.accepted < after.drafted - before.drafted
    assert len({tuple(token_ids) for token_ids in several}) == SEVERAL["n"] * len(TWO)


def test_a_seeded_request_whose_prompt_comes_in_chunks(trained: Path, draft: Path) -> None:
    """vLLM alone ends at one on a CPU."""
    config = speculative("ngram", draft, verify_strategy="target_match")
    prompts, texts = [PROMPTS[0] * 3, PROMPTS[1]], []
    for chunk in (32, 512):
        with engine(trained, config, max_num_batched_tokens=chunk) as e:
            texts.append([[c.token_ids for c in r.outputs] for r in e.generate(prompts, n=5, **SAMPLED)])
    assert texts[0] == texts[1]
    assert len({tuple(token_ids) for token_ids in texts[0][0]}) == 5
