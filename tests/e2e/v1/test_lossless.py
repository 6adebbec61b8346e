"""Greedy text equals the text without speculation, with any drafter."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import PROMPTS, PROPOSERS, engine, marked, speculative, target
from tests.e2e.references import DRAFTING, check_padding, check_sums, stats

# An engine's arguments, by their effect.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix_caching": {"enable_prefix_caching": True, "block_size": 32},
    "chunked_prefill": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
}
# What runs in every engine. In other engines than the plain one the rest are slow tests.
WIDELY_RUN = ["mtp_ngram", "suffix", "adaptive"]
# Some prompts exceed a chunk of the prefill, and the blocks that a prefix cache drops because of MTP.
LONG = [*PROMPTS, PROMPTS[0] * 3, list(range(30, 250))]


def check_sources(proposer: str, counts: dict[str, Any], *, is_taken: bool, is_padded: bool = False) -> None:
    """Check that the expected sources drafted and no others: the model in its slots, the history after them.

    Args:
        proposer: a name of `PROPOSERS`.
        counts: of the engine's worker.
        is_taken: whether some drafts of the history must have been accepted, as in the trained model's text.
        is_padded: whether vLLM may have padded the first steps of some requests.
    """
    config = PROPOSERS[proposer]
    is_hybrid = "mtp_strategy" in config
    history = next((source for source in ("ngram", "suffix") if source in proposer), None)
    sources = {"model"} if is_hybrid else set()
    if history is not None:
        sources.add(history)
        steps = config.get("num_model_steps", 1) if is_hybrid else 0
        assert any(counts["drafted"][history][steps:])
        assert any(counts["accepted"][history][steps:]) or not is_taken
    found = {source for source, row in counts["drafted"].items() if any(row)}
    assert found - ({"unfilled"} if is_padded else set()) == sources


@pytest.fixture(scope="module")
def plain_text(tiny: Path, trained: Path) -> dict[Path, list[list[int]]]:
    """The texts without speculation, by model."""
    texts = {}
    for model in (tiny, trained):
        with engine(model) as e:
            texts[model] = e.tokens(LONG)
            assert texts[model] == [t for p in LONG for t in e.tokens([p])]
        assert len(set(texts[model][0])) > 1
    return texts


def in_each_engine() -> Iterator[Any]:
    names = [*PROPOSERS, "adaptive"]
    for kind in ENGINES:
        seldom = set() if kind == "plain" else {*names} - {*WIDELY_RUN}
        for param in marked(names, ["mtp_ngram", "suffix"], slow=seldom):
            yield pytest.param(*param.values, kind, marks=param.marks)


@pytest.mark.parametrize(("proposer", "engine_kind"), [*in_each_engine()])
def test_greedy_text(
    proposer: str, engine_kind: str, tiny: Path, trained: Path, draft: Path, plain_text: dict[Path, list[list[int]]]
) -> None:
    model = target(proposer, tiny, trained)
    expected = plain_text[model]
    with engine(model, speculative(proposer, draft), **ENGINES[engine_kind]) as e:
        assert e.tokens(LONG) == expected
        # Once more, when prefix caches and suffix trees hold the first run.
        assert e.tokens(LONG) == expected
        assert [t for p in LONG[:3] for t in e.tokens([p])] == expected[:3]
        counts, width = e.counts(), e.runner.num_spec_tokens
        if proposer != "mtp":
            check_sums(e)
        if proposer in DRAFTING:
            is_padded = engine_kind == "chunked_prefill"
            check_sources(proposer, stats(e), is_taken=model == trained, is_padded=is_padded)
    # Without accepted and rejected drafts the test would show little.
    if proposer == "naive":
        assert counts.accepted == 0
    else:
        assert 0 < counts.accepted < counts.drafted
    # A slot without a draft is not verified. (An n-gram match fills all slots.)
    if proposer not in ("mtp", "ngram", "naive"):
        assert counts.drafted < counts.drafts * width


@pytest.mark.parametrize("strategy", ["topp", pytest.param("greedy", marks=pytest.mark.slow)])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_greedy_text_under_lossy_strategies(
    proposer: str, strategy: str, tiny: Path, trained: Path, draft: Path, plain_text: dict[Path, list[list[int]]]
) -> None:
    """At temperature 0 they too give the target's text; test_target_match.py samples."""
    model = target(proposer, tiny, trained)
    with engine(model, speculative(proposer, draft, verify_strategy=strategy)) as e:
        assert e.tokens(LONG) == plain_text[model]


