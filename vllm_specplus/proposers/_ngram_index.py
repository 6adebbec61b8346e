"""The n-gram index: the compiled half of `proposers.ngram`.

Importing this module imports numba, which must not happen before a vLLM worker has started;
`NgramMatcher` imports it when it is constructed.

Each request has one table per window size, which maps a window of `size` tokens to the greatest
position where it ended with a token after it. A table is an open-addressing hash table of uint32
entries, probed linearly:

    entry = tag | position      0 = empty; a mask parts the two, by the table's capacity

Equal tags are followed by a comparison of the tokens themselves, so a lookup is exact. The windows
are not stored: they are read back from the request's own row.

A step touches a fixed number of random cache lines for each new token, whatever the context, but
each is a cache and TLB miss once the tables outgrow the caches. Requests are therefore worked on in
blocks: the lines that a block will touch are prefetched first, so that the misses overlap.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numba as nb
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

# Columns of the state, [num_slots, NUM_COLUMNS] int64: one cache line for each request.
TABLE, TABLE_SIZE, CAPACITY, POSITION_MASK, NUM_INDEXED, NUM_PROMPT, NUM_FINGERPRINT = range(7)
NUM_COLUMNS = 8
FINGERPRINT_SIZE = 8  # last tokens seen, by which a reused request id is told from the same one

_BLOCK = 16  # requests whose misses overlap
_PREFETCH_ENDS = 8  # a step rarely brings more tokens; a prompt's many need no prefetch
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def _compiled(*signature: Any) -> Callable[[Callable], Any]:
    """`numba.njit`, cached on disk where a folder for that can be written."""

    def compile_function(function: Callable) -> Any:
        try:
            return nb.njit(*signature, cache=True, nogil=True)(function)
        except RuntimeError:  # "no locator available": neither __pycache__ nor ~ is writable
            return nb.njit(*signature, nogil=True)(function)

    return compile_function


@intrinsic
def _to_pointer(typingctx: Any, address: Any) -> Any:
    """int64 address -> void pointer, for `numba.carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def _prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array.flat[index]` without waiting for it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
        int32 = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, int32, int32, int32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], function_type)
        read, keep, data_cache = (ir.Constant(int32, value) for value in (0, 3, 1))
        builder.call(prefetch, [pointer, read, keep, data_cache])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


class _Text(NamedTuple):
    """The sequence of request `row`: its history and the model's drafts after it."""

    token_ids: np.ndarray  # [>=B, max_model_len] int32
    drafts: np.ndarray  # [B, S] int32
    row: int
    num_tokens: int  # of the history


class _Tables(NamedTuple):
    """The hash tables of a request, one after the other, shortest window first."""

    entries: np.ndarray  # [num_sizes * size] uint32
    size: int  # entries of each
    mask: int  # the bits of an entry that hold a position


@_compiled()
def _tables(state: np.ndarray, slot: int, num_sizes: int) -> _Tables:
    size = state[slot, TABLE_SIZE]
    entries = nb.carray(_to_pointer(state[slot, TABLE]), num_sizes * size, np.uint32)
    return _Tables(entries, size, state[slot, POSITION_MASK])


@_compiled()
def _tag(window_hash: int, tables: _Tables) -> Any:
    """What an entry of the window holds besides the position."""
    return np.int64(np.uint32(window_hash)) & ~tables.mask


@_compiled()
def _token(text: _Text, position: int) -> int:
    if position < text.num_tokens:
        return text.token_ids[text.row, position]
    return text.drafts[text.row, position - text.num_tokens]


@_compiled()
def _hash_windows(text: _Text, end: int, min_size: int, max_size: int, hashes: np.ndarray) -> int:
    """Hash the windows that end at `end` into hashes[size - min_size]; return how many there are.

    The hash of a window goes on from the hash of the next shorter one.
    """
    running = np.uint64(0)
    longest = min(max_size, end)
    for size in range(1, longest + 1):
        token = np.uint64(np.uint32(_token(text, end - size)))
        running = (running + token + np.uint64(1)) * _FACTOR
        running ^= running >> _HALF
        if size >= min_size:
            hashes[size - min_size] = running * _MIX
    return max(0, longest - min_size + 1)


@_compiled()
def _home(tables: _Tables, level: int, window_hash: int) -> Any:
    """Where the probing for a window starts: multiply-shift, no division."""
    return level * tables.size + np.int64(((window_hash >> _HALF) * np.uint64(tables.size)) >> _HALF)


@_compiled()
def _common_suffix(text: _Text, end: int, earlier_end: int, limit: int) -> int:
    """Tokens that agree, backwards from two ends, up to `limit`."""
    length = 0
    limit = min(limit, earlier_end)
    while length < limit and _token(text, earlier_end - 1 - length) == _token(text, end - 1 - length):
        length += 1
    return length


