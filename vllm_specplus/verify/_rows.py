"""Verification on a CPU, one row after the other: the compiled half of `verify.numba_backend`.

Importing this module imports numba, which must not happen before a vLLM worker has started.

A request's rows are read until its run of drafts ends, and no row behind that is looked at. Loops over the vocabulary
go by whole blocks of 64 tokens and have no branches, so that each instruction works on several tokens. What they find
out tells which few blocks are worth a second look, token by token.

A row is kept as integers that are ordered as its values are: keys. Block maxima are keys too.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from vllm_specplus._numba import bits_of, compiled, float_of

BLOCK = 64
# Literals: code in numba's cache keeps the numbers that it was compiled with.
CODES = {"greedy": 0, "target_match": 1, "topp": 2, "rejection": 3}
_GREEDY, _TARGET_MATCH, _TOPP, _REJECTION = CODES.values()

_f32, _i32, _u32 = np.float32, np.int32, np.uint32
_NEG_INF, _POS_INF = _f32(-math.inf), _f32(math.inf)
_LOWEST_KEY = _i32(np.array(-math.inf, _f32).view(np.int32) ^ 0x7FFFFFFF)
_MAGNITUDE = _i32(0x7FFFFFFF)
_NO_TOKEN = -1

# The hash of `verify.noise`.
_KEY_MUL_1, _KEY_MUL_2 = _u32(0xCC9E2D51), _u32(0x1B873593)
_FIVE, _HASH_ADD, _KEY_BYTES = _u32(5), _u32(0xE6546B64), _u32(16)
_FINAL_MUL_1, _FINAL_MUL_2 = _u32(0x85EBCA6B), _u32(0xC2B2AE35)
_ZERO = _f32(0.0)
_SMALLEST_SURVIVAL, _SERIES_BELOW, _ONE = _f32(2.0**-24), _f32(0.25), _f32(1.0)
_SERIES = tuple(_f32(1.0 / degree) for degree in range(7, 0, -1))
_EIGHTH = _f32(1.0 / 8.0)
_MOST_NOISE = _f32(23.0)

_PHILOX_ROUNDS = 10
_PHILOX_MULS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEYS = (0x9E3779B9, 0xBB67AE85)
_SMALLEST_UNIFORM = _f32(4.6566127342e-10)
_WORD = 0xFFFFFFFF

# exp(x) = 2^n exp(r), |r| <= ln(2) / 2: ln(2) in two parts, and the series of exp(r) from its last term on.
_LOG2_E = _f32(1.0 / math.log(2.0))
_LN2_HIGH, _LN2_LOW = _f32(0.693359375), _f32(math.log(2.0) - 0.693359375)
_EXP_SERIES = tuple(_f32(1.0 / math.factorial(n)) for n in range(7, 1, -1))
_LEAST_EXPONENT = _f32(-87.0)
_HALF = _f32(0.5)

# An upper bound of -log(u): log2 is at least the exponent plus the mantissa as a straight line. u has 31 bits here.
_BOUND_OFFSET = _f32((127 + 31) * math.log(2.0) + 1e-4)
_BOUND_SCALE = _f32(math.log(2.0) / (1 << 23))

# The floors under which tokens are left out of a search, as distances from a row's best; the last leaves none out.
_FLOORS = (_f32(6.0), _f32(14.0), _POS_INF)
_DIGITS = (21, 10, 0)  # of a key, the highest first
NUM_BINS = 2048


class Batch(NamedTuple):
    """What `verify` reads of `VerifyInputs`, under the same names; an array without elements stands for None.

    Attributes:
        logits: float32, from the first row's first element on.
        stride: elements from a row to the next one.
        token_keys: ``[padded_size]`` uint32, of ``noise.token_keys``.
    """

    logits: np.ndarray
    stride: int
    vocab_size: int
    cu_num_rows: np.ndarray
    draft_token_ids: np.ndarray
    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray
    token_keys: np.ndarray


class Row(NamedTuple):
    """Scratch memory for one row; `padded_size` is the vocabulary's size in whole blocks.

    Attributes:
        keys: ``[padded_size]`` int32 of the row's values, -inf past the vocabulary's end.
        maxima: ``[padded_size / 64]`` int32, the largest key of each block.
        weights: ``[padded_size]`` float32, exp(z - the largest z), where something asks for it.
        found: ``[padded_size]`` int32, some tokens by rising id.
        counts, masses: ``[NUM_BINS]`` int64 and float64, of a radix search.
    """

    keys: np.ndarray
    maxima: np.ndarray
    weights: np.ndarray
    found: np.ndarray
    counts: np.ndarray
    masses: np.ndarray


# numba computes 32-bit integers in 64 bits; each cast takes the result back, so that it wraps and fills a vector.


@compiled(allocates=False, forceinline=True)
def _key(value: Any) -> Any:
    """An integer that is ordered as the float is."""
    bits = bits_of(value)
    return _i32(bits ^ (_i32(bits >> 31) & _MAGNITUDE))


@compiled(allocates=False, forceinline=True)
def _value(key: Any) -> Any:
    return float_of(_i32(key ^ (_i32(key >> 31) & _MAGNITUDE)))


@compiled(allocates=False, forceinline=True)
def _rotate(word: Any, left: int) -> Any:
    return _u32(_u32(word << left) | _u32(word >> (32 - left)))


@compiled(allocates=False, forceinline=True)
def _rotated_key(word: Any) -> Any:
    word = _rotate(_u32(word * _KEY_MUL_1), 15)
    return _rotate(_u32(word * _KEY_MUL_2), 13)


@compiled(allocates=False, forceinline=True)
def _noise_key(seed: Any, position: Any) -> Any:
    """What a row brings into the hash of its noise, as ``noise.noise_keys``."""
    prefix = _u32(0)
    for word in (_u32(seed & _WORD), _u32((seed >> 32) & _WORD), _u32(position & _WORD)):
        prefix = _u32(_u32(_rotate(prefix, 13) ^ _rotated_key(word)) * _FIVE + _HASH_ADD)
    return _rotate(prefix, 13)


@compiled(allocates=False, forceinline=True)
def _hash(noise_key: Any, token_key: Any) -> Any:
    h = _u32(_u32(_u32(_u32(noise_key ^ token_key) * _FIVE) + _HASH_ADD) ^ _KEY_BYTES)
    h = _u32(_u32(h ^ _u32(h >> 16)) * _FINAL_MUL_1)
    h = _u32(_u32(h ^ _u32(h >> 13)) * _FINAL_MUL_2)
    return _u32(h ^ _u32(h >> 16))


@compiled(allocates=False)
def _gumbel(h: Any) -> Any:
    """The noise of a token's hash, as ``noise.gumbel_noise``."""
    u = _f32((np.float64(h) + 0.5) * 2.0**-32)
    if u < _SERIES_BELOW:
        series = _EIGHTH
        for factor in _SERIES:
            series = series * u + factor
        return -_f32(math.log(series * u))
    return -_f32(math.log(-_f32(math.log(max(_ONE - u, _SMALLEST_SURVIVAL)))))


