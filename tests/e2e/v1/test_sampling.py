"""Sampling parameters under every strategy: what a request asks for holds, drafts or not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.e2e.engines import PROMPTS, Engine, engine, speculative

STRATEGIES = ["topp", "greedy", "target_match", "rejection"]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 11}
# Engine settings that make a random model's JSON end.
STRUCTURED = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}


@pytest.fixture(scope="module")
def plain(trained: Path) -> dict[str, list[list[int]]]:
    """Greedy texts of the stock engine without speculation, by the request's rules."""
    with engine(trained, **STRUCTURED) as e:
        return {name: e.tokens(**rules) for name, rules in RULES.items()}


RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
    "min_tokens": {"min_tokens": 20, "ignore_eos": False, "stop_token_ids": list(range(128))},
    "bad_words": {"bad_words": ["a", "bc"]},
    "allowed_token_ids": {"allowed_token_ids": [65, 66, 70, 71]},
    "stop": {"stop": ["e", "zz"], "ignore_eos": False},
}


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request: pytest.FixtureRequest, trained: Path, draft: Path, plain: Any) -> Iterator[tuple[str, Engine]]:
    """One engine for all tests of a strategy; `plain` first, since a process runs one at a time."""
    config = speculative("mtp_ngram", draft, verify_strategy=request.param)
    with engine(trained, config, **STRUCTURED) as e:
        yield request.param, e


@pytest.mark.parametrize("rules", RULES)
def test_greedy_text(rules: str, strategy: tuple[str, Engine], plain: dict[str, list[list[int]]]) -> None:
    assert strategy[1].tokens(**RULES[rules]) == plain[rules]


def test_min_tokens_is_reached_amid_drafts(strategy: tuple[str, Engine], plain: dict[str, list[list[int]]]) -> None:
    """References bring many tokens in a step. Each request may end with a token that its text has not had before."""
    ends = [
        (prompt, text[: i + 1])
        for prompt, text in zip(PROMPTS, plain["none"], strict=True)
        for i in range(1, len(text))
        if text[i] not in text[:i]
    ]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=len(text) + 4,
            min_tokens=len(text) - 1,
            stop_token_ids=text[-1:],
            extra_args={"sp_advice_prompt_token_ids": text},
        )
        for _, text in ends
    ]
    results = strategy[1].llm.generate([{"prompt_token_ids": prompt} for prompt, _ in ends], params, use_tqdm=False)
    assert [list(r.outputs[0].token_ids) for r in results] == [text for _, text in ends]


def test_bad_words_and_masks_when_sampling(strategy: tuple[str, Engine]) -> None:
    texts = strategy[1].tokens(**SAMPLED, allowed_token_ids=[65, 66, 67], bad_words=["A"])
    assert {token for t in texts for token in t} <= {66, 67}


def test_same_seed_same_text(strategy: tuple[str, Engine]) -> None:
    name, e = strategy
    first = e.tokens(**SAMPLED)
    assert e.tokens(**SAMPLED) == first
    # In other batches too: alone, and in another order.
    assert [e.tokens([p], **SAMPLED)[0] for p in PROMPTS] == first
    assert e.tokens(PROMPTS[::-1], **SAMPLED) == first[::-1]
    other = e.tokens(**SAMPLED | {"seed": 12})
    assert (other == first) == (name == "greedy")


def test_no_seed_new_text(strategy: tuple[str, Engine]) -> None:
    name, e = strategy
    unseeded = {k: v for k, v in SAMPLED.items() if k != "seed"}
    assert (e.tokens(**unseeded) == e.tokens(**unseeded)) == (name == "greedy")


def test_several_completions(strategy: tuple[str, Engine]) -> None:
    name, e = strategy
    texts = e.tokens(PROMPTS[:2], n=3, **SAMPLED)
    # vLLM numbers the seeds of a request's completions.
    seeds = [SAMPLED["seed"] + i for i in range(3)]
    assert texts == [text for p in PROMPTS[:2] for s in seeds for text in e.tokens([p], **SAMPLED | {"seed": s})]
    assert (len({tuple(t) for t in texts}) == 2) == (name == "greedy")


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_logprobs(sampling: dict[str, Any], strategy: tuple[str, Engine]) -> None:
    """Each emitted token has a logprob, and the most likely ones beside it are those of its position."""
    with_logprobs = strategy[1].generate(PROMPTS, logprobs=3, **sampling)
    assert [list(r.outputs[0].token_ids) for r in with_logprobs] == strategy[1].tokens(**sampling)
    for result in with_logprobs:
        output = result.outputs[0]
        assert len(output.logprobs) == len(output.token_ids)
        for token, row in zip(output.token_ids, output.logprobs, strict=True):
            top = max(row.values(), key=lambda entry: entry.logprob)
            assert row[token].logprob <= top.logprob <= 0
            assert (row[token].rank == 1) == (row[token].logprob == top.logprob)
            if not sampling:
                assert row[token].rank == 1


def test_structured_output(strategy: tuple[str, Engine]) -> None:
    check_structured_output(strategy[1])


def check_structured_output(e: Engine) -> None:
    """Check that texts keep to a grammar, greedy and sampled."""
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["ab", "abcd"]}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    for sampling in ({}, SAMPLED):
        results = e.generate(
            PROMPTS[:4],
            structured_outputs=StructuredOutputsParams(json=schema),
            max_tokens=80,
            ignore_eos=False,
            **sampling,
        )
        for result in results:
            value = json.loads(result.outputs[0].text)
            assert value["name"] in ("ab", "abcd")
            assert isinstance(value["ok"], bool)
