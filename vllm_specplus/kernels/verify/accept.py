"""`accept_kernel` walks over each request's rows until a draft is not accepted, and decides what follows the drafts."""

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.arguments import (
    GREEDY,
    NORMAL,
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
    REJECT_ALL,
    REJECTION,
    TARGET_MATCH,
    draft_of,
    filters_of,
    rows_of,
    temperature_of,
)
from vllm_specplus.kernels.verify.nucleus import (
    NEG_INF,
    POS_INF,
    find_cut,
)
from vllm_specplus.kernels.verify.row_stats import (
    draft_mass_of,
    total_mass_of,
)
from vllm_specplus.kernels.verify.strategies import (
    Batch,
    Request,
    judge_draft,
    kept_by_count,
    key_of,
    nucleus_mass,
    row_at,
    sample_of_row,
)


@triton.jit
def _plan_residual(batch, request, p_floats, i_row, row, groups, total, sizes, FILTERED: tl.constexpr):
    """Write what a rejected draft leaves to be sampled, if the draft was sampled itself.

    Returns:
        The two numbers that every plan has: the excluded token, int32, and the log of the draft model's mass, float32.
        The log is infinite if the draft was not sampled.
    """
    draft = draft_of(batch.logits, batch.rows, i_row, request.temperature)
    excluded = draft.token
    draft_log_mass = tl.full((), POS_INF, tl.float32)
    if batch.draft_logits.ptr is not None:
        max_draft_logit, draft_mass = draft_mass_of(batch.stats, i_row, request.temperature, sizes)
        if (draft.token >= 0) & (max_draft_logit > NEG_INF):
            excluded = tl.full((), -1, tl.int32)
            draft_log_mass = tl.log(draft_mass)
            mass = total
            if FILTERED:
                mass = nucleus_mass(row, groups, request.filters, total, sizes)
            tl.store(p_floats + PLAN_LOG_MASS, tl.log(mass))
            tl.store(p_floats + PLAN_DRAFT_MAX, max_draft_logit)
    return excluded, draft_log_mass


@triton.jit
def _plan_sample(
    batch,
    request,
    plans,
    run,
    row,
    groups,
    first,
    max_candidates,
    sizes,
    STRATEGY: tl.constexpr,
    POLICY: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """Write the plan for the sample that follows the accepted drafts, of `topp` or `rejection`."""
    filters, i_row = request.filters, request.start + run
    p_floats = plans.floats_ptr + request.i_req * NUM_PLAN_FLOATS
    p_ints = plans.ints_ptr + request.i_req * NUM_PLAN_INTS
    total = total_mass_of(batch.stats, i_row, row, sizes)
    tl.store(p_floats + PLAN_MAX, row.max_logit)
    if FILTERED:
        floor, mass = kept_by_count(row, groups, filters, total, sizes)
        tl.store(p_floats + PLAN_LIMIT, tl.where(filters.top_p < 1.0, filters.top_p * mass, POS_INF))
        if max_candidates < tl.minimum(filters.top_k, row.vocab_size):
            no_limit = tl.full((), POS_INF, tl.float32)
            floor, _ = find_cut(row, groups, max_candidates, total, no_limit, sizes)
        tl.store(p_floats + PLAN_FLOOR, floor)
    excluded = tl.full((), -1, tl.int32)
    draft_log_mass = tl.full((), POS_INF, tl.float32)
    if (STRATEGY == REJECTION) & (POLICY == NORMAL):
        if run < request.num_rows - 1:
            excluded, draft_log_mass = _plan_residual(
                batch, request, p_floats, i_row, row, groups, total, sizes, FILTERED
            )
    tl.store(p_floats + PLAN_DRAFT_LOG_MASS, draft_log_mass)
    tl.store(p_ints + PLAN_ROW, i_row)
    tl.store(p_ints + PLAN_SLOT, run)
    tl.store(p_ints + PLAN_EXCLUDED, excluded)
    tl.store(p_ints + PLAN_FIRST, first)


@triton.jit(do_not_specialize=["max_rows", "verify_window", "max_candidates"])
def accept_kernel(
    logits,  # Logits
    draft_logits,  # DraftLogits
    rows,  # Rows
    temperature_ptr,  # [num_reqs] float32
    filters,  # Filters
    keys,  # NoiseKeys
    stats,  # Stats
    groups,  # Groups
    plans,  # out: Plans
    output,  # out: Output
    max_rows,
    verify_window,
    max_candidates,
    sizes,  # Sizes
    STRATEGY: tl.constexpr,
    POLICY: tl.constexpr,
    FILTERED: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
):
    """Grid (num_reqs,). `stats` and the maxima of `groups` are as `row_stats_kernel` left them."""
    i_req = tl.program_id(0).to(tl.int64)
    start, num_rows = rows_of(rows, i_req, max_rows)
    temperature, is_greedy = temperature_of(temperature_ptr, i_req, STRATEGY)
    request = Request(i_req, start, num_rows, temperature, is_greedy, filters_of(filters, i_req))
    batch = Batch(logits, draft_logits, rows, keys, stats, groups)

    run = tl.zeros((), tl.int32)  # drafts accepted so far
    token = tl.full((), -1, tl.int32)  # the token that the row under test emits; -1: not known yet
    going = (num_rows > 1) & (POLICY != REJECT_ALL)
    while going:
        draft = draft_of(logits, rows, start + run, temperature)
        accepted = draft.is_usable
        if (POLICY == NORMAL) & accepted:
            accepted, token = judge_draft(
                batch, request, run, draft, verify_window, max_candidates, sizes, STRATEGY, FILTERED
            )
        run += accepted.to(tl.int32)
        token = tl.where(accepted, -1, token)
        going = accepted & (run < num_rows - 1)

    tl.store(plans.ints_ptr + i_req * NUM_PLAN_INTS + PLAN_ROW, -1)
    if num_rows > 0:
        i_row = start + run
        row, row_groups, first = row_at(batch, request, i_row, sizes)
        if (STRATEGY == GREEDY) | is_greedy:
            token = first
        elif STRATEGY == TARGET_MATCH:
            if token < 0:
                key = key_of(batch, request, i_row)
                token = sample_of_row(batch, row, row_groups, request.filters, i_row, key, first, sizes, FILTERED)
        else:
            _plan_sample(
                batch, request, plans, run, row, row_groups, first, max_candidates, sizes, STRATEGY, POLICY, FILTERED
            )

    slots = tl.arange(0, ALL_SLOTS)
    drafts = tl.load(rows.drafts_ptr + start + slots, mask=slots < run, other=-1)
    tokens = tl.where((slots == run) & (num_rows > 0), token, drafts)
    tl.store(output.token_ids_ptr + i_req * max_rows + slots, tokens, mask=slots < max_rows)
    tl.store(output.num_tokens_ptr + i_req, tl.where(num_rows > 0, run + 1, 0))