@compiled(allocates=False, forceinline=True)
def _noise_bound(h: Any) -> Any:
    """At least the noise of a token's hash, and rarely .1 more where the noise is large."""
    return _BOUND_OFFSET - _f32(bits_of(_f32(_i32(_u32(h >> 1))))) * _BOUND_SCALE


@compiled(allocates=False)
def _acceptance_uniform(seed: Any, position: Any) -> Any:
    """As ``noise.acceptance_uniform``."""
    word_0, word_1, word_2, word_3 = (
        np.uint64(position & _WORD),
        np.uint64((position >> 32) & _WORD),
        np.uint64(0),
        np.uint64(0),
    )
    key_a, key_b = np.uint64(seed & _WORD), np.uint64((seed >> 32) & _WORD)
    low, half = np.uint64(_WORD), np.uint64(32)
    for _ in range(_PHILOX_ROUNDS):
        b = word_2 * np.uint64(_PHILOX_MULS[1])
        a = word_0 * np.uint64(_PHILOX_MULS[0])
        word_0, word_1, word_2, word_3 = (b >> half) ^ word_1 ^ key_a, b & low, (a >> half) ^ word_3 ^ key_b, a & low
        key_a = (key_a + np.uint64(_PHILOX_KEYS[0])) & low
        key_b = (key_b + np.uint64(_PHILOX_KEYS[1])) & low
    signed = np.int64(_i32(_u32(word_0)))
    folded = -signed - 1 if signed < 0 else signed
    return max(_f32(folded) * _SMALLEST_UNIFORM, _SMALLEST_UNIFORM)


@compiled(allocates=False, error_model="numpy")
def _read_block(logits: np.ndarray, temperature: Any, keys: np.ndarray) -> Any:
    """Write the keys of a block's values over the temperature, NaN as -inf; return the largest."""
    largest = _LOWEST_KEY
    for j in range(len(logits)):
        value = logits[j] / temperature
        # Of a NaN too. A zero has one sign.
        key = _key(value + _ZERO) if value == value else _LOWEST_KEY
        keys[j] = key
        largest = max(largest, key)
    return largest


