"""`judge_kernel` decides each row by itself: whether its draft is accepted, and what is emitted if it is not.

Statistics settle most rows, all rows of a request at once. The others are looked at one by one. A row that keeps too
many tokens for a `Head` leaves its sample to the kernels after it.
"""

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.arguments import (
    NO_LIMIT,
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
    PLAN_NUM_LEFT,
    PLAN_REQUEST,
    PLAN_SHARE,
    PLAN_TOKEN,
    REJECT_ALL,
    REJECTION,
    TARGET_MATCH,
    draft_of,
    draft_row_of,
    filters_of,
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
    weigh,
)
from vllm_specplus.kernels.verify.request_stats import (
    Batch,
    Request,
    keeps_one,
    note_open,
    note_settled,
    read_notes,
    statistics_of,
)
from vllm_specplus.kernels.verify.row_stats import first_token, first_tokens
from vllm_specplus.kernels.verify.strategies import (
    judge_by_statistics,
    judge_in_head,
    judge_in_row,
    need_of,
    nucleus_bounds,
    nucleus_mass,
)

# The share of a row's mass below which a sample is not looked for by the race alone. It would list too many tokens.
_LEAST_SHARE = tl.constexpr(1 / 16)
_SMALLEST_SHARE = tl.constexpr(1e-30)
_SKIPPED_AT_ONCE = tl.constexpr(128)


@triton.jit
def _left_by(batch, i_row, row, found, draft, is_rejected):
    """What a rejected draft leaves to be sampled: `Residual`, with the log of no mass yet.

    Nothing is left out where no draft is rejected.
    """
    excluded = tl.where(is_rejected, draft.token, -1)
    no_mass = tl.zeros((), tl.float32)
    max_draft_logit, draft_log_mass = no_mass + NEG_INF, no_mass + POS_INF
    p_draft_row = row.ptr
    if batch.draft_logits.ptr is not None:
        p_draft_row, _ = draft_row_of(batch.draft_logits, i_row, row.vocab_size)
        if (excluded >= 0) & (found.max_draft_logit > NEG_INF):
            excluded = tl.full((), -1, tl.int32)
            max_draft_logit, draft_log_mass = found.max_draft_logit, tl.log(found.draft_mass)
    return Residual(p_draft_row, excluded, no_mass, max_draft_logit, draft_log_mass)


@triton.jit
def _plan_sample(plans, i_row, row, groups, filters, bounds, residual, draft, max_candidates, sizes, FILTERED):
    """Write what the kernels after this one need to sample from a row that has no head."""
    p_floats, p_ints = plans.floats_ptr + i_row * NUM_PLAN_FLOATS, plans.ints_ptr + i_row * NUM_PLAN_INTS
    floor = bounds.floor
    sampled = tl.minimum(bounds.least_mass, bounds.limit)
    if FILTERED:
        if max_candidates < tl.minimum(filters.top_k, row.vocab_size):
            no_limit = tl.full((), POS_INF, tl.float32)
            floor, of_candidates = find_cut(row, groups, max_candidates, bounds.mass, no_limit, sizes)
            sampled = tl.minimum(sampled, of_candidates)
    weight = tl.where(residual.excluded >= 0, weigh(draft.logit, row.max_logit, row.temperature), 0.0)
    least = tl.maximum(_LEAST_SHARE * (bounds.mass - weight), _SMALLEST_SHARE)
    share = tl.where(residual.draft_log_mass < POS_INF, least, tl.maximum(sampled - weight, least))
    tl.store(p_floats + PLAN_MAX, row.max_logit)
    tl.store(p_floats + PLAN_LIMIT, bounds.limit)
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


