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

from typing import Any

import numba as nb
import numpy as np

from vllm_specplus.proposers._numba import compiled, prefetch, to_pointer

# Columns of the state, [num_slots, NUM_COLUMNS] int64: one cache line for each request.
TABLE, TABLE_SIZE, CAPACITY, POSITION_MASK, NUM_INDEXED, NUM_PROMPT, NUM_FINGERPRINT = range(7)
NUM_COLUMNS = 8
FINGERPRINT_SIZE = 8  # last tokens seen, by which a reused request id is told from the same one

_BLOCK = 16  # requests whose misses overlap
_PREFETCH_ENDS = 8  # a step rarely brings more tokens; a prompt's many are prefetched as they are inserted
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)

# Shapes: history [num_tokens] int32 and drafts [S] int32 are one sequence, the second after the
# first; entries [num_sizes * table_size] uint32 are the tables, shortest window first; hashes
# [num_sizes] or [_PREFETCH_ENDS, num_sizes] uint64 is scratch. Plain arguments, as numba would count
# references at each access to a tuple of arrays, which makes a step three times as slow.


@compiled()
def _tables(state: np.ndarray, slot: int, num_sizes: int) -> tuple[np.ndarray, int, int]:
    """The entries of a slot's tables, entries per table, the mask of an entry's position."""
    table_size, mask = state[slot, TABLE_SIZE], state[slot, POSITION_MASK]
    return nb.carray(to_pointer(state[slot, TABLE]), num_sizes * table_size, np.uint32), table_size, mask


@compiled()
def _token(history: np.ndarray, drafts: np.ndarray, position: int) -> int:
    if position < len(history):
        return history[position]
    return drafts[position - len(history)]


@compiled()
def _hash_windows(history: np.ndarray, drafts: np.ndarray, end: int, sizes: tuple[int, int], hashes: np.ndarray) -> int:
    """Hash the windows that end at `end` into `hashes`; return how many there are.

    The hash of a window goes on from the hash of the next shorter one.
    """
    min_size, max_size = sizes
    running = np.uint64(0)
    longest = min(max_size, end)
    for size in range(1, longest + 1):
        token = np.uint64(np.uint32(_token(history, drafts, end - size)))
        running = (running + token + np.uint64(1)) * _FACTOR
        running ^= running >> _HALF
        if size >= min_size:
            hashes[size - min_size] = running * _MIX
    return max(0, longest - min_size + 1)


@compiled()
def _tag(window_hash: int, mask: int) -> Any:
    """What an entry of the window holds besides the position."""
    return np.int64(np.uint32(window_hash)) & ~mask


@compiled()
def _home(window_hash: int, level: int, table_size: int) -> Any:
    """Where the probing for a window starts: multiply-shift, no division."""
    return level * table_size + np.int64(((window_hash >> _HALF) * np.uint64(table_size)) >> _HALF)


@compiled()
def _common_suffix(history: np.ndarray, drafts: np.ndarray, end: int, earlier_end: int, limit: int) -> int:
    """Tokens that agree, backwards from two ends, up to `limit`."""
    length = 0
    limit = min(limit, earlier_end)
    while length < limit:
        if _token(history, drafts, earlier_end - 1 - length) != _token(history, drafts, end - 1 - length):
            break
        length += 1
    return length


@compiled()
def _probe(
    history: np.ndarray,
    drafts: np.ndarray,
    end: int,
    size: int,
    level: int,
    window_hash: int,
    entries: np.ndarray,
    table_size: int,
    mask: int,
) -> int:
    """The entry of the window, or the empty entry where it belongs: an index into `entries`."""
    tag = _tag(window_hash, mask)
    index = _home(window_hash, level, table_size)
    while True:
        entry = np.int64(entries[index])
        if entry == 0:
            return index
        if entry & ~mask == tag and _common_suffix(history, drafts, end, entry & mask, size) == size:
            return index
        index += 1
        if index == (level + 1) * table_size:
            index = level * table_size


@compiled()
def _begin(
    history: np.ndarray,
    num_prompt_tokens: int,
    entries: np.ndarray,
    state: np.ndarray,
    fingerprints: np.ndarray,
    slot: int,
) -> int:
    """Forget what is indexed if the request is not what it was; return the first end to insert."""
    num_indexed = state[slot, NUM_INDEXED]
    if num_indexed == 0:
        return 0
    num_seen = num_indexed + 1  # the last token seen ended no window with a token after it
    same = num_seen <= len(history) and state[slot, NUM_PROMPT] == num_prompt_tokens
    if same:
        count = state[slot, NUM_FINGERPRINT]
        for k in range(count):
            if history[num_seen - count + k] != fingerprints[slot, k]:
                same = False
    if same:
        return num_seen
    entries[:] = 0
    state[slot, NUM_INDEXED] = 0
    return 0


@compiled()
def _prefetch_entries(
    history: np.ndarray,
    drafts: np.ndarray,
    first: int,
    sizes: tuple[int, int],
    entries: np.ndarray,
    table_size: int,
    mask: int,
    hashes: np.ndarray,
    homes: np.ndarray,
) -> int:
    """Prefetch the entries that a request will probe; return how many, and which in `homes`."""
    num_tokens = len(history)
    first = max(first, num_tokens - _PREFETCH_ENDS)
    count = 0
    for k in range(num_tokens - first + 1):
        end = first + k if first + k < num_tokens else num_tokens + len(drafts)
        for level in range(_hash_windows(history, drafts, end, sizes, hashes)):
            home = _home(hashes[level], level, table_size)
            prefetch(entries, home)
            homes[count, 0] = home
            homes[count, 1] = _tag(hashes[level], mask)
            count += 1
    return count