@compiled(allocates=False)
def _read(batch: Batch, i: int, temperature: Any, row: Row) -> int:
    """Read row i; return the first block that holds the largest value."""
    logits = batch.logits[i * batch.stride : i * batch.stride + batch.vocab_size]
    best, best_block = _LOWEST_KEY, 0
    num_whole = len(logits) // BLOCK
    for block in range(num_whole):
        start, end = block * BLOCK, (block + 1) * BLOCK
        row.maxima[block] = _read_block(logits[start:end], temperature, row.keys[start:end])
    if num_whole < len(row.maxima):
        start = num_whole * BLOCK
        for j in range(len(logits), len(row.keys)):
            row.keys[j] = _LOWEST_KEY
        row.maxima[num_whole] = _read_block(logits[start:], temperature, row.keys[start:])
    for block in range(len(row.maxima)):
        if row.maxima[block] > best:
            best, best_block = row.maxima[block], block
    return best_block


@compiled(allocates=False)
def _first(row: Row, best_block: int) -> int:
    """The first token of the order."""
    for j in range(best_block * BLOCK, (best_block + 1) * BLOCK):
        if row.keys[j] == row.maxima[best_block]:
            return j
    return _NO_TOKEN


@compiled(allocates=False)
def _second(row: Row) -> int:
    """The second token of the order; -1 where no other than the first is above -inf."""
    first_key, second_key, first, second = _LOWEST_KEY, _LOWEST_KEY, _NO_TOKEN, _NO_TOKEN
    for block in range(len(row.maxima)):
        if row.maxima[block] > second_key:
            for j in range(block * BLOCK, (block + 1) * BLOCK):
                if row.keys[j] > first_key:
                    first_key, second_key, first, second = row.keys[j], first_key, j, first
                elif row.keys[j] > second_key:
                    second_key, second = row.keys[j], j
    return second


@compiled(allocates=False, error_model="numpy", fastmath={"reassoc"})
def _weigh_block(keys: np.ndarray, best: Any, weights: np.ndarray) -> Any:
    """Write exp(value - best) of a block, 0 where it is tiny; return the sum."""
    total = _ZERO
    for j in range(BLOCK):
        value = _value(keys[j])
        # inf - inf is no number, but it stands for a token that ties with the best.
        x = value - best if value < best else _ZERO
        is_tiny = x < _LEAST_EXPONENT
        x = _LEAST_EXPONENT if is_tiny else x
        n = np.floor(x * _LOG2_E + _HALF)
        r = x - n * _LN2_HIGH - n * _LN2_LOW
        series = _EXP_SERIES[0]
        for i in range(1, 6):
            series = series * r + _EXP_SERIES[i]
        series = (series * r + _ONE) * r + _ONE
        weight = series * float_of(_i32(_i32(_i32(n) + 127) << 23))
        weight = _ZERO if is_tiny else weight
        weights[j] = weight
        total += weight
    return total


@compiled(allocates=False)
def _weigh(row: Row, best: Any) -> float:
    """Write the weight of each token; return their sum."""
    total = 0.0
    for block in range(len(row.maxima)):
        start, end = block * BLOCK, (block + 1) * BLOCK
        total += _weigh_block(row.keys[start:end], best, row.weights[start:end])
    return total


@compiled(allocates=False)
def _num_reaching(keys: np.ndarray, token_keys: np.ndarray, noise_key: Any, lowest: Any, least: Any) -> Any:
    """How many tokens of a block are at least `lowest` and may reach the score `least`."""
    count = _i32(0)
    for j in range(BLOCK):
        bound = _value(keys[j]) + _noise_bound(_hash(noise_key, token_keys[j]))
        count = _i32(count + _i32(_i32(bound >= least) & _i32(keys[j] >= lowest)))
    return count


