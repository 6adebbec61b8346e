"""`judge_kernel` decides each row by itself: whether its draft is accepted, and what is emitted if it is not.

Most rows are settled there. A row that keeps too many tokens for a `Head` leaves its sample to the kernels after it.
"""

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.arguments import (
    GREEDY,
    NORMAL,
    NUM_PLAN_FLOATS,
    NUM_PLAN_INTS,
    PLAN_ACCEPTS,
    PLAN_DRAFT_LOG_MASS,
    PLAN_DRAFT_MAX,
    PLAN_EXCLUDED,
    PLAN_FLOOR,
    PLAN_LIMIT,
    PLAN_LOG_MASS,
    PLAN_MAX,
    PLAN_NUM_LISTED,
    PLAN_REQUEST,
    PLAN_SHARE,
    PLAN_TOKEN,
    REJECT_ALL,
    REJECTION,
    TARGET_MATCH,
    draft_of,
    draft_row_of,
    filters_of,
    request_of,
    rows_of,
    temperature_of,
)
from vllm_specplus.kernels.verify.head import head_of, nucleus_of_head, sample_of_head
from vllm_specplus.kernels.verify.nucleus import (
    NEG_INF,
    POS_INF,
    NoiseKey,
    Residual,
    Row,
    RowGroups,
    find_cut,
    lowest_kept,
    weigh,
)
from vllm_specplus.kernels.verify.row_stats import draft_mass_of, first_token, max_logit_of, total_mass_of
from vllm_specplus.kernels.verify.strategies import (
    Batch,
    Request,
    judge_by_statistics,
    judge_in_head,
    judge_in_row,
    kept_of,
    need_of,
    nucleus_mass,
)

# The share of a row's mass below which a sample is not looked for by the race alone. It would list too many tokens.
_LEAST_SHARE = tl.constexpr(1 / 16)
_SMALLEST_SHARE = tl.constexpr(1e-30)


@triton.jit
def _row_at(batch, request, i_row, sizes):
    """A `Row` and its `RowGroups`."""
    logits, groups = batch.logits, batch.groups
    max_logit = max_logit_of(batch.stats, i_row, sizes)
    lowest = lowest_kept(max_logit, request.temperature, request.filters.min_p)
    row = Row(logits.ptr + i_row * logits.stride, logits.vocab_size, request.temperature, max_logit, lowest)
    at = i_row * groups.num_groups
    return row, RowGroups(groups.max_ptr + at, groups.list_ptr + at, groups.num_groups)


@triton.jit
def _left_by(batch, i_row, row, draft, is_rejected, sizes):
    """What a rejected draft leaves to be sampled: `Residual`, with the log of no mass yet.

    Nothing is left out where no draft is rejected.
    """
    excluded = tl.where(is_rejected, draft.token, -1)
    no_mass = tl.zeros((), tl.float32)
    max_draft_logit, draft_log_mass = no_mass + NEG_INF, no_mass + POS_INF
    p_draft_row = row.ptr
    if batch.draft_logits.ptr is not None:
        p_draft_row, _ = draft_row_of(batch.draft_logits, i_row, row.vocab_size)
        if excluded >= 0:
            max_draft_logit, draft_mass = draft_mass_of(batch.stats, i_row, row.temperature, sizes)
            if max_draft_logit > NEG_INF:
                excluded = tl.full((), -1, tl.int32)
                draft_log_mass = tl.log(draft_mass)
    return Residual(p_draft_row, excluded, no_mass, max_draft_logit, draft_log_mass)


@triton.jit
def _plan_sample(plans, i_row, row, groups, filters, kept, residual, draft, max_candidates, sizes, FILTERED):
    """Write what the kernels after this one need to sample from a row that has no head."""
    p_floats, p_ints = plans.floats_ptr + i_row * NUM_PLAN_FLOATS, plans.ints_ptr + i_row * NUM_PLAN_INTS
    floor = kept.floor
    sampled = tl.minimum(kept.mass, kept.limit)
    if FILTERED:
        if max_candidates < tl.minimum(filters.top_k, row.vocab_size):
            no_limit = tl.full((), POS_INF, tl.float32)
            floor, of_candidates = find_cut(row, groups, max_candidates, kept.mass, no_limit, sizes)
            sampled = tl.minimum(sampled, of_candidates)
    weight = tl.where(residual.excluded >= 0, weigh(draft.logit, row.max_logit, row.temperature), 0.0)
    least = tl.maximum(_LEAST_SHARE * (kept.mass - weight), _SMALLEST_SHARE)
    share = tl.where(residual.draft_log_mass < POS_INF, least, tl.maximum(sampled - weight, least))
    tl.store(p_floats + PLAN_MAX, row.max_logit)
    tl.store(p_floats + PLAN_LIMIT, kept.limit)
    tl.store(p_floats + PLAN_FLOOR, floor)
    tl.store(p_floats + PLAN_SHARE, tl.log2(share))
    tl.store(p_floats + PLAN_LOG_MASS, residual.log_mass)
    tl.store(p_floats + PLAN_DRAFT_MAX, residual.max_draft_logit)
    tl.store(p_floats + PLAN_DRAFT_LOG_MASS, residual.draft_log_mass)
    tl.store(p_ints + PLAN_EXCLUDED, residual.excluded)


