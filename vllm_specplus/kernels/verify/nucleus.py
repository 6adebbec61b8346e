"""One row of logits inside a Triton kernel: its nucleus, and samples from it.

What is here after `score_tokens` are the slow paths. One program takes one row at a time, and
reads as little of it as it can: the row is visited by groups of `GROUP_SIZE` tokens, and only those
groups whose largest logit (left behind by the first pass over the row) reaches what is looked for.

Tokens are ordered by (logit descending, id ascending), which spares a division for each; the weight
of a token is exp((logit - M) / temperature), M being the largest logit of its row. Functions pass
tuples on:

    row       p_row, vocab_size, temperature, M, lowest     p_: a pointer to the row; min-p keeps
                                                            logits of at least `lowest`
    groups    p_group_max, p_list, num_groups               maxima, and scratch of as many int32
    key       seed, position                                of the noise
    residual  p_draft_row, excluded, log_mass, draft_M, draft_log_mass     see `score_tokens`
"""

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.noise import gumbel_noise

GROUP_SIZE = tl.constexpr(64)
LARGEST = tl.constexpr(3.4028234663852886e38)
LOG2_E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))


@triton.jit
def load_logits(p_row, tokens, vocab_size):
    """Logits of some tokens, -inf outside the vocabulary: float32 of the shape of `tokens`.

    A logit that is no number becomes -inf, and +inf the largest float, so that differences are numbers.
    """
    logits = tl.load(p_row + tokens, mask=tokens < vocab_size, other=NEG_INF).to(tl.float32)
    return tl.minimum(tl.maximum(logits, NEG_INF), LARGEST)


@triton.jit
def weigh(logits, M, temperature):
    """exp((logits - M) / temperature), 0 for -inf even where all of the row is."""
    return tl.exp2((logits - tl.maximum(M, -LARGEST)) * (LOG2_E / temperature))


@triton.jit
def lowest_kept(M, temperature, min_p):
    """The logit from which on min-p keeps tokens; -`LARGEST` where it keeps all that are not masked."""
    return tl.maximum(M + temperature * tl.log(min_p), -LARGEST)


@triton.jit
def best_of(score, tokens, vocab_size):
    """The best score and the lowest token that has it: float32, int32."""
    best = tl.max(score)
    holders = tl.where(score == best, tokens, vocab_size)
    return best, tl.min(holders)


@triton.jit
def score_tokens(row, key, residual, tokens, DRAFT_LOGITS: tl.constexpr):
    """Some logits, and the score whose argmax is the sample: float32, of the shape of `tokens`.

    The sample is of the row without the token `excluded` (-1: none); or, if `draft_log_mass` is finite,
    of what the row has more of than the draft model's (max(p - q, 0)), given the logs of the masses of
    both, and the largest draft logit. A score of -inf: the token cannot be sampled. The division by the
    temperature is that of vLLM's kernels, for the sake of equal bits.
    """
    p_row, vocab_size, temperature, M, lowest = row
    seed, position = key
    p_draft_row, excluded, log_mass, draft_M, draft_log_mass = residual
    logits = load_logits(p_row, tokens, vocab_size)
    noise = gumbel_noise(seed, position, tokens)
    score = logits / temperature + noise
    if DRAFT_LOGITS:
        if draft_log_mass < POS_INF:
            log_p = (logits - M) / temperature - log_mass
            log_q = (load_logits(p_draft_row, tokens, vocab_size) - draft_M) / temperature - draft_log_mass
            ratio = tl.exp(log_q - log_p)
            # NaN, where neither has any, is not below 1.
            score = tl.where(ratio < 1.0, log_p + tl.log(1.0 - ratio) + noise, NEG_INF)
    # A quotient too large for a float must not pass for more than another of its kind.
    score = tl.minimum(score, LARGEST)
    return logits, tl.where((logits >= lowest) & (tokens != excluded), score, NEG_INF)


@triton.jit
def _order_key(x):
    """int32 that is ordered as float32 is."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_key(order_key):
    """The float32 of an `_order_key`."""
    return (order_key ^ ((order_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _halfway(low, high):
    """The integer in the middle of two int32, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _group_max(groups, ALL_GROUPS: tl.constexpr):
    """[ALL_GROUPS] int32 numbers of groups and float32 maxima, -inf past the last group."""
    p_group_max, _, num_groups = groups
    numbers = tl.arange(0, ALL_GROUPS)
    return numbers, tl.load(p_group_max + numbers, mask=numbers < num_groups, other=NEG_INF)


