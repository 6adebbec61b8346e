"""References and limits that requests bring, on Model Runner V2."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.e2e.engines import PROMPTS, Engine, engine, marked, target
from tests.e2e.references import DRAFTING, ask, asking, check_sums, config_of, stats
from tests.e2e.v2.engines import FEW, async_engine, tokens
from tests.e2e.v2.warm_up import warmed_up

pytestmark = pytest.mark.interpreter

TOKENS = 24


def generate(e: Engine, prompts: list[list[int]], options: list[dict[str, Any]]) -> list[Any]:
    """The results of requests with their own lengths and options."""
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=a["max_tokens"], extra_args=a["extra"])
        for a in options
    ]
    return e.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


@pytest.fixture(scope="module")
def base(tiny: Path, trained: Path) -> dict[Path, list[list[int]]]:
    """The texts without speculation, by model."""
    texts = {}
    for model in (tiny, trained):
        with engine(model) as e:
            texts[model] = tokens(e, max_tokens=TOKENS)
    return texts


@pytest.mark.parametrize("proposer", marked(sorted(DRAFTING), {"mtp_ngram"}))
def test_greedy_text_is_the_text_without_speculation(
    proposer: str, tiny: Path, trained: Path, draft: Path, base: dict[Path, list[list[int]]]
) -> None:
    model = target(proposer, tiny, trained)
    with engine(model, config_of(proposer, draft)) as e:
        assert ask(e, FEW * 2, asking(base[model]), max_tokens=TOKENS) == base[model] * 2
        accepted = check_sums(e)
        tokens(e, FEW[:1], max_tokens=2)
        assert stats(e)["entries"] == {"requests": 0, "references": 0, "request_counts": 0}
    assert accepted["reference"] > TOKENS
    assert accepted["unfilled"] == 0


@pytest.mark.parametrize("proposer", ["mtp_ngram", "suffix"])
def test_asynchronous_scheduling(proposer: str, trained: Path, draft: Path, base: dict[Path, list[list[int]]]) -> None:
    """The host has the tokens of the step before, and the device continues its forecasts."""
    texts = base[trained]
    with async_engine(trained, config_of(proposer, draft)) as e:
        assert ask(e, FEW * 2, asking(texts), max_tokens=TOKENS) == texts * 2
        accepted, counted = stats(e)["accepted"], e.counts().accepted
    assert sum(accepted["reference"]) > TOKENS
    assert sum(accepted["unfilled"]) == 0
    # The device also counts the drafts past a request's end, which the scheduler throws away.
    assert 0 <= sum(map(sum, accepted.values())) - counted <= 8 * 13


@pytest.mark.parametrize("adaptive", [False, True])
def test_steps_under_asynchronous_scheduling(
    adaptive: bool, trained: Path, draft: Path, base: dict[Path, list[list[int]]]
) -> None:
    """A text that is all in the reference takes a step for each full width; the scheduler may throw one more away."""
    with async_engine(trained, config_of("naive", draft) | {"adaptive": adaptive}) as e:
        assert ask(e, FEW[:1], asking(base[trained])[:1], max_tokens=TOKENS) == base[trained][:1]
        drafted = stats(e)["drafted"]["reference"]
    needed = -(-(TOKENS - 1) // (len(drafted) + 1))
    assert needed <= drafted[0] <= needed + 1


def test_limits_and_isolation(trained: Path, draft: Path, base: dict[Path, list[list[int]]]) -> None:
    with engine(trained, config_of("mtp_ngram", draft)) as e:
        assert ask(e, FEW, [{"spec_tokens": 0}] * 4, max_tokens=TOKENS) == base[trained]
        assert e.counts().drafted == 0
        assert ask(e, FEW, [{"spec_tokens": 1}] * 4, max_tokens=TOKENS) == base[trained]
        assert e.counts().drafted == e.counts().drafts > 0
    reference = {"sp_advice_prompt_token_ids": base[trained][0]}
    with engine(trained, config_of("naive", draft)) as e:
        ask(e, FEW[:1], [reference], max_tokens=TOKENS)
        alone = e.counts().drafted
        assert alone > 0
        ask(e, [FEW[0]] * 3, [{}, reference, {}], max_tokens=TOKENS)
        assert e.counts().drafted == 2 * alone
        # In places of requests that had a reference.
        ask(e, [FEW[0]] * 3, [{}] * 3, max_tokens=TOKENS)
        assert e.counts().drafted == 2 * alone


@pytest.mark.parametrize("proposer", [pytest.param("naive", marks=pytest.mark.slow), "mtp_ngram"])
def test_seeded_text_is_the_text_without_speculation(proposer: str, trained: Path, draft: Path) -> None:
    sampled = {"temperature": 0.8, "seed": 7, "max_tokens": TOKENS}
    with engine(trained) as e:
        texts = ask(e, FEW, [{}] * 4, **sampled)
    with engine(trained, config_of(proposer, draft, verify_strategy="target_match")) as e:
        assert ask(e, FEW * 2, asking(texts), **sampled) == texts * 2
        assert check_sums(e)["reference"] > TOKENS


def test_width_of_128(trained: Path) -> None:
    with engine(trained, {"method": "naive", "num_speculative_tokens": 128}) as e:
        (text,) = ask(e, FEW[:1], [{"spec_tokens": 0}], max_tokens=150)
        assert e.counts().drafts == 0
        assert ask(e, FEW[:1], [{"sp_advice_prompt_token_ids": text}], max_tokens=150) == [text]
        # The prompt's step gives one token, the first step of drafts 129, and a second one the others.
        assert (e.counts().drafts, e.counts().accepted) == (2, 128 + 20)


@pytest.mark.parametrize("start", [engine, async_engine])
def test_vllms_warm_up_leaves_nothing(
    start: Any, trained: Path, draft: Path, base: dict[Path, list[list[int]]]
) -> None:
    """On a GPU vLLM runs steps of made-up requests before it takes real ones."""

    def state_of(runner: Any) -> tuple[bool, int, bool]:
        drafting = runner.speculator.drafting
        drafted = any(map(any, drafting.requests.stats()["drafted"].values()))
        matcher = drafting._slot_filler._filler._matcher._matcher
        return drafted, matcher.num_cached_requests, drafting._copier._previous is not None

    before = []
    with (
        warmed_up(lambda runner: before.append(state_of(runner))),
        # Made-up requests have no salt, so they leave something in trees that all share alone.
        start(trained, config_of("mtp_suffix", draft, suffix_decoding_scope="shared"), max_num_seqs=2) as e,
    ):
        assert before == [(True, 2, start is async_engine)]
        assert state_of(e.runner) == (False, 0, False)
        assert tokens(e, FEW[:1], max_tokens=TOKENS) == base[trained][:1]


def test_preempted_requests_go_on_with_their_reference(
    trained: Path, draft: Path, base: dict[Path, list[list[int]]]
) -> None:
    prompts = [prompt[:60] for prompt in PROMPTS[:4]]
    limits = {"block_size": 32, "max_model_len": 128}
    with engine(trained, **limits) as e:
        texts = tokens(e, prompts, max_tokens=60)
    with engine(trained, config_of("mtp_ngram", draft), num_gpu_blocks_override=10, **limits) as e:
        assert ask(e, prompts * 2, asking(texts), max_tokens=60) == texts * 2
        preempted = next(m for m in e.llm.get_metrics() if m.name == "vllm:num_preemptions")
        assert preempted.value > 0
        assert check_sums(e)["reference"] > 60


def test_steps_without_slots(trained: Path, draft: Path, base: dict[Path, list[list[int]]]) -> None:
    """vLLM may want no drafts for large batches; the host still follows the text."""
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 64, 0]]}
    with engine(trained, config_of("ngram", draft, **schedule)) as e:
        mirror = e.runner.speculator.drafting._copier.mirror
        reference = {"sp_advice_prompt_token_ids": base[trained][0], "sp_edit": 1}
        # The second request ends first, and the first one goes on alone.
        params = [{"max_tokens": TOKENS, "extra": reference}, {"max_tokens": 8, "extra": {}}]
        texts = [list(r.outputs[0].token_ids) for r in generate(e, FEW[:2], params)]
        assert texts == [base[trained][0], base[trained][1][:8]]
        (followed,) = mirror.is_followed.nonzero()[0].tolist()
        output = mirror.output(followed).tolist()
        assert output == base[trained][0][: len(output)]
        assert len(output) > 8
        assert sum(stats(e)["accepted"]["reference"]) > 0


def test_sampled_drafts_beside_references(trained: Path, draft: Path) -> None:
    """vLLM verifies drafts that the model sampled beside those of references."""
    config = config_of("mtp_ngram", draft, draft_sample_method="probabilistic")
    sampled: dict[str, Any] = {"temperature": 0.7, "max_tokens": TOKENS}
    with engine(trained, config) as e:
        texts = ask(e, FEW, [{}] * 4, seed=3, **sampled)
        ask(e, FEW * 2, asking(texts), seed=3, **sampled)
        accepted = check_sums(e)
    assert accepted["reference"] > 0
    assert accepted["model"] > 0