@compiled()
def _prefetch_tokens(history: np.ndarray, entries: np.ndarray, mask: int, homes: np.ndarray, count: int) -> None:
    """Prefetch the earlier windows that a request will compare with."""
    for k in range(count):
        entry = np.int64(entries[homes[k, 0]])
        if entry != 0 and entry & ~mask == homes[k, 1]:
            prefetch(history, (entry & mask) - 1)


@compiled()
def _insert(
    history: np.ndarray,
    drafts: np.ndarray,
    first: int,
    sizes: tuple[int, int],
    entries: np.ndarray,
    table_size: int,
    mask: int,
    hashes: np.ndarray,
) -> None:
    """Insert every window that ends in [first, num_tokens), that is, has a token after it."""
    min_size, max_size = sizes
    num_tokens = len(history)
    first = max(first, min_size)
    # The entries of a step's few tokens are prefetched by now; those of a whole prompt are not.
    is_bulk = num_tokens - first > _PREFETCH_ENDS
    for chunk in range(first, num_tokens, _PREFETCH_ENDS):
        ends = range(chunk, min(chunk + _PREFETCH_ENDS, num_tokens))
        for end in ends:
            num_levels = _hash_windows(history, drafts, end, sizes, hashes[end - chunk])
            if is_bulk:
                for level in range(num_levels):
                    prefetch(entries, _home(hashes[end - chunk, level], level, table_size))
        for end in ends:
            for level in range(min(max_size, end) - min_size + 1):
                window_hash = hashes[end - chunk, level]
                size = min_size + level
                index = _probe(history, drafts, end, size, level, window_hash, entries, table_size, mask)
                entries[index] = _tag(window_hash, mask) | end


@compiled()
def _find(
    history: np.ndarray,
    drafts: np.ndarray,
    sizes: tuple[int, int],
    entries: np.ndarray,
    table_size: int,
    mask: int,
    hashes: np.ndarray,
) -> Any:
    """The most recent earlier end of the longest window that ends the sequence, or 0."""
    end = len(history) + len(drafts)
    for level in range(_hash_windows(history, drafts, end, sizes, hashes) - 1, -1, -1):
        size = sizes[0] + level
        # Windows that end among the drafts are not in the table: drafts may yet be rejected.
        for earlier_end in range(end - 1, max(len(history), size) - 1, -1):
            if _common_suffix(history, drafts, end, earlier_end, size) == size:
                return earlier_end
        index = _probe(history, drafts, end, size, level, hashes[level], entries, table_size, mask)
        if entries[index] != 0:
            return np.int64(entries[index]) & mask
    return 0


@compiled()
def _draft(history: np.ndarray, drafts: np.ndarray, found: int, count: int, out: np.ndarray) -> None:
    """Copy `count` tokens from `found` on; past the end, go on with the tokens just copied."""
    end = len(history) + len(drafts)
    for k in range(count):
        out[k] = _token(history, drafts, found + k) if found + k < end else out[found + k - end]


@compiled()
def _remember(
    history: np.ndarray, num_prompt_tokens: int, state: np.ndarray, fingerprints: np.ndarray, slot: int
) -> None:
    """Note how far a request is indexed and what its last tokens are."""
    count = min(len(history), FINGERPRINT_SIZE)
    state[slot, NUM_INDEXED] = max(0, len(history) - 1)
    state[slot, NUM_PROMPT] = num_prompt_tokens
    state[slot, NUM_FINGERPRINT] = count
    for k in range(count):
        fingerprints[slot, k] = history[len(history) - count + k]


_INT32_1D, _INT32_2D = nb.int32[::1], nb.int32[:, ::1]
_INT64_1D, _INT64_2D = nb.int64[::1], nb.int64[:, ::1]
_SIZES = nb.types.UniTuple(nb.int64, 2)


@compiled(
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
            prefetch(state, slots[i] * NUM_COLUMNS)
            prefetch(fingerprints, slots[i] * FINGERPRINT_SIZE)
            prefetch(token_ids, i * token_ids.shape[1] + num_tokens[i] - 1)
        for i in rows:
            b, slot, history = i - block, slots[i], token_ids[i, : num_tokens[i]]
            entries, table_size, mask = _tables(state, slot, num_sizes)
            first[b] = _begin(history, num_prompt_tokens[i], entries, state, fingerprints, slot)
            counts[b] = _prefetch_entries(
                history, drafts[i], first[b], sizes, entries, table_size, mask, hashes[0], homes[b]
            )
        for i in rows:
            entries, _, mask = _tables(state, slots[i], num_sizes)
            _prefetch_tokens(token_ids[i], entries, mask, homes[i - block], counts[i - block])
        for i in rows:
            slot, history = slots[i], token_ids[i, : num_tokens[i]]
            entries, table_size, mask = _tables(state, slot, num_sizes)
            _insert(history, drafts[i], first[i - block], sizes, entries, table_size, mask, hashes)
            _remember(history, num_prompt_tokens[i], state, fingerprints, slot)
            if max_drafts[i] <= 0:
                continue
            found = _find(history, drafts[i], sizes, entries, table_size, mask, hashes[0])
            if found > 0:
                _draft(history, drafts[i], found, max_drafts[i], out_token_ids[i])
                out_num_tokens[i] = max_drafts[i]
                end = len(history) + drafts.shape[1]
                out_match_len[i] = _common_suffix(history, drafts[i], end, found, match_len_cap)