@triton.jit
def _judge_row(
    batch,
    request,
    slot,
    heads,
    plans,
    verify_window,
    max_candidates,
    sizes,
    STRATEGY: tl.constexpr,
    POLICY: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """Decide a row that its `Statistics` leave open, and what it emits if its draft is not accepted."""
    logits, groups, filters = batch.logits, batch.groups, request.filters
    i_row = request.start + slot
    found, draft, verdict = read_notes(plans, i_row, request)
    p_row, at = logits.ptr + i_row * logits.stride, i_row * groups.num_groups
    row = Row(p_row, logits.vocab_size, request.temperature, found.max_logit, found.lowest)
    row_groups = RowGroups(groups.max_ptr + at, groups.list_ptr + at, groups.num_groups)
    key = NoiseKey(tl.load(batch.keys.seeds_ptr + request.i_req), tl.load(batch.keys.positions_ptr + i_row))
    with_draft_logits: tl.constexpr = batch.draft_logits.ptr is not None
    is_rejected = (slot < request.num_rows - 1) & (STRATEGY == REJECTION) & (POLICY == NORMAL)
    residual = _left_by(batch, i_row, row, found, draft, is_rejected)
    token = tl.full((), -1, tl.int32)
    is_done = tl.full((), False, tl.int1)
    if FILTERED:
        # A verdict of `target_match` needs the token alone.
        needs_row = (verdict < 0) & (STRATEGY != TARGET_MATCH)
        is_done = keeps_one(filters, found.total) & (needs_row == 0)
        if is_done:
            token = first_token(logits, batch.stats, groups, i_row, sizes)
        else:
            need = need_of(row, filters, found.total, verify_window, max_candidates)
            head, is_done = head_of(row, row_groups, heads, i_row, need, sizes)
            if is_done:
                inside, mass = nucleus_of_head(row, head, filters, found.total)
                left = _with_log_mass(residual, mass)
                token = sample_of_head(row, head, inside & (head.rank < max_candidates), key, left, with_draft_logits)
                if needs_row:
                    verdict = judge_in_head(
                        batch,
                        request,
                        i_row,
                        head,
                        inside,
                        mass,
                        found,
                        draft,
                        verify_window,
                        max_candidates,
                        sizes,
                        STRATEGY,
                    )
        if is_done & (verdict < 0):
            verdict = (draft.token == token).to(tl.int32)
    if is_done == 0:
        bounds = nucleus_bounds(row, row_groups, filters, found.total, sizes, FILTERED)
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
                    bounds,
                    found,
                    draft,
                    verify_window,
                    max_candidates,
                    sizes,
                    STRATEGY,
                )
        if with_draft_logits:
            if (residual.draft_log_mass < POS_INF) & (verdict == 0):
                mass = bounds.mass
                if FILTERED:
                    mass = nucleus_mass(row, row_groups, filters, bounds, sizes)
                residual = _with_log_mass(residual, mass)
        _plan_sample(plans, i_row, row, row_groups, filters, bounds, residual, draft, max_candidates, sizes, FILTERED)
    p_ints = plans.ints_ptr + i_row * NUM_PLAN_INTS
    tl.store(p_ints + PLAN_ACCEPTS, (verdict == 1).to(tl.int32))
    tl.store(p_ints + PLAN_TOKEN, token)