@triton.jit
def _list_groups(groups, bound, ALL_GROUPS: tl.constexpr):
    """Write the numbers of the groups that hold a logit of at least `bound`, in rising order; return how many."""
    numbers, best = _group_max(groups, ALL_GROUPS)
    listed = (best >= bound) & (best > NEG_INF)
    at = tl.cumsum(listed.to(tl.int32), axis=0) - 1
    # Other threads of this program may still read the list that was there, and will read this one.
    tl.debug_barrier()
    tl.store(groups[1] + at, numbers, mask=listed)
    tl.debug_barrier()
    return tl.sum(listed.to(tl.int32), axis=0)


@triton.jit
def _tile(groups, first, num_listed, TILE_GROUPS: tl.constexpr):
    """[TILE_GROUPS, GROUP_SIZE] int32 tokens of the listed groups from `first` on, then none of the vocabulary."""
    at = first + tl.arange(0, TILE_GROUPS)
    # The group after the last lies outside the vocabulary. Tokens stay in runs, as wide loads need them.
    numbers = tl.load(groups[1] + at, mask=at < num_listed, other=groups[2])
    return numbers[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]


@triton.jit
def _kth_group_max(groups, k, ALL_GROUPS: tl.constexpr):
    """A value that the k-th largest group maximum, and so the k-th largest logit, is not below: float32."""
    _, best = _group_max(groups, ALL_GROUPS)
    order_keys = _order_key(best)
    low, high = _order_key(tl.full((), NEG_INF, tl.float32)), tl.max(order_keys, axis=0)
    searching = k <= groups[2]
    while searching:
        middle = _halfway(low, high) + 1
        count = tl.sum((order_keys >= middle).to(tl.int32), axis=0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle - 1)
        searching = (low < high) & (count != k)
    return _from_key(low)


@triton.jit
def _split(row, groups, num_listed, order_key, TILE_GROUPS: tl.constexpr):
    """How many tokens that min-p keeps exceed an `_order_key`, what they weigh, and the keys on both sides.

    Returns:
        int32 count, float32 mass, int32 largest key that does not exceed, int32 smallest that does.
    """
    p_row, vocab_size, temperature, M, lowest = row
    least = _order_key(tl.full((), NEG_INF, tl.float32))
    most = _order_key(tl.full((), POS_INF, tl.float32))
    count = tl.zeros((TILE_GROUPS, GROUP_SIZE), tl.int32)
    mass = tl.zeros((TILE_GROUPS, GROUP_SIZE), tl.float32)
    below = tl.zeros((TILE_GROUPS, GROUP_SIZE), tl.int32) + least
    beyond = tl.zeros((TILE_GROUPS, GROUP_SIZE), tl.int32) + most
    for first in range(0, num_listed, TILE_GROUPS):
        logits = load_logits(p_row, _tile(groups, first, num_listed, TILE_GROUPS), vocab_size)
        keys = _order_key(logits)
        kept = logits >= lowest
        above = kept & (keys > order_key)
        count += above.to(tl.int32)
        mass += tl.where(above, weigh(logits, M, temperature), 0.0)
        below = tl.maximum(below, tl.where(kept & (keys <= order_key), keys, least))
        beyond = tl.minimum(beyond, tl.where(above, keys, most))
    smallest_above = tl.min(beyond)
    return tl.sum(count), tl.sum(mass), tl.max(below), smallest_above


@triton.jit
def find_cut(row, groups, max_count, total, mass_limit, ALL_GROUPS: tl.constexpr, TILE_GROUPS: tl.constexpr):
    """Cut the order where `max_count` tokens, or the mass `mass_limit`, lie above a token.

    Of the tokens that min-p keeps those stay that have fewer and less above them, and the first.
    `total`: what all tokens that compete weigh, of which `mass_limit` is a part, or infinite: no limit.

    Returns:
        float32 logit that none of those tokens is below, and their mass, float32.
    """
    mass_limit = tl.maximum(mass_limit, 1e-37)
    # Tokens so unlikely that all of a vocabulary of them weighs less than what may be left out.
    left_out = tl.maximum(total - mass_limit - 4e-6 * total, 0.0)
    negligible = row[3] + row[2] * tl.log(left_out / row[1])
    bound = tl.maximum(tl.maximum(_kth_group_max(groups, max_count, ALL_GROUPS), row[4]), negligible)
    num_listed = _list_groups(groups, bound, ALL_GROUPS)
    # The cut is the smallest logit of a token above which there are fewer and less.
    middle, high = _order_key(bound) - 1, _order_key(row[3])
    count, mass, _, low = _split(row, groups, num_listed, middle, TILE_GROUPS)
    fits = (count <= max_count) & (mass < mass_limit)
    while (low < high) & (fits == 0):
        middle = _halfway(low, high)
        count, mass, below, above = _split(row, groups, num_listed, middle, TILE_GROUPS)
        stays = (count < max_count) & (mass < mass_limit)
        high = tl.where(stays, below, high)
        low = tl.where(stays, low, above)
        fits = (count == max_count) & (mass < mass_limit)
    if fits == 0:
        # Of the tokens that tie at the cut, the first few stay.
        middle = low
        count, mass, _, _ = _split(row, groups, num_listed, low, TILE_GROUPS)
        with_ties, _, _, _ = _split(row, groups, num_listed, low - 1, TILE_GROUPS)
        weight = weigh(_from_key(low), row[3], row[2])
        by_count = (tl.minimum(with_ties, max_count) - count).to(tl.float32)
        by_mass = tl.maximum(tl.ceil((mass_limit - mass) / tl.maximum(weight, 1e-37)), 1.0)
        mass += tl.minimum(by_count, by_mass) * weight
    return _from_key(tl.maximum(middle, _order_key(bound))), mass


