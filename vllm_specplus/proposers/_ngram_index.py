"""The n-gram index: the compiled half of `proposers.ngram`.

Importing this module imports numba, which must not happen before a vLLM worker has started;
`NgramMatcher` imports it when it is constructed.

Each request has one table per window size, which maps a window of `size` tokens to the greatest
position where it ended with a token after it. A table is an open-addressing hash table of uint32
entries, probed linearly:

    entry = tag | position      0 = empty; `position_mask` parts the two, by the table's size

Equal tags are followed by a comparison of the tokens themselves, so a lookup is exact. The windows
are not stored: they are read back from the request's own row.

A step touches a fixed number of random cache lines for each new token, whatever the context, but
each is a cache and TLB miss once the tables outgrow the caches. Requests are therefore worked on in
blocks: the lines that a block will touch are prefetched first, so that the misses overlap.
"""

from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

# Columns of the state, [num_slots, NUM_COLUMNS] int64: one cache line for each request.
TABLE, TABLE_SIZE, CAPACITY, NUM_INDEXED, NUM_PROMPT, NUM_FINGERPRINT = 0, 1, 2, 3, 4, 5
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
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", [cgutils.voidptr_t], function_type
        )
        read, keep, data_cache = (ir.Constant(int32, value) for value in (0, 3, 1))
        builder.call(prefetch, [pointer, read, keep, data_cache])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@_compiled()
def _table(state, slot, num_sizes):
    """The tables of a slot, one after the other: [num_sizes * TABLE_SIZE] uint32."""
    return nb.carray(
        _to_pointer(state[slot, TABLE]), num_sizes * state[slot, TABLE_SIZE], np.uint32
    )


@_compiled()
def _position_mask(state, slot):
    """The low bits of an entry that hold a position; all positions are below CAPACITY."""
    mask = np.uint32(state[slot, CAPACITY])
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> np.uint32(shift)
    return mask


@_compiled()
def _token(token_ids, i, num_tokens, drafts, position):
    """Token of the sequence history + drafts of request i."""
    if position < num_tokens:
        return token_ids[i, position]
    return drafts[i, position - num_tokens]


@_compiled()
def _hash_windows(token_ids, i, num_tokens, drafts, end, min_size, max_size, hashes):
    """Hash the windows that end at `end` into hashes[size - min_size]; return how many there are.

    The hash of a window goes on from the hash of the next shorter one.
    """
    running = np.uint64(0)
    longest = min(max_size, end)
    for size in range(1, longest + 1):
        token = np.uint64(np.uint32(_token(token_ids, i, num_tokens, drafts, end - size)))
        running = (running + token + np.uint64(1)) * _FACTOR
        running ^= running >> _HALF
        if size >= min_size:
            hashes[size - min_size] = running * _MIX
    return max(0, longest - min_size + 1)


@_compiled()
def _home(window_hash, level, table_size):
    """Where in a slot's tables the probing for a window starts: multiply-shift, no division."""
    scaled = ((window_hash >> _HALF) * np.uint64(table_size)) >> _HALF
    return level * table_size + np.int64(scaled)


@_compiled()
def _common_suffix(token_ids, i, num_tokens, drafts, end, earlier_end, limit):
    """Tokens that agree, backwards from two ends, up to `limit`."""
    length = 0
    limit = min(limit, earlier_end)
    while length < limit and _token(
        token_ids, i, num_tokens, drafts, earlier_end - 1 - length
    ) == _token(token_ids, i, num_tokens, drafts, end - 1 - length):
        length += 1
    return length


@_compiled()
def _probe(
    token_ids, i, num_tokens, drafts, end, size, level, window_hash, table, table_size, mask
):
    """The entry of the window, or the empty entry where it belongs: an index into `table`."""
    tag = np.uint32(window_hash) & ~mask
    index = _home(window_hash, level, table_size)
    last = (level + 1) * table_size
    while table[index] != 0:
        if table[index] & ~mask == tag:
            earlier_end = np.int64(table[index] & mask)
            common = _common_suffix(token_ids, i, num_tokens, drafts, end, earlier_end, size)
            if common == size:
                return index
        index += 1
        if index == last:
            index = level * table_size
    return index