@_compiled()
def _probe(text: _Text, tables: _Tables, end: int, level: int, size: int, window_hash: int) -> int:
    """The entry of the window, or the empty entry where it belongs: an index into the entries."""
    tag = _tag(window_hash, tables)
    index = _home(tables, level, window_hash)
    past_last = (level + 1) * tables.size
    while True:
        entry = np.int64(tables.entries[index])
        if entry == 0:
            return index
        if entry & ~tables.mask == tag and _common_suffix(text, end, entry & tables.mask, size) == size:
            return index
        index += 1
        if index == past_last:
            index = level * tables.size


@_compiled()
def _begin(
    text: _Text, num_prompt_tokens: int, tables: _Tables, state: np.ndarray, fingerprints: np.ndarray, slot: int
) -> int:
    """Forget what is indexed if the request is not what it was; return the first end to insert."""
    num_indexed = state[slot, NUM_INDEXED]
    if num_indexed == 0:
        return 0
    num_seen = num_indexed + 1  # the last token seen ended no window with a token after it
    same = num_seen <= text.num_tokens and state[slot, NUM_PROMPT] == num_prompt_tokens
    if same:
        count = state[slot, NUM_FINGERPRINT]
        for k in range(count):
            if _token(text, num_seen - count + k) != fingerprints[slot, k]:
                same = False
    if same:
        return num_seen
    tables.entries[:] = 0
    state[slot, NUM_INDEXED] = 0
    return 0


@_compiled()
def _prefetch_tables(
    text: _Text, tables: _Tables, first: int, sizes: tuple[int, int], hashes: np.ndarray, homes: np.ndarray
) -> int:
    """Prefetch the entries that a request will probe; return how many, and which in `homes`."""
    first = max(first, text.num_tokens - _PREFETCH_ENDS)
    count = 0
    for k in range(text.num_tokens - first + 1):
        end = first + k if first + k < text.num_tokens else text.num_tokens + text.drafts.shape[1]
        for level in range(_hash_windows(text, end, sizes[0], sizes[1], hashes)):
            home = _home(tables, level, hashes[level])
            _prefetch(tables.entries, home)
            homes[count, 0] = home
            homes[count, 1] = _tag(hashes[level], tables)
            count += 1
    return count


@_compiled()
def _prefetch_tokens(text: _Text, tables: _Tables, homes: np.ndarray, count: int) -> None:
    """Prefetch the earlier windows that a request will compare with."""
    row_start = text.row * text.token_ids.shape[1]
    for k in range(count):
        entry = np.int64(tables.entries[homes[k, 0]])
        if entry != 0 and entry & ~tables.mask == homes[k, 1]:
            _prefetch(text.token_ids, row_start + (entry & tables.mask) - 1)


@_compiled()
def _insert(text: _Text, tables: _Tables, first: int, sizes: tuple[int, int], hashes: np.ndarray) -> None:
    """Insert every window that ends in [first, num_tokens), that is, has a token after it."""
    min_size, max_size = sizes
    first = max(first, min_size)
    # The entries of a step's few tokens are prefetched by now; those of a whole prompt are not.
    is_bulk = text.num_tokens - first > _PREFETCH_ENDS
    for chunk in range(first, text.num_tokens, _PREFETCH_ENDS):
        chunk_end = min(chunk + _PREFETCH_ENDS, text.num_tokens)
        for end in range(chunk, chunk_end):
            window_hashes = hashes[end - chunk]
            num_levels = _hash_windows(text, end, min_size, max_size, window_hashes)
            if is_bulk:
                for level in range(num_levels):
                    _prefetch(tables.entries, _home(tables, level, window_hashes[level]))
        for end in range(chunk, chunk_end):
            for level in range(min(max_size, end) - min_size + 1):
                window_hash = hashes[end - chunk, level]
                index = _probe(text, tables, end, level, min_size + level, window_hash)
                tables.entries[index] = _tag(window_hash, tables) | end


@_compiled()
def _find(text: _Text, tables: _Tables, sizes: tuple[int, int], hashes: np.ndarray) -> Any:
    """The most recent earlier end of the longest window that ends the sequence, or 0."""
    min_size, max_size = sizes
    end = text.num_tokens + text.drafts.shape[1]
    for level in range(_hash_windows(text, end, min_size, max_size, hashes) - 1, -1, -1):
        size = min_size + level
        # Windows that end among the drafts are not in the table: drafts may yet be rejected.
        for earlier_end in range(end - 1, max(text.num_tokens, size) - 1, -1):
            if _common_suffix(text, end, earlier_end, size) == size:
                return earlier_end
        entry = np.int64(tables.entries[_probe(text, tables, end, level, size, hashes[level])])
        if entry != 0:
            return entry & tables.mask
    return 0


