"""Every config key changes what the engine does: none is parsed and then ignored."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import PROMPTS, Counts, engine
from vllm_specplus.config import SpecPlusOptions

HYBRID = {"method": "mtp", "num_speculative_tokens": 6, "mtp_strategy": "with_ngram", "adaptive": False}
SUFFIX = HYBRID | {"mtp_strategy": "with_suffix"}
TOPP = {"method": "mtp", "num_speculative_tokens": 3, "verify_strategy": "topp"}
SAMPLED = {"temperature": 1.2, "top_p": 0.9, "seed": 4}

# key -> (config with it at one value, config with it at another, sampling)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "method": (HYBRID, HYBRID | {"method": "draft_model"}, {}),
    "num_speculative_tokens": (HYBRID, HYBRID | {"num_speculative_tokens": 3}, {}),
    "num_model_steps": (HYBRID, HYBRID | {"num_model_steps": 4}, {}),
    "mtp_strategy": (HYBRID, HYBRID | {"mtp_strategy": "with_suffix"}, {}),
    "max_ngram_size": (
        HYBRID | {"max_ngram_size": 2, "min_ngram_size": 2},
        HYBRID | {"max_ngram_size": 12, "min_ngram_size": 2},
        {},
    ),
    "min_ngram_size": (HYBRID | {"min_ngram_size": 1}, HYBRID | {"min_ngram_size": 5}, {}),
    "match_override_len": (HYBRID, HYBRID | {"match_override_len": 2}, {}),
    "adaptive": (HYBRID, HYBRID | {"adaptive": True}, {}),
    "suffix_decoding_max_tree_depth": (SUFFIX, SUFFIX | {"suffix_decoding_max_tree_depth": 3}, {}),
    "suffix_decoding_max_cached_requests": (
        SUFFIX | {"suffix_decoding_max_cached_requests": 0},
        SUFFIX | {"suffix_decoding_max_cached_requests": -1},
        {},
    ),
    "suffix_decoding_max_spec_factor": (
        SUFFIX,
        SUFFIX | {"suffix_decoding_max_spec_factor": 0.3},
        {},
    ),
    "suffix_decoding_min_token_prob": (
        SUFFIX,
        SUFFIX | {"suffix_decoding_min_token_prob": 0.9},
        {},
    ),
    "suffix_decoding_max_cached_tokens": (SUFFIX, SUFFIX | {"suffix_decoding_max_cached_tokens": 0}, {}),
    "suffix_decoding_scope": (SUFFIX, SUFFIX | {"suffix_decoding_scope": "request"}, {}),
    "verify_strategy": (TOPP, TOPP | {"verify_strategy": "greedy"}, SAMPLED),
    "max_candidate_len": (TOPP, TOPP | {"max_candidate_len": 1}, SAMPLED),
    "verify_window": (
        TOPP | {"max_candidate_len": 2, "verify_window": 0},
        TOPP | {"max_candidate_len": 2, "verify_window": 1},
        {"temperature": 1.2, "top_p": 0.3, "seed": 4},
    ),
    "ngram_match_order": (
        HYBRID | {"min_ngram_size": 1},
        HYBRID | {"min_ngram_size": 1, "ngram_match_order": "first"},
        {},
    ),
    "accept_policy": (HYBRID, HYBRID | {"accept_policy": "reject_all"}, {}),
}


Outcome = tuple[Counts, list[list[int]]]


@pytest.fixture(scope="module")
def outcome(trained: Path, draft: Path) -> Callable[..., Outcome]:
    """What an engine drafts and says under a config; each config runs once."""
    known: dict[str, Outcome] = {}

    def run(config: dict[str, Any], sampling: dict[str, Any]) -> Outcome:
        if config["method"] == "draft_model":
            config = config | {"model": str(draft)}
        name = json.dumps([config, sampling])
        if name not in known:
            with engine(trained, config) as e:
                # Twice, so that what is remembered of past requests has a say.
                texts = [e.tokens(PROMPTS, **sampling) for _ in range(2)]
                known[name] = e.counts(), texts[1]
        return known[name]

    return run


def test_the_same_config_behaves_the_same(trained: Path, outcome: Callable[..., Outcome]) -> None:
    """So a difference below is the key's doing."""
    for config, sampling in ((HYBRID, {}), (SUFFIX, {}), (TOPP, SAMPLED)):
        first = outcome(config, sampling)
        with engine(trained, config) as e:
            texts = [e.tokens(PROMPTS, **sampling) for _ in range(2)]
            assert (e.counts(), texts[1]) == first


@pytest.mark.parametrize("key", CASES)
def test_key_changes_behaviour(key: str, outcome: Callable[..., Outcome]) -> None:
    one, other, sampling = CASES[key]
    assert outcome(one, sampling) != outcome(other, sampling)


def test_every_key_is_tested() -> None:
    # `allow_force_accept` acts on requests that ask for it: test_dialects.py.
    assert {*CASES, "allow_force_accept"} == set(SpecPlusOptions.model_fields)
