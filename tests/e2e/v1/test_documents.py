"""Every config of the other systems' documents in an engine: what is drafted is what its system's rule says."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.e2e.dialects import LONG, check_ngram_rule, ngram_drafts
from tests.e2e.engines import PROMPTS, engine
from vllm_specplus.config import SpecPlusConfigError

DOCUMENTS = Path(__file__).parents[2] / "config" / "migration_examples.json"
EXAMPLES: list[dict[str, Any]] = [example["given"] for example in json.loads(DOCUMENTS.read_text())]

Rule = Literal["each slot", "some slots", "all accepted", "nothing", "refused"] | tuple[int, int, int, bool]
# each slot: a draft model fills each slot in each step. some slots: texts or the arbiter decide.
# A tuple: n-grams of the largest and the smallest size, slots, and whether the earliest occurrence wins.
RULES: list[Rule] = [
    "each slot",
    "all accepted",
    "each slot",
    "some slots",
    "some slots",
    "each slot",
    # vLLM's own.
    "some slots",
    (3, 1, 3, False),
    "some slots",
    "some slots",
    "some slots",
    "each slot",
    "nothing",
    "refused",
    (2, 1, 5, True),
    "each slot",
    "each slot",
    "each slot",
    "each slot",
    "some slots",
    "each slot",
    "each slot",
    "some slots",
    "each slot",
    "nothing",
    "each slot",
    "each slot",
]
HYBRIDS = [config for config in EXAMPLES if config.get("mtp_strategy") == "with_ngram"]
SLOT_KEYS = ("num_speculative_tokens", "speculate_max_draft_token_num", "gen_num_per_cycle")
KINDS = ("trained", "tiny", "eagle3")


def model_kind(config: dict[str, Any]) -> str:
    """The model to draft for: the trained one, or another for a draft model or head of its shape."""
    method = config.get("method") or config.get("speculate_method") or config.get("sp_type")
    return {"eagle": "tiny", "vanilla": "tiny", "eagle3": "eagle3"}.get(str(method), "trained")


def local(config: dict[str, Any], target: Path, draft: Path) -> dict[str, Any]:
    """The config with paths of this machine; without FP8, which vLLM has not on a CPU."""
    paths = {"tiny": draft, "eagle3": draft / "eagle3", "trained": target}
    path = draft / "eagle" if "eagle" in config.values() else paths[model_kind(config)]
    models = dict.fromkeys(("model", "draft_model_name_or_path", "sp_checkpoint_path"), str(path))
    kept = {key: value for key, value in config.items() if value not in ("fp8", "FP8", "FP8_PER_BLOCK")}
    return {key: models.get(key, value) for key, value in kept.items()}


@pytest.fixture(scope="module")
def targets(trained: Path, tiny: Path, draft: Path) -> dict[str, Path]:
    # EAGLE 3 reads outputs of layers that vLLM's MiMo does not offer.
    return {"trained": trained, "tiny": tiny, "eagle3": draft}


@pytest.fixture(scope="module")
def answers(targets: dict[str, Path]) -> dict[str, list[list[int]]]:
    """Greedy answers without speculation, by model."""
    found = {}
    for kind in KINDS:
        with engine(targets[kind]) as e:
            found[kind] = e.tokens(PROMPTS, max_tokens=LONG + 10)
    return found


def test_each_example_has_its_rule() -> None:
    assert len(EXAMPLES) == len(RULES)


@pytest.mark.parametrize(("config", "rule"), list(zip(EXAMPLES, RULES, strict=True)), ids=json.dumps)
def test_example(
    config: dict[str, Any], rule: Rule, targets: dict[str, Path], draft: Path, answers: dict[str, list[list[int]]]
) -> None:
    kind = model_kind(config)
    own = local(config, targets[kind], draft)
    if rule == "refused":
        with pytest.raises(SpecPlusConfigError, match="wint4"), engine(targets[kind], own):
            pass
        return
    with engine(targets[kind], own) as e:
        if isinstance(rule, tuple):
            check_ngram_rule(e, answers[kind], rule, to_the_end=True)
            return
        texts = e.tokens(PROMPTS, max_tokens=LONG)
        if rule == "nothing":
            assert e.llm.llm_engine.vllm_config.speculative_config is not None
            assert e.counts().drafted == 0
        else:
            counts = e.counts()
            slots = next(config[k] for k in SLOT_KEYS if k in config)
            assert counts.drafts > 0
            if rule == "some slots":
                assert counts.drafted <= slots * counts.drafts
            else:
                assert counts.drafted == slots * counts.drafts
            if rule == "all accepted":
                assert counts.accepted == counts.drafted
                return
        assert texts == [answer[:LONG] for answer in answers[kind]]


@pytest.mark.parametrize("config", HYBRIDS, ids=json.dumps)
def test_hybrid_appends_as_fastdeploy(
    config: dict[str, Any], targets: dict[str, Path], draft: Path, answers: dict[str, list[list[int]]]
) -> None:
    """The model's drafts come first, then what followed the earliest occurrence of the tail that ends with them."""
    own = local(config, targets["trained"], draft) | {"dialect": "fastdeploy", "adaptive": False}
    sizes = config.get("max_ngram_size", 5), config.get("min_ngram_size", 2)
    num_steps = config["num_model_steps"]
    steps = []
    with engine(targets["trained"], own) as e:
        drafter = e.runner.drafter._drafter
        inner = drafter.draft

        def noting(history: Any, model_drafts: Any, max_drafts: Any) -> Any:
            drafts = inner(history, model_drafts, max_drafts)
            for i, row in enumerate(drafts.token_ids):
                steps.append((history.tokens(i).tolist(), model_drafts[i].tolist(), int(max_drafts[i]), list(row)))
            return drafts

        drafter.draft = noting
        assert e.tokens(PROMPTS, max_tokens=LONG) == [answer[:LONG] for answer in answers["trained"]]
    for text, of_model, limit, drafts in steps:
        matched = ngram_drafts([*text, *of_model], *sizes, max(limit - num_steps, 0), True)
        assert drafts == of_model[:limit] + matched
    assert any(len(drafts) == config["num_speculative_tokens"] for *_, drafts in steps)
