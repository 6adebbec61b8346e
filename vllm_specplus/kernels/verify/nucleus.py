"""One row of logits inside a Triton kernel: its nucleus, and samples from it.

Everything after `score_tokens` belongs to the slow paths. One program takes one row at a time, and reads as little of
it as it can. It visits the row by groups of `GROUP_SIZE` tokens, and only the groups whose largest logit is high
enough. The first pass over the row has left these maxima.

Tokens are ordered by (logit descending, id ascending), which needs no division for each token. The weight of a token is
exp((logit - M) / temperature), where M is the largest logit of its row.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.noise import gumbel_noise

GROUP_SIZE = tl.constexpr(64)
LARGEST = tl.constexpr(3.4028234663852886e38)
LOG2_E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))
_LIST_RUN = tl.constexpr(4)  # groups that one thread loads at once


class Row(NamedTuple):
    """One row of the target's logits."""

    ptr: tl.tensor
    vocab_size: tl.tensor
    temperature: tl.tensor
    max_logit: tl.tensor
    lowest: tl.tensor  # min-p keeps logits of at least this


class RowGroups(NamedTuple):
    """The groups of one row."""

    max_ptr: tl.tensor  # [num_groups], the largest logit of each
    list_ptr: tl.tensor  # scratch, [num_groups] int32
    num_groups: tl.tensor


class NoiseKey(NamedTuple):
    """The seed and the position that a row's noise depends on, both int64."""

    seed: tl.tensor
    position: tl.tensor


class Residual(NamedTuple):
    """What a rejected draft leaves to be sampled from a row; see `score_tokens`."""

    draft_ptr: tl.tensor  # the row of the draft model's logits
    excluded: tl.tensor
    log_mass: tl.tensor
    max_draft_logit: tl.tensor
    draft_log_mass: tl.tensor


@triton.jit
def load_numbers(p_row, tokens, vocab_size):
    """Logits of some tokens, -inf for NaN and outside the vocabulary: float32 of the shape of `tokens`."""
    logits = tl.load(p_row + tokens, mask=tokens < vocab_size, other=NEG_INF)
    return tl.maximum(logits.to(tl.float32), NEG_INF)


@triton.jit
def load_logits(p_row, tokens, vocab_size):
    """As `load_numbers`, but +inf becomes the largest float, so that differences are numbers."""
    return tl.minimum(load_numbers(p_row, tokens, vocab_size), LARGEST)


@triton.jit
def weigh(logits, max_logit, temperature):
    """exp((logits - max_logit) / temperature). A logit of -inf weighs 0, even in a row of nothing else."""
    return tl.exp2((logits - tl.maximum(max_logit, -LARGEST)) * (LOG2_E / temperature))


@triton.jit
def lowest_kept(max_logit, temperature, min_p):
    """The lowest logit that min-p keeps; -`LARGEST` where it keeps every token that is not masked."""
    return tl.maximum(max_logit + temperature * tl.log(min_p), -LARGEST)


@triton.jit
def best_of(score, tokens, vocab_size):
    """The best score and the lowest token that has it: float32, int32."""
    best = tl.max(score)
    holders = tl.where(score == best, tokens, vocab_size)
    return best, tl.min(holders)


@triton.jit
def score_tokens(row, key, residual, tokens, DRAFT_LOGITS: tl.constexpr):
    """Some logits, and the score whose argmax is the sample: float32, of the shape of `tokens`.

    The sample is of the row without the token `excluded`; -1 excludes none. With a finite `draft_log_mass` the sample
    is of max(p - q, 0) instead, q being the draft model's probability. The residual then holds the logs of both masses
    and the largest draft logit. A token with a score of -inf cannot be sampled. The division by the temperature is the
    one in vLLM's kernels, for equal bits.
    """
    temperature = row.temperature
    logits = load_logits(row.ptr, tokens, row.vocab_size)
    noise = gumbel_noise(key.seed, key.position, tokens)
    score = logits / temperature + noise
    if DRAFT_LOGITS:
        if residual.draft_log_mass < POS_INF:
            draft_logits = load_logits(residual.draft_ptr, tokens, row.vocab_size)
            log_p = (logits - row.max_logit) / temperature - residual.log_mass
            log_q = (draft_logits - residual.max_draft_logit) / temperature - residual.draft_log_mass
            ratio = tl.exp(log_q - log_p)
            # NaN is not below 1; it comes where neither has any mass.
            score = tl.where(ratio < 1.0, log_p + tl.log(1.0 - ratio) + noise, NEG_INF)
    # Quotients too large for a float become equal.
    score = tl.minimum(score, LARGEST)
    return logits, tl.where((logits >= row.lowest) & (tokens != residual.excluded), score, NEG_INF)