@triton.jit
def _skip_rows(plans, first, end):
    """Say that nothing is to be sampled at some rows."""
    for at in range(first, end, _SKIPPED_AT_ONCE):
        i_rows = at + tl.arange(0, _SKIPPED_AT_ONCE)
        tl.store(plans.ints_ptr + i_rows * NUM_PLAN_INTS + PLAN_TOKEN, 0, mask=i_rows < end)
        tl.store(plans.ints_ptr + i_rows * NUM_PLAN_INTS + PLAN_REQUEST, -1, mask=i_rows < end)


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "max_rows", "verify_window", "max_candidates"])
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
    num_rows,
    max_rows,
    verify_window,
    max_candidates,
    sizes,  # Sizes
    STRATEGY: tl.constexpr,
    POLICY: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """Grid (judges x num_reqs,), requests first. `stats` and maxima of `groups` are as `row_stats_kernel` left them.

    Each program looks at the statistics of all rows of its request, and so finds what all others find. They leave some
    rows open, up to the first whose draft they reject. The judges share these by their slots.
    """
    i_program, num_judges = tl.program_id(0), tl.num_programs(0) // num_reqs
    i_req, i_judge = (i_program % num_reqs).to(tl.int64), i_program // num_reqs
    start, num_own = rows_of(rows, i_req, max_rows)
    temperature, is_greedy = temperature_of(temperature_ptr, i_req, STRATEGY)
    request = Request(i_req, start, num_own, temperature, filters_of(filters, i_req))
    batch = Batch(logits, draft_logits, rows, keys, stats, groups)
    with_above: tl.constexpr = (filters.top_p_ptr is not None) and STRATEGY != TARGET_MATCH
    num_seen = tl.zeros((), tl.int32)
    going = num_own > 0
    # What a compiler moves out of these loops takes registers for as long as they run, and spills others.
    for first in tl.range(0, sizes.ALL_SLOTS, sizes.JUDGED_ROWS, disable_licm=True):
        if going:
            slots = first + tl.arange(0, sizes.JUDGED_ROWS)
            i_rows = start + tl.minimum(slots, num_own - 1)
            drafts = draft_of(logits, rows, i_rows, temperature)
            found = statistics_of(batch, request, i_rows, drafts, sizes, STRATEGY, with_above)
            is_usable = (slots < num_own - 1) & drafts.is_usable & (POLICY != REJECT_ALL)
            verdict = tl.where(is_usable, -1 if POLICY == NORMAL else 1, 0)
            token = tl.zeros_like(verdict)
            # Whose own token is the first of all.
            is_first = slots < tl.where(is_greedy, num_own, 0)
            if FILTERED and STRATEGY == TARGET_MATCH:
                is_first = is_first | ((slots < num_own) & keeps_one(request.filters, found.total))
            if tl.max(is_first.to(tl.int32), axis=0) > 0:
                token = tl.where(is_first, first_tokens(logits, stats, groups, i_rows, sizes), 0)
                verdict = tl.where(is_first & (verdict < 0), (drafts.token == token).to(tl.int32), verdict)
            if STRATEGY != TARGET_MATCH:
                by_statistics = judge_by_statistics(
                    found, drafts, request.filters, logits.vocab_size, verify_window, max_candidates, STRATEGY
                )
                verdict = tl.where(verdict < 0, by_statistics, verdict)
            last = tl.min(tl.where(verdict == 0, slots, NO_LIMIT), axis=0)
            is_open = (verdict != 1) & (slots <= last) & (is_first == 0)
            if i_judge == 0:
                note_settled(plans, i_rows, verdict, token, i_req, slots < num_own, is_open)
            is_mine = is_open & (slots % num_judges == i_judge)
            note_open(plans, i_rows, found, drafts, verdict, is_mine)
            slot = tl.min(tl.where(is_mine, slots, NO_LIMIT), axis=0)
            while tl.condition(slot < NO_LIMIT, disable_licm=True):
                _judge_row(
                    batch,
                    request,
                    slot,
                    heads,
                    plans,
                    verify_window,
                    max_candidates,
                    sizes,
                    STRATEGY,
                    POLICY,
                    FILTERED,
                )
                slot = tl.min(tl.where(is_mine & (slots > slot), slots, NO_LIMIT), axis=0)
            num_seen += sizes.JUDGED_ROWS
            going = (last == NO_LIMIT) & (num_seen < num_own)
    if (STRATEGY == TARGET_MATCH) and (POLICY == NORMAL):
        # The kernels after this one are about to look at each row.
        if i_judge == 0:
            num_seen = tl.minimum(num_seen, num_own)
            tl.store(plans.ints_ptr + start * NUM_PLAN_INTS + PLAN_NUM_LEFT, num_seen, mask=num_own > 0)
            end = tl.load(rows.cu_ptr + i_req + 1)
            end = tl.where(i_req == num_reqs - 1, num_rows, end)
            _skip_rows(plans, start + num_seen, end)