@_compiled()
def _begin(token_ids, i, num_tokens, num_prompt_tokens, state, fingerprints, slot, num_sizes):
    """Forget what is indexed if request i is not what it was; return the first end to insert."""
    num_indexed = state[slot, NUM_INDEXED]
    if num_indexed == 0:
        return 0
    num_seen = num_indexed + 1  # the last token seen ended no window with a token after it
    count = state[slot, NUM_FINGERPRINT]
    same = num_seen <= num_tokens and state[slot, NUM_PROMPT] == num_prompt_tokens
    if same:
        for k in range(count):
            if token_ids[i, num_seen - count + k] != fingerprints[slot, k]:
                same = False
                break
    if not same:
        _table(state, slot, num_sizes)[:] = 0
        state[slot, NUM_INDEXED] = 0
        return 0
    return num_indexed


@_compiled()
def _insert(token_ids, i, num_tokens, drafts, first, sizes, state, slot, hashes):
    """Insert every window that ends in [first, num_tokens), that is, has a token after it."""
    min_size, max_size = sizes
    table = _table(state, slot, max_size - min_size + 1)
    table_size = state[slot, TABLE_SIZE]
    mask = _position_mask(state, slot)
    for end in range(first, num_tokens):
        num_levels = _hash_windows(
            token_ids, i, num_tokens, drafts, end, min_size, max_size, hashes
        )
        for level in range(num_levels):
            index = _probe(
                token_ids, i, num_tokens, drafts, end, min_size + level, level,
                hashes[level], table, table_size, mask,
            )  # fmt: skip
            table[index] = (np.uint32(hashes[level]) & ~mask) | np.uint32(end)


@_compiled()
def _find(token_ids, i, num_tokens, drafts, sizes, state, slot, hashes):
    """The most recent earlier end of the longest window that ends the sequence, or 0."""
    min_size, max_size = sizes
    table = _table(state, slot, max_size - min_size + 1)
    table_size = state[slot, TABLE_SIZE]
    mask = _position_mask(state, slot)
    end = num_tokens + drafts.shape[1]
    num_levels = _hash_windows(token_ids, i, num_tokens, drafts, end, min_size, max_size, hashes)
    for level in range(num_levels - 1, -1, -1):
        size = min_size + level
        # Windows that end among the drafts are not in the table: drafts may yet be rejected.
        for earlier_end in range(end - 1, max(num_tokens, size) - 1, -1):
            common = _common_suffix(token_ids, i, num_tokens, drafts, end, earlier_end, size)
            if common == size:
                return earlier_end
        index = _probe(
            token_ids, i, num_tokens, drafts, end, size, level,
            hashes[level], table, table_size, mask,
        )  # fmt: skip
        if table[index] != 0:
            return np.int64(table[index] & mask)
    return 0


@_compiled()
def _prefetch_tables(token_ids, i, num_tokens, drafts, first, sizes, state, slot, hashes, homes):
    """Prefetch the entries that request i will probe; remember where they are."""
    min_size, max_size = sizes
    table = _table(state, slot, max_size - min_size + 1)
    table_size = state[slot, TABLE_SIZE]
    first = max(first, num_tokens - _PREFETCH_ENDS)
    count = 0
    for k in range(num_tokens - first + 1):
        end = first + k if first + k < num_tokens else num_tokens + drafts.shape[1]
        num_levels = _hash_windows(
            token_ids, i, num_tokens, drafts, end, min_size, max_size, hashes
        )
        for level in range(num_levels):
            home = _home(hashes[level], level, table_size)
            _prefetch(table, home)
            homes[count, 0] = home
            homes[count, 1] = np.int64(np.uint32(hashes[level]))
            count += 1
    return count


@_compiled()
def _prefetch_tokens(token_ids, i, num_sizes, state, slot, homes, count):
    """Prefetch the earlier windows that request i will compare with."""
    table = _table(state, slot, num_sizes)
    mask = _position_mask(state, slot)
    row = i * token_ids.shape[1]
    for k in range(count):
        entry = table[homes[k, 0]]
        if entry != 0 and (entry ^ np.uint32(homes[k, 1])) & ~mask == 0:
            _prefetch(token_ids, row + np.int64(entry & mask) - 1)