def test_padding_is_no_draft(tiny: Path, draft: Path) -> None:
    check_padding(tiny, draft)


def test_eagle3(draft: Path) -> None:
    with engine(draft) as e:
        expected = e.tokens(LONG)
    with engine(draft, speculative("eagle3_ngram", draft)) as e:
        assert e.tokens(LONG) == expected
        accepted, counts = check_sums(e), e.counts()
    assert accepted["model"] > 0
    assert accepted["ngram"] > 0
    assert counts.accepted < counts.drafted < counts.drafts * 4


@pytest.mark.parametrize("steps", [1, 3])
def test_the_model_makes_its_steps_and_no_more(steps: int, trained: Path, draft: Path) -> None:
    with engine(trained, speculative("mtp_ngram", draft, num_model_steps=steps)) as e:
        drafter = e.runner.drafter
        passes, proposals = [], []
        drafter.model.register_forward_hook(lambda *_: passes.append(1))
        propose = drafter.propose
        drafter.propose = lambda *args, **kwargs: proposals.append(1) or propose(*args, **kwargs)
        e.tokens()
    assert len(passes) == steps * len(proposals) > 0


# Of these lengths the last has no room for a draft, and the one before it for one.
PROMPTS_NEAR_THE_END = [list(range(40, 90)), [65, 66] * 31, list(range(40, 103))]


@pytest.fixture(scope="module")
def texts_to_the_end(tiny: Path) -> list[list[int]]:
    """Texts up to the length of a model of 64 tokens, without speculation."""
    with engine(tiny, max_model_len=64) as e:
        texts = e.tokens(PROMPTS_NEAR_THE_END, max_tokens=None)
    assert [len(text) for text in texts] == [14, 2, 1]
    return texts


@pytest.mark.parametrize(
    "proposer", marked([*PROPOSERS, "adaptive"], [], slow=["mtp_ngram_override", "mtp_suffix", "eagle_ngram", "naive"])
)
def test_up_to_the_models_length(proposer: str, tiny: Path, draft: Path, texts_to_the_end: list[list[int]]) -> None:
    with engine(tiny, speculative(proposer, draft), max_model_len=64) as e:
        assert e.tokens(PROMPTS_NEAR_THE_END, max_tokens=None) == texts_to_the_end


MANY = [[*PROMPTS[k % 4][:60], 65 + k] for k in range(8)]


@pytest.fixture(scope="module")
def texts_of_many(trained: Path) -> list[list[int]]:
    """Texts of `MANY` without speculation, where no request is preempted."""
    with engine(trained) as e:
        return e.tokens(MANY, max_tokens=120)


@pytest.mark.parametrize(
    "proposer",
    marked(["mtp_ngram", "mtp_suffix", "draft_model_ngram", "ngram", "adaptive"], [], slow=["draft_model_ngram"]),
)
def test_preempted_and_resumed(proposer: str, trained: Path, draft: Path, texts_of_many: list[list[int]]) -> None:
    with engine(trained, speculative(proposer, draft), num_gpu_blocks_override=20, block_size=32) as e:
        assert e.tokens(MANY, max_tokens=120) == texts_of_many
        preempted = {m.name: m for m in e.llm.get_metrics()}["vllm:num_preemptions"].value
    assert preempted > 0
