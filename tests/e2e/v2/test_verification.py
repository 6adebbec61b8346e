"""Strategies, policies and sampling parameters on Model Runner V2."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from tests.e2e.engines import PROPOSERS, Engine, engine, marked, speculative
from tests.e2e.v1.test_sampling import RULES as V1_RULES
from tests.e2e.v1.test_sampling import SAMPLED as V1_SAMPLED
from tests.e2e.v1.test_sampling import STRATEGIES, STRUCTURED
from tests.e2e.v2.engines import FEW, async_engine, tokens
from vllm_specplus.runners.v2.samplers import StrategyRejectionSampler

pytestmark = pytest.mark.interpreter

TWO = FEW[:2]
SAMPLED = V1_SAMPLED | {"max_tokens": 12}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "abcd"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
# V2 takes at most 128 stop tokens, and adds some of its own.
RULES = V1_RULES | {"min_tokens": V1_RULES["min_tokens"] | {"min_tokens": 12, "stop_token_ids": list(range(100))}}


@pytest.fixture(scope="module")
def plain(trained: Path) -> dict[str, list[list[int]]]:
    """Texts of the stock engine without speculation: greedy under each set of rules, and sampled with a seed."""
    with engine(trained, **STRUCTURED) as e:
        texts = {name: tokens(e, TWO, **rules) for name, rules in RULES.items()}
        return texts | {"sampled": tokens(e, TWO, **SAMPLED)}


@pytest.fixture(scope="module", params=marked(STRATEGIES, [], slow=["topp", "greedy"]))
def strategy(request: pytest.FixtureRequest, trained: Path, draft: Path, plain: Any) -> Iterator[tuple[str, Engine]]:
    """One engine for all tests of a strategy; `plain` comes first, since a process runs one engine at a time."""
    config = speculative("mtp_ngram", draft, verify_strategy=request.param)
    with engine(trained, config, **STRUCTURED) as e:
        yield request.param, e


@pytest.mark.parametrize("rules", [name for name in RULES if name != "none"])
def test_greedy_text(rules: str, strategy: tuple[str, Engine], plain: dict[str, list[list[int]]]) -> None:
    assert tokens(strategy[1], TWO, **RULES[rules]) == plain[rules]


def test_masks_when_sampling(strategy: tuple[str, Engine]) -> None:
    texts = tokens(strategy[1], TWO, **SAMPLED, allowed_token_ids=[65, 66, 67], bad_words=["A"])
    assert {token for t in texts for token in t} <= {66, 67}


def test_same_seed_same_text(strategy: tuple[str, Engine], plain: dict[str, list[list[int]]]) -> None:
    name, e = strategy
    first = tokens(e, TWO, **SAMPLED)
    if name == "target_match":
        # vLLM's V2 runner samples with the same noise, so this is the text without speculation.
        assert first == plain["sampled"]
    assert tokens(e, [FEW[2], *TWO[::-1]], **SAMPLED)[1:] == first[::-1]
    other = tokens(e, TWO, **SAMPLED | {"seed": 12})
    assert (other == first) == (name == "greedy")


def test_no_seed_new_text_and_several_completions(strategy: tuple[str, Engine]) -> None:
    name, e = strategy
    unseeded = {k: v for k, v in SAMPLED.items() if k != "seed"}
    texts = tokens(e, TWO[:1], n=3, **unseeded)
    assert len({tuple(t) for t in texts}) == (1 if name == "greedy" else 3)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_logprobs(sampling: dict[str, Any], strategy: tuple[str, Engine]) -> None:
    """Each emitted token has a logprob, beside those of the most likely tokens at its position."""
    sampling = {"max_tokens": 12} | sampling
    results = strategy[1].generate(TWO, logprobs=3, **sampling)
    assert [list(r.outputs[0].token_ids) for r in results] == strategy[1].tokens(TWO, **sampling)
    for result in results:
        output = result.outputs[0]
        for token, row in zip(output.token_ids, output.logprobs, strict=True):
            top = max(row.values(), key=lambda entry: entry.logprob)
            assert row[token].logprob <= top.logprob <= 0
            if "temperature" not in sampling:
                assert row[token].rank == 1


def test_structured_output(strategy: tuple[str, Engine]) -> None:
    for sampling in ({}, SAMPLED):
        rules = {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "max_tokens": 80, "ignore_eos": False}
        for result in strategy[1].generate(TWO, **sampling | rules):
            value = json.loads(result.outputs[0].text)
            assert value["name"] in ("ab", "abcd")
            assert isinstance(value["ok"], bool)


@pytest.mark.parametrize("adaptive", [pytest.param(False, marks=pytest.mark.slow), True])
def test_structured_output_under_asynchronous_scheduling(adaptive: bool, trained: Path, draft: Path) -> None:
    """The scheduler checks drafts against the grammar, and no padding."""
    config = speculative("mtp_ngram", draft, verify_strategy="target_match", adaptive=adaptive)
    rules = {"structured_outputs": StructuredOutputsParams(json=SCHEMA), "max_tokens": 80, "ignore_eos": False}
    with async_engine(trained, config, **STRUCTURED) as e:
        for result in e.generate(TWO[:1], **rules):
            assert json.loads(result.outputs[0].text)["name"] in ("ab", "abcd")


@pytest.mark.parametrize("mode", ["processed_logprobs", pytest.param("raw_logits", marks=pytest.mark.slow)])
def test_logprobs_modes(mode: str, trained: Path, draft: Path) -> None:
    """The logprobs are those of the stock engine, whose text `target_match` gives."""
    values = []
    for config in (None, speculative("mtp_ngram", draft, verify_strategy="target_match")):
        with engine(trained, config, logprobs_mode=mode) as e:
            results = e.generate(TWO, logprobs=0, **SAMPLED)
        values.append(
            [
                row[token].logprob
                for r in results
                for token, row in zip(r.outputs[0].token_ids, r.outputs[0].logprobs, strict=True)
            ]
        )
    assert values[1] == pytest.approx(values[0], rel=1e-3, abs=1e-3)


def test_in_chunks(trained: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM verifies a batch of many rows in parts, which changes nothing."""
    sizes: list[int] = []
    verify = StrategyRejectionSampler._verify

    def counting(self: Any, logits: torch.Tensor, *args: Any) -> Any:
        sizes.append(logits.shape[0])
        return verify(self, logits, *args)

    monkeypatch.setattr(StrategyRejectionSampler, "_verify", counting)
    found, batches = [], []
    params = [
        SamplingParams(temperature=0.7 + 0.1 * seed, seed=seed, logprobs=2, max_tokens=12, ignore_eos=True)
        for seed in range(len(FEW))
    ]
    # All drafts of one request are accepted, in whichever part it is.
    params[-1].extra_args = {"force_sp_accept": True}
    config = speculative("mtp_ngram", draft, verify_strategy="target_match", allow_force_accept=True)
    with engine(trained, config) as e:
        for _ in range(2):
            results = e.llm.generate([{"prompt_token_ids": p} for p in FEW], params, use_tqdm=False)
            found.append([(list(r.outputs[0].token_ids), _logprobs(r)) for r in results])
            batches.append(sizes[:])
            sizes.clear()
            monkeypatch.setattr(rejection_sampler, "get_max_chunk_logits", lambda vocab_size: 7)
        counts = e.counts()
    assert found[0] == found[1]
    assert sum(batches[0]) == sum(batches[1])
    assert max(batches[1]) <= 7 < max(batches[0])
    assert 0 < counts.accepted < counts.drafted


