"""The arguments and results of matchers, and the protocol that all matchers meet."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

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
        scopes: [B] a matcher may draft for a request from another's text only if both have the same scope. None among
            them: from its own text alone. None in their place: all requests have the same one.
    """

    req_ids: Sequence[str]
    token_ids: np.ndarray
    num_tokens: np.ndarray
    num_prompt_tokens: np.ndarray
    scopes: Sequence[str | None] | None = None

    def tokens(self, i: int) -> np.ndarray:
        """[num_tokens[i]] int32, a view of the tokens of request i."""
        return self.token_ids[i, : self.num_tokens[i]]

    def only(self, i: int) -> Self:
        """The history of request i alone."""
        chosen = slice(i, i + 1)
        return replace(
            self,
            req_ids=self.req_ids[chosen],
            token_ids=self.token_ids[chosen],
            num_tokens=self.num_tokens[chosen],
            num_prompt_tokens=self.num_prompt_tokens[chosen],
            scopes=None if self.scopes is None else self.scopes[chosen],
        )


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

    def before(self, token_id: int) -> "Match":
        """The same, each request's drafts cut off before the first one that is `token_id` or more."""
        width = self.token_ids.shape[1]
        is_above = np.pad(self.token_ids >= token_id, ((0, 0), (0, 1)), constant_values=True)
        num_tokens = np.minimum(self.num_tokens, is_above.argmax(axis=1)).astype(np.int32)
        token_ids = np.where(np.arange(width) < num_tokens[:, None], self.token_ids, np.int32(-1))
        return Match(token_ids, num_tokens, np.where(num_tokens > 0, self.match_len, 0).astype(np.int32))


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


class StateRows:
    """Gives each request a row of some state, and takes it back.

    Args:
        max_num_reqs: requests that have state at the same time.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self._rows: dict[str, int] = {}
        self._free = list(range(max_num_reqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._rows)

    def assign(self, req_ids: Sequence[str]) -> tuple[np.ndarray, list[tuple[str, int]]]:
        """[B] int64, the row of each request; and the new requests, each with the row that it has just been given.

        Raises:
            RuntimeError: more requests have state than there is room for.
        """
        rows = self._rows
        new: list[tuple[str, int]] = []
        try:
            return np.array([rows[req_id] for req_id in req_ids], np.int64), new
        except KeyError:
            pass
        for req_id in req_ids:
            if req_id in rows:
                continue
            if not self._free:
                raise RuntimeError(
                    f"no room for request {req_id!r}: {len(rows)} requests have state, which is max_num_reqs; call "
                    "retain() with the unfinished requests first"
                )
            rows[req_id] = self._free.pop()
            new.append((req_id, rows[req_id]))
        return np.array([rows[req_id] for req_id in req_ids], np.int64), new

    def find(self, req_id: str) -> int | None:
        """The row of a request; None where it has none."""
        return self._rows.get(req_id)

    def retain(self, req_ids: Collection[str]) -> list[int]:
        """Take back the row of every request that is not named; return these rows."""
        dropped = [self._rows.pop(req_id) for req_id in self._rows.keys() - req_ids]
        self._free += dropped
        return dropped