@_compiled()
def _draft(text: _Text, found: int, count: int, out_token_ids: np.ndarray) -> None:
    """Copy `count` tokens from `found` on; past the end, go on with the tokens just copied."""
    end = text.num_tokens + text.drafts.shape[1]
    for k in range(count):
        if found + k < end:
            out_token_ids[text.row, k] = _token(text, found + k)
        else:
            out_token_ids[text.row, k] = out_token_ids[text.row, found + k - end]


@_compiled()
def _remember(text: _Text, num_prompt_tokens: int, state: np.ndarray, fingerprints: np.ndarray, slot: int) -> None:
    """Note how far a request is indexed and what its last tokens are."""
    count = min(text.num_tokens, FINGERPRINT_SIZE)
    state[slot, NUM_INDEXED] = max(0, text.num_tokens - 1)
    state[slot, NUM_PROMPT] = num_prompt_tokens
    state[slot, NUM_FINGERPRINT] = count
    for k in range(count):
        fingerprints[slot, k] = text.token_ids[text.row, text.num_tokens - count + k]


_INT32_1D, _INT32_2D = nb.int32[::1], nb.int32[:, ::1]
_INT64_1D, _INT64_2D = nb.int64[::1], nb.int64[:, ::1]
_SIZES = nb.types.UniTuple(nb.int64, 2)


@_compiled(
    nb.void(
        *(_INT32_2D, _INT64_1D, _INT64_1D, _INT32_2D, _INT64_1D, _INT64_1D, _INT64_2D, _INT32_2D),
        *(_SIZES, nb.int64, _INT32_2D, _INT32_1D, _INT32_1D),
    )
)
def update_and_match(
    token_ids: np.ndarray,
    num_tokens: np.ndarray,
    num_prompt_tokens: np.ndarray,
    drafts: np.ndarray,
    max_drafts: np.ndarray,
    slots: np.ndarray,
    state: np.ndarray,
    fingerprints: np.ndarray,
    sizes: tuple[int, int],
    match_len_cap: int,
    out_token_ids: np.ndarray,
    out_num_tokens: np.ndarray,
    out_match_len: np.ndarray,
) -> None:
    """Index what is new in B requests, then look up the tail of each.

    Args:
        token_ids: [>=B, max_model_len] int32.
        num_tokens, num_prompt_tokens, max_drafts, slots: [B] int64.
        drafts: [B, S] int32, S may be 0.
        state: [num_slots, NUM_COLUMNS] int64, changed in place; every slot used has its tables.
        fingerprints: [num_slots, FINGERPRINT_SIZE] int32, changed in place.
        sizes: shortest and longest window.
        match_len_cap: where counting the match length stops.
        out_token_ids: [B, K] int32 full of -1; out_num_tokens, out_match_len: [B] int32 zeros.
    """
    num_sizes = sizes[1] - sizes[0] + 1
    hashes = np.empty((_PREFETCH_ENDS, num_sizes), np.uint64)
    homes = np.empty((_BLOCK, (_PREFETCH_ENDS + 1) * num_sizes, 2), np.int64)
    counts = np.empty(_BLOCK, np.int64)
    first = np.empty(_BLOCK, np.int64)
    for block in range(0, len(slots), _BLOCK):
        rows = range(block, min(block + _BLOCK, len(slots)))
        for i in rows:
            _prefetch(state, slots[i] * NUM_COLUMNS)
            _prefetch(fingerprints, slots[i] * FINGERPRINT_SIZE)
            _prefetch(token_ids, i * token_ids.shape[1] + num_tokens[i] - 1)
        for i in rows:
            b = i - block
            text = _Text(token_ids, drafts, i, num_tokens[i])
            tables = _tables(state, slots[i], num_sizes)
            first[b] = _begin(text, num_prompt_tokens[i], tables, state, fingerprints, slots[i])
            counts[b] = _prefetch_tables(text, tables, first[b], sizes, hashes[0], homes[b])
        for i in rows:
            text = _Text(token_ids, drafts, i, num_tokens[i])
            _prefetch_tokens(text, _tables(state, slots[i], num_sizes), homes[i - block], counts[i - block])
        for i in rows:
            text = _Text(token_ids, drafts, i, num_tokens[i])
            tables = _tables(state, slots[i], num_sizes)
            _insert(text, tables, first[i - block], sizes, hashes)
            _remember(text, num_prompt_tokens[i], state, fingerprints, slots[i])
            if max_drafts[i] <= 0:
                continue
            found = _find(text, tables, sizes, hashes[0])
            if found > 0:
                _draft(text, found, max_drafts[i], out_token_ids)
                out_num_tokens[i] = max_drafts[i]
                end = num_tokens[i] + drafts.shape[1]
                out_match_len[i] = _common_suffix(text, end, found, match_len_cap)