def _logprobs(result: Any) -> list[dict[int, float]]:
    return [{token: entry.logprob for token, entry in row.items()} for row in result.outputs[0].logprobs]


def test_sampling_masks(trained: Path, draft: Path) -> None:
    """Each token comes with the tokens that it was sampled from, as without speculation."""
    found = []
    replay = {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
    for config in (None, speculative("mtp_ngram", draft, verify_strategy="target_match")):
        with engine(trained, config, **replay) as e:
            outputs = [r.outputs[0] for r in e.generate(TWO, **SAMPLED | {"top_k": 8})]
        found.append([(list(o.token_ids), o.sampling_mask.token_ids) for o in outputs])
    assert found[0] == found[1]
    for token_ids, masks in found[1]:
        assert all(token in mask for token, mask in zip(token_ids, masks, strict=True))
        assert 1 < max(map(len, masks)) <= 8


# The head of EAGLE belongs to the random model.
WITH_TRAINED = sorted(PROPOSERS.keys() - {"naive", "mtp_ngram", "eagle_ngram"})


@pytest.mark.parametrize(
    "proposer", marked(WITH_TRAINED, ["mtp_ngram_override"], slow=["draft_model_ngram", "mtp_suffix", "mtp"])
)
def test_seeded_text_of_target_match(proposer: str, trained: Path, draft: Path, plain: Any) -> None:
    """It is the text without speculation: the noise depends only on seed and position."""
    with engine(trained, speculative(proposer, draft, verify_strategy="target_match")) as e:
        assert tokens(e, TWO, **SAMPLED) == plain["sampled"]


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["mtp_ngram", "suffix"])
def test_several_seeded_completions_of_target_match(proposer: str, trained: Path, draft: Path) -> None:
    """Each is that without speculation; vLLM numbers the seeds of a request's completions."""
    several = SAMPLED | {"n": 3}
    with engine(trained) as e:
        expected = tokens(e, TWO, **several)
    with engine(trained, speculative(proposer, draft, verify_strategy="target_match")) as e:
        for _ in range(2):
            assert tokens(e, TWO, **several) == expected
        counts = e.counts()
    assert 0 < counts.accepted < counts.drafted
    assert len({tuple(token_ids) for token_ids in expected}) == several["n"] * len(TWO)


@pytest.mark.parametrize("proposer", marked(["mtp_ngram", "suffix"], [], slow=["suffix"]))
def test_policies(proposer: str, trained: Path, draft: Path, plain: dict[str, list[list[int]]]) -> None:
    accepted = {}
    for policy in ("accept_all", "reject_all"):
        with engine(trained, speculative(proposer, draft, accept_policy=policy)) as e:
            texts = tokens(e, TWO)
            counts = e.counts()
        assert all(0 < token < 320 for t in texts for token in t)
        assert counts.drafted > 0
        accepted[policy] = counts.accepted / counts.drafted
    assert texts == plain["none"]
    assert accepted == {"accept_all": 1.0, "reject_all": 0.0}
