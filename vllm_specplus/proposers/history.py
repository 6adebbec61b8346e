"""What a matcher sees, what it answers, and the protocol that all matchers share."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class History:
    """What a matcher may look at: the host-side tokens of the batch's requests.

    Attributes:
        req_ids: [B] request ids, each at most once.
        token_ids: [>=B, max_model_len] int32, C-contiguous; row i belongs to req_ids[i]. May be a
            large buffer that the engine goes on using, and the order of its rows may change from
            step to step.
        num_tokens: [B] int, prompt and output tokens of each request, no drafts.
        num_prompt_tokens: [B] int, prompt tokens of each request.
    """

    req_ids: Sequence[str]
    token_ids: np.ndarray
    num_tokens: np.ndarray
    num_prompt_tokens: np.ndarray

    def tokens(self, i: int) -> np.ndarray:
        """[num_tokens[i]] int32, a view of the tokens of request i."""
        return self.token_ids[i, : self.num_tokens[i]]


@dataclass(frozen=True)
class Match:
    """What a matcher found.

    Attributes:
        token_ids: [B, K] int32, the drafts of each request; -1 after the last one.
        num_tokens: [B] int32, drafted tokens; 0 = no match.
        match_len: [B] int32, tokens of the matched context; 0 = no match.
    """

    token_ids: np.ndarray
    num_tokens: np.ndarray
    match_len: np.ndarray

    def to_lists(self) -> list[list[int]]:
        """The drafts as one list of token ids per request, [] where nothing matched."""
        rows, counts = self.token_ids.tolist(), self.num_tokens.tolist()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]


class Matcher(Protocol):
    """Drafts the continuation of a sequence from text seen earlier; keeps state per request id."""

    @property
    def match_len_cap(self) -> int:
        """The largest `Match.match_len` this matcher reports."""

    def match(self, history: History, model_drafts: np.ndarray | None, max_drafts: np.ndarray) -> Match:
        """Take in what is new in `history` and draft from it.

        Args:
            history: the batch.
            model_drafts: [B, S] int, tokens that a draft model put after each request's history
                (all S of a row are valid), or None. They are matched but not remembered.
            max_drafts: [B] int >= 0, at most so many tokens for each request. 0 drafts nothing for
                it; what is new in its history is taken in all the same.

        Returns:
            The drafts, with K = max(max_drafts).
        """

    def retain(self, req_ids: Collection[str]) -> None:
        """Drop the state of every request that is not named."""
