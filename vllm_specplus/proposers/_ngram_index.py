"""The n-gram index: the compiled half of `proposers.ngram`.

Importing this module imports numba, which must not happen before a vLLM worker has started. `NgramMatcher` imports it
when it is constructed.

Each request has one table for each n-gram size. It maps an n-gram of `size` tokens to a position where the n-gram ended
with a token after it: the greatest one, or the smallest where the earliest occurrence wins (`takes_first`). A table is
an open-addressing hash table of uint32 entries, probed linearly:

    entry = tag | position      0 = empty; a mask parts the two, by the table's capacity

If tags are equal, the tokens themselves are compared, so a lookup is exact. The caller chooses the hash's factor. It
must be secret, or a client could write a prompt whose n-grams all collide. N-grams are not stored: they are read back
from the request's own row.

A step touches a fixed number of random cache lines for each new token, whatever the length of the history. Each is a
cache and TLB miss once the tables outgrow the caches. Requests are therefore worked on in blocks: the lines that a
block will touch are prefetched first, so that the misses overlap.
"""

from typing import Any

import numba as nb
import numpy as np

from vllm_specplus._numba import compiled, prefetch, to_pointer

# Columns of the state, [max_num_reqs, NUM_COLUMNS] int64: one cache line for each request.
TABLE, TABLE_SIZE, CAPACITY, POSITION_MASK, NUM_INDEXED, NUM_PROMPT, NUM_FINGERPRINT = range(7)
NUM_COLUMNS = 8
FINGERPRINT_SIZE = 8  # latest indexed tokens, which tell a request from another one that reuses its id

_BLOCK = 16  # requests whose cache misses overlap
_PREFETCH_ENDS = 8  # a step rarely brings more tokens; those of a prompt are prefetched as they are inserted
_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)

# Shapes: history [num_tokens] int32 and drafts [S] int32 are one sequence, the drafts after the history. entries
# [num_sizes * table_size] uint32 are the tables, the smallest n-gram size first. hashes [num_sizes] or
# [_PREFETCH_ENDS, num_sizes] uint64 is scratch. Arguments are plain arrays. numba counts references at each access to a
# tuple of arrays, which makes a step three times as slow.


@compiled()
def _tables(state: np.ndarray, state_row: int, num_sizes: int) -> tuple[np.ndarray, int, int]:
    """The entries of a request's tables, entries per table, the mask of an entry's position."""
    table_size, mask = state[state_row, TABLE_SIZE], state[state_row, POSITION_MASK]
    return nb.carray(to_pointer(state[state_row, TABLE]), num_sizes * table_size, np.uint32), table_size, mask


@compiled()
def _token(history: np.ndarray, drafts: np.ndarray, position: int) -> int:
    if position < len(history):
        return history[position]
    return drafts[position - len(history)]


@compiled()
def _hash_ngrams(
    history: np.ndarray, drafts: np.ndarray, end: int, sizes: tuple[int, int], factor: int, hashes: np.ndarray
) -> int:
    """Hash the n-grams that end at `end` into `hashes`; return how many there are.

    The hash of an n-gram goes on from the hash of the next shorter one.
    """
    min_size, max_size = sizes
    running = np.uint64(0)
    longest = min(max_size, end)
    for size in range(1, longest + 1):
        token = np.uint64(np.uint32(_token(history, drafts, end - size)))
        running = (running + token + np.uint64(1)) * factor
        running ^= running >> _HALF
        if size >= min_size:
            hashes[size - min_size] = running * _MIX
    return max(0, longest - min_size + 1)


@compiled()
def _tag(ngram_hash: int, mask: int) -> Any:
    """The tag of an n-gram's entry, which stands beside the position."""
    return np.int64(np.uint32(ngram_hash)) & ~mask


@compiled()
def _home(ngram_hash: int, level: int, table_size: int) -> Any:
    """Where the probing for an n-gram starts: multiply-shift, no division."""
    return level * table_size + np.int64(((ngram_hash >> _HALF) * np.uint64(table_size)) >> _HALF)


@compiled()
def _common_suffix(history: np.ndarray, drafts: np.ndarray, end: int, earlier_end: int, limit: int) -> int:
    """How many tokens agree, backwards from two ends, up to `limit`."""
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
    ngram_hash: int,
    entries: np.ndarray,
    table_size: int,
    mask: int,
) -> int:
    """The n-gram's entry, or the empty entry where it belongs: an index into `entries`."""
    tag = _tag(ngram_hash, mask)
    index = _home(ngram_hash, level, table_size)
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
    state_row: int,
) -> int:
    """Clear the index if it is of another request; return the first end to insert."""
    num_indexed = state[state_row, NUM_INDEXED]
    if num_indexed == 0:
        return 0
    num_known = num_indexed + 1  # the last one ended no n-gram with a token after it
    same = num_known <= len(history) and state[state_row, NUM_PROMPT] == num_prompt_tokens
    if same:
        count = state[state_row, NUM_FINGERPRINT]
        for k in range(count):
            if history[num_known - count + k] != fingerprints[state_row, k]:
                same = False
    if same:
        return num_known
    entries[:] = 0
    state[state_row, NUM_INDEXED] = 0
    return 0