@triton.jit
def _with_log_mass(residual, mass):
    """A `Residual` of a row whose nucleus has this mass."""
    return Residual(
        residual.draft_ptr, residual.excluded, tl.log(mass), residual.max_draft_logit, residual.draft_log_mass
    )


@triton.jit(do_not_specialize=["num_reqs", "max_rows", "verify_window", "max_candidates"])
def judge_kernel(
    logits,  # Logits
    draft_logits,  # DraftLogits
    rows,  # Rows
    temperature_ptr,  # [num_reqs] float32
    filters,  # Filters
    keys,  # NoiseKeys
    stats,  # Stats
    groups,  # Groups
    heads,  # Heads
    plans,  # out: Plans
    num_reqs,
    max_rows,
    verify_window,
    max_candidates,
    sizes,  # Sizes
    STRATEGY: tl.constexpr,
    POLICY: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """Grid (num_rows,). `stats` and the maxima of `groups` are as `row_stats_kernel` left them."""
    i_row = tl.program_id(0).to(tl.int64)
    p_ints = plans.ints_ptr + i_row * NUM_PLAN_INTS
    # So it stays where a row does not count.
    tl.store(p_ints + PLAN_TOKEN, 0)
    i_req = request_of(rows, i_row, num_reqs)
    if i_req >= num_reqs:
        return
    start, num_rows = rows_of(rows, i_req, max_rows)
    if i_row - start >= num_rows:
        return
    temperature, is_greedy = temperature_of(temperature_ptr, i_req, STRATEGY)
    request = Request(i_req, start, num_rows, temperature, filters_of(filters, i_req))
    batch = Batch(logits, draft_logits, rows, keys, stats, groups)
    is_draft_row = i_row - start < num_rows - 1
    draft = draft_of(logits, rows, i_row, temperature)
    is_usable = is_draft_row & draft.is_usable & (POLICY != REJECT_ALL)
    verdict = tl.where(is_usable, -1 if POLICY == NORMAL else 1, 0)
    token = tl.full((), -1, tl.int32)

    if (STRATEGY == GREEDY) | is_greedy:
        token = first_token(logits, stats, groups, i_row, sizes)
        verdict = tl.where(verdict < 0, (draft.token == token).to(tl.int32), verdict)
    else:
        with_above: tl.constexpr = filters.top_p_ptr is not None
        with_draft_logits: tl.constexpr = draft_logits.ptr is not None
        row, row_groups = _row_at(batch, request, i_row, sizes)
        total = total_mass_of(stats, i_row, row, sizes)
        key = NoiseKey(tl.load(keys.seeds_ptr + i_req), tl.load(keys.positions_ptr + i_row))
        if STRATEGY != TARGET_MATCH:
            if verdict < 0:
                verdict = judge_by_statistics(
                    batch,
                    request,
                    i_row,
                    row,
                    total,
                    key,
                    draft,
                    verify_window,
                    max_candidates,
                    sizes,
                    STRATEGY,
                    with_above,
                )
        # What the row of an accepted draft would emit is never asked for.
        is_accepted = verdict == 1
        has_head = is_accepted
        is_rejected = is_draft_row & (STRATEGY == REJECTION) & (POLICY == NORMAL)
        residual = _left_by(batch, i_row, row, draft, is_rejected, sizes)
        if FILTERED:
            if is_accepted == 0:
                need = need_of(row, request.filters, total, verify_window, max_candidates)
                head, has_head = head_of(row, row_groups, heads, i_row, need, sizes)
                if has_head:
                    inside, mass = nucleus_of_head(row, head, request.filters, total)
                    candidates = inside & (head.rank < max_candidates)
                    left = _with_log_mass(residual, mass)
                    token = sample_of_head(row, head, candidates, key, left, with_draft_logits)
                    if verdict < 0:
                        if STRATEGY == TARGET_MATCH:
                            verdict = (draft.token == token).to(tl.int32)
                        else:
                            verdict = judge_in_head(
                                batch,
                                request,
                                i_row,
                                row,
                                head,
                                inside,
                                mass,
                                key,
                                draft,
                                verify_window,
                                max_candidates,
                                sizes,
                                STRATEGY,
                            )
        if has_head == 0:
            kept = kept_of(row, row_groups, request.filters, total, sizes, FILTERED)
            if verdict < 0:
                if STRATEGY == TARGET_MATCH:
                    # If it is what the row samples.
                    verdict = tl.full((), 1, tl.int32)
                elif FILTERED:
                    verdict = judge_in_row(
                        batch,
                        request,
                        i_row,
                        row,
                        row_groups,
                        kept,
                        key,
                        draft,
                        verify_window,
                        max_candidates,
                        sizes,
                        STRATEGY,
                        with_above,
                    )
            if with_draft_logits:
                if (residual.draft_log_mass < POS_INF) & (verdict == 0):
                    mass = kept.mass
                    if FILTERED:
                        mass = nucleus_mass(row, row_groups, request.filters, kept, sizes)
                    residual = _with_log_mass(residual, mass)
            _plan_sample(
                plans, i_row, row, row_groups, request.filters, kept, residual, draft, max_candidates, sizes, FILTERED
            )
        token = tl.where(is_accepted, 0, token)
    tl.store(p_ints + PLAN_ACCEPTS, (verdict == 1).to(tl.int32))
    tl.store(p_ints + PLAN_TOKEN, token)
    tl.store(p_ints + PLAN_REQUEST, i_req.to(tl.int32))
    tl.store(p_ints + PLAN_NUM_LISTED, 0)
