"""The ways of drafting that are run on a GPU, by name."""

from typing import Any

_HYBRID = {"method": "mtp", "num_speculative_tokens": 5, "num_model_steps": 2, "mtp_strategy": "with_ngram"}
_APPEND = _HYBRID | {"adaptive": False}
NONE = "none"
# In place of a draft model's folder: that of one with random weights, or of such an EAGLE head, made for the target.
RANDOM_DRAFT, RANDOM_HEAD = "a random draft model", "a random head"

CONFIGS: dict[str, dict[str, Any] | None] = {
    NONE: None,
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
    "hybrid": _APPEND,
    "suffix": {"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_max_cached_requests": -1},
    "adaptive": _HYBRID,
    "override": _HYBRID | {"match_override_len": 4},
    "hybrid-suffix": _APPEND | {"mtp_strategy": "with_suffix"},
    "hybrid-draft_model": _HYBRID | {"method": "draft_model", "model": RANDOM_DRAFT},
    "hybrid-eagle": _APPEND | {"method": "eagle", "model": RANDOM_HEAD},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "max_ngram_size": 4, "min_ngram_size": 1},
    "naive": {"method": "naive"},
    "hybrid-rejection": _APPEND | {"verify_strategy": "rejection"},
    "hybrid-target_match": _APPEND | {"verify_strategy": "target_match"},
}
# Whose cost is measured; the texts of all are compared.
OF_STEPS = (NONE, "mtp", "hybrid", "hybrid-suffix", "adaptive", "hybrid-rejection")
# The most launches and copies of a step beyond those of this config, which makes as many passes.
AS_MANY_PASSES = "mtp"
MOST_BEYOND = {"hybrid": 4, "hybrid-suffix": 8}
OF_SPEED = (NONE, "mtp", "hybrid", "suffix", "adaptive")
DRY_STEPS, DRY_SPEED = ("hybrid",), (NONE, "hybrid")
# Requests at once.
BATCHES, DRY_BATCHES = (1, 16, 64), (1, 2)