@triton.jit
def _before(row, groups, num_listed, token, logit, TILE_GROUPS: tl.constexpr):
    """How many tokens are ordered before one, and what they weigh: int32, float32."""
    p_row, vocab_size, temperature, M, _ = row
    count = tl.zeros((TILE_GROUPS, GROUP_SIZE), tl.int32)
    mass = tl.zeros((TILE_GROUPS, GROUP_SIZE), tl.float32)
    for first in range(0, num_listed, TILE_GROUPS):
        tokens = _tile(groups, first, num_listed, TILE_GROUPS)
        logits = load_logits(p_row, tokens, vocab_size)
        before = (logits > logit) | ((logits == logit) & (tokens < token))
        count += before.to(tl.int32)
        mass += tl.where(before, weigh(logits, M, temperature), 0.0)
    return tl.sum(count), tl.sum(mass)


@triton.jit
def _sample_before(
    row, groups, num_listed, key, residual, token, logit, DRAFT_LOGITS: tl.constexpr, TILE_GROUPS: tl.constexpr
):
    """The best score among the tokens ordered before one, and its token: float32, int32."""
    vocab_size = row[1]
    best = tl.full((TILE_GROUPS, GROUP_SIZE), NEG_INF, tl.float32)
    best_tokens = tl.zeros((TILE_GROUPS, GROUP_SIZE), tl.int32) + vocab_size
    for first in range(0, num_listed, TILE_GROUPS):
        tokens = _tile(groups, first, num_listed, TILE_GROUPS)
        logits, score = score_tokens(row, key, residual, tokens, DRAFT_LOGITS)
        before = (logits > logit) | ((logits == logit) & (tokens < token))
        # Groups come in rising order, so of equal scores in one place the first has the lowest token.
        better = before & (score > best)
        best = tl.where(better, score, best)
        best_tokens = tl.where(better, tokens, best_tokens)
    return best_of(best, best_tokens, vocab_size)


@triton.jit
def settle_sample(
    row,
    groups,
    key,
    residual,
    token,
    floor,
    max_count,
    mass_limit,
    DRAFT_LOGITS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    """The token of the best score in the nucleus, given that of the best score in a larger set.

    Where that token is in the nucleus, it is the best there too. Where it is not, no token ordered
    after it is in the nucleus either, so the same is asked of those before it.

    Args:
        token: int32, where to begin; -1: no token can be sampled.
        floor: logit that no token of the nucleus is below; saves work.
        max_count, mass_limit: a token of the nucleus has fewer and less before it, or nothing.

    Returns:
        int32; -1 if no token of the nucleus can be sampled.
    """
    p_row, vocab_size, _, _, lowest = row
    searching = token >= 0
    while searching:
        logit = load_logits(p_row, token, vocab_size)
        num_listed = _list_groups(groups, tl.maximum(logit, floor), ALL_GROUPS)
        inside = logit >= floor
        if inside:
            count, mass = _before(row, groups, num_listed, token, logit, TILE_GROUPS)
            inside = (logit >= lowest) & (count < max_count) & (mass < mass_limit)
            inside = inside | (count == 0)
        searching = inside == 0
        if searching:
            score, token = _sample_before(
                row, groups, num_listed, key, residual, token, logit, DRAFT_LOGITS, TILE_GROUPS
            )
            searching = score > NEG_INF
            token = tl.where(searching, token, -1)
    return token