@_compiled()
def _draft(token_ids, i, num_tokens, drafts, found, count, out):
    """Copy `count` tokens from `found` on; past the end, go on with the tokens just copied."""
    end = num_tokens + drafts.shape[1]
    for k in range(count):
        if found + k < end:
            out[i, k] = _token(token_ids, i, num_tokens, drafts, found + k)
        else:
            out[i, k] = out[i, found + k - end]


@_compiled()
def _remember(token_ids, i, num_tokens, num_prompt_tokens, state, fingerprints, slot):
    """Note how far request i is indexed and what its last tokens are."""
    count = min(num_tokens, FINGERPRINT_SIZE)
    state[slot, NUM_INDEXED] = max(0, num_tokens - 1)
    state[slot, NUM_PROMPT] = num_prompt_tokens
    state[slot, NUM_FINGERPRINT] = count
    for k in range(count):
        fingerprints[slot, k] = token_ids[i, num_tokens - count + k]


_INT32_1D, _INT32_2D, _INT64_1D, _INT64_2D = (
    nb.int32[::1], nb.int32[:, ::1], nb.int64[::1], nb.int64[:, ::1],
)  # fmt: skip


@_compiled(
    nb.void(
        _INT32_2D, _INT64_1D, _INT64_1D, _INT32_2D, _INT64_1D, _INT64_1D, _INT64_2D, _INT32_2D,
        nb.types.UniTuple(nb.int64, 2), nb.int64, _INT32_2D, _INT32_1D, _INT32_1D,
    )
)  # fmt: skip
def update_and_match(
    token_ids, num_tokens, num_prompt_tokens, drafts, max_drafts, slots, state, fingerprints,
    sizes, match_len_cap, out_token_ids, out_num_tokens, out_match_len,
):  # fmt: skip
    """Index what is new in B requests, then look up the tail of each.

    Args:
        token_ids: [>=B, max_model_len] int32.
        num_tokens, num_prompt_tokens, max_drafts, slots: [B] int64.
        drafts: [B, S] int32, S may be 0.
        state: [num_slots, NUM_COLUMNS] int64, changed in place.
        fingerprints: [num_slots, FINGERPRINT_SIZE] int32, changed in place.
        sizes: shortest and longest window.
        match_len_cap: where counting the match length stops.
        out_token_ids: [B, K] int32 full of -1; out_num_tokens, out_match_len: [B] int32 zeros.
    """
    num_sizes = sizes[1] - sizes[0] + 1
    hashes = np.empty(num_sizes, np.uint64)
    homes = np.empty((_BLOCK, (_PREFETCH_ENDS + 1) * num_sizes, 2), np.int64)
    counts = np.empty(_BLOCK, np.int64)
    first = np.empty(_BLOCK, np.int64)
    for block in range(0, len(slots), _BLOCK):
        block_size = min(_BLOCK, len(slots) - block)
        for b in range(block_size):
            i = block + b
            first[b] = _begin(
                token_ids, i, num_tokens[i], num_prompt_tokens[i], state, fingerprints, slots[i],
                num_sizes,
            )  # fmt: skip
            counts[b] = _prefetch_tables(
                token_ids, i, num_tokens[i], drafts, first[b], sizes, state, slots[i], hashes,
                homes[b],
            )  # fmt: skip
        for b in range(block_size):
            i = block + b
            _prefetch_tokens(token_ids, i, num_sizes, state, slots[i], homes[b], counts[b])
        for b in range(block_size):
            i = block + b
            n, slot = num_tokens[i], slots[i]
            _insert(token_ids, i, n, drafts, max(first[b], sizes[0]), sizes, state, slot, hashes)
            _remember(token_ids, i, n, num_prompt_tokens[i], state, fingerprints, slot)
            if max_drafts[i] <= 0:
                continue
            found = _find(token_ids, i, n, drafts, sizes, state, slot, hashes)
            if found > 0:
                end = n + drafts.shape[1]
                _draft(token_ids, i, n, drafts, found, max_drafts[i], out_token_ids)
                out_num_tokens[i] = max_drafts[i]
                out_match_len[i] = _common_suffix(
                    token_ids, i, n, drafts, end, found, match_len_cap
                )