@triton.jit
def order_key(x):
    """int32 that is ordered as float32 is."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_order_key(key):
    """The float32 of an `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _halfway(low, high):
    """The integer in the middle of two int32, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def group_max(groups, sizes):
    """[ALL_GROUPS] int32 numbers of groups and float32 maxima, -inf past the last group."""
    numbers = tl.arange(0, sizes.ALL_GROUPS)
    return numbers, load_logits(groups.max_ptr, numbers, groups.num_groups)


@triton.jit
def list_groups(groups, bound, sizes):
    """Write the numbers of the groups with a logit of at least `bound`, in rising order. Return how many there are."""
    run: tl.constexpr = min(_LIST_RUN, sizes.LISTED_GROUPS)
    own = tl.arange(0, sizes.LISTED_GROUPS // run)[:, None] * run + tl.arange(0, run)[None, :]
    num_listed = tl.zeros((), tl.int32)
    # Other threads of this program may still read the former list, and will read this one.
    tl.debug_barrier()
    for first in range(0, sizes.ALL_GROUPS, sizes.LISTED_GROUPS):
        best = load_logits(groups.max_ptr, first + own, groups.num_groups)
        listed = ((best >= bound) & (best > NEG_INF)).to(tl.int32)
        by_run = tl.sum(listed, axis=1)
        at = num_listed + (tl.cumsum(by_run, axis=0) - by_run)[:, None] + tl.cumsum(listed, axis=1) - 1
        tl.store(groups.list_ptr + at, first + own, mask=listed > 0)
        num_listed += tl.sum(by_run, axis=0)
    tl.debug_barrier()
    return num_listed


@triton.jit
def tile_of(groups, first, num_listed, NUM: tl.constexpr):
    """The listed groups from `first` on, and their tokens, int32; then what lies past the vocabulary.

    Returns:
        [NUM] and [NUM, GROUP_SIZE].
    """
    at = first + tl.arange(0, NUM)
    # The group after the last lies outside the vocabulary. Tokens stay in runs, as wide loads need them.
    numbers = tl.load(groups.list_ptr + at, mask=at < num_listed, other=groups.num_groups)
    return numbers, numbers[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]


@triton.jit
def _kth_group_max(groups, k, sizes):
    """A lower bound of the k-th largest group maximum, and so of the k-th largest logit: float32."""
    _, best = group_max(groups, sizes)
    order_keys = order_key(best)
    low, high = order_key(tl.full((), NEG_INF, tl.float32)), tl.max(order_keys, axis=0)
    searching = k <= groups.num_groups
    while searching:
        middle = _halfway(low, high) + 1
        count = tl.sum((order_keys >= middle).to(tl.int32), axis=0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle - 1)
        searching = (low < high) & (count != k)
    return from_order_key(low)


@triton.jit
def _split(row, groups, num_listed, pivot, sizes):
    """Split the tokens that min-p keeps at a pivot, an `order_key`.

    Returns:
        Tokens whose key exceeds it, int32, and their mass, float32; the largest key that does not exceed it, int32, and
        the smallest that does, int32.
    """
    least = order_key(tl.full((), NEG_INF, tl.float32))
    most = order_key(tl.full((), POS_INF, tl.float32))
    count = tl.zeros((sizes.TILE_GROUPS, GROUP_SIZE), tl.int32)
    mass = tl.zeros((sizes.TILE_GROUPS, GROUP_SIZE), tl.float32)
    below = tl.zeros((sizes.TILE_GROUPS, GROUP_SIZE), tl.int32) + least
    beyond = tl.zeros((sizes.TILE_GROUPS, GROUP_SIZE), tl.int32) + most
    for first in range(0, num_listed, sizes.TILE_GROUPS):
        _, tokens = tile_of(groups, first, num_listed, sizes.TILE_GROUPS)
        logits = load_logits(row.ptr, tokens, row.vocab_size)
        keys = order_key(logits)
        is_inside = logits >= row.lowest
        above = is_inside & (keys > pivot)
        count += above.to(tl.int32)
        mass += tl.where(above, weigh(logits, row.max_logit, row.temperature), 0.0)
        below = tl.maximum(below, tl.where(is_inside & (keys <= pivot), keys, least))
        beyond = tl.minimum(beyond, tl.where(above, keys, most))
    smallest_above = tl.min(beyond)
    return tl.sum(count), tl.sum(mass), tl.max(below), smallest_above


@triton.jit
def find_cut(row, groups, max_count, total, mass_limit, sizes):
    """Cut the order of the tokens by number and mass.

    Among the tokens min-p keeps, keep each one with fewer than `max_count` tokens and less than `mass_limit` mass
    ranked above it. Always keep the first.

    Args:
        total: float32, the mass of all tokens that compete. `mass_limit` is a part of it, or infinite for no limit.

    Returns:
        A lower bound of the logits of the tokens that stay, and their mass: float32.
    """
    mass_limit = tl.maximum(mass_limit, 1e-37)
    # A whole vocabulary of tokens below this logit weighs less than the mass that may be left out.
    spare_mass = tl.maximum(total - mass_limit - 4e-6 * total, 0.0)
    negligible = row.max_logit + row.temperature * tl.log(spare_mass / row.vocab_size)
    bound = tl.maximum(tl.maximum(_kth_group_max(groups, max_count, sizes), row.lowest), negligible)
    num_listed = list_groups(groups, bound, sizes)
    # The cut is the smallest logit with fewer tokens and less mass above it.
    middle, high = order_key(bound) - 1, order_key(row.max_logit)
    count, mass, _, low = _split(row, groups, num_listed, middle, sizes)
    fits = (count <= max_count) & (mass < mass_limit)
    while (low < high) & (fits == 0):
        middle = _halfway(low, high)
        count, mass, below, above = _split(row, groups, num_listed, middle, sizes)
        stays = (count < max_count) & (mass < mass_limit)
        high = tl.where(stays, below, high)
        low = tl.where(stays, low, above)
        fits = (count == max_count) & (mass < mass_limit)
    if fits == 0:
        # Only the first few of the tokens that tie at the cut stay.
        middle = low
        count, mass, _, _ = _split(row, groups, num_listed, low, sizes)
        with_ties, _, _, _ = _split(row, groups, num_listed, low - 1, sizes)
        weight = weigh(from_order_key(low), row.max_logit, row.temperature)
        by_count = (tl.minimum(with_ties, max_count) - count).to(tl.float32)
        by_mass = tl.maximum(tl.ceil((mass_limit - mass) / tl.maximum(weight, 1e-37)), 1.0)
        mass += tl.minimum(by_count, by_mass) * weight
    return from_order_key(tl.maximum(middle, order_key(bound))), mass