@compiled()
def _prefetch_entries(
    history: np.ndarray,
    drafts: np.ndarray,
    first: int,
    sizes: tuple[int, int],
    factor: int,
    entries: np.ndarray,
    table_size: int,
    mask: int,
    hashes: np.ndarray,
    homes: np.ndarray,
) -> int:
    """Prefetch the entries that a request will probe, write them into `homes` and return their number."""
    num_tokens = len(history)
    first = max(first, num_tokens - _PREFETCH_ENDS)
    count = 0
    for k in range(num_tokens - first + 1):
        end = first + k if first + k < num_tokens else num_tokens + len(drafts)
        for level in range(_hash_ngrams(history, drafts, end, sizes, factor, hashes)):
            home = _home(hashes[level], level, table_size)
            prefetch(entries, home)
            homes[count, 0] = home
            homes[count, 1] = _tag(hashes[level], mask)
            count += 1
    return count


@compiled()
def _prefetch_tokens(history: np.ndarray, entries: np.ndarray, mask: int, homes: np.ndarray, count: int) -> None:
    """Prefetch the earlier n-grams that a request will compare with."""
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
    factor: int,
    entries: np.ndarray,
    table_size: int,
    mask: int,
    hashes: np.ndarray,
    takes_first: bool,
) -> None:
    """Insert every n-gram that ends in [first, num_tokens), so that a token comes after it."""
    min_size, max_size = sizes
    num_tokens = len(history)
    first = max(first, min_size)
    # The entries of a step's few tokens have been prefetched; those of a whole prompt have not.
    is_bulk = num_tokens - first > _PREFETCH_ENDS
    for chunk in range(first, num_tokens, _PREFETCH_ENDS):
        ends = range(chunk, min(chunk + _PREFETCH_ENDS, num_tokens))
        for end in ends:
            num_levels = _hash_ngrams(history, drafts, end, sizes, factor, hashes[end - chunk])
            if is_bulk:
                for level in range(num_levels):
                    prefetch(entries, _home(hashes[end - chunk, level], level, table_size))
        for end in ends:
            for level in range(min(max_size, end) - min_size + 1):
                ngram_hash = hashes[end - chunk, level]
                size = min_size + level
                index = _probe(history, drafts, end, size, level, ngram_hash, entries, table_size, mask)
                if not takes_first or entries[index] == 0:
                    entries[index] = _tag(ngram_hash, mask) | end


@compiled()
def _find(
    history: np.ndarray,
    drafts: np.ndarray,
    sizes: tuple[int, int],
    factor: int,
    entries: np.ndarray,
    table_size: int,
    mask: int,
    hashes: np.ndarray,
    takes_first: bool,
) -> Any:
    """The latest earlier end of the longest n-gram that ends the sequence, or the first such end; 0: there is none."""
    end = len(history) + len(drafts)
    for level in range(_hash_ngrams(history, drafts, end, sizes, factor, hashes) - 1, -1, -1):
        size = sizes[0] + level
        index = _probe(history, drafts, end, size, level, hashes[level], entries, table_size, mask)
        found = np.int64(entries[index]) & mask if entries[index] != 0 else 0
        if takes_first and found > 0:
            return found
        # N-grams that end among the drafts are not in the table, since drafts may yet be rejected.
        for earlier_end in range(max(len(history), size), end):
            if _common_suffix(history, drafts, end, earlier_end, size) == size:
                found = earlier_end
                if takes_first:
                    break
        if found > 0:
            return found
    return 0


@compiled()
def _draft(history: np.ndarray, drafts: np.ndarray, found: int, count: int, out: np.ndarray) -> None:
    """Copy `count` tokens from `found` on; past the end, continue with the tokens just copied."""
    end = len(history) + len(drafts)
    for k in range(count):
        out[k] = _token(history, drafts, found + k) if found + k < end else out[found + k - end]


@compiled()
def _note_progress(
    history: np.ndarray, num_prompt_tokens: int, state: np.ndarray, fingerprints: np.ndarray, state_row: int
) -> None:
    """Note how far a request is indexed, and its last tokens."""
    count = min(len(history), FINGERPRINT_SIZE)
    state[state_row, NUM_INDEXED] = max(0, len(history) - 1)
    state[state_row, NUM_PROMPT] = num_prompt_tokens
    state[state_row, NUM_FINGERPRINT] = count
    for k in range(count):
        fingerprints[state_row, k] = history[len(history) - count + k]


