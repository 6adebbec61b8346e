"""Suffix decoding: drafts from the request's own text and from past responses."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from vllm_specplus.proposers.history import History, Match

_NUM_FINGERPRINT_TOKENS = 8


@dataclass
class _Fed:
    """What the cache has been given of one request."""

    num_prompt_tokens: int
    num_tokens: int
    last_tokens: bytes


class SuffixMatcher:
    """arctic-inference's `SuffixDecodingCache` behind the `Matcher` protocol.

    Each request has a suffix tree of its own text; one further tree, shared by all, holds the
    responses of past requests, so drafts may come from another request's output.
    Source: "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
    https://arxiv.org/abs/2411.04975, and https://github.com/snowflakedb/ArcticInference.

    Args:
        max_tree_depth: the longest context matched plus what follows it, in tokens.
        max_cached_requests: past responses kept, the oldest dropped first; 0 = none, -1 = unlimited.
        max_spec_factor: at most this many drafts per matched token.
        min_token_prob: a draft needs at least this estimated probability.

    Raises:
        ImportError: arctic-inference is not installed.
        ValueError: `max_cached_requests` below -1.
    """

    def __init__(
        self,
        *,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
    ) -> None:
        if max_cached_requests < -1:
            raise ValueError(f"max_cached_requests={max_cached_requests} must be -1 (unlimited), 0 (none) or more")
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache
        except ImportError as error:
            raise ImportError("suffix decoding needs arctic-inference: pip install vllm-specplus[suffix]") from error
        # The cache itself takes -1 as "no limit".
        self._cache = SuffixDecodingCache(max_tree_depth=max_tree_depth, max_cached_requests=max_cached_requests)
        self.max_tree_depth = max_tree_depth
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = min_token_prob
        self._fed: dict[str, _Fed] = {}

    @property
    def match_len_cap(self) -> int:
        """The largest match length reported: the tree's depth holds the drafts as well.

        The cache answers with its best-scored match, not the longest: with k drafts expected
        after each of them, matches count at most `max_tree_depth` - k tokens.
        """
        return self.max_tree_depth - 1

    @property
    def num_cached_requests(self) -> int:
        """Responses in the tree that all requests share."""
        return len(self._cache.cached_requests)

    def match(self, history: History, model_drafts: np.ndarray | None, max_drafts: np.ndarray) -> Match:
        """See `Matcher.match`. A request without output yet (prefill) is left for later."""
        num_reqs = len(history.req_ids)
        token_ids = np.full((num_reqs, int(max_drafts.max(initial=0))), -1, np.int32)
        num_drafts = np.zeros(num_reqs, np.int32)
        match_len = np.zeros(num_reqs, np.int32)
        if model_drafts is not None:
            model_drafts = model_drafts.astype(np.int32, copy=False)

        # A request is fed and asked before the next one is fed: responses of the same step reach
        # the shared tree in row order, as in vLLM's own proposer.
        for i, req_id in enumerate(history.req_ids):
            row = history.tokens(i)
            num_prompt_tokens = int(history.num_prompt_tokens[i])
            if len(row) <= num_prompt_tokens:
                continue
            self._feed(req_id, row, num_prompt_tokens)
            if max_drafts[i] <= 0:
                continue
            context = row[-self.max_tree_depth :]
            if model_drafts is not None:
                context = np.concatenate((context, model_drafts[i]))[-self.max_tree_depth :]
            draft = self._cache.speculate(
                req_id,
                context,
                max_spec_tokens=int(max_drafts[i]),
                max_spec_factor=self.max_spec_factor,
                min_token_prob=self.min_token_prob,
            )
            count = len(draft.token_ids)
            if count:
                token_ids[i, :count] = draft.token_ids
                num_drafts[i] = count
                match_len[i] = draft.match_len
        return Match(token_ids, num_drafts, match_len)

    def retain(self, req_ids: Collection[str]) -> None:
        """See `Matcher.retain`. The responses of dropped requests stay in the shared tree."""
        for req_id in self._fed.keys() - set(req_ids):
            del self._fed[req_id]
            self._cache.stop_request(req_id)

    def _feed(self, req_id: str, row: np.ndarray, num_prompt_tokens: int) -> None:
        """Give the cache the tokens of `row` ([num_tokens] int32) that it does not have yet."""
        fed = self._fed.get(req_id)
        if fed is not None and not _continues(fed, row, num_prompt_tokens):
            self._cache.stop_request(req_id)
            fed = None
        if fed is None:
            # Starting a request also drops the response cached under the same id.
            self._cache.start_request(req_id, row[:num_prompt_tokens])
            fed = self._fed[req_id] = _Fed(num_prompt_tokens, num_prompt_tokens, b"")
        if fed.num_tokens < len(row):
            self._cache.add_active_response(req_id, row[fed.num_tokens :])
            fed.num_tokens = len(row)
            fed.last_tokens = row[-_NUM_FINGERPRINT_TOKENS:].tobytes()


def _continues(fed: _Fed, row: np.ndarray, num_prompt_tokens: int) -> bool:
    """Whether `row` goes on from what was fed; its last tokens stand for all of it."""
    if fed.num_prompt_tokens != num_prompt_tokens:
        return False
    start = max(0, fed.num_tokens - _NUM_FINGERPRINT_TOKENS)
    return row[start : fed.num_tokens].tobytes() == fed.last_tokens
