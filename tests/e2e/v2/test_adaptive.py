"""Adaptive drafting on Model Runner V2: the same text, whatever is drafted, and drafts that follow what pays."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import engine
from tests.e2e.references import ask, check_sums, stats
from tests.e2e.v2.engines import FEW, async_engine, tokens
from vllm_specplus.proposers.arbiter import Prices

HYBRID = {"method": "mtp", "num_speculative_tokens": 6, "num_model_steps": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "mtp_ngram": HYBRID | {"mtp_strategy": "with_ngram"},
    "mtp_suffix": HYBRID | {"mtp_strategy": "with_suffix"},
    "draft_model_ngram": HYBRID | {"method": "draft_model", "model": "draft", "mtp_strategy": "with_ngram"},
    "eagle_ngram": HYBRID | {"method": "eagle", "model": "draft/eagle", "mtp_strategy": "with_ngram"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 12, "adaptive": True},
    "suffix": {"method": "suffix", "num_speculative_tokens": 12, "adaptive": True},
    "naive": {"method": "naive", "num_speculative_tokens": 12},
}
MAX_TOKENS = 20
TWO = FEW[:2]


def config_of(name: str, draft: Path, **more: Any) -> dict[str, Any]:
    config = CONFIGS[name] | more
    return config | {"model": config["model"].replace("draft", str(draft), 1)} if "model" in config else config


@contextmanager
def counted_passes(e: Any):
    """The passes of each step in which the draft model runs; 0 where it sleeps."""
    counted, filler = [], e.runner.speculator.drafting._slot_filler
    plan = filler._plan_passes
    filler._plan_passes = lambda *args: counted.append(plan(*args)) or counted[-1]
    yield counted
    filler._plan_passes = plan


@pytest.fixture(scope="module")
def base(tiny: Path, trained: Path) -> dict[Path, list[list[int]]]:
    """The greedy texts without speculation, by model."""
    texts = {}
    for model in (tiny, trained):
        with engine(model, None) as e:
            texts[model] = tokens(e, TWO, max_tokens=MAX_TOKENS)
    return texts


@pytest.mark.parametrize(
    ("name", "start"),
    [
        pytest.param("mtp_ngram", engine, marks=pytest.mark.every_version),
        ("mtp_ngram", async_engine),
        ("mtp_suffix", engine),
        ("draft_model_ngram", async_engine),
        ("eagle_ngram", engine),
        ("ngram", async_engine),
        ("suffix", async_engine),
        ("naive", engine),
    ],
)
def test_text(name: str, start: Any, tiny: Path, trained: Path, draft: Path, base: dict[Path, list[list[int]]]) -> None:
    """Greedy texts equal those without speculation, alone and with a reference that comes and one that does not."""
    model = tiny if name == "eagle_ngram" else trained
    expected = base[model]
    references = [{"sp_advice_prompt_token_ids": expected[0]}, {"sp_advice_prompt_token_ids": [1, 2, 3, 4] * 9}]
    with start(model, config_of(name, draft)) as e:
        assert tokens(e, TWO, max_tokens=MAX_TOKENS) == expected
        assert ask(e, TWO, references, max_tokens=MAX_TOKENS) == expected
        # With asynchronous scheduling vLLM leaves out the steps that it throws away.
        assert start is async_engine or check_sums(e)
        assert sum(stats(e)["accepted"]["reference"]) > 0


def test_a_model_that_costs_too_much_sleeps(tiny: Path, base: dict[Path, list[list[int]]]) -> None:
    """The random model's head, at a price that no draft is worth."""
    with engine(tiny, CONFIGS["mtp_ngram"]) as e, counted_passes(e) as passes:
        e.runner.speculator.drafting.requests.prices.agree = lambda num_reqs: Prices(0.02, 1.0, 4.0, 4.0)
        assert tokens(e, TWO, max_tokens=MAX_TOKENS) == base[tiny]
    assert 0 < sum(number > 0 for number in passes) < 0.7 * len(passes)


@pytest.mark.parametrize("start", [engine, async_engine])
def test_sampled_drafts_are_chosen_blindly(start: Any, trained: Path) -> None:
    config = CONFIGS["mtp_ngram"] | {"draft_sample_method": "probabilistic"}
    with start(trained, config) as e:
        assert e.runner.speculator.drafting._slot_filler._state.is_blind
        assert len(tokens(e, TWO, temperature=1.0)) == len(TWO)
        assert sum(stats(e)["accepted"]["model"]) > 0


def test_a_wrong_reference_is_soon_left_alone(trained: Path, base: dict[Path, list[list[int]]]) -> None:
    """A text that the answer does not follow: few of its tokens are drafted, though every slot is free for it."""
    wrong = {"sp_advice_prompt_token_ids": [1, 2, 3, 4] * 50}
    with engine(trained, CONFIGS["naive"]) as e:
        for _ in range(2):
            assert ask(e, TWO, [wrong] * len(TWO), max_tokens=MAX_TOKENS) == base[trained]
        drafted = sum(stats(e)["drafted"]["reference"])
        assert check_sums(e)["reference"] == 0
    # Without a choice each step would draft 12.
    assert drafted < 0.5 * 2 * len(TWO) * MAX_TOKENS
