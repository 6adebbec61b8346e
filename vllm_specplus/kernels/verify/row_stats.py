"""The first pass over the logits: statistics of each block of a row, and the functions that combine them."""

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.arguments import (
    GREEDY,
    NO_LIMIT,
    NUM_STATS,
    STAT_ABOVE,
    STAT_DRAFT_MAX,
    STAT_DRAFT_SUM,
    STAT_MAX,
    STAT_SUM,
    block_tokens,
    draft_of,
    draft_row_of,
    request_of,
    rows_of,
    temperature_of,
)
from vllm_specplus.kernels.verify.nucleus import (
    GROUP_SIZE,
    LARGEST,
    NEG_INF,
    load_logits,
    load_numbers,
    weigh,
)
from vllm_specplus.kernels.verify.order import least_before, own_groups


@triton.jit(do_not_specialize=["num_reqs", "max_rows"])
def row_stats_kernel(
    logits,  # Logits
    draft_logits,  # DraftLogits
    rows,  # Rows
    temperature_ptr,  # [num_reqs] float32
    stats,  # out: Stats
    groups,  # out: Groups, their maxima
    num_reqs,
    max_rows,
    STRATEGY: tl.constexpr,
    WITH_ABOVE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Grid (num_rows, num_blocks). The mass above the drafts is found if WITH_ABOVE."""
    i_row, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_req = request_of(rows, i_row, num_reqs)
    if i_req >= num_reqs:
        return
    start, num_rows = rows_of(rows, i_req, max_rows)
    i_slot = i_row - start
    if i_slot >= num_rows:
        return
    num_blocks, vocab_size = stats.num_blocks, logits.vocab_size
    p_stats = stats.ptr + i_row * NUM_STATS * num_blocks + i_block
    temperature, is_greedy = temperature_of(temperature_ptr, i_req, STRATEGY)

    numbers, tokens = block_tokens(i_block, BLOCK_GROUPS)
    # As `load_logits`, but for a minimum of each logit.
    values = load_numbers(logits.ptr + i_row * logits.stride, tokens, vocab_size)
    group_max = tl.max(values, axis=1)
    max_logit = tl.minimum(tl.max(group_max, axis=0), LARGEST)
    tl.store(groups.max_ptr + i_row * groups.num_groups + numbers, group_max)
    tl.store(p_stats + STAT_MAX * num_blocks, max_logit)
    if (STRATEGY == GREEDY) | is_greedy:
        return

    if max_logit == LARGEST:
        values = tl.minimum(values, LARGEST)
    tl.store(p_stats + STAT_SUM * num_blocks, tl.sum(weigh(values, max_logit, temperature)))
    is_draft_row = i_slot < num_rows - 1
    if WITH_ABOVE:
        draft = draft_of(logits, rows, i_row, temperature)
        above = tl.zeros((), tl.float32)
        # A draft is a likely token: few blocks have a likelier one. They are loaded again, which spares registers.
        if is_draft_row & (max_logit >= draft.logit):
            values = load_logits(logits.ptr + i_row * logits.stride, tokens, vocab_size)
            least = least_before(numbers, tl.maximum(draft.token, 0), draft.logit)
            above = tl.sum(tl.where(values >= least[:, None], weigh(values, max_logit, temperature), 0.0))
        tl.store(p_stats + STAT_ABOVE * num_blocks, above)
    if is_draft_row:
        if draft_logits.ptr is not None:
            p_draft_row, draft_vocab_size = draft_row_of(draft_logits, i_row, vocab_size)
            draft_values = load_logits(p_draft_row, tokens, draft_vocab_size)
            max_draft_logit = tl.max(draft_values)
            tl.store(p_stats + STAT_DRAFT_MAX * num_blocks, max_draft_logit)
            draft_weight = weigh(draft_values, max_draft_logit, temperature)
            tl.store(p_stats + STAT_DRAFT_SUM * num_blocks, tl.sum(draft_weight))


@triton.jit
def _stats_of(stats, i_rows, which: tl.constexpr, other, sizes):
    """[n, ALL_BLOCKS] float32, one statistic of each block of n rows, `other` past the last block."""
    blocks = tl.arange(0, sizes.ALL_BLOCKS)[None, :]
    p_stats = stats.ptr + (i_rows[:, None] * NUM_STATS + which) * stats.num_blocks
    return tl.load(p_stats + blocks, mask=blocks < stats.num_blocks, other=other)


@triton.jit
def max_logits_of(stats, i_rows, sizes):
    """The largest logit of each row: [n] float32."""
    return tl.max(_stats_of(stats, i_rows, STAT_MAX, NEG_INF, sizes), axis=1)


@triton.jit
def first_tokens(logits, stats, groups, i_rows, sizes):
    """The first token of each row's order.

    Args:
        i_rows: [n] int64.

    Returns:
        [n] int32.
    """
    blocks = tl.arange(0, sizes.ALL_BLOCKS)[None, :]
    best = _stats_of(stats, i_rows, STAT_MAX, NEG_INF, sizes)
    i_rows = i_rows[:, None]
    max_logit = tl.max(best, axis=1)[:, None]
    block = tl.min(tl.where(best == max_logit, blocks, NO_LIMIT), axis=1)[:, None]

    numbers = block * sizes.BLOCK_GROUPS + tl.arange(0, sizes.BLOCK_GROUPS)[None, :]
    best = load_logits(groups.max_ptr + i_rows * groups.num_groups, numbers, groups.num_groups)
    group = tl.min(tl.where(best == max_logit, numbers, NO_LIMIT), axis=1)[:, None]

    tokens = group * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    values = load_logits(logits.ptr + i_rows * logits.stride, tokens, logits.vocab_size)
    return tl.min(tl.where(values == max_logit, tokens, NO_LIMIT), axis=1)


@triton.jit
def first_token(logits, stats, groups, i_row, sizes):
    """The first token of one row's order: int32."""
    return tl.sum(first_tokens(logits, stats, groups, tl.zeros((1,), tl.int64) + i_row, sizes), axis=0)


@triton.jit
def _weighted_sums(mass, weight):
    """The sums of mass x weight over [n, ALL_BLOCKS], the same to the last bit in every thread: [n] float32.

    The sum of bare products may differ between threads. The compiler may fuse a thread's own product with the addition
    of its neighbour's product, which has been rounded. The neighbour does so with the roles exchanged. Threads that
    disagree about a number that they branch on wait for each other for ever. The compiler fuses no product that was
    chosen over 0.
    """
    return tl.sum(tl.where(mass > 0.0, mass * weight, 0.0), axis=1)


@triton.jit
def _masses_of(stats, i_rows, which: tl.constexpr, max_logits, temperature, sizes):
    """The sum over each row of a mass that each block has relative to its own largest logit: [n] float32."""
    best = _stats_of(stats, i_rows, STAT_MAX, NEG_INF, sizes)
    weight = weigh(best, max_logits[:, None], temperature)
    return _weighted_sums(_stats_of(stats, i_rows, which, 0.0, sizes), weight)


@triton.jit
def total_masses_of(stats, i_rows, max_logits, temperature, sizes):
    """The mass of all tokens of each row: [n] float32."""
    return _masses_of(stats, i_rows, STAT_SUM, max_logits, temperature, sizes)


@triton.jit
def masses_above_drafts(logits, stats, i_rows, max_logits, drafts, temperature, sizes):
    """The mass of the tokens that are ordered before each row's draft: [n] float32."""
    others = _masses_of(stats, i_rows, STAT_ABOVE, max_logits, temperature, sizes)
    p_rows = logits.ptr + i_rows * logits.stride
    values, before = own_groups(p_rows, logits.vocab_size, tl.maximum(drafts.token, 0), drafts.logit)
    return others + tl.sum(tl.where(before, weigh(values, max_logits[:, None], temperature), 0.0), axis=1)


@triton.jit
def draft_masses_of(stats, i_rows, temperature, sizes):
    """The draft model's largest logit at each row, -inf if it has no distribution there, and its mass: [n] float32."""
    best = _stats_of(stats, i_rows, STAT_DRAFT_MAX, NEG_INF, sizes)
    max_logits = tl.max(best, axis=1)
    mass = _stats_of(stats, i_rows, STAT_DRAFT_SUM, 0.0, sizes)
    return max_logits, _weighted_sums(mass, weigh(best, max_logits[:, None], temperature))