_INT32_1D, _INT32_2D = nb.int32[::1], nb.int32[:, ::1]
_INT64_1D, _INT64_2D = nb.int64[::1], nb.int64[:, ::1]
_SIZES = nb.types.UniTuple(nb.int64, 2)


@compiled(
    nb.boolean(
        *(_INT32_2D, _INT64_1D, _INT64_1D, _INT32_2D, _INT64_1D, _INT64_1D, _INT64_2D, _INT32_2D),
        *(_SIZES, nb.uint64, nb.boolean, nb.int64, _INT32_2D, _INT32_1D, _INT32_1D),
    )
)
def update_and_match(
    token_ids: np.ndarray,
    num_tokens: np.ndarray,
    num_prompt_tokens: np.ndarray,
    drafts: np.ndarray,
    max_drafts: np.ndarray,
    state_rows: np.ndarray,
    state: np.ndarray,
    fingerprints: np.ndarray,
    sizes: tuple[int, int],
    factor: int,
    takes_first: bool,
    match_len_cap: int,
    out_token_ids: np.ndarray,
    out_num_tokens: np.ndarray,
    out_match_len: np.ndarray,
) -> bool:
    """Index the new tokens of B requests, then look up the tail of each.

    Args:
        token_ids: [>=B, max_model_len] int32.
        num_tokens, num_prompt_tokens, max_drafts: [B] int64.
        state_rows: [B] int64, the row of each request in the two arrays below.
        drafts: [B, S] int32, S may be 0.
        state: [max_num_reqs, NUM_COLUMNS] int64, changed in place.
        fingerprints: [max_num_reqs, FINGERPRINT_SIZE] int32, changed in place.
        sizes: smallest and largest n-gram size.
        factor: an odd uint64 of the hash; the same in every call.
        takes_first: whether the earliest occurrence of an n-gram wins, or the latest; the same in every call.
        match_len_cap: matches are measured up to this many tokens.
        out_token_ids: [B, K] int32, -1 after the last draft; out_num_tokens, out_match_len: [B] int32.

    Returns:
        Whether it was done: nothing is where a request's tables are too small, or its history longer than its row.
    """
    for i in range(len(state_rows)):
        if max(num_tokens[i], 1) > min(state[state_rows[i], CAPACITY], token_ids.shape[1]):
            return False
    out_token_ids[:] = -1
    out_num_tokens[:] = 0
    out_match_len[:] = 0
    num_sizes = sizes[1] - sizes[0] + 1
    hashes = np.empty((_PREFETCH_ENDS, num_sizes), np.uint64)
    homes = np.empty((_BLOCK, (_PREFETCH_ENDS + 1) * num_sizes, 2), np.int64)
    counts = np.empty(_BLOCK, np.int64)
    first = np.empty(_BLOCK, np.int64)
    for block in range(0, len(state_rows), _BLOCK):
        rows = range(block, min(block + _BLOCK, len(state_rows)))
        for i in rows:
            prefetch(state, state_rows[i] * NUM_COLUMNS)
            prefetch(fingerprints, state_rows[i] * FINGERPRINT_SIZE)
            prefetch(token_ids, i * token_ids.shape[1] + num_tokens[i] - 1)
        for i in rows:
            b, state_row, history = i - block, state_rows[i], token_ids[i, : num_tokens[i]]
            entries, table_size, mask = _tables(state, state_row, num_sizes)
            first[b] = _begin(history, num_prompt_tokens[i], entries, state, fingerprints, state_row)
            counts[b] = _prefetch_entries(
                history, drafts[i], first[b], sizes, factor, entries, table_size, mask, hashes[0], homes[b]
            )
        for i in rows:
            entries, _, mask = _tables(state, state_rows[i], num_sizes)
            _prefetch_tokens(token_ids[i], entries, mask, homes[i - block], counts[i - block])
        for i in rows:
            state_row, history = state_rows[i], token_ids[i, : num_tokens[i]]
            entries, table_size, mask = _tables(state, state_row, num_sizes)
            _insert(history, drafts[i], first[i - block], sizes, factor, entries, table_size, mask, hashes, takes_first)
            _note_progress(history, num_prompt_tokens[i], state, fingerprints, state_row)
            if max_drafts[i] <= 0:
                continue
            found = _find(history, drafts[i], sizes, factor, entries, table_size, mask, hashes[0], takes_first)
            if found > 0:
                _draft(history, drafts[i], found, max_drafts[i], out_token_ids[i])
                out_num_tokens[i] = max_drafts[i]
                end = len(history) + drafts.shape[1]
                out_match_len[i] = _common_suffix(history, drafts[i], end, found, match_len_cap)
    return True
