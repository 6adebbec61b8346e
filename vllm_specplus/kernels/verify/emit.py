"""`emit_kernel` samples what is still to be sampled, and writes each request's tokens."""

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.arguments import (
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
    PLAN_SHARE,
    PLAN_TOKEN,
    REJECTION,
    draft_row_of,
    filters_of,
    rows_of,
    temperature_of,
)
from vllm_specplus.kernels.verify.nucleus import (
    NEG_INF,
    POS_INF,
    NoiseKey,
    Residual,
    Row,
    RowGroups,
    list_groups,
    load_logits,
    lowest_kept,
)
from vllm_specplus.kernels.verify.order import count_before, mass_before, sample_before
from vllm_specplus.kernels.verify.race import MARGIN, SLACK, SLACK_OF_Z, run_of
from vllm_specplus.kernels.verify.row_stats import first_token

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _plan_of(logits, draft_logits, keys, plans, i_req, i_row, temperature, min_p):
    """The `Row` to sample from, its `NoiseKey`, its `Residual`, and the score from which on all tokens are listed."""
    p_floats, p_ints = plans.floats_ptr + i_row * NUM_PLAN_FLOATS, plans.ints_ptr + i_row * NUM_PLAN_INTS
    p_row = logits.ptr + i_row * logits.stride
    p_draft_row = p_row
    if draft_logits.ptr is not None:
        p_draft_row, _ = draft_row_of(draft_logits, i_row, logits.vocab_size)
    max_logit = tl.load(p_floats + PLAN_MAX)
    row = Row(p_row, logits.vocab_size, temperature, max_logit, lowest_kept(max_logit, temperature, min_p))
    key = NoiseKey(tl.load(keys.seeds_ptr + i_req), tl.load(keys.positions_ptr + i_row))
    log_mass, draft_log_mass = tl.load(p_floats + PLAN_LOG_MASS), tl.load(p_floats + PLAN_DRAFT_LOG_MASS)
    residual = Residual(
        p_draft_row, tl.load(p_ints + PLAN_EXCLUDED), log_mass, tl.load(p_floats + PLAN_DRAFT_MAX), draft_log_mass
    )
    largest = max_logit / temperature
    # The scores of a residual are relative to the row's largest z.
    origin = tl.where(draft_log_mass < POS_INF, -log_mass, largest)
    known_from = origin + tl.load(p_floats + PLAN_SHARE) * _LN_2 - MARGIN + SLACK + SLACK_OF_Z * tl.abs(largest)
    return row, key, residual, known_from


@triton.jit
def _sample_row(
    logits,
    draft_logits,
    keys,
    groups,
    plans,
    visited_ptr,
    i_req,
    i_row,
    temperature,
    filters,
    max_candidates,
    sizes,
    FILTERED: tl.constexpr,
):
    """The token sampled at a row, from the groups that `race_kernel` has listed: int32, -1 if none can be sampled.

    A token of the nucleus that is the best of the row is the best of the nucleus too. If the token is not in the
    nucleus, no token ordered after it is. The search then goes on among the tokens before it. Where a list does not
    hold the best of those, the row is searched.
    """
    p_floats, p_ints = plans.floats_ptr + i_row * NUM_PLAN_FLOATS, plans.ints_ptr + i_row * NUM_PLAN_INTS
    row, key, residual, known_from = _plan_of(
        logits, draft_logits, keys, plans, i_req, i_row, temperature, filters.min_p
    )
    p_max, at = groups.max_ptr + i_row * groups.num_groups, i_req * groups.num_groups
    listed = RowGroups(p_max, groups.list_ptr + i_row * groups.num_groups, groups.num_groups)
    visited = RowGroups(p_max, visited_ptr + at, groups.num_groups)
    num_listed, floor = tl.load(p_ints + PLAN_NUM_LISTED), tl.load(p_floats + PLAN_FLOOR)
    mass_limit, max_count = tl.load(p_floats + PLAN_LIMIT), tl.minimum(filters.top_k, max_candidates)

    token = tl.zeros((), tl.int32) + row.vocab_size
    logit = tl.full((), NEG_INF, tl.float32)
    searching = tl.full((), True, tl.int1)
    while searching:
        with_draft_logits: tl.constexpr = draft_logits.ptr is not None
        score, found = sample_before(
            row, listed, num_listed, key, residual, token, logit, floor, sizes, with_draft_logits
        )
        if (score >= known_from) == 0:
            num_visited = list_groups(visited, tl.maximum(logit, floor), sizes)
            score, found = sample_before(
                row, visited, num_visited, key, residual, token, logit, floor, sizes, with_draft_logits
            )
        token = tl.where(score > NEG_INF, found, -1)
        searching = tl.full((), False, tl.int1)
        if FILTERED:
            if token >= 0:
                logit = load_logits(row.ptr, token, row.vocab_size)
                num_visited = list_groups(visited, logit, sizes)
                mass = mass_before(row, visited, num_visited, token, logit, sizes)
                # Only the first token has no mass before it. It is always kept.
                inside = (logit >= row.lowest) & ((mass < mass_limit) | (mass == 0.0))
                if inside & (max_count < row.vocab_size):
                    inside = count_before(row, visited, num_visited, token, logit, sizes) < max_count
                searching = inside == 0
    return token