@compiled(allocates=False)
def _sample(
    row: Row, token_keys: np.ndarray, noise_key: Any, best_block: int, nucleus: tuple[Any, int], excluded: int
) -> int:
    """The token of a nucleus with the best score + noise, the lower id on a tie; -1: none is left.

    Args:
        nucleus: the lowest key inside, above that of -inf, and the last token inside that has it.
        excluded: a token that does not count.
    """
    lowest, last = nucleus
    least, token = _NEG_INF, _NO_TOKEN
    # The best block comes first: few others reach what is found there.
    for i in range(len(row.maxima)):
        block = best_block if i == 0 else i - 1 if i <= best_block else i
        if row.maxima[block] < lowest or _value(row.maxima[block]) + _MOST_NOISE < least:
            continue
        start, end = block * BLOCK, (block + 1) * BLOCK
        if _num_reaching(row.keys[start:end], token_keys[start:end], noise_key, lowest, least) == 0:
            continue
        for j in range(start, end):
            key = row.keys[j]
            if key < lowest or j == excluded or (key == lowest and j > last):
                continue
            h = _hash(noise_key, token_keys[j])
            if _value(key) + _noise_bound(h) < least:
                continue
            score = _value(key) + _gumbel(h)
            if score > least or (score == least and j < token):
                least, token = score, j
    return token


@compiled(allocates=False)
def _gather(row: Row, floor: Any) -> tuple[int, float]:
    """Write into `found` the tokens whose keys are at least a floor, by rising id; return their number and mass."""
    count, mass = 0, 0.0
    for block in range(len(row.maxima)):
        if row.maxima[block] >= floor:
            for j in range(block * BLOCK, (block + 1) * BLOCK):
                if row.keys[j] >= floor:
                    row.found[count] = j
                    count += 1
                    mass += row.weights[j]
    return count, mass


@compiled(allocates=False)
def _cut(row: Row, num_found: int, most: int, enough: float) -> tuple[Any, int, float]:
    """Where a number of first tokens of the order ends, by a radix search.

    Args:
        num_found: the tokens in `found`: the first of the order, at least as many as are kept.
        most: the most tokens that are kept.
        enough: the mass at which no more are kept; one always is.

    Returns:
        The last kept token's key, this token and the mass of all that are kept.
    """
    above, mass, prefix, mask = 0, 0.0, _i32(0), _i32(0)
    for digit in _DIGITS:
        row.counts[:] = 0
        row.masses[:] = 0.0
        # A negative key's first bit is set.
        flip = NUM_BINS // 2 if digit == _DIGITS[0] else 0
        for i in range(num_found):
            key = row.keys[row.found[i]]
            if key & mask == prefix:
                place = ((key >> digit) & (NUM_BINS - 1)) ^ flip
                row.counts[place] += 1
                row.masses[place] += row.weights[row.found[i]]
        lowest, place = 0, NUM_BINS - 1
        while row.counts[lowest] == 0:
            lowest += 1
        while place > lowest and (
            row.counts[place] == 0 or (above + row.counts[place] < most and mass + row.masses[place] < enough)
        ):
            above += row.counts[place]
            mass += row.masses[place]
            place -= 1
        prefix = _i32(prefix | _i32((place ^ flip) << digit))
        mask = _i32(mask | _i32((NUM_BINS - 1) << digit))
    # All that are left have the same key, so they come by their ids.
    last = _NO_TOKEN
    for i in range(num_found):
        j = row.found[i]
        if row.keys[j] == prefix and (above == 0 or (above < most and mass < enough)):
            above += 1
            mass += row.weights[j]
            last = j
    return prefix, last, mass


@compiled(allocates=False)
def _nucleus(row: Row, best: Any, filters: tuple[float, int, float, int], vocab_size: int) -> tuple[Any, int, float]:
    """The lowest key of a nucleus, the last token inside that has it, and the mass inside.

    Args:
        best: the row's largest value, above -inf.
        filters: top-p, top-k, min-p and the most candidates; 1, the vocabulary's size, 0 and the same are off.
    """
    top_p, top_k, min_p, max_candidates = filters
    total = _weigh(row, best)
    num_needed = min(top_k, max_candidates) if top_p >= 1 else top_k
    num_found, mass = 0, 0.0
    # Few tokens are looked at, if all that count are among them.
    for distance in _FLOORS:
        floor = _key(best - distance) if distance < _POS_INF else _i32(_LOWEST_KEY + 1)
        num_found, mass = _gather(row, floor)
        has_mass = top_k >= vocab_size and min_p == 0 and top_p < 1 and mass >= top_p * total
        if num_found >= num_needed or has_mass or math.exp(-distance) < _HALF * min_p:
            break
    if min_p > 0:
        kept, mass = 0, 0.0
        for i in range(num_found):
            j = row.found[i]
            if row.weights[j] >= min_p:
                row.found[kept] = j
                kept += 1
                mass += row.weights[j]
        num_found = kept
    elif top_k >= vocab_size:
        mass = total
    if top_k < num_found:
        _, _, mass = _cut(row, num_found, top_k, math.inf)
    return _cut(row, num_found, min(top_k, max_candidates), top_p * mass if top_p < 1 else math.inf)


