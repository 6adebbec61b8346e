"""Every config key changes what the engine does: none is parsed and then ignored."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import PROMPTS, Counts, engine
from vllm_specplus.config import SpecPlusOptions

HYBRID = {"method": "mtp", "num_speculative_tokens": 6, "mtp_strategy": "with_ngram"}
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
    "verify_strategy": (TOPP, TOPP | {"verify_strategy": "greedy"}, SAMPLED),
    "max_candidate_len": (TOPP, TOPP | {"max_candidate_len": 1}, SAMPLED),
    "verify_window": (
        TOPP | {"max_candidate_len": 1},
        TOPP | {"max_candidate_len": 1, "verify_window": 1},
        SAMPLED,
    ),
    "accept_policy": (HYBRID, HYBRID | {"accept_policy": "reject_all"}, {}),
}


def outcome(
    model: Path, config: dict[str, Any], draft: Path, sampling: dict[str, Any]
) -> tuple[Counts, list[list[int]]]:
    if config["method"] == "draft_model":
        config = config | {"model": str(draft)}
    with engine(model, config) as e:
        # Twice, so that what is remembered of past requests has a say.
        texts = [e.tokens(PROMPTS, **sampling) for _ in range(2)]
        return e.counts(), texts[1]


@pytest.mark.parametrize("key", CASES)
def test_key_changes_behaviour(key: str, tiny: Path, draft: Path) -> None:
    one, other, sampling = CASES[key]
    first = outcome(tiny, one, draft, sampling)
    assert outcome(tiny, one, draft, sampling) == first
    assert outcome(tiny, other, draft, sampling) != first


def test_every_key_is_tested() -> None:
    assert set(CASES) == set(SpecPlusOptions.model_fields)
