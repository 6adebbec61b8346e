"""Adaptive drafting on Model Runner V2: the same text, whatever is drafted, and drafts that follow what pays."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import engine
from tests.e2e.references import ask, check_sums, check_that_drafts_end_with_the_text, stats
from tests.e2e.v2.engines import FEW, async_engine, tokens
from vllm_specplus.proposers.arbiter import Prices
from vllm_specplus.proposers.draft_widths import DraftWidths, Plan

pytestmark = pytest.mark.interpreter

HYBRID = {"method": "mtp", "num_speculative_tokens": 6, "num_model_steps": 2}
DRAFT_MODEL = HYBRID | {"method": "draft_model", "model": "draft"}
EAGLE = HYBRID | {"method": "eagle", "model": "draft/eagle"}
CONFIGS: dict[str, dict[str, Any]] = {
    "mtp_ngram": HYBRID | {"mtp_strategy": "with_ngram"},
    "mtp_suffix": HYBRID | {"mtp_strategy": "with_suffix"},
    "draft_model_ngram": DRAFT_MODEL | {"mtp_strategy": "with_ngram"},
    "draft_model_suffix": DRAFT_MODEL | {"mtp_strategy": "with_suffix"},
    "eagle_ngram": EAGLE | {"mtp_strategy": "with_ngram"},
    "eagle_suffix": EAGLE | {"mtp_strategy": "with_suffix"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 12, "adaptive": True},
    "suffix": {"method": "suffix", "num_speculative_tokens": 12, "adaptive": True},
    "naive": {"method": "naive", "num_speculative_tokens": 12},
}
MAX_TOKENS = 20
TWO = FEW[:2]
SAMPLED = {"temperature": 0.8, "seed": 7}
Texts = dict[str, list[list[int]]]


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
def base(tiny: Path, trained: Path) -> dict[Path, Texts]:
    """The texts without speculation, greedy and sampled with a seed, by model."""
    texts = {}
    for model in (tiny, trained):
        with engine(model, None) as e:
            sampled = tokens(e, TWO, max_tokens=MAX_TOKENS, **SAMPLED)
            texts[model] = {"greedy": tokens(e, TWO, max_tokens=MAX_TOKENS), "sampled": sampled}
    return texts


@pytest.mark.parametrize(
    ("name", "start"),
    [
        pytest.param("mtp_ngram", engine, marks=pytest.mark.every_version),
        ("mtp_ngram", async_engine),
        pytest.param("mtp_suffix", engine, marks=pytest.mark.slow),
        pytest.param("mtp_suffix", async_engine, marks=pytest.mark.slow),
        pytest.param("draft_model_ngram", async_engine, marks=pytest.mark.slow),
        pytest.param("draft_model_suffix", engine, marks=pytest.mark.slow),
        pytest.param("eagle_ngram", engine, marks=pytest.mark.slow),
        pytest.param("eagle_suffix", engine, marks=pytest.mark.slow),
        ("ngram", async_engine),
        pytest.param("suffix", engine, marks=pytest.mark.slow),
        pytest.param("suffix", async_engine, marks=pytest.mark.slow),
        pytest.param("naive", engine, marks=pytest.mark.slow),
    ],
)
def test_text(name: str, start: Any, tiny: Path, trained: Path, draft: Path, base: dict[Path, Texts]) -> None:
    """Greedy and seeded texts equal those without speculation, and with a reference that comes or does not."""
    model = tiny if name.startswith("eagle") else trained
    expected = base[model]["greedy"]
    references = [{"sp_advice_prompt_token_ids": expected[0]}, {"sp_advice_prompt_token_ids": [1, 2, 3, 4] * 9}]
    with start(model, config_of(name, draft, verify_strategy="target_match")) as e:
        assert tokens(e, TWO, max_tokens=MAX_TOKENS) == expected
        assert tokens(e, TWO, max_tokens=MAX_TOKENS, **SAMPLED) == base[model]["sampled"]
        assert ask(e, TWO, references, max_tokens=MAX_TOKENS) == expected
        # With asynchronous scheduling vLLM leaves out the steps that it throws away.
        assert start is async_engine or check_sums(e)
        assert sum(stats(e)["accepted"]["reference"]) > 0


def set_prices(e: Any, of_pass: float) -> None:
    prices = Prices(0.02, 1.0, of_pass, of_pass)
    e.runner.speculator.drafting.requests.prices.agree = lambda num_reqs: prices


@pytest.mark.parametrize("start", [engine, async_engine])
def test_a_model_that_costs_too_much_sleeps(start: Any, tiny: Path, base: dict[Path, Texts]) -> None:
    """The random model's head, at a price that no draft is worth."""
    with start(tiny, CONFIGS["mtp_ngram"]) as e, counted_passes(e) as passes:
        set_prices(e, of_pass=4.0)
        assert tokens(e, TWO, max_tokens=MAX_TOKENS) == base[tiny]["greedy"]
    assert 0 < sum(number > 0 for number in passes) < 0.25 * len(passes)


def test_a_model_sleeps_where_no_step_has_slots(
    trained: Path, base: dict[Path, Texts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However good its drafts are, it has to run with each step, and none of them is used."""
    monkeypatch.setattr(DraftWidths, "choose", lambda self, req_ids: Plan(0))
    with async_engine(trained, CONFIGS["mtp_ngram"], chooses_widths=True) as e, counted_passes(e) as passes:
        set_prices(e, of_pass=3.0)
        assert tokens(e, TWO, max_tokens=MAX_TOKENS) == base[trained]["greedy"]
        # They begin asleep.
        num_steps = len(passes)
        assert tokens(e, TWO, max_tokens=MAX_TOKENS) == base[trained]["greedy"]
    assert 0 < sum(passes[:num_steps]) < 0.5 * num_steps
    assert sum(passes[num_steps:]) == 0


@pytest.mark.parametrize("start", [pytest.param(engine, marks=pytest.mark.slow), async_engine])
def test_sampled_drafts_are_chosen_blindly(start: Any, trained: Path) -> None:
    config = CONFIGS["mtp_ngram"] | {"draft_sample_method": "probabilistic"}
    with start(trained, config) as e:
        assert e.runner.speculator.drafting._slot_filler._state.sizes.IS_BLIND.value
        assert len(tokens(e, TWO, temperature=1.0)) == len(TWO)
        assert sum(stats(e)["accepted"]["model"]) > 0


def test_a_wrong_reference_is_soon_left_alone(trained: Path, base: dict[Path, Texts]) -> None:
    """A text that the answer does not follow: few of its tokens are drafted, though every slot is free for it."""
    wrong = {"sp_advice_prompt_token_ids": [1, 2, 3, 4] * 50}
    with engine(trained, CONFIGS["naive"]) as e:
        for _ in range(2):
            assert ask(e, TWO, [wrong] * len(TWO), max_tokens=MAX_TOKENS) == base[trained]["greedy"]
        drafted = sum(stats(e)["drafted"]["reference"])
        assert check_sums(e)["reference"] == 0
    # Without a choice each step would draft 12.
    assert drafted < 0.5 * 2 * len(TWO) * MAX_TOKENS


def test_drafts_end_with_the_text(trained: Path, base: dict[Path, Texts]) -> None:
    """With asynchronous scheduling a step would come behind the end, whose drafts count too."""
    with engine(trained, CONFIGS["naive"]) as e:
        check_that_drafts_end_with_the_text(e, TWO[0], base[trained]["greedy"][0])
