"""The arguments and results of matchers, and the protocol that all matchers meet."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class History:
    """The tokens of the batch's requests on the host.

    Attributes:
        req_ids: [B] request ids, each at most once.
        token_ids: [>=B, max_model_len] int32, C-contiguous; row i belongs to req_ids[i]. It may be a large buffer of
            the engine's, whose rows may change their order from step to step.
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
    """The drafts that a matcher has found.

    Attributes:
        token_ids: [B, K] int32, the drafts of each request; -1 after the last one.
        num_tokens: [B] int32, drafts of each request; 0 = no match.
        match_len: [B] int32, tokens of the tail that matched; 0 = no match.
    """

    token_ids: np.ndarray
    num_tokens: np.ndarray
    match_len: np.ndarray

    def to_lists(self) -> list[list[int]]:
        """The drafts as one list of token ids per request, [] where nothing matched."""
        rows, counts = self.token_ids.tolist(), self.num_tokens.tolist()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]


class Matcher(Protocol):
    """Finds how the history went on after the same tokens; keeps state for each request id."""

    @property
    def match_len_cap(self) -> int:
        """The largest `Match.match_len` this matcher reports."""

    def match(self, history: History, model_drafts: np.ndarray | None, max_drafts: np.ndarray) -> Match:
        """Take in the new tokens of `history` and draft from it.

        Args:
            history: the batch.
            model_drafts: [B, S] int, a draft model's tokens after each request's history (all S of a row are valid),
                or None. They are matched but not remembered.
            max_drafts: [B] int >= 0, the most drafts of each request. With 0 nothing is drafted, but the new tokens
                of the history are taken in.

        Returns:
            The drafts, with K = max(max_drafts).
        """

    def retain(self, req_ids: Collection[str]) -> None:
        """Drop the state of every request that is not named."""
