"""accept_all accepts every draft and reject_all none, by vLLM's own metrics."""

from pathlib import Path

import pytest

from tests.e2e.engines import PROMPTS, PROPOSERS, engine, marked, speculative, target

DRAFTING = marked(
    [name for name in PROPOSERS if name != "naive"], [], slow=["mtp_ngram_override", "mtp_suffix", "eagle_ngram"]
)
STRATEGIES = [
    *(None, "topp", "rejection"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("greedy", "target_match")),
]


@pytest.fixture(scope="module")
def plain_text(tiny: Path, trained: Path) -> dict[Path, list[list[int]]]:
    """The texts without speculation, by model."""
    texts = {}
    for model in (tiny, trained):
        with engine(model) as e:
            texts[model] = e.tokens()
    return texts


@pytest.mark.parametrize("proposer", DRAFTING)
def test_accept_all(proposer: str, tiny: Path, trained: Path, draft: Path) -> None:
    model = target(proposer, tiny, trained)
    config = speculative(proposer, draft, accept_policy="accept_all")
    with engine(model, config) as e:
        texts = e.tokens()
        counts = e.counts()
    assert counts.accepted == counts.drafted > 0
    assert all(len(t) == 48 for t in texts)
    assert all(0 <= token < 320 for t in texts for token in t)


@pytest.mark.parametrize("proposer", DRAFTING)
def test_reject_all(
    proposer: str, tiny: Path, trained: Path, draft: Path, plain_text: dict[Path, list[list[int]]]
) -> None:
    model = target(proposer, tiny, trained)
    with engine(model, speculative(proposer, draft, accept_policy="reject_all")) as e:
        assert e.tokens() == plain_text[model]
        counts = e.counts()
    assert counts.drafted > 0
    assert counts.accepted == 0
    assert counts.by_position == [0] * len(counts.by_position)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_policies_hold_under_every_strategy(strategy: str | None, trained: Path, draft: Path) -> None:
    extra = {} if strategy is None else {"verify_strategy": strategy}
    accepted = {}
    for policy in ("accept_all", "reject_all"):
        config = speculative("mtp_ngram", draft, accept_policy=policy, **extra)
        with engine(trained, config) as e:
            e.tokens(PROMPTS, temperature=1.0, top_p=0.9, seed=3)
            counts = e.counts()
        accepted[policy] = counts.accepted / counts.drafted
    assert accepted == {"accept_all": 1.0, "reject_all": 0.0}


def test_accept_all_keeps_masks(trained: Path, draft: Path) -> None:
    """A draft that a request's rules forbid is not valid."""
    allowed = [65, 66, 67]
    config = speculative("mtp_ngram", draft, accept_policy="accept_all")
    with engine(trained, config) as e:
        texts = e.tokens(PROMPTS, allowed_token_ids=allowed)
    assert {token for t in texts for token in t} <= set(allowed)


@pytest.mark.parametrize("proposer", ["mtp", "mtp_ngram", "ngram"])
def test_padding_is_never_accepted(proposer: str, trained: Path, draft: Path) -> None:
    """Beside a request that is about to reach the model's length, vLLM schedules zeros as padding.

    Measured before these were dropped: 4 to 32 zeros among the 60 tokens of the short request.
    """
    # topp without filters accepts any token, and the model would never write a zero byte.
    config = speculative(proposer, draft, verify_strategy="topp")
    near_the_end, short = (PROMPTS[0] * 2)[:114], PROMPTS[1][:8]
    with engine(trained, config, max_model_len=128) as e:
        texts = e.tokens([near_the_end, short], temperature=1.0, seed=1, max_tokens=60)
    assert [len(t) for t in texts] == [14, 60]
    assert 0 not in texts[0] + texts[1]
