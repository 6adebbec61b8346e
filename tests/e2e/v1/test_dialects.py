"""Configs of other systems in engines: what is drafted and accepted is what that system's rule says."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.dialects import LONG, NGRAM_RULES, check_forced_acceptance, check_ngram_rule
from tests.e2e.engines import PROMPTS, engine

MTP = {"method": "mtp", "num_speculative_tokens": 2}
SAMPLED = {"temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def answers(trained: Path) -> list[list[int]]:
    with engine(trained) as e:
        return e.tokens(PROMPTS, max_tokens=LONG + 10)


@pytest.mark.parametrize(("config", "rule"), [(row[0], row[1:]) for row in NGRAM_RULES], ids=json.dumps)
def test_ngram_rules(config: dict[str, Any], rule: Any, trained: Path, answers: list[list[int]]) -> None:
    with engine(trained, config) as e:
        check_ngram_rule(e, answers, rule, to_the_end=True)


def test_deterministic_drafts_from_the_advice_alone(trained: Path, answers: list[list[int]]) -> None:
    with engine(trained, {"sp_type": "deterministic", "gen_num_per_cycle": 8}) as e:
        assert e.tokens(PROMPTS, max_tokens=LONG) == [answer[:LONG] for answer in answers]
        assert e.counts().drafted == 0
        advice = {"sp_advice_prompt_token_ids": answers[0]}
        (result,) = e.generate(PROMPTS[:1], max_tokens=LONG, extra_args=advice | {"aux_info": True})
        assert list(result.outputs[0].token_ids) == answers[0][:LONG]
        # Nine tokens a step, and the prompt's own.
        assert result.aux_info["iter_count"] <= 2 + LONG // 9 + 1
        assert result.aux_info["output_len"] == LONG
        stats = e.llm.collective_rpc("specplus_stats")[0]
        assert sum(stats["drafted"]["reference"]) == e.counts().drafted > 0


def test_topp_does_not_accept_everything(trained: Path) -> None:
    """A client with OpenAI's defaults names no top_p. Without a limit each draft is accepted, which checks the test."""
    rates, highest = [], []
    for keys in ({}, {"max_candidate_len": None}):
        with engine(trained, MTP | {"verify_strategy": "topp"} | keys) as e:
            e.tokens(PROMPTS, **SAMPLED | {"temperature": 2.0})
            counts = e.counts()
            rates.append(counts.accepted / counts.drafted)
            ranks = [
                next(part.rank for token, part in row.items() if token == chosen)
                for result in e.generate(PROMPTS, logprobs=5, **SAMPLED | {"temperature": 2.0})
                for chosen, row in zip(result.outputs[0].token_ids, result.outputs[0].logprobs, strict=True)
            ]
            highest.append(max(ranks))
    assert rates[0] < 1 == rates[1]
    # Each token is one of the five candidates.
    assert 1 < highest[0] <= 5 < highest[1]


@pytest.mark.parametrize("name", ["mtp", "hybrid"])
def test_all_drafts_of_one_request_are_accepted(name: str, trained: Path) -> None:
    """Where vLLM drafts, and where the plugin does."""
    hybrid = {"mtp_strategy": "with_ngram", "adaptive": False, "num_speculative_tokens": 3}
    check_forced_acceptance(trained, MTP | (hybrid if name == "hybrid" else {}))


@pytest.mark.parametrize(
    "config",
    [
        {"sp_type": "mtp", "gen_num_per_cycle": 2},
        {"method": "mtp", "num_speculative_tokens": 2, "num_model_steps": 2},
        {"speculate_method": "mtp", "speculate_max_draft_token_num": 2},
    ],
    ids=["rtp_llm", "own_key", "paddlenlp"],
)
def test_aux_info_where_vllm_drafts_alone(config: dict[str, Any], trained: Path) -> None:
    """Names and keys for something that vLLM does by itself."""
    with engine(trained, config) as e:
        for extra in ({}, {"n": 2, "temperature": 1.0, "seed": 5}):
            before = e.counts()
            (result,) = e.generate(PROMPTS[:1], extra_args={"aux_info": True}, **extra)
            after = e.counts()
            aux = result.aux_info
            assert aux["output_len"] == 48 * len(result.outputs)
            # A step gives its accepted drafts and one token more; the last one may be cut.
            steps = aux["output_len"] - (after.accepted - before.accepted)
            assert steps <= aux["iter_count"] <= steps + 2 * len(result.outputs)
            assert aux["avg_tokens_per_iter"] == aux["output_len"] / aux["iter_count"]
            assert aux["cost_time"] > 0
        (result,) = e.generate(PROMPTS[:1])
        assert not hasattr(result, "aux_info")


def test_a_name_of_paddles_quantization(tiny: Path) -> None:
    with engine(tiny, MTP | {"quantization": "WINT8"}) as e:
        assert len(e.tokens(PROMPTS[:1])[0]) == 48


@pytest.mark.parametrize("config", [{"speculate_method": "None"}, {"sp_type": "none"}], ids=json.dumps)
def test_no_speculation(config: dict[str, Any], trained: Path, answers: list[list[int]]) -> None:
    with engine(trained, config) as e:
        assert e.llm.llm_engine.vllm_config.speculative_config is None
        assert e.tokens(PROMPTS[:2], max_tokens=LONG) == [answer[:LONG] for answer in answers[:2]]
