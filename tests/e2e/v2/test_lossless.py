"""Greedy text on Model Runner V2 equals the text without speculation, and that of V1, with any drafter."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import PROMPTS, PROPOSERS, engine, marked, speculative, target
from tests.e2e.references import DRAFTING, check_padding, check_sums, stats
from tests.e2e.v1.test_lossless import PROMPTS_NEAR_THE_END, check_sources
from tests.e2e.v2.engines import FEW, async_engine, tokens, v1_tokens

pytestmark = pytest.mark.interpreter

# Long prompts exceed a chunk of the prefill, and the blocks that a prefix cache drops because of MTP.
PROMPT_SETS = {"few": FEW, "long": [PROMPTS[0] * 3, PROMPTS[1], list(range(30, 150))]}
ADAPTIVE = "adaptive"  # a hybrid; test_adaptive.py has more that choose
ENGINES: dict[str, dict[str, Any]] = {
    "prefix_caching": {"enable_prefix_caching": True, "block_size": 32},
    "chunked_prefill": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
}


def config_of(proposer: str, draft: Path) -> dict[str, Any]:
    return speculative("mtp_ngram", draft, adaptive=True) if proposer == ADAPTIVE else speculative(proposer, draft)


@pytest.fixture(scope="module")
def plain_text(tiny: Path, trained: Path) -> dict[tuple[Path, str], list[list[int]]]:
    """The texts without speculation, by model and set of prompts."""
    texts = {}
    for model in (tiny, trained):
        with engine(model) as e:
            assert type(e.runner).__module__ == "vllm.v1.worker.cpu.model_runner"  # that of V2
            for name, prompts in PROMPT_SETS.items():
                texts[model, name] = tokens(e, prompts)
        assert len(set(texts[model, "few"][0])) > 1
    return texts


@pytest.mark.parametrize("proposer", marked(PROPOSERS, ["mtp_ngram", "suffix"]))
def test_greedy_text(proposer: str, tiny: Path, trained: Path, draft: Path, plain_text: Any) -> None:
    model = target(proposer, tiny, trained)
    # A random model's texts are so short that the history would draft almost nothing otherwise.
    more = {} if model == trained else {"min_ngram_size": 1}
    with engine(model, speculative(proposer, draft, **more)) as e:
        assert tokens(e) == plain_text[model, "few"]
        # Once more alone, when suffix trees hold the first run.
        assert tokens(e, FEW[:1]) == plain_text[model, "few"][:1]
        counts, width = e.counts(), e.runner.num_speculative_steps
        if proposer in DRAFTING:
            check_sums(e)
            check_sources(proposer, stats(e), is_taken=model == trained)
    if proposer == "naive":
        assert counts.drafted == 0
        return
    # Without accepted and rejected drafts the test would show little.
    assert 0 < counts.accepted < counts.drafted
    # A slot without a draft is not verified. (An n-gram match fills all slots.)
    if proposer not in ("mtp", "ngram"):
        assert counts.drafted < counts.drafts * width


@pytest.mark.parametrize(
    ("proposer", "engine_kind"),
    [
        ("mtp_suffix", "prefix_caching"),
        (ADAPTIVE, "prefix_caching"),
        ("mtp_ngram", "chunked_prefill"),
        ("draft_model_ngram", "chunked_prefill"),
        ("suffix", "chunked_prefill"),
        (ADAPTIVE, "chunked_prefill"),
        *(
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in [
                ("mtp_ngram", "prefix_caching"),
                ("draft_model_ngram", "prefix_caching"),
                ("suffix", "prefix_caching"),
                ("mtp_suffix", "chunked_prefill"),
            ]
        ),
    ],
)
def test_greedy_text_of_long_prompts(
    proposer: str, engine_kind: str, tiny: Path, trained: Path, draft: Path, plain_text: Any
) -> None:
    model = trained if proposer == ADAPTIVE else target(proposer, tiny, trained)
    with engine(model, config_of(proposer, draft), **ENGINES[engine_kind]) as e:
        for _ in range(2):
            assert tokens(e, PROMPT_SETS["long"]) == plain_text[model, "long"]


@pytest.mark.parametrize(
    ("proposer", "strategy"),
    [
        ("mtp_ngram", "topp"),
        ("mtp_ngram", "rejection"),
        ("suffix", "greedy"),
        ("suffix", "target_match"),
        *(
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in [
                ("mtp_ngram", "greedy"),
                ("mtp_ngram", "target_match"),
                ("suffix", "topp"),
                ("suffix", "rejection"),
            ]
        ),
    ],
)
def test_greedy_text_under_every_strategy(
    proposer: str, strategy: str, trained: Path, draft: Path, plain_text: Any
) -> None:
    with engine(trained, speculative(proposer, draft, verify_strategy=strategy)) as e:
        assert tokens(e) == plain_text[trained, "few"]


def test_v1_has_the_same_text(trained: Path, draft: Path, plain_text: Any) -> None:
    for config in (None, speculative("mtp_ngram", draft)):
        assert v1_tokens(trained, config) == plain_text[trained, "few"]


@pytest.mark.parametrize(
    "proposer",
    [pytest.param("mtp_ngram_override", marks=pytest.mark.slow), "mtp_suffix", "ngram", "suffix", "naive"],
)
def test_asynchronous_scheduling(proposer: str, trained: Path, draft: Path, plain_text: Any) -> None:
    """All slots are scheduled before their drafts are made; those without a draft are padding."""
    with async_engine(trained, speculative(proposer, draft)) as e:
        assert tokens(e) == plain_text[trained, "few"]
        found, counts = stats(e), e.counts()
    unfilled = found["drafted"].pop("unfilled")
    check_sources(proposer, found, is_taken=True)
    assert sum(found["accepted"]["unfilled"]) == 0
    if proposer == "naive":
        assert counts.drafted == 0
    else:
        assert 0 < counts.accepted < counts.drafted
        assert any(unfilled)


def test_asynchronous_scheduling_accepts_no_padding(trained: Path, draft: Path) -> None:
    """`accept_all` accepts every draft, and a slot without a draft holds token 0."""
    with async_engine(trained, speculative("mtp_ngram", draft, accept_policy="accept_all")) as e:
        assert 0 not in {token for text in tokens(e) for token in text}
        found = stats(e)
    assert any(found["drafted"].pop("unfilled"))
    check_sources("mtp_ngram", found, is_taken=True)
    assert sum(found["accepted"]["unfilled"]) == 0


def test_padding_is_no_draft(tiny: Path, draft: Path) -> None:
    check_padding(tiny, draft)


def test_eagle3(draft: Path) -> None:
    with engine(draft) as e:
        expected = tokens(e)
    with engine(draft, speculative("eagle3_ngram", draft)) as e:
        assert tokens(e) == expected
        accepted, counts = check_sums(e), e.counts()
    assert accepted["model"] > 0
    assert accepted["ngram"] > 0
    assert counts.accepted < counts.drafted < counts.drafts * 4


@pytest.mark.parametrize("steps", [1, 3])
def test_the_model_makes_its_steps_and_no_more(steps: int, trained: Path, draft: Path) -> None:
    with engine(trained, speculative("mtp_ngram", draft, num_model_steps=steps)) as e:
        speculator = e.runner.speculator
        passes, proposals = [], []
        speculator.model.register_forward_hook(lambda *_: passes.append(1))
        propose = speculator.propose
        speculator.propose = lambda *args, **kwargs: proposals.append(1) or propose(*args, **kwargs)
        tokens(e, FEW[:2], max_tokens=8)
        # The first draft's graph runs over the target's batch, with all slots; later ones have graphs of their own.
        assert speculator.prefill_cudagraph_manager.decode_query_len == 6
        assert speculator.decode_cudagraph_manager.vllm_config.num_speculative_tokens == steps
    assert len(passes) == steps * len(proposals) > 0


@pytest.fixture(scope="module")
def texts_to_the_end(tiny: Path) -> list[list[int]]:
    """Texts up to the length of a model of 64 tokens, without speculation."""
    with engine(tiny, max_model_len=64) as e:
        texts = e.tokens(PROMPTS_NEAR_THE_END, max_tokens=None)
    assert [len(text) for text in texts] == [14, 2, 1]
    return texts


@pytest.mark.parametrize("proposer", marked(["mtp_ngram", "mtp_suffix", "suffix", ADAPTIVE], [], slow=["mtp_suffix"]))
def test_up_to_the_models_length(proposer: str, tiny: Path, draft: Path, texts_to_the_end: list[list[int]]) -> None:
    with engine(tiny, config_of(proposer, draft), max_model_len=64) as e:
        assert e.tokens(PROMPTS_NEAR_THE_END, max_tokens=None) == texts_to_the_end


MANY = [[*PROMPTS[k % 4][:60], 65 + k] for k in range(5)]


@pytest.fixture(scope="module")
def texts_of_many(trained: Path) -> list[list[int]]:
    """Texts of `MANY` without speculation, where no request is preempted."""
    with engine(trained, max_model_len=128) as e:
        return e.tokens(MANY, max_tokens=60)


@pytest.mark.parametrize("proposer", ["mtp_ngram", "mtp_suffix", ADAPTIVE])
def test_preempted_and_resumed(proposer: str, trained: Path, draft: Path, texts_of_many: list[list[int]]) -> None:
    config = config_of(proposer, draft)
    with engine(trained, config, max_model_len=128, num_gpu_blocks_override=10, block_size=32) as e:
        assert e.tokens(MANY, max_tokens=60) == texts_of_many
        preempted = {m.name: m for m in e.llm.get_metrics()}["vllm:num_preemptions"].value
    assert preempted > 0
