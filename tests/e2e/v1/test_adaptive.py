"""Adaptive drafting on the V1 model runner: the same text, whatever is drafted, and drafts that follow what pays."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import PROMPTS, engine, marked
from tests.e2e.references import ask, asking, check_sums, check_that_drafts_end_with_the_text, stats
from tests.e2e.v1.test_sampling import STRUCTURED, check_structured_output
from vllm_specplus.proposers.arbiter import Prices
from vllm_specplus.runners.step_prices import StepPrices

HYBRID = {"method": "mtp", "num_speculative_tokens": 8, "num_model_steps": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "mtp_ngram": HYBRID | {"mtp_strategy": "with_ngram"},
    "mtp_suffix": HYBRID | {"mtp_strategy": "with_suffix"},
    "draft_model_suffix": HYBRID | {"method": "draft_model", "model": "draft", "mtp_strategy": "with_suffix"},
    "draft_model_ngram": HYBRID | {"method": "draft_model", "model": "draft", "mtp_strategy": "with_ngram"},
    "eagle_ngram": HYBRID | {"method": "eagle", "model": "draft/eagle", "mtp_strategy": "with_ngram"},
    "eagle_suffix": HYBRID | {"method": "eagle", "model": "draft/eagle", "mtp_strategy": "with_suffix"},
    "eagle3_ngram": HYBRID | {"method": "eagle3", "model": "draft/eagle3", "mtp_strategy": "with_ngram"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 24, "adaptive": True},
    "suffix": {"method": "suffix", "num_speculative_tokens": 24, "adaptive": True},
    "naive": {"method": "naive", "num_speculative_tokens": 16},
}
# The README's config for predicted outputs.
PREDICTIONS = {"method": "ngram", "num_speculative_tokens": 16, "max_ngram_size": 5, "adaptive": True}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}


def config_of(name: str, draft: Path, **more: Any) -> dict[str, Any]:
    config = CONFIGS[name] | more
    return config | {"model": config["model"].replace("draft", str(draft), 1)} if "model" in config else config


def arbiter_of(e: Any) -> Any:
    drafter = e.runner.drafter
    return (getattr(drafter, "_drafter", None) or drafter._adaptive).arbiter


Texts = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def base(tiny: Path, trained: Path, draft: Path) -> dict[Path, Texts]:
    """The greedy and the seeded texts without speculation, by model."""
    texts = {}
    for model in (tiny, trained, draft):
        with engine(model, {"method": "naive", "verify_strategy": "target_match"}) as e:
            texts[model] = {"greedy": e.tokens(max_tokens=96), "sampled": e.tokens(max_tokens=96, **SAMPLED)}
    return texts


@pytest.mark.parametrize(
    "name", marked(CONFIGS, ["mtp_ngram"], slow=["eagle_suffix", "eagle3_ngram", "draft_model_suffix"])
)
def test_text(name: str, tiny: Path, trained: Path, draft: Path, base: dict[Path, Texts]) -> None:
    """Greedy and seeded texts equal those without speculation, alone and with references of all kinds."""
    # The heads are of these models; EAGLE 3's reads what vLLM's MiMo does not offer.
    model = {"eagle": tiny, "eagle3": draft}.get(CONFIGS[name]["method"], trained)
    expected = base[model]
    with engine(model, config_of(name, draft, verify_strategy="target_match")) as e:
        for _ in range(2):
            assert e.tokens(max_tokens=96) == expected["greedy"]
            assert e.tokens(max_tokens=96, **SAMPLED) == expected["sampled"]
        greedy = expected["greedy"][:4]
        assert ask(e, PROMPTS[:4] * 2, asking(greedy), max_tokens=96) == greedy * 2
        accepted = check_sums(e)
        assert accepted["reference"] > 0
        assert not any(stats(e)["drafted"]["unfilled"])
        # The next step forgets the requests that have ended.
        assert arbiter_of(e).num_requests <= 8


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_model_that_costs_too_much_sleeps(is_measured: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random model's head, which is right one time in four; on a CPU a pass costs a good part of a step.

    Measured costs depend on what else the machine does. With fixed ones later rounds hardly make a pass.
    """
    if not is_measured:
        # A pass costs 0.4 of a step, in which each request gets one token.
        monkeypatch.setattr(
            StepPrices,
            "agree",
            lambda self, num_reqs: Prices(slot=0.02, step=1.0, first_pass=0.4 * num_reqs, later_pass=0.4 * num_reqs),
        )
    with engine(tiny) as e:
        expected = e.tokens(max_tokens=96)
    with engine(tiny, CONFIGS["mtp_ngram"]) as e:
        proposer = e.runner.drafter
        proposals, rounds, inner = [], [], type(proposer).__mro__[2].propose

        def count(*args: Any, **kwargs: Any) -> Any:
            proposals.append(1)
            return inner(*args, **kwargs)

        type(proposer).__mro__[2].propose = count
        try:
            for _ in range(6):
                proposals.clear()
                assert e.tokens(max_tokens=96) == expected
                rounds.append(len(proposals))
        finally:
            type(proposer).__mro__[2].propose = inner
    # Each round has some 96 steps.
    assert 0 < sum(rounds) < 0.7 * len(rounds) * 96
    assert is_measured or sum(rounds[3:]) < 0.2 * len(rounds[3:]) * 96


def test_sampled_drafts_are_chosen_blindly(trained: Path) -> None:
    config = CONFIGS["mtp_ngram"] | {"draft_sample_method": "probabilistic"}
    with engine(trained, config) as e:
        assert arbiter_of(e)._offers.is_blind
        assert len(e.tokens(temperature=1.0)) == len(PROMPTS)
        assert check_sums(e)["model"] > 0
    with engine(trained, config | {"verify_strategy": "target_match"}) as e:
        assert not arbiter_of(e)._offers.is_blind


def test_structured_output(trained: Path) -> None:
    with engine(trained, CONFIGS["mtp_ngram"] | {"verify_strategy": "target_match"}, **STRUCTURED) as e:
        check_structured_output(e)


@pytest.mark.parametrize("config", [CONFIGS["naive"], PREDICTIONS], ids=["naive", "ngram"])
def test_a_wrong_reference_is_soon_left_alone(config: dict[str, Any], trained: Path, base: dict[Path, Texts]) -> None:
    """A text that the answer does not follow: few of its tokens are drafted, though every slot is free for it."""
    wrong = {"sp_advice_prompt_token_ids": [1, 2, 3, 4] * 50}
    with engine(trained, config) as e:
        for _ in range(4):
            assert ask(e, PROMPTS, [wrong] * len(PROMPTS), max_tokens=96) == base[trained]["greedy"]
        drafted = sum(stats(e)["drafted"]["reference"])
        assert check_sums(e)["reference"] == 0
    # Without a choice each step would draft 16.
    assert drafted < 0.5 * 4 * len(PROMPTS) * 96


def test_drafts_end_with_the_text(trained: Path, base: dict[Path, Texts]) -> None:
    with engine(trained, CONFIGS["naive"]) as e:
        check_that_drafts_end_with_the_text(e, PROMPTS[0], base[trained]["greedy"][0])
