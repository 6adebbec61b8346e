"""Adaptive drafting on Model Runner V2: the same text, whatever is drafted, and drafts that follow what pays."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import engine, marked
from tests.e2e.references import ask, asking, check_sums, stats
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
MAX_TOKENS = 32


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
            texts[model] = tokens(e, max_tokens=MAX_TOKENS)
    return texts


@pytest.mark.parametrize("start", [engine, async_engine], ids=["sync", "async"])
@pytest.mark.parametrize("name", marked(CONFIGS, ["mtp_ngram"]))
def test_text(name: str, start: Any, tiny: Path, trained: Path, draft: Path, base: dict[Path, list[list[int]]]) -> None:
    """Greedy texts equal those without speculation, alone and with references of all kinds."""
    model = tiny if name == "eagle_ngram" else trained
    expected = base[model]
    with start(model, config_of(name, draft)) as e:
        for _ in range(2):
            assert tokens(e, max_tokens=MAX_TOKENS) == expected
        assert ask(e, FEW * 2, asking(expected), max_tokens=MAX_TOKENS) == expected * 2
        # With asynchronous scheduling vLLM leaves out the steps that it throws away.
        assert start is async_engine or check_sums(e)
        assert sum(stats(e)["accepted"]["reference"]) > 0


def test_a_model_that_costs_too_much_sleeps(tiny: Path, base: dict[Path, list[list[int]]]) -> None:
    """The random model's head, at a price that no draft is worth."""
    with engine(tiny, CONFIGS["mtp_ngram"]) as e, counted_passes(e) as passes:
        e.runner.speculator.drafting.requests.prices.agree = lambda num_reqs: Prices(0.02, 1.0, 4.0, 4.0)
        for _ in range(2):
            assert tokens(e, max_tokens=MAX_TOKENS) == base[tiny]
    assert 0 < sum(number > 0 for number in passes) < 0.7 * len(passes)


@pytest.mark.parametrize("start", [engine, async_engine], ids=["sync", "async"])
def test_sampled_drafts_are_chosen_blindly(start: Any, trained: Path) -> None:
    config = CONFIGS["mtp_ngram"] | {"draft_sample_method": "probabilistic"}
    with start(trained, config) as e:
        assert e.runner.speculator.drafting._slot_filler._state.is_blind
        assert len(tokens(e, temperature=1.0)) == len(FEW)
        assert sum(stats(e)["accepted"]["model"]) > 0


def test_a_wrong_reference_is_soon_left_alone(trained: Path, base: dict[Path, list[list[int]]]) -> None:
    """A text that the answer does not follow: few of its tokens are drafted, though every slot is free for it."""
    wrong = {"sp_advice_prompt_token_ids": [1, 2, 3, 4] * 50}
    with engine(trained, CONFIGS["naive"]) as e:
        for _ in range(3):
            assert ask(e, FEW, [wrong] * len(FEW), max_tokens=MAX_TOKENS) == base[trained]
        drafted = sum(stats(e)["drafted"]["reference"])
        assert check_sums(e)["reference"] == 0
    # Without a choice each step would draft 12.
    assert drafted < 0.5 * 3 * len(FEW) * MAX_TOKENS