@triton.jit(do_not_specialize=["max_rows", "max_candidates"])
def emit_kernel(
    logits,  # Logits
    draft_logits,  # DraftLogits
    rows,  # Rows
    temperature_ptr,  # [num_reqs] float32
    filters,  # Filters, top-k and min-p alone
    keys,  # NoiseKeys
    stats,  # Stats
    groups,  # Groups, with the lists of `race_kernel`
    visited_ptr,  # scratch, [num_reqs, num_groups] int32
    plans,  # Plans, as `judge_kernel` and `race_kernel` left them
    output,  # out: Output
    max_rows,
    max_candidates,
    sizes,  # Sizes
    EACH_ROW: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """Grid (num_reqs,). With EACH_ROW a draft is also tested by the token that its row samples."""
    i_req = tl.program_id(0).to(tl.int64)
    start, num_rows = rows_of(rows, i_req, max_rows)
    temperature, _ = temperature_of(temperature_ptr, i_req, REJECTION)
    request_filters = filters_of(filters, i_req)
    token = tl.full((), -1, tl.int32)
    run = tl.zeros((), tl.int32)
    if not EACH_ROW:
        run += run_of(plans, start, num_rows, sizes.ALL_SLOTS)
    going = num_rows > 0
    while going:
        i_row = start + run
        p_ints = plans.ints_ptr + i_row * NUM_PLAN_INTS
        token = tl.load(p_ints + PLAN_TOKEN)
        if token < 0:
            token = _sample_row(
                logits,
                draft_logits,
                keys,
                groups,
                plans,
                visited_ptr,
                i_req,
                i_row,
                temperature,
                request_filters,
                max_candidates,
                sizes,
                FILTERED,
            )
        if token < 0:
            token = first_token(logits, stats, groups, i_row, sizes)
        going = tl.full((), False, tl.int1)
        if EACH_ROW:
            going = (tl.load(p_ints + PLAN_ACCEPTS) > 0) & (tl.load(rows.drafts_ptr + i_row) == token)
            run += going.to(tl.int32)
    write_tokens(rows, output, i_req, start, num_rows, run, token, max_rows, sizes)


@triton.jit
def write_tokens(rows, output, i_req, start, num_rows, run, token, max_rows, sizes):
    """Write the accepted drafts of a request, the token after them, and their number."""
    slots = tl.arange(0, sizes.ALL_SLOTS)
    drafts = tl.load(rows.drafts_ptr + start + slots, mask=slots < run, other=-1).to(tl.int64)
    tokens = tl.where((slots == run) & (num_rows > 0), token.to(tl.int64), drafts)
    tl.store(output.token_ids_ptr + i_req * max_rows + slots, tokens, mask=slots < max_rows)
    tl.store(output.num_tokens_ptr + i_req, tl.where(num_rows > 0, run + 1, 0))
