"""The head of a row: its likeliest tokens, few enough to be compared with each other at once.

Where a filter keeps few tokens, the nucleus is in the head. Its mass and its members follow from the ranks of the
head's tokens, and nothing has to be searched. A row that keeps more tokens has no head.

The largest logits of the groups say how far down the head must reach. Each of them is one token's logit. So at least k
tokens are as likely as the k-th largest of them. The mass of the k largest is at most the mass of those tokens.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.nucleus import (
    LARGEST,
    NEG_INF,
    POS_INF,
    best_of,
    group_max,
    list_groups,
    load_logits,
    score_tokens,
    tile_of,
    weigh,
)

# Float32 sums of a row's weights are off by less than this part of them.
_MASS_SLACK = tl.constexpr(1e-5)
# Tokens of a head that the others are compared with at once.
_CHUNK = tl.constexpr(32)
_MOST_BOUNDS = tl.constexpr(24)


class Need(NamedTuple):
    """How far down a head must reach: to a rank, to the mass before it, or to a logit, whichever comes first."""

    count: tl.tensor  # int32
    mass: tl.tensor  # float32
    logit: tl.tensor  # float32
    least_count: tl.tensor  # int32; the rank that it must reach in any case


class Head(NamedTuple):
    """Each [HEAD_SIZE], in order of the tokens' ids. Past the last token, logits are -inf and tokens not in the row."""

    tokens: tl.tensor  # int32
    logits: tl.tensor  # float32
    weight: tl.tensor  # float32
    rank: tl.tensor  # int32, the number of tokens ordered before each
    before: tl.tensor  # float32, the mass of those tokens


@triton.jit
def _bound_of_head(row, groups, need, sizes):
    """A logit such that the head is all tokens of at least that, float32, and whether one was found, bool."""
    _, best = group_max(groups, sizes)
    weight = weigh(best, row.max_logit, row.temperature)
    num_groups = tl.sum((best > NEG_INF).to(tl.int32), axis=0)
    near = tl.zeros((), tl.float32)  # a distance from the largest logit that is too small
    far = tl.full((), POS_INF, tl.float32)  # and one that is too large
    distance = tl.zeros((), tl.float32)
    bound = row.max_logit + 0.0
    found = tl.full((), False, tl.int1)
    tried = tl.zeros((), tl.int32)
    while (found == 0) & (tried < _MOST_BOUNDS):
        bound = row.max_logit - distance * row.temperature
        is_listed = (best >= bound) & (best > NEG_INF)
        count = tl.sum(is_listed.to(tl.int32), axis=0)
        mass = tl.sum(tl.where(is_listed, weight, 0.0), axis=0)
        reaches = (count >= need.count) | (mass >= need.mass * (1.0 + _MASS_SLACK)) | (bound <= need.logit)
        reaches = reaches & (count >= need.least_count)
        # If nothing is left to list, the head is the whole row.
        is_whole = (reaches == 0) & (count == num_groups)
        reaches = reaches | is_whole
        bound = tl.where(is_whole, -LARGEST, bound)
        is_small = count <= sizes.HEAD_GROUPS
        found = reaches & is_small
        # The head must reach further, but there are too many tokens as it is.
        tried = tl.where(reaches | is_small, tried + 1, _MOST_BOUNDS)
        near = tl.where(reaches, near, distance)
        far = tl.where(reaches, distance, far)
        distance = tl.where(far < POS_INF, 0.5 * (near + far), tl.maximum(2.0 * distance, 1.0))
    return bound, found


@triton.jit
def _store_head(row, groups, heads, i_row, bound, num_listed, sizes):
    """Write the tokens of the listed groups whose logit is at least `bound`, as far as there is room.

    Returns:
        How many they are: int32.
    """
    num_tokens = tl.zeros((), tl.int32)
    # Here the judges need the most registers, and what a compiler moves out of the loop takes more.
    for first in tl.range(0, num_listed, sizes.TILE_GROUPS, disable_licm=True):
        _, tokens = tile_of(groups, first, num_listed, sizes.TILE_GROUPS)
        logits = load_logits(row.ptr, tokens, row.vocab_size)
        taken = (logits >= bound).to(tl.int32)
        by_group = tl.sum(taken, axis=1)
        start = num_tokens + tl.cumsum(by_group, axis=0) - by_group
        at = start[:, None] + tl.cumsum(taken, axis=1) - 1
        is_stored = (taken > 0) & (at < sizes.HEAD_SIZE)
        tl.store(heads.tokens_ptr + i_row * sizes.HEAD_SIZE + at, tokens, mask=is_stored)
        tl.store(heads.logits_ptr + i_row * sizes.HEAD_SIZE + at, logits, mask=is_stored)
        num_tokens += tl.sum(by_group, axis=0)
    # Other threads of this program read them.
    tl.debug_barrier()
    return num_tokens


