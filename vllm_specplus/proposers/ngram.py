"""N-gram drafting: copy the tokens that followed the same n-gram earlier in the request's own text."""

import mmap
import secrets
from collections.abc import Collection
from typing import Literal

import numpy as np

from vllm_specplus.proposers.history import History, Match, StateRows

_MIN_CAPACITY = 1024  # tokens that a request's first tables have room for
_ENTRIES_PER_TOKEN = 2  # so that at most half of a table is filled
_HUGE_PAGE_SIZE = 2 << 20
# No client knows it, so none can write a prompt whose n-grams collide. Drafts do not depend on it.
_HASH_FACTOR = np.uint64(secrets.randbits(64) | 1)


class NgramMatcher:
    """Looks up the longest n-gram over prompt, output and model drafts, and of its occurrences the latest or the first.

    Let s be history + model drafts. The last `size` tokens of s are looked for earlier in s, from `max_ngram_size` down
    to `min_ngram_size`. The first size that occurs wins. Of its occurrences the latest wins (`match_order` "recent"),
    which may overlap the tail, or the first ("first"): the prompt's come before the output's, as in FastDeploy.
    The drafts are the tokens that follow it. Where s ends, the copy continues with the tokens just drafted, as in LZ77,
    so a repetition of any period fills all slots. A request's drafts come from its own text only.
    Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding.

    The text is indexed as it grows (see `_ngram_index`), so a step costs the same at any length of the history. Two
    things are linear in the length: to index a prompt, and to make larger tables each time that a request has grown by
    half. Memory: `_ENTRIES_PER_TOKEN` x 4 bytes for each token and n-gram size, and up to half as much again while a
    request grows.

    A request id may come back with other text, which is then indexed anew. It is noticed by its prompt length, by a
    shorter history, or by the last eight tokens. If all of these agree, matches may be missed. Drafts are still only
    continuations found in the present text.

    Args:
        max_num_reqs: requests that have state at the same time.
        max_model_len: longest history, in tokens.
        min_ngram_size: smallest n-gram size, >= 1.
        max_ngram_size: largest n-gram size, >= min_ngram_size.
        match_len_cap: matches are measured up to this many tokens; raised to `max_ngram_size`.
        match_order: which occurrence of an n-gram wins.

    Raises:
        ValueError: a size out of range.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        *,
        min_ngram_size: int,
        max_ngram_size: int,
        match_len_cap: int = 64,
        match_order: Literal["recent", "first"] = "recent",
    ) -> None:
        if not 1 <= min_ngram_size <= max_ngram_size:
            raise ValueError(f"min_ngram_size={min_ngram_size} must lie between 1 and max_ngram_size={max_ngram_size}")
        if max_num_reqs < 1 or not 1 <= max_model_len < 2**31:
            raise ValueError(
                f"max_num_reqs={max_num_reqs} and max_model_len={max_model_len} must be at least "
                "1, max_model_len below 2**31"
            )
        # numba, imported before a vLLM CPU worker has started, breaks that worker.
        from vllm_specplus.proposers import _ngram_index

        self._index = _ngram_index
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self._sizes = (min_ngram_size, max_ngram_size)
        self._takes_first = match_order == "first"
        self._match_len_cap = max(match_len_cap, max_ngram_size)
        self._state = np.zeros((max_num_reqs, _ngram_index.NUM_COLUMNS), np.int64)
        self._fingerprints = np.zeros((max_num_reqs, _ngram_index.FINGERPRINT_SIZE), np.int32)
        # The compiled code goes by the addresses in the state; this keeps the tables alive.
        self._tables: list[np.ndarray | None] = [None] * max_num_reqs
        self._state_rows = StateRows(max_num_reqs)

    @property
    def match_len_cap(self) -> int:
        """The largest match length reported."""
        return self._match_len_cap

    @property
    def num_table_bytes(self) -> int:
        """Memory set aside for the tables of all requests."""
        return sum(table.nbytes for table in self._tables if table is not None)

    def match(self, history: History, model_drafts: np.ndarray | None, max_drafts: np.ndarray) -> Match:
        """See `Matcher.match`.

        Raises:
            ValueError: `history.token_ids` is not a C-contiguous int32 array, or a history is
                longer than its rows or than `max_model_len`.
            RuntimeError: more than `max_num_reqs` requests have state.
        """
        num_reqs = len(history.req_ids)
        num_tokens = np.ascontiguousarray(history.num_tokens, np.int64)
        num_prompt_tokens = np.ascontiguousarray(history.num_prompt_tokens, np.int64)
        self._check(history.token_ids, num_reqs)
        state_rows, _ = self._state_rows.assign(history.req_ids)
        if model_drafts is None:
            model_drafts = np.empty((num_reqs, 0), np.int32)
        limits = np.ascontiguousarray(max_drafts, np.int64)
        result = Match(
            np.empty((num_reqs, max(limits.tolist(), default=0)), np.int32),
            np.empty(num_reqs, np.int32),
            np.empty(num_reqs, np.int32),
        )
        arguments = (
            history.token_ids,
            num_tokens,
            num_prompt_tokens,
            np.ascontiguousarray(model_drafts, np.int32),
            limits,
            state_rows,
            self._state,
            self._fingerprints,
            self._sizes,
            _HASH_FACTOR,
            self._takes_first,
            self._match_len_cap,
            result.token_ids,
            result.num_tokens,
            result.match_len,
        )
        if not self._index.update_and_match(*arguments):
            self._make_room(num_tokens, state_rows, history.token_ids.shape)
            self._index.update_and_match(*arguments)
        return result

    def retain(self, req_ids: Collection[str]) -> None:
        """See `Matcher.retain`. The memory of dropped requests is free again."""
        for row in self._state_rows.retain(req_ids):
            self._state[row] = 0
            self._tables[row] = None

    @staticmethod
    def _check(token_ids: np.ndarray, num_reqs: int) -> None:
        if token_ids.dtype != np.int32 or not token_ids.flags.c_contiguous:
            raise ValueError(
                f"token_ids must be C-contiguous int32, got {token_ids.dtype} with strides {token_ids.strides}"
            )
        if num_reqs > len(token_ids):
            raise ValueError(f"{num_reqs} histories do not fit token_ids of shape {token_ids.shape}")

    def _make_room(self, num_tokens: np.ndarray, state_rows: np.ndarray, shape: tuple[int, ...]) -> None:
        """Make larger tables for the requests whose tables are too small; `shape` is that of all histories."""
        most = int(num_tokens.max())
        if most > min(self.max_model_len, shape[1]):
            raise ValueError(
                f"a history of {most} tokens does not fit token_ids of shape {shape} and "
                f"max_model_len={self.max_model_len}"
            )
        # Even an empty history needs tables: the model's drafts are looked up in them.
        room = self._state[state_rows, self._index.CAPACITY]
        for i in np.flatnonzero(np.maximum(num_tokens, 1) > room).tolist():
            self._make_tables(int(state_rows[i]), int(num_tokens[i]))

    def _make_tables(self, row: int, num_tokens: int) -> None:
        """Give a row of the state empty tables, with room for half as many tokens again."""
        index = self._index
        capacity = min(self.max_model_len, max(_MIN_CAPACITY, num_tokens + num_tokens // 2))
        table_size = capacity * _ENTRIES_PER_TOKEN
        num_sizes = self._sizes[1] - self._sizes[0] + 1
        table = _zeros(num_sizes * table_size)
        self._tables[row] = table
        self._state[row, index.TABLE] = table.ctypes.data
        self._state[row, index.TABLE_SIZE] = table_size
        self._state[row, index.CAPACITY] = capacity
        self._state[row, index.POSITION_MASK] = (1 << capacity.bit_length()) - 1
        self._state[row, index.NUM_INDEXED] = 0


def _zeros(num_entries: int) -> np.ndarray:
    """[num_entries] uint32 zeros; on huge pages if large, since each random access to small pages costs a page walk."""
    num_bytes = num_entries * np.dtype(np.uint32).itemsize
    if num_bytes < _HUGE_PAGE_SIZE:
        return np.zeros(num_entries, np.uint32)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux only
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint32)
