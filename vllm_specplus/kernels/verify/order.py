"""The tokens of a row that are ordered before a given one: their mass, their number, and a sample of them."""

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.nucleus import (
    GROUP_SIZE,
    NEG_INF,
    POS_INF,
    best_of,
    from_order_key,
    load_logits,
    order_key,
    score_tokens,
    tile_of,
    weigh,
)

_SCAN_RUN = tl.constexpr(8)  # tokens side by side, which one thread loads at once where each is of two bytes


@triton.jit
def least_before(numbers, token, logit):
    """The least logit that a token of some groups must have to be ordered before a given one: float32.

    It is infinite in the token's own group, whose tokens differ in it.
    """
    own = token // GROUP_SIZE
    next_above = from_order_key(order_key(logit) + 1)
    return tl.where(numbers < own, logit, tl.where(numbers > own, next_above, POS_INF))


@triton.jit
def own_groups(p_rows, vocab_size, tokens, logits):
    """[n, GROUP_SIZE] logits of the own groups of n tokens, and which are ordered before the token: float32, bool."""
    others = (tokens // GROUP_SIZE * GROUP_SIZE)[:, None] + tl.arange(0, GROUP_SIZE)[None, :]
    values = load_logits(p_rows[:, None], others, vocab_size)
    is_equal = values == logits[:, None]
    return values, (values > logits[:, None]) | (is_equal & (others < tokens[:, None]))


@triton.jit
def _own_group(row, token, logit):
    """As `own_groups`, of one token: [1, GROUP_SIZE]."""
    one = tl.zeros((1,), tl.int32)
    return own_groups(row.ptr + one, row.vocab_size, token + one, logit + one.to(tl.float32))


@triton.jit
def _sums_of_runs(values):
    """The sums over each `_SCAN_RUN` tokens side by side: [NUM, GROUP_SIZE / `_SCAN_RUN`] of [NUM, GROUP_SIZE].

    A scan adds these up, since a sum for each token would need more registers than there are.
    """
    return tl.sum(tl.reshape(values, (values.shape[0], GROUP_SIZE // _SCAN_RUN, _SCAN_RUN)), axis=2)


@triton.jit
def mass_before(row, groups, num_listed, token, logit, sizes):
    """The mass of the tokens ordered before one: float32."""
    mass = tl.zeros((sizes.SCAN_GROUPS, GROUP_SIZE // _SCAN_RUN), tl.float32)
    for first in range(0, num_listed, sizes.SCAN_GROUPS):
        numbers, tokens = tile_of(groups, first, num_listed, sizes.SCAN_GROUPS)
        logits = load_logits(row.ptr, tokens, row.vocab_size)
        before = logits >= least_before(numbers, token, logit)[:, None]
        mass += _sums_of_runs(tl.where(before, weigh(logits, row.max_logit, row.temperature), 0.0))
    logits, before = _own_group(row, token, logit)
    return tl.sum(mass) + tl.sum(tl.where(before, weigh(logits, row.max_logit, row.temperature), 0.0))


@triton.jit
def count_before(row, groups, num_listed, token, logit, sizes):
    """The number of tokens ordered before one: int32."""
    count = tl.zeros((sizes.SCAN_GROUPS, GROUP_SIZE // _SCAN_RUN), tl.int32)
    for first in range(0, num_listed, sizes.SCAN_GROUPS):
        numbers, tokens = tile_of(groups, first, num_listed, sizes.SCAN_GROUPS)
        logits = load_logits(row.ptr, tokens, row.vocab_size)
        count += _sums_of_runs((logits >= least_before(numbers, token, logit)[:, None]).to(tl.int32))
    _, before = _own_group(row, token, logit)
    return tl.sum(count) + tl.sum(before.to(tl.int32))


@triton.jit
def equal_token(row, groups, num_listed, logit, number, sizes):
    """The token of a given logit that has `number` tokens of the same before it: int32.

    Args:
        groups: all that hold the logit are listed, in rising order.
    """
    token = tl.zeros((), tl.int32) + row.vocab_size
    num_seen, first = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    while (token == row.vocab_size) & (first < num_listed):
        numbers, tokens = tile_of(groups, first, num_listed, sizes.SCAN_GROUPS)
        by_group = tl.sum((load_logits(row.ptr, tokens, row.vocab_size) == logit).to(tl.int32), axis=1)
        before = num_seen + tl.cumsum(by_group, axis=0) - by_group
        is_its_group = (before <= number) & (number < before + by_group)
        if tl.sum(is_its_group.to(tl.int32), axis=0) > 0:
            own = tl.sum(tl.where(is_its_group, numbers, 0), axis=0) * GROUP_SIZE + tl.arange(0, GROUP_SIZE)
            is_equal = (load_logits(row.ptr, own, row.vocab_size) == logit).to(tl.int32)
            at = tl.sum(tl.where(is_its_group, before, 0), axis=0) + tl.cumsum(is_equal, axis=0) - 1
            token = tl.sum(tl.where((is_equal > 0) & (at == number), own, 0), axis=0)
        num_seen += tl.sum(by_group, axis=0)
        first += sizes.SCAN_GROUPS
    return token


@triton.jit
def sample_before(row, groups, num_listed, key, residual, token, logit, floor, sizes, DRAFT_LOGITS: tl.constexpr):
    """The best score of the tokens before one whose logits are at least `floor`, and its token: float32, int32."""
    best = tl.full((sizes.LIST_GROUPS, GROUP_SIZE), NEG_INF, tl.float32)
    best_tokens = tl.zeros((sizes.LIST_GROUPS, GROUP_SIZE), tl.int32) + row.vocab_size
    for first in range(0, num_listed, sizes.LIST_GROUPS):
        _, tokens = tile_of(groups, first, num_listed, sizes.LIST_GROUPS)
        logits, score = score_tokens(row, key, residual, tokens, DRAFT_LOGITS)
        before = (logits > logit) | ((logits == logit) & (tokens < token))
        better = before & (logits >= floor) & ((score > best) | ((score == best) & (tokens < best_tokens)))
        best = tl.where(better, score, best)
        best_tokens = tl.where(better, tokens, best_tokens)
    return best_of(best, best_tokens, row.vocab_size)
