"""The sample that follows the accepted drafts, of `topp` and `rejection`.

`sample_kernel` finds the best score in each block of the row that `accept_kernel` has planned. `emit_kernel` takes the
best of all blocks. If that token is outside the nucleus, it searches on.
"""

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.arguments import (
    NO_LIMIT,
    NUM_PLAN_FLOATS,
    NUM_PLAN_INTS,
    PLAN_DRAFT_LOG_MASS,
    PLAN_DRAFT_MAX,
    PLAN_EXCLUDED,
    PLAN_FIRST,
    PLAN_FLOOR,
    PLAN_LIMIT,
    PLAN_LOG_MASS,
    PLAN_MAX,
    PLAN_ROW,
    PLAN_SLOT,
    REJECTION,
    best_block,
    block_tokens,
    draft_row_of,
    filters_of,
    temperature_of,
)
from vllm_specplus.kernels.verify.nucleus import (
    NEG_INF,
    NoiseKey,
    Residual,
    Row,
    RowGroups,
    best_of,
    lowest_kept,
    score_tokens,
    settle_sample,
)


@triton.jit
def _plan_of(logits, draft_logits, temperature_ptr, filters, keys, plans, i_req, i_row):
    """The `Row` that a request samples from, its `NoiseKey` and its `Residual`."""
    p_floats, p_ints = plans.floats_ptr + i_req * NUM_PLAN_FLOATS, plans.ints_ptr + i_req * NUM_PLAN_INTS
    p_row = logits.ptr + i_row * logits.stride
    p_draft_row = p_row
    if draft_logits.ptr is not None:
        p_draft_row, _ = draft_row_of(draft_logits, i_row, logits.vocab_size)
    temperature, _ = temperature_of(temperature_ptr, i_req, REJECTION)
    max_logit = tl.load(p_floats + PLAN_MAX)
    lowest = lowest_kept(max_logit, temperature, filters_of(filters, i_req).min_p)
    row = Row(p_row, logits.vocab_size, temperature, max_logit, lowest)
    key = NoiseKey(tl.load(keys.seeds_ptr + i_req), tl.load(keys.positions_ptr + i_row))
    residual = Residual(
        p_draft_row,
        tl.load(p_ints + PLAN_EXCLUDED),
        tl.load(p_floats + PLAN_LOG_MASS),
        tl.load(p_floats + PLAN_DRAFT_MAX),
        tl.load(p_floats + PLAN_DRAFT_LOG_MASS),
    )
    return row, key, residual


@triton.jit
def sample_kernel(
    logits,  # Logits
    draft_logits,  # DraftLogits
    temperature_ptr,  # [num_reqs] float32
    filters,  # Filters, min-p alone
    keys,  # NoiseKeys
    groups,  # Groups, as `row_stats_kernel` left them
    plans,  # Plans, as `accept_kernel` left them
    samples,  # out: Samples
    FILTERED: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Grid (num_blocks, num_reqs)."""
    i_block, i_req = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_row = tl.load(plans.ints_ptr + i_req * NUM_PLAN_INTS + PLAN_ROW)
    if i_row < 0:
        return
    numbers, tokens = block_tokens(i_block, BLOCK_GROUPS)
    at = i_req * samples.num_blocks + i_block
    if FILTERED:
        p_max = groups.max_ptr + i_row * groups.num_groups
        best = tl.load(p_max + numbers, mask=numbers < groups.num_groups, other=NEG_INF)
        if tl.max(best, axis=0) < tl.load(plans.floats_ptr + i_req * NUM_PLAN_FLOATS + PLAN_FLOOR):
            tl.store(samples.scores_ptr + at, NEG_INF)
            tl.store(samples.tokens_ptr + at, 0)
            return
    row, key, residual = _plan_of(logits, draft_logits, temperature_ptr, filters, keys, plans, i_req, i_row)
    _, score = score_tokens(row, key, residual, tokens, draft_logits.ptr is not None)
    best, best_token = best_of(score, tokens, logits.vocab_size)
    tl.store(samples.scores_ptr + at, best)
    tl.store(samples.tokens_ptr + at, best_token)


@triton.jit(do_not_specialize=["max_rows", "max_candidates"])
def emit_kernel(
    logits,  # Logits
    draft_logits,  # DraftLogits
    temperature_ptr,  # [num_reqs] float32
    filters,  # Filters, top-k and min-p alone
    keys,  # NoiseKeys
    groups,  # Groups, as `row_stats_kernel` left them
    plans,  # Plans, as `accept_kernel` left them
    samples,  # Samples, as `sample_kernel` left them
    token_ids_ptr,  # out [num_reqs, max_rows] int64: one slot of each request
    max_rows,
    max_candidates,
    sizes,  # Sizes
    FILTERED: tl.constexpr,
):
    """Grid (num_reqs,)."""
    i_req = tl.program_id(0).to(tl.int64)
    p_floats, p_ints = plans.floats_ptr + i_req * NUM_PLAN_FLOATS, plans.ints_ptr + i_req * NUM_PLAN_INTS
    i_row = tl.load(p_ints + PLAN_ROW)
    if i_row < 0:
        return
    num_blocks, num_groups = samples.num_blocks, groups.num_groups
    blocks = tl.arange(0, sizes.ALL_BLOCKS)
    at = i_req * num_blocks + blocks
    score, token = best_block(
        tl.load(samples.scores_ptr + at, mask=blocks < num_blocks, other=NEG_INF),
        tl.load(samples.tokens_ptr + at, mask=blocks < num_blocks, other=NO_LIMIT),
    )
    token = tl.where(score > NEG_INF, token, -1)
    if FILTERED:
        row, key, residual = _plan_of(logits, draft_logits, temperature_ptr, filters, keys, plans, i_req, i_row)
        token = settle_sample(
            row,
            RowGroups(groups.max_ptr + i_row * num_groups, groups.list_ptr + i_req * num_groups, num_groups),
            key,
            residual,
            token,
            tl.load(p_floats + PLAN_FLOOR),
            tl.minimum(filters_of(filters, i_req).top_k, max_candidates),
            tl.load(p_floats + PLAN_LIMIT),
            sizes,
            draft_logits.ptr is not None,
        )
    first = tl.load(p_ints + PLAN_FIRST).to(tl.int32)
    p_slot = token_ids_ptr + i_req * max_rows + tl.load(p_ints + PLAN_SLOT)
    tl.store(p_slot, tl.where(token >= 0, token, first))
