"""The plugin's options, resolved."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_specplus.config import rules
from vllm_specplus.config.keys import (
    MAX_DRAFT_TOKENS,
    AcceptPolicy,
    AtLeastOne,
    AtLeastZero,
    CachedRequests,
    Factor,
    MtpStrategy,
    Probability,
    VerifyStrategy,
)

HISTORY_METHODS = ("ngram", "suffix", "naive")
"""Methods that draft from text alone: the request's and others', or (naive) nothing but its reference."""


class SpecPlusOptions(BaseModel):
    """The plugin's options, resolved: what the runner reads. Frozen; pickles to the workers."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)

    method: str
    """The method that runs; vLLM's deprecated names for MTP are ``mtp`` here."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)]
    """Draft slots per request and step."""
    num_model_steps: AtLeastOne | None = None
    """Forward passes of the draft model in a hybrid; None where vLLM's own drafter runs."""
    mtp_strategy: MtpStrategy = "default"
    """What fills the slots after `num_model_steps`."""
    max_ngram_size: AtLeastOne = rules.DEFAULT_WINDOW[0]
    min_ngram_size: AtLeastOne = rules.DEFAULT_WINDOW[1]
    """Longest and shortest tail, in tokens, that the n-gram lookup matches."""
    match_override_len: AtLeastZero = 0
    """Hybrids: a match of at least this many tokens replaces the model's drafts; 0: never."""
    suffix_decoding_max_tree_depth: AtLeastOne = 24
    suffix_decoding_max_cached_requests: CachedRequests = 10000
    """As vLLM's key, and -1 for no limit."""
    suffix_decoding_max_spec_factor: Factor = 1.0
    suffix_decoding_min_token_prob: Probability = 0.1
    verify_strategy: VerifyStrategy | None = None
    """None: vLLM's own rejection sampler."""
    max_candidate_len: AtLeastOne | None = None
    """``topp``: candidates per row; None: as many as the nucleus has."""
    verify_window: AtLeastZero = 0
    """``topp``: rows of the window fallback; 0: off."""
    accept_policy: AcceptPolicy = "normal"

    @property
    def is_hybrid(self) -> bool:
        """Whether history matches follow the draft model's tokens."""
        return self.mtp_strategy != "default"

    @property
    def drafts_from_history(self) -> bool:
        """Whether the plugin drafts, and not vLLM alone."""
        return self.is_hybrid or self.method in HISTORY_METHODS

    @property
    def matches_ngrams(self) -> bool:
        """Whether the plugin's n-gram match drafts."""
        return self.mtp_strategy == "with_ngram" or self.method == "ngram"

    @property
    def matches_suffixes(self) -> bool:
        """Whether the plugin's suffix trees draft."""
        return self.mtp_strategy == "with_suffix" or self.method == "suffix"

    @property
    def suffix_matcher(self) -> dict[str, Any]:
        """The arguments of the `SuffixMatcher` that they ask for."""
        return {
            "max_tree_depth": self.suffix_decoding_max_tree_depth,
            "max_cached_requests": self.suffix_decoding_max_cached_requests,
            "max_spec_factor": self.suffix_decoding_max_spec_factor,
            "min_token_prob": self.suffix_decoding_min_token_prob,
        }
