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
    PLAN_NUM_LEFT,
    PLAN_NUM_LISTED,
    PLAN_REQUEST,
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
from vllm_specplus.kernels.verify.order import count_before, equal_token, mass_before, sample_before
from vllm_specplus.kernels.verify.race import MARGIN, SLACK, SLACK_OF_Z, run_of
from vllm_specplus.kernels.verify.request_stats import Batch, Request
from vllm_specplus.kernels.verify.row_stats import first_token

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _plan_of(batch, request, i_row, plans):
    """The `Row` to sample from, its `NoiseKey`, its `Residual`, and the score from which on all tokens are listed."""
    logits, temperature = batch.logits, request.temperature
    p_floats, p_ints = plans.floats_ptr + i_row * NUM_PLAN_FLOATS, plans.ints_ptr + i_row * NUM_PLAN_INTS
    p_row = logits.ptr + i_row * logits.stride
    p_draft_row = p_row
    if batch.draft_logits.ptr is not None:
        p_draft_row, _ = draft_row_of(batch.draft_logits, i_row, logits.vocab_size)
    max_logit = tl.load(p_floats + PLAN_MAX)
    lowest = lowest_kept(max_logit, temperature, request.filters.min_p)
    row = Row(p_row, logits.vocab_size, temperature, max_logit, lowest)
    key = NoiseKey(tl.load(batch.keys.seeds_ptr + request.i_req), tl.load(batch.keys.positions_ptr + i_row))
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
def _sample_row(batch, request, i_row, plans, visited_ptr, max_candidates, sizes, FILTERED: tl.constexpr):
    """The token sampled at a row, from the groups that `race_kernel` has listed: int32.

    A token of the nucleus that is the best of the row is the best of the nucleus too. If the token is not in the
    nucleus, no token ordered after it is. The search then goes on among the tokens before it. Where a list does not
    hold the best of those, the row is searched. Where no token can be sampled, it is the first one.
    """
    p_floats, p_ints = plans.floats_ptr + i_row * NUM_PLAN_FLOATS, plans.ints_ptr + i_row * NUM_PLAN_INTS
    row, key, residual, known_from = _plan_of(batch, request, i_row, plans)
    groups, at = batch.groups, i_row * batch.groups.num_groups
    listed = RowGroups(groups.max_ptr + at, groups.list_ptr + at, groups.num_groups)
    visited = RowGroups(groups.max_ptr + at, visited_ptr + at, groups.num_groups)
    num_listed, floor = tl.load(p_ints + PLAN_NUM_LISTED), tl.load(p_floats + PLAN_FLOOR)
    mass_limit, max_count = tl.load(p_floats + PLAN_LIMIT), tl.minimum(request.filters.top_k, max_candidates)

    token = tl.zeros((), tl.int32) + row.vocab_size
    logit = tl.full((), NEG_INF, tl.float32)
    searching = tl.full((), True, tl.int1)
    while tl.condition(searching, disable_licm=True):
        with_draft_logits: tl.constexpr = batch.draft_logits.ptr is not None
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
                    if inside == 0:
                        # Among equal tokens may be many that are too far back. The search goes on before all of them.
                        none = tl.zeros((), tl.int32)
                        num_above = count_before(row, visited, num_visited, none, logit, sizes)
                        number = tl.maximum(max_count - num_above, 0)
                        token = equal_token(row, visited, num_visited, logit, number, sizes)
                searching = inside == 0
    if token < 0:
        token = first_token(batch.logits, batch.stats, groups, i_row, sizes)
    return token


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "max_rows", "max_candidates"])
def emit_kernel(
    logits,  # Logits
    draft_logits,  # DraftLogits
    rows,  # Rows
    temperature_ptr,  # [num_reqs] float32
    filters,  # Filters, top-k and min-p alone
    keys,  # NoiseKeys
    stats,  # Stats
    groups,  # Groups, with the lists of `race_kernel`
    visited_ptr,  # scratch, [num_rows, num_groups] int32
    plans,  # Plans, as `judge_kernel` and `race_kernel` left them; changed in place
    output,  # out: Output
    num_reqs,
    num_rows,
    max_rows,
    max_candidates,
    sizes,  # Sizes
    EACH_ROW: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """Grid (num_reqs,), for the row after the accepted drafts of each request.

    With EACH_ROW a draft must also be the token that its row samples. A program then samples one row after the other,
    up to the first draft that is not. Without filters a sample takes little. So a program takes a row there, and the
    last of a request to end writes its tokens. The grid is (max(num_rows, num_reqs),) then, as programs also write
    what requests without rows emit.
    """
    by_row: tl.constexpr = EACH_ROW and not FILTERED
    i_program = tl.program_id(0).to(tl.int64)
    i_req = i_program
    if by_row:
        if i_program < num_reqs:
            start, num_own = rows_of(rows, i_req, max_rows)
            if num_own == 0:
                drafts = load_drafts(rows, start, num_own, sizes)
                write_tokens(drafts, output, i_req, num_own, num_own, num_own, max_rows, sizes)
        # Both are on their way together.
        p_plan = plans.ints_ptr + i_program * NUM_PLAN_INTS
        settled = tl.load(p_plan + PLAN_TOKEN, mask=i_program < num_rows, other=0)
        i_req = tl.load(p_plan + PLAN_REQUEST, mask=i_program < num_rows, other=-1).to(tl.int64)
        if i_req < 0:
            return
    start, num_own = rows_of(rows, i_req, max_rows)
    temperature, _ = temperature_of(temperature_ptr, i_req, REJECTION)
    request = Request(i_req, start, num_own, temperature, filters_of(filters, i_req))
    batch = Batch(logits, draft_logits, rows, keys, stats, groups)
    p_plans = plans.ints_ptr + start * NUM_PLAN_INTS
    if by_row:
        if settled < 0:
            token = _sample_row(batch, request, i_program, plans, visited_ptr, max_candidates, sizes, FILTERED)
            tl.store(p_plan + PLAN_TOKEN, token)
        tl.debug_barrier()  # the token comes before this program's place among those that have ended
        if tl.atomic_add(p_plans + PLAN_NUM_LEFT, -1) == 1:
            tl.debug_barrier()  # and the tokens of the others are read after it
            drafts = load_drafts(rows, start, num_own, sizes)
            run, token = _first_missed(p_plans, drafts, num_own, sizes)
            write_tokens(drafts, output, i_req, num_own, run, token, max_rows, sizes)
    elif EACH_ROW:
        drafts = load_drafts(rows, start, num_own, sizes)
        run, token = _first_missed(p_plans, drafts, num_own, sizes)
        while (token < 0) & (num_own > 0):
            token = _sample_row(batch, request, start + run, plans, visited_ptr, max_candidates, sizes, FILTERED)
            tl.store(p_plans + run * NUM_PLAN_INTS + PLAN_TOKEN, token)
            tl.debug_barrier()  # other threads of this program read it with the other tokens
            run, token = _first_missed(p_plans, drafts, num_own, sizes)
        write_tokens(drafts, output, i_req, num_own, run, token, max_rows, sizes)
    else:
        run = run_of(plans, start, num_own, sizes.ALL_SLOTS)
        token = tl.load(p_plans + run * NUM_PLAN_INTS + PLAN_TOKEN, mask=num_own > 0, other=0)
        if token < 0:
            token = _sample_row(batch, request, start + run, plans, visited_ptr, max_candidates, sizes, FILTERED)
        drafts = load_drafts(rows, start, num_own, sizes)
        write_tokens(drafts, output, i_req, num_own, run, token, max_rows, sizes)


@triton.jit
def _first_missed(p_first, drafts, num_rows, sizes):
    """How many drafts of a request are what their rows sample, up to the first that is not, and what its row samples.

    The latter is -1 where it has still to be sampled.

    p_first: the plan of the request's first row. drafts: see `load_drafts`.
    """
    slots = tl.arange(0, sizes.ALL_SLOTS)
    is_own, at = slots < num_rows, slots * NUM_PLAN_INTS
    tokens = tl.load(p_first + at + PLAN_TOKEN, mask=is_own, other=-1)
    accepts = tl.load(p_first + at + PLAN_ACCEPTS, mask=is_own, other=0) > 0
    accepts = accepts & (drafts == tokens)
    run = tl.min(tl.where(accepts, sizes.ALL_SLOTS, slots), axis=0)
    return run, tl.sum(tl.where(slots == run, tokens, 0), axis=0)


@triton.jit
def load_drafts(rows, start, num_rows, sizes):
    """The drafts of a request, [ALL_SLOTS]; -1 past its rows."""
    slots = tl.arange(0, sizes.ALL_SLOTS)
    return tl.load(rows.drafts_ptr + start + slots, mask=slots < num_rows, other=-1)


@triton.jit
def write_tokens(drafts, output, i_req, num_rows, run, token, max_rows, sizes):
    """Write the accepted drafts of a request, the token after them, and their number.

    drafts: see `load_drafts`.
    """
    slots = tl.arange(0, sizes.ALL_SLOTS)
    tokens = tl.where(slots < run, drafts, -1).to(tl.int64)
    tokens = tl.where((slots == run) & (num_rows > 0), token.to(tl.int64), tokens)
    tl.store(output.token_ids_ptr + i_req * max_rows + slots, tokens, mask=slots < max_rows)
    tl.store(output.num_tokens_ptr + i_req, tl.where(num_rows > 0, run + 1, 0))
