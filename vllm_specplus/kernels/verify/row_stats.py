"""The first pass over the logits: statistics of each block of a row, and the functions that combine them."""

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.arguments import (
    GREEDY,
    NO_LIMIT,
    NUM_STAT_FLOATS,
    NUM_STAT_INTS,
    STAT_ABOVE,
    STAT_ARGMAX,
    STAT_DRAFT_MAX,
    STAT_DRAFT_SUM,
    STAT_MAX,
    STAT_RANK,
    STAT_SAMPLE,
    STAT_SCORE,
    STAT_SUM,
    TARGET_MATCH,
    best_block,
    block_tokens,
    draft_of,
    draft_row_of,
    rows_of,
    temperature_of,
)
from vllm_specplus.kernels.verify.noise import gumbel_noise
from vllm_specplus.kernels.verify.nucleus import LARGEST, NEG_INF, best_of, load_logits, weigh


@triton.jit(do_not_specialize=["max_rows"])
def row_stats_kernel(
    logits,  # Logits
    draft_logits,  # DraftLogits
    rows,  # Rows
    temperature_ptr,  # [num_reqs] float32
    keys,  # NoiseKeys
    stats,  # out: Stats
    groups,  # out: Groups, their maxima if FILTERED
    max_rows,
    STRATEGY: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Grid (num_blocks, max_rows, num_reqs)."""
    i_block, i_slot, i_req = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, num_rows = rows_of(rows, i_req, max_rows)
    if i_slot >= num_rows:
        return
    i_row = start + i_slot
    num_blocks, vocab_size = stats.num_blocks, logits.vocab_size
    p_floats = stats.floats_ptr + i_row * NUM_STAT_FLOATS * num_blocks + i_block
    p_ints = stats.ints_ptr + i_row * NUM_STAT_INTS * num_blocks + i_block
    temperature, is_greedy = temperature_of(temperature_ptr, i_req, STRATEGY)

    numbers, tokens = block_tokens(i_block, BLOCK_GROUPS)
    values = load_logits(logits.ptr + i_row * logits.stride, tokens, vocab_size)
    max_logit, first = best_of(values, tokens, vocab_size)
    tl.store(p_floats + STAT_MAX * num_blocks, max_logit)
    tl.store(p_ints + STAT_ARGMAX * num_blocks, first)
    if (STRATEGY == GREEDY) | is_greedy:
        return

    if FILTERED:
        p_max = groups.max_ptr + i_row * groups.num_groups
        tl.store(p_max + numbers, tl.max(values, axis=1), mask=numbers < groups.num_groups)
    weight = weigh(values, max_logit, temperature)
    tl.store(p_floats + STAT_SUM * num_blocks, tl.sum(weight))
    if STRATEGY == TARGET_MATCH:
        noise = gumbel_noise(tl.load(keys.seeds_ptr + i_req), tl.load(keys.positions_ptr + i_row), tokens)
        score, sample = best_of(tl.minimum(values / temperature + noise, LARGEST), tokens, vocab_size)
        tl.store(p_floats + STAT_SCORE * num_blocks, score)
        tl.store(p_ints + STAT_SAMPLE * num_blocks, sample)
    elif i_slot < num_rows - 1:
        draft = draft_of(logits, rows, i_row, temperature)
        before = (values > draft.logit) | ((values == draft.logit) & (tokens < draft.token))
        tl.store(p_floats + STAT_ABOVE * num_blocks, tl.sum(tl.where(before, weight, 0.0)))
        tl.store(p_ints + STAT_RANK * num_blocks, tl.sum(before.to(tl.int32)))
        if draft_logits.ptr is not None:
            p_draft_row, draft_vocab_size = draft_row_of(draft_logits, i_row, vocab_size)
            draft_values = load_logits(p_draft_row, tokens, draft_vocab_size)
            max_draft_logit = tl.max(draft_values)
            tl.store(p_floats + STAT_DRAFT_MAX * num_blocks, max_draft_logit)
            draft_weight = weigh(draft_values, max_draft_logit, temperature)
            tl.store(p_floats + STAT_DRAFT_SUM * num_blocks, tl.sum(draft_weight))


@triton.jit
def _floats_of(stats, i_row, which: tl.constexpr, other, sizes):
    """[ALL_BLOCKS] float32, one number of each block of a row, `other` past the last block."""
    blocks = tl.arange(0, sizes.ALL_BLOCKS)
    p_floats = stats.floats_ptr + (i_row * NUM_STAT_FLOATS + which) * stats.num_blocks
    return tl.load(p_floats + blocks, mask=blocks < stats.num_blocks, other=other)


@triton.jit
def _ints_of(stats, i_row, which: tl.constexpr, other, sizes):
    """[ALL_BLOCKS] int32, one number of each block of a row, `other` past the last block."""
    blocks = tl.arange(0, sizes.ALL_BLOCKS)
    p_ints = stats.ints_ptr + (i_row * NUM_STAT_INTS + which) * stats.num_blocks
    return tl.load(p_ints + blocks, mask=blocks < stats.num_blocks, other=other)


@triton.jit
def first_of(stats, i_row, sizes):
    """The largest logit of a row and the first token of its order: float32, int32."""
    return best_block(
        _floats_of(stats, i_row, STAT_MAX, NEG_INF, sizes), _ints_of(stats, i_row, STAT_ARGMAX, NO_LIMIT, sizes)
    )


@triton.jit
def best_score_of(stats, i_row, sizes):
    """The best score of a row by `target_match`, and its token: float32, int32."""
    return best_block(
        _floats_of(stats, i_row, STAT_SCORE, NEG_INF, sizes), _ints_of(stats, i_row, STAT_SAMPLE, NO_LIMIT, sizes)
    )


@triton.jit
def rank_of_draft(stats, i_row, sizes):
    """The number of tokens that a row orders before its draft: int32."""
    return tl.sum(_ints_of(stats, i_row, STAT_RANK, 0, sizes), axis=0)


@triton.jit
def _weighted_sum(mass, weight):
    """The sum of mass x weight over [ALL_BLOCKS], the same to the last bit in every thread: float32.

    The sum of bare products may differ between threads. The compiler may fuse a thread's own product with the addition
    of its neighbour's product, which has been rounded. The neighbour does so with the roles exchanged. Threads that
    disagree about a number that they branch on wait for each other for ever. The compiler fuses no product that was
    chosen over 0.
    """
    return tl.sum(tl.where(mass > 0.0, mass * weight, 0.0), axis=0)


@triton.jit
def _mass_of(stats, i_row, which: tl.constexpr, max_logit, temperature, sizes):
    """The sum over a row of a mass that each block has relative to its own largest logit: float32."""
    best = _floats_of(stats, i_row, STAT_MAX, NEG_INF, sizes)
    return _weighted_sum(_floats_of(stats, i_row, which, 0.0, sizes), weigh(best, max_logit, temperature))


@triton.jit
def total_mass_of(stats, i_row, row, sizes):
    """The mass of all tokens of a row: float32."""
    return _mass_of(stats, i_row, STAT_SUM, row.max_logit, row.temperature, sizes)


@triton.jit
def mass_above_draft(stats, i_row, row, sizes):
    """The mass of the tokens that are ordered before a row's draft: float32."""
    return _mass_of(stats, i_row, STAT_ABOVE, row.max_logit, row.temperature, sizes)


@triton.jit
def draft_mass_of(stats, i_row, temperature, sizes):
    """The draft model's largest logit at a row, -inf if it has no distribution there, and its mass: float32."""
    best = _floats_of(stats, i_row, STAT_DRAFT_MAX, NEG_INF, sizes)
    max_logit = tl.max(best, axis=0)
    mass = _floats_of(stats, i_row, STAT_DRAFT_SUM, 0.0, sizes)
    return max_logit, _weighted_sum(mass, weigh(best, max_logit, temperature))
