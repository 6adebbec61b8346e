"""The options that a config resolves to, and the questions that the runners ask of them."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from vllm_specplus.config.keys import (
    DEFAULT_NGRAM_SIZES,
    HISTORY_METHODS,
    MAX_DRAFT_TOKENS,
    NGRAM_KEYS,
    SUFFIX_KEYS,
    AtLeastOne,
    CommonKeys,
)


class SpecPlusOptions(CommonKeys):
    """The plugin's options, resolved, as the runners read them. Frozen; pickled to the workers.

    num_model_steps: the most forward passes of the draft model in a hybrid; None elsewhere.
    mtp_strategy: what drafts from history beside the draft model.
    ngram_match_order: which of several occurrences of an n-gram wins: the latest, or the first.
    match_override_len: in a hybrid, a match of at least this many tokens replaces the model's drafts; 0: never.
    adaptive: whether each step drafts what earns most; else a fixed rule joins the sources.
    suffix_decoding_*: as vLLM's keys; -1 cached requests are no limit.
    suffix_decoding_max_cached_tokens: the tokens of answers in suffix trees; -1: no limit. None: the engine is going to
        choose a limit by its machine's memory.
    suffix_decoding_scope: whose answers the suffix trees of a request hold: everybody's, those with its ``cache_salt``,
        or its own alone.
    verify_strategy: None: vLLM's own verification.
    max_candidate_len: for ``topp``, the candidates of a row; None: the whole nucleus.
    verify_window: for ``topp``, the drafts after a second choice that must be first choices; 0: off.
    allow_force_accept: whether a request may have all of its drafts accepted.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)

    method: str
    """The method that runs; vLLM's deprecated names for MTP are ``mtp`` here."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)]
    """Draft slots per request and step."""
    max_ngram_size: AtLeastOne = DEFAULT_NGRAM_SIZES[0]
    min_ngram_size: AtLeastOne = DEFAULT_NGRAM_SIZES[1]
    """The largest and the smallest n-gram size, in tokens."""
    adaptive: bool = False

    @property
    def is_hybrid(self) -> bool:
        """Whether history drafts beside the draft model."""
        return self.mtp_strategy != "default"

    @property
    def drafts_from_history(self) -> bool:
        """Whether the plugin drafts, alone or beside a model."""
        return self.is_hybrid or self.method in HISTORY_METHODS

    @property
    def matches_ngrams(self) -> bool:
        """Whether the plugin's n-gram match drafts."""
        return self.mtp_strategy == "with_ngram" or self.method == "ngram"

    @property
    def drafts_ngrams(self) -> bool:
        """Whether n-grams of the request's own text draft; beside suffix trees they do where the arbiter chooses."""
        return self.matches_ngrams or (self.matches_suffixes and self.adaptive)

    @property
    def matches_suffixes(self) -> bool:
        """Whether the plugin's suffix trees draft."""
        return self.mtp_strategy == "with_suffix" or self.method == "suffix"

    @property
    def needs_salts(self) -> bool:
        """Whether the workers have to know each request's ``cache_salt``."""
        return self.suffix_decoding_scope == "salt" and self.caches_answers

    @property
    def caches_answers(self) -> bool:
        """Whether suffix trees keep answers for other requests."""
        limits = self.suffix_decoding_max_cached_requests, self.suffix_decoding_max_cached_tokens
        return self.matches_suffixes and self.suffix_decoding_scope != "request" and 0 not in limits

    def in_use(self) -> dict[str, Any]:
        """The options that something reads in this configuration, in the order of the documentation's table."""
        unused: set[str] = set()
        if not self.is_hybrid:
            unused |= {"num_model_steps", "mtp_strategy", "match_override_len"}
        if not self.drafts_from_history or not self.num_speculative_tokens:
            # A request's reference is matched by n-grams, whatever drafts beside it.
            unused |= set(NGRAM_KEYS)
        if not self.num_speculative_tokens or not self.drafts_ngrams:
            unused.add("ngram_match_order")
        if not self.drafts_from_history or not self.num_speculative_tokens or self.match_override_len:
            unused.add("adaptive")
        if not self.matches_suffixes:
            unused |= set(SUFFIX_KEYS)
        if self.verify_strategy != "topp":
            unused |= {"max_candidate_len", "verify_window"}
        if self.verify_strategy is None or not self.num_speculative_tokens:
            # A strategy also samples where nothing is drafted, but then there is no draft to accept.
            unused |= {"verify_window", "accept_policy", "allow_force_accept"}
        if self.accept_policy != "normal":
            unused.add("verify_window")
        return {key: getattr(self, key) for key in CommonKeys.model_fields if key not in unused}

    @property
    def suffix_matcher(self) -> dict[str, Any]:
        """The arguments of the `SuffixMatcher` for these options."""
        return {
            "max_tree_depth": self.suffix_decoding_max_tree_depth,
            "max_cached_requests": self.suffix_decoding_max_cached_requests,
            "max_cached_tokens": (
                -1 if self.suffix_decoding_max_cached_tokens is None else self.suffix_decoding_max_cached_tokens
            ),
            "max_spec_factor": self.suffix_decoding_max_spec_factor,
            "min_token_prob": self.suffix_decoding_min_token_prob,
        }
