"""Suffix decoding: drafts from the request's own text and from past responses."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_specplus.proposers.history import History, Match

if TYPE_CHECKING:
    from arctic_inference.suffix_decoding import SuffixDecodingCache

_NUM_FINGERPRINT_TOKENS = 8
_ONE_SCOPE = ""


@dataclass
class _Progress:
    """The part of one request's tokens that the cache of its scope has."""

    scope: str | None
    num_prompt_tokens: int
    num_tokens: int
    last_tokens: bytes


@dataclass
class _Response:
    """A response in the tree of its scope."""

    scope: str
    num_tokens: int = 0


class SuffixMatcher:
    """arctic-inference's `SuffixDecodingCache` behind the `Matcher` protocol.

    Each request has a suffix tree of its own text. One more tree for each scope (`History.scopes`) holds the responses
    of its requests, past and running. So drafts may come from the output of another request of the same scope.
    Source: "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
    https://arxiv.org/abs/2411.04975, and https://github.com/snowflakedb/ArcticInference.

    Args:
        max_tree_depth: the longest tail that is matched plus its drafts, in tokens.
        max_cached_requests: responses to keep in all scopes together, of which the oldest goes first; 0 = none,
            -1 = unlimited.
        max_cached_tokens: tokens of these responses to keep, of which the oldest response goes first; 0 = none,
            -1 = unlimited. A response that alone has more is not kept.
        max_spec_factor: at most this many drafts per matched token.
        min_token_prob: a draft needs at least this estimated probability.

    Raises:
        ImportError: arctic-inference is not installed.
        ValueError: `max_cached_requests` or `max_cached_tokens` below -1.
    """

    def __init__(
        self,
        *,
        max_tree_depth: int,
        max_cached_requests: int,
        max_cached_tokens: int = -1,
        max_spec_factor: float,
        min_token_prob: float,
    ) -> None:
        for name, limit in (("max_cached_requests", max_cached_requests), ("max_cached_tokens", max_cached_tokens)):
            if limit < -1:
                raise ValueError(f"{name}={limit} must be -1 (unlimited), 0 (none) or more")
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache
        except ImportError as error:
            raise ImportError("suffix decoding needs arctic-inference: docs/index.md says how it is built") from error
        self._make_cache = SuffixDecodingCache
        # The trees of requests whose responses nobody shares.
        self._unshared = SuffixDecodingCache(max_tree_depth, max_cached_requests=0)
        # By scope; a scope with nothing in its trees has no entry.
        self._shared: dict[str, SuffixDecodingCache] = {}
        # By request whose response is in a shared tree, the oldest first.
        self._cached: dict[str, _Response] = {}
        self._num_cached_tokens = 0
        self.max_cached_requests = max_cached_requests
        self.max_cached_tokens = max_cached_tokens
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
        """Responses in the trees that requests share."""
        return len(self._cached)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of these responses."""
        return self._num_cached_tokens

    @property
    def num_scopes(self) -> int:
        """Scopes that have a shared tree."""
        return len(self._shared)

    @property
    def active_requests(self) -> Collection[str]:
        """The requests that have a tree of their own text."""
        return self._progress.keys()

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
            scope = _ONE_SCOPE if history.scopes is None else history.scopes[i]
            cache = self._add_new_tokens(req_id, scope, row, num_prompt_tokens)
            if max_drafts[i] <= 0:
                continue
            context = row[-self.max_tree_depth :]
            if model_drafts is not None:
                context = np.concatenate((context, model_drafts[i]))[-self.max_tree_depth :]
            draft = cache.speculate(
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
        """See `Matcher.retain`. The responses of dropped requests stay in the shared trees."""
        for req_id in self._progress.keys() - set(req_ids):
            self._stop(req_id)

    def _add_new_tokens(
        self, req_id: str, scope: str | None, row: np.ndarray, num_prompt_tokens: int
    ) -> "SuffixDecodingCache":
        """Add the tokens of `row` ([num_tokens] int32) that the cache does not have yet; return the request's cache."""
        progress = self._progress.get(req_id)
        if progress is not None and not _continues(progress, row, num_prompt_tokens):
            self._stop(req_id)
            progress = None
        if progress is None:
            progress = self._start(req_id, scope, row[:num_prompt_tokens])
        cache = self._cache_of(progress.scope)
        if progress.num_tokens < len(row):
            cache.add_active_response(req_id, row[progress.num_tokens :])
            self._count(req_id, len(row) - progress.num_tokens)
            progress.num_tokens = len(row)
            progress.last_tokens = row[-_NUM_FINGERPRINT_TOKENS:].tobytes()
        return cache

    def _count(self, req_id: str, num_new: int) -> None:
        """Count new tokens of a response; drop the oldest responses if there are too many."""
        response = self._cached.get(req_id)
        if response is None:
            return
        response.num_tokens += num_new
        self._num_cached_tokens += num_new
        while self._num_cached_tokens > self.max_cached_tokens >= 0:
            self._evict(next(iter(self._cached)))

    def _start(self, req_id: str, scope: str | None, prompt: np.ndarray) -> _Progress:
        """Make the request's own tree, and room for its response."""
        if req_id in self._cached:
            # An earlier request had the same id.
            self._evict(req_id)
        if 0 in (self.max_cached_requests, self.max_cached_tokens):
            scope = None
        self._cache_of(scope).start_request(req_id, prompt)
        progress = self._progress[req_id] = _Progress(scope, len(prompt), len(prompt), b"")
        if scope is not None:
            self._cached[req_id] = _Response(scope)
            while len(self._cached) > self.max_cached_requests > 0:
                self._evict(next(iter(self._cached)))
        return progress

    def _stop(self, req_id: str) -> None:
        """Drop the request's own tree."""
        scope = self._progress.pop(req_id).scope
        self._cache_of(scope).stop_request(req_id)
        self._drop_if_empty(scope)

    def _evict(self, req_id: str) -> None:
        """Drop a response from the tree of its scope."""
        response = self._cached.pop(req_id)
        self._num_cached_tokens -= response.num_tokens
        self._shared[response.scope].evict_cached_response(req_id)
        self._drop_if_empty(response.scope)

    def _cache_of(self, scope: str | None) -> "SuffixDecodingCache":
        if scope is None:
            return self._unshared
        if scope not in self._shared:
            self._shared[scope] = self._make_cache(self.max_tree_depth, max_cached_requests=-1)
        return self._shared[scope]

    def _drop_if_empty(self, scope: str | None) -> None:
        if scope is not None and not self._shared[scope].cached_requests and not self._shared[scope].active_requests:
            del self._shared[scope]


def _continues(progress: _Progress, row: np.ndarray, num_prompt_tokens: int) -> bool:
    """Whether `row` goes on from the tokens in the cache; their last ones stand for all of them."""
    if progress.num_prompt_tokens != num_prompt_tokens:
        return False
    start = max(0, progress.num_tokens - _NUM_FINGERPRINT_TOKENS)
    return row[start : progress.num_tokens].tobytes() == progress.last_tokens