@compiled(allocates=False)
def _judge(
    batch: Batch, request: int, i: int, proposal: int, options: tuple[int, int, int], row: Row
) -> tuple[bool, int]:
    """Whether a row accepts its draft, and else the token that it emits.

    Args:
        i: the row's number.
        proposal: its draft, or -1.
    """
    strategy, _, max_candidates = options
    temperature = batch.temperature[request]
    is_greedy = strategy == _GREEDY or temperature == 0
    best_block = _read(batch, i, _ONE if is_greedy else temperature, row)
    best = _value(row.maxima[best_block])
    if best == _NEG_INF:
        return False, 0
    can_accept = proposal >= 0 and row.keys[proposal] > _LOWEST_KEY
    if is_greedy:
        first = _first(row, best_block)
        return can_accept and proposal == first, first

    vocab_size = batch.vocab_size
    top_p = batch.top_p[request] if len(batch.top_p) else 1.0
    top_k = batch.top_k[request] if len(batch.top_k) else 0
    min_p = batch.min_p[request] if len(batch.min_p) else 0.0
    top_k = min(top_k, vocab_size) if top_k > 0 else vocab_size
    is_filtered = top_p < 1 or top_k < vocab_size or min_p > 0 or max_candidates < vocab_size
    nucleus, mass = (_i32(_LOWEST_KEY + 1), vocab_size), 0.0
    if is_filtered:
        lowest, last, mass = _nucleus(row, best, (top_p, top_k, min_p, max_candidates), vocab_size)
        nucleus = lowest, last
    elif strategy == _REJECTION and can_accept:
        mass = _weigh(row, best)
    is_inside = can_accept and (
        row.keys[proposal] > nucleus[0] or (row.keys[proposal] == nucleus[0] and proposal <= nucleus[1])
    )
    excluded = _NO_TOKEN
    if strategy == _REJECTION:
        excluded = proposal
        if is_inside and row.weights[proposal] / mass > _acceptance_uniform(batch.seeds[request], batch.positions[i]):
            return True, _NO_TOKEN
    elif strategy == _TOPP and is_inside:
        return True, _NO_TOKEN
    noise_key = _noise_key(batch.seeds[request], batch.positions[i])
    token = _sample(row, batch.token_keys, noise_key, best_block, nucleus, excluded)
    if token == _NO_TOKEN:
        token = _first(row, best_block)
    return strategy == _TARGET_MATCH and can_accept and token == proposal, token


@compiled(allocates=False)
def _come_first(batch: Batch, request: int, start: int, end: int, row: Row) -> bool:
    """Whether the drafts of a sampled request's rows, from `start` to before `end`, come first in their rows."""
    for i in range(start, end):
        best_block = _read(batch, i, batch.temperature[request], row)
        if row.maxima[best_block] == _LOWEST_KEY or batch.draft_token_ids[i] != _first(row, best_block):
            return False
    return True


@compiled(allocates=False)
def verify(
    batch: Batch,
    options: tuple[int, int, int],
    row: Row,
    token_ids: np.ndarray,
    num_tokens: np.ndarray,
) -> None:
    """Verify the drafts of every request; see ``vllm_specplus.verify.verify_draft_tokens``.

    Args:
        options: one of `CODES`, the `verify_window`, and the `max_candidate_len` or the vocabulary's size.
        token_ids: ``[num_reqs, max_rows]`` int64, written.
        num_tokens: ``[num_reqs]`` int32, written.
    """
    strategy, verify_window, _ = options
    for request in range(len(num_tokens)):
        start, end = batch.cu_num_rows[request], batch.cu_num_rows[request + 1]
        end = min(end, start + token_ids.shape[1])
        count = 0
        for i in range(start, end):
            proposal = batch.draft_token_ids[i] if i < end - 1 else _NO_TOKEN
            if proposal < 0 or proposal >= batch.vocab_size:
                proposal = _NO_TOKEN
            accepts, token = _judge(batch, request, i, proposal, options, row)
            has_window = strategy == _TOPP and verify_window > 0 and i + verify_window < end - 1
            if has_window and not accepts and batch.temperature[request] > 0:
                accepts = proposal == _second(row) != _NO_TOKEN
                accepts = accepts and _come_first(batch, request, i + 1, i + 1 + verify_window, row)
            token_ids[request, count] = proposal if accepts else token
            count += 1
            if not accepts:
                break
        token_ids[request, count:] = _NO_TOKEN
        num_tokens[request] = count
