"""Suffix decoding: drafts from the request's own text and from past responses."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from vllm_specplus.proposers.history import History, Match

_NUM_FINGERPRINT_TOKENS = 8


@dataclass
class _Progress:
    """The part of one request's tokens that the cache has."""

    num_prompt_tokens: int
    num_tokens: int
    last_tokens: bytes


class SuffixMatcher:
    """arctic-inference's `SuffixDecodingCache` behind the `Matcher` protocol.

    Each request has a suffix tree of its own text. One more tree, shared by all, holds the responses of past requests,
    so drafts may come from another request's output.
    Source: "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
    https://arxiv.org/abs/2411.04975, and https://github.com/snowflakedb/ArcticInference.

    Args:
        max_tree_depth: the longest tail that is matched plus its drafts, in tokens.
        max_cached_requests: past responses to keep, of which the oldest goes first; 0 = none, -1 = unlimited.
        max_spec_factor: at most this many drafts per matched token.
        min_token_prob: a draft needs at least this estimated probability.

    Raises:
        ImportError: arctic-inference is not installed.
        ValueError: `max_cached_requests` below -1.
    """

    def __init__(
        self,
        *,
        max_tree_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
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
        self._progress: dict[str, _Progress] = {}

    @property
    def match_len_cap(self) -> int:
        """The largest match length reported: a draft takes one token of the tree's depth.

        The cache returns the match with the best score, not the longest. With k drafts after it, a match counts at
        most `max_tree_depth` - k tokens.
        """
        return self.max_tree_depth - 1

    @property
    def num_cached_requests(self) -> int:
        """Responses in the tree that all requests share."""
        return len(self._cache.cached_requests)

    def match(self, history: History, model_drafts: np.ndarray | None, max_drafts: np.ndarray) -> Match:
        """See `Matcher.match`. A request without output (in its prefill) is left for later."""
        num_reqs = len(history.req_ids)
        token_ids = np.full((num_reqs, int(max_drafts.max(initial=0))), -1, np.int32)
        num_drafts = np.zeros(num_reqs, np.int32)
        match_len = np.zeros(num_reqs, np.int32)
        if model_drafts is not None:
            model_drafts = model_drafts.astype(np.int32, copy=False)

        # A request drafts before the next one's tokens are added. So responses of the same step reach the shared tree
        # in row order, as in vLLM's own proposer.
        for i, req_id in enumerate(history.req_ids):
            row = history.tokens(i)
            num_prompt_tokens = int(history.num_prompt_tokens[i])
            if len(row) <= num_prompt_tokens:
                continue
            self._add_new_tokens(req_id, row, num_prompt_tokens)
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
        for req_id in self._progress.keys() - set(req_ids):
            del self._progress[req_id]
            self._cache.stop_request(req_id)

    def _add_new_tokens(self, req_id: str, row: np.ndarray, num_prompt_tokens: int) -> None:
        """Add the tokens of `row` ([num_tokens] int32) that the cache does not have yet."""
        progress = self._progress.get(req_id)
        if progress is not None and not _continues(progress, row, num_prompt_tokens):
            self._cache.stop_request(req_id)
            progress = None
        if progress is None:
            # To start a request also drops the response cached under the same id.
            self._cache.start_request(req_id, row[:num_prompt_tokens])
            progress = self._progress[req_id] = _Progress(num_prompt_tokens, num_prompt_tokens, b"")
        if progress.num_tokens < len(row):
            self._cache.add_active_response(req_id, row[progress.num_tokens :])
            progress.num_tokens = len(row)
            progress.last_tokens = row[-_NUM_FINGERPRINT_TOKENS:].tobytes()


def _continues(progress: _Progress, row: np.ndarray, num_prompt_tokens: int) -> bool:
    """Whether `row` goes on from the tokens in the cache; their last ones stand for all of them."""
    if progress.num_prompt_tokens != num_prompt_tokens:
        return False
    start = max(0, progress.num_tokens - _NUM_FINGERPRINT_TOKENS)
    return row[start : progress.num_tokens].tobytes() == progress.last_tokens
