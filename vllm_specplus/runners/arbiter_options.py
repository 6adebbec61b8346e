"""The arbiter's arguments on either model runner."""

from typing import Any, TypedDict

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.sources import NGRAM, SUFFIX
from vllm_specplus.strategies import uses_draft_distribution

MATCH_LEN_CAP = 64
"""Tokens up to which an agreement is measured; longer ones say no more."""


class ArbiterOptions(TypedDict):
    """See `AdaptiveDrafter`."""

    num_model_steps: int
    num_speculative_tokens: int
    is_blind: bool
    makes_all_passes: bool


def arbiter_options(vllm_config: Any) -> ArbiterOptions:
    """Read the arbiter's arguments from vLLM's config."""
    speculative_config = vllm_config.speculative_config
    options: SpecPlusOptions = speculative_config.specplus
    samples_drafts = speculative_config.draft_sample_method == "probabilistic"
    return {
        "num_model_steps": options.num_model_steps or 0,
        "num_speculative_tokens": speculative_config.num_speculative_tokens,
        "is_blind": samples_drafts and uses_draft_distribution(options.verify_strategy),
        # Data-parallel ranks have to agree on the passes.
        "makes_all_passes": vllm_config.parallel_config.data_parallel_size > 1,
    }


def matching_sources(options: SpecPlusOptions) -> list[int]:
    """The sources that match the history; suffix trees are joined by the n-gram match."""
    if options.matches_suffixes:
        return [NGRAM, SUFFIX]
    return [NGRAM] if options.matches_ngrams else []