@triton.jit
def _load_head(row, heads, i_row, num_tokens, sizes):
    """The `Head` of a row, which has `num_tokens`."""
    p_tokens, p_logits = heads.tokens_ptr + i_row * sizes.HEAD_SIZE, heads.logits_ptr + i_row * sizes.HEAD_SIZE
    at = tl.arange(0, sizes.HEAD_SIZE)
    tokens = tl.load(p_tokens + at, mask=at < num_tokens, other=row.vocab_size)
    logits = tl.load(p_logits + at, mask=at < num_tokens, other=NEG_INF)
    rank = tl.zeros((sizes.HEAD_SIZE,), tl.int32)
    before = tl.zeros((sizes.HEAD_SIZE,), tl.float32)
    for first in range(0, num_tokens, _CHUNK):
        # The others are along the first axis, most of which a thread has to itself.
        others = first + tl.arange(0, _CHUNK)[:, None]
        other = tl.load(p_logits + others, mask=others < num_tokens, other=NEG_INF)
        is_before = (other > logits[None, :]) | ((other == logits[None, :]) & (others < at[None, :]))
        rank += tl.sum(is_before.to(tl.int32), axis=0)
        before += tl.sum(tl.where(is_before, weigh(other, row.max_logit, row.temperature), 0.0), axis=0)
    return Head(tokens, logits, weigh(logits, row.max_logit, row.temperature), rank, before)


@triton.jit
def head_of(row, groups, heads, i_row, need, sizes):
    """The `Head` of a row, and whether it has one: bool. Without one the head is empty."""
    num_tokens = tl.zeros((), tl.int32)
    bound, has_head = _bound_of_head(row, groups, need, sizes)
    if has_head:
        num_listed = list_groups(groups, bound, sizes)
        num_tokens = _store_head(row, groups, heads, i_row, bound, num_listed, sizes)
        has_head = num_tokens <= sizes.HEAD_SIZE
        num_tokens = tl.where(has_head, num_tokens, 0)
    return _load_head(row, heads, i_row, num_tokens, sizes), has_head


@triton.jit
def nucleus_of_head(row, head, filters, total):
    """Which tokens of a head are in the nucleus, [HEAD_SIZE] bool, and the mass of the nucleus, float32.

    The head must reach as far as the filters do, and as top-k and min-p alone if top-p acts on what they keep.
    """
    kept = (head.logits >= row.lowest) & (head.rank < filters.top_k)
    mass = total
    if (filters.top_k < row.vocab_size) | (filters.min_p > 0.0):
        mass = tl.sum(tl.where(kept, head.weight, 0.0), axis=0)
    limit = tl.where(filters.top_p < 1.0, filters.top_p * mass, POS_INF)
    # Tokens outside of the head have -inf and the highest rank.
    inside = (kept & (head.before < limit)) | ((head.rank == 0) & (head.tokens < row.vocab_size))
    return inside, tl.sum(tl.where(inside, head.weight, 0.0), axis=0)


@triton.jit
def sample_of_head(row, head, inside, key, residual, DRAFT_LOGITS: tl.constexpr):
    """A sample among some tokens of a head, the first of all where none of them can be sampled: int32."""
    _, score = score_tokens(row, key, residual, head.tokens, DRAFT_LOGITS)
    best, token = best_of(tl.where(inside, score, NEG_INF), head.tokens, row.vocab_size)
    is_first = (head.rank == 0) & (head.tokens < row.vocab_size)
    first = tl.sum(tl.where(is_first, head.tokens, 0), axis=0)
    return tl.where(best > NEG_INF, token, first)
