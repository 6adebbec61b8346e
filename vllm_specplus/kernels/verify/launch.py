"""Verification of draft tokens in fused Triton kernels: what ``verify/reference.py`` says.

| kernel       | programs          | reads              | leaves behind                                         |
|--------------|-------------------|--------------------|-------------------------------------------------------|
| `_row_stats` | rows x blocks of  | every logit, once  | per block: the largest logit, its token, the mass; of the |
|              | the vocabulary    |                    | draft, its rank and the mass above it; the best       |
|              |                   |                    | z + noise for `target_match`                          |
| `_accept`    | requests          | what blocks left   | accepted drafts, and what is to be emitted after them |
| `_sample`    | requests x blocks | one row of each    | per block: the best score                             |
|              |                   | request            |                                                       |
| `_emit`      | requests          | what blocks left   | the sampled token                                     |

`greedy` and `target_match` end with the second. Nothing is sorted and no logits are copied. A sample is
the argmax of z + noise over more than the nucleus at first, which mostly lies in it; ``kernels/nucleus.py`` has
what is done where it does not, and where top-k or min-p leave the mass of the nucleus open.

The host never waits, and the launches depend on shapes and `max_rows` alone: with a `Workspace` made
before, they can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.verify.noise import acceptance_uniform, gumbel_noise
from vllm_specplus.kernels.verify.nucleus import (
    GROUP_SIZE,
    LARGEST,
    NEG_INF,
    POS_INF,
    best_of,
    find_cut,
    load_logits,
    lowest_kept,
    score_tokens,
    settle_sample,
    weigh,
)
from vllm_specplus.verify.types import POLICIES, STRATEGIES, VerifyInputs, VerifyOutput

# Logits that one program of the wide kernels takes, and that one step of the slow paths takes.
BLOCK_SIZE = 4096
TILE_SIZE = 4096

_GREEDY = tl.constexpr(STRATEGIES.index("greedy"))
_TARGET_MATCH = tl.constexpr(STRATEGIES.index("target_match"))
_TOPP = tl.constexpr(STRATEGIES.index("topp"))
_REJECTION = tl.constexpr(STRATEGIES.index("rejection"))
_NORMAL = tl.constexpr(POLICIES.index("normal"))
_REJECT_ALL = tl.constexpr(POLICIES.index("reject_all"))

# What a block of a row leaves behind.
_MAX, _SUM, _ABOVE, _SCORE, _DRAFT_MAX, _DRAFT_SUM, _NUM_FLOATS = (tl.constexpr(i) for i in range(7))
_ARGMAX, _RANK, _SAMPLE, _NUM_INTS = (tl.constexpr(i) for i in range(4))
# What `_accept` leaves to be sampled for a request; a row of -1: nothing.
_PLAN_MAX, _PLAN_LIMIT, _PLAN_FLOOR, _PLAN_LOG_MASS, _PLAN_DRAFT_MAX, _PLAN_DRAFT_LOG_MASS, _PLAN_FLOATS = (
    tl.constexpr(i) for i in range(7)
)
_PLAN_ROW, _PLAN_SLOT, _PLAN_EXCLUDED, _PLAN_FIRST, _PLAN_INTS = (tl.constexpr(i) for i in range(5))

_NO_LIMIT = tl.constexpr(2**31 - 1)
# Temperatures outside act as these do; their reciprocals are no ordinary floats.
_COLDEST, _HOTTEST = tl.constexpr(1e-30), tl.constexpr(1e30)
# The most programs that a launch has along its second and third axis.
_MOST_PROGRAMS = 65_535


@triton.jit
def _rows_of(cu_ptr, i_req, max_rows):
    """First row of a request, int64, and how many of its rows count, int32."""
    start = tl.load(cu_ptr + i_req)
    end = tl.load(cu_ptr + i_req + 1)
    return start, tl.minimum(end - start, max_rows).to(tl.int32)


@triton.jit
def _temperature_of(temperature_ptr, i_req, STRATEGY: tl.constexpr):
    """The divisor of a request's logits, and whether the request is greedy."""
    temperature = tl.load(temperature_ptr + i_req)
    greedy = (temperature == 0.0) | (STRATEGY == _GREEDY)
    return tl.where(greedy, 1.0, tl.minimum(tl.maximum(temperature, _COLDEST), _HOTTEST)), greedy


@triton.jit
def _filters_of(top_p_ptr, top_k_ptr, min_p_ptr, i_req):
    """top_p, top_k (`_NO_LIMIT`: off) and min_p of a request."""
    top_p, min_p = tl.full((), 1.0, tl.float32), tl.full((), 0.0, tl.float32)
    top_k = tl.full((), _NO_LIMIT, tl.int32)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + i_req)
    if top_k_ptr is not None:
        given = tl.load(top_k_ptr + i_req)
        top_k = tl.where((given > 0) & (given < _NO_LIMIT), given, _NO_LIMIT).to(tl.int32)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + i_req)
    return top_p, top_k, min_p


@triton.jit
def _draft_of(p_row, drafts_ptr, i_row, temperature, vocab_size):
    """The draft at a row, int32, -1 if there is none; its logit; and whether any policy may accept it."""
    draft = tl.load(drafts_ptr + i_row)
    draft = tl.where((draft >= 0) & (draft < vocab_size), draft, -1).to(tl.int32)
    logit = load_logits(p_row, tl.maximum(draft, 0), vocab_size)
    # Masked, or so unlikely that it may as well be.
    return draft, logit, (draft >= 0) & (logit / temperature > NEG_INF)


@triton.jit
def _draft_row_of(draft_logits_ptr, draft_logits_stride, draft_rows_ptr, i_row, vocab_size):
    """Pointer to the draft logits of a row, and how many there are: 0 where the draft was not sampled."""
    i_draft_row = i_row
    if draft_rows_ptr is not None:
        i_draft_row = tl.load(draft_rows_ptr + i_row)
    size = tl.where(i_draft_row >= 0, vocab_size, 0)
    return draft_logits_ptr + tl.maximum(i_draft_row, 0) * draft_logits_stride, size


@triton.jit
def _block_tokens(i_block, BLOCK_GROUPS: tl.constexpr):
    """[BLOCK_GROUPS] groups and [BLOCK_GROUPS, GROUP_SIZE] tokens of a block, int32."""
    groups = i_block * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    return groups, groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]


@triton.jit(do_not_specialize=["max_rows"])
def _row_stats(
    logits_ptr,  # [num_rows, vocab]
    logits_stride,
    draft_logits_ptr,  # [num_draft_rows, vocab] or None
    draft_logits_stride,
    draft_rows_ptr,  # [num_rows] int64 or None
    cu_ptr,  # [num_reqs + 1] int64
    drafts_ptr,  # [num_rows] int64
    temperature_ptr,  # [num_reqs] float32
    seeds_ptr,  # [num_reqs] int64
    positions_ptr,  # [num_rows] int64
    floats_ptr,  # out [num_rows, _NUM_FLOATS, num_blocks] float32
    ints_ptr,  # out [num_rows, _NUM_INTS, num_blocks] int32
    group_max_ptr,  # out [num_rows, num_groups] float32, if FILTERED
    vocab_size,
    max_rows,
    num_blocks,
    num_groups,
    STRATEGY: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    i_block, i_slot, i_req = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, num_rows = _rows_of(cu_ptr, i_req, max_rows)
    if i_slot >= num_rows:
        return
    i_row = start + i_slot
    p_row = logits_ptr + i_row * logits_stride
    p_floats = floats_ptr + i_row * _NUM_FLOATS * num_blocks + i_block
    p_ints = ints_ptr + i_row * _NUM_INTS * num_blocks + i_block
    temperature, greedy = _temperature_of(temperature_ptr, i_req, STRATEGY)

    groups, tokens = _block_tokens(i_block, BLOCK_GROUPS)
    logits = load_logits(p_row, tokens, vocab_size)
    M, first = best_of(logits, tokens, vocab_size)
    tl.store(p_floats + _MAX * num_blocks, M)
    tl.store(p_ints + _ARGMAX * num_blocks, first)
    if (STRATEGY == _GREEDY) | greedy:
        return

    if FILTERED:
        tl.store(group_max_ptr + i_row * num_groups + groups, tl.max(logits, axis=1), mask=groups < num_groups)
    weight = weigh(logits, M, temperature)
    tl.store(p_floats + _SUM * num_blocks, tl.sum(weight))
    if STRATEGY == _TARGET_MATCH:
        noise = gumbel_noise(tl.load(seeds_ptr + i_req), tl.load(positions_ptr + i_row), tokens)
        score, sample = best_of(tl.minimum(logits / temperature + noise, LARGEST), tokens, vocab_size)
        tl.store(p_floats + _SCORE * num_blocks, score)
        tl.store(p_ints + _SAMPLE * num_blocks, sample)
    elif i_slot < num_rows - 1:
        draft, logit, _ = _draft_of(p_row, drafts_ptr, i_row, temperature, vocab_size)
        before = (logits > logit) | ((logits == logit) & (tokens < draft))
        tl.store(p_floats + _ABOVE * num_blocks, tl.sum(tl.where(before, weight, 0.0)))
        tl.store(p_ints + _RANK * num_blocks, tl.sum(before.to(tl.int32)))
        if draft_logits_ptr is not None:
            p_draft_row, draft_vocab_size = _draft_row_of(
                draft_logits_ptr, draft_logits_stride, draft_rows_ptr, i_row, vocab_size
            )
            draft_logits = load_logits(p_draft_row, tokens, draft_vocab_size)
            draft_M = tl.max(draft_logits)
            tl.store(p_floats + _DRAFT_MAX * num_blocks, draft_M)
            tl.store(p_floats + _DRAFT_SUM * num_blocks, tl.sum(weigh(draft_logits, draft_M, temperature)))


@triton.jit
def _floats_of(stats, i_row, which: tl.constexpr, other, ALL_BLOCKS: tl.constexpr):
    """[ALL_BLOCKS] float32 that the blocks of a row left behind, `other` past the last block."""
    floats_ptr, _, num_blocks = stats
    blocks = tl.arange(0, ALL_BLOCKS)
    p_floats = floats_ptr + (i_row * _NUM_FLOATS + which) * num_blocks
    return tl.load(p_floats + blocks, mask=blocks < num_blocks, other=other)


@triton.jit
def _ints_of(stats, i_row, which: tl.constexpr, other, ALL_BLOCKS: tl.constexpr):
    """[ALL_BLOCKS] int32 that the blocks of a row left behind, `other` past the last block."""
    _, ints_ptr, num_blocks = stats
    blocks = tl.arange(0, ALL_BLOCKS)
    p_ints = ints_ptr + (i_row * _NUM_INTS + which) * num_blocks
    return tl.load(p_ints + blocks, mask=blocks < num_blocks, other=other)


@triton.jit
def _best_block(best, tokens):
    """The best of the blocks' scores and the lowest token that has it: float32, int32."""
    score = tl.max(best, axis=0)
    return score, tl.min(tl.where(best == score, tokens, _NO_LIMIT), axis=0)


@triton.jit
def _first_of(stats, i_row, ALL_BLOCKS: tl.constexpr):
    """The largest logit of a row and the first token of its order: float32, int32."""
    return _best_block(
        _floats_of(stats, i_row, _MAX, NEG_INF, ALL_BLOCKS), _ints_of(stats, i_row, _ARGMAX, _NO_LIMIT, ALL_BLOCKS)
    )


@triton.jit
def _weighted_sum(mass, weight):
    """The sum of mass x weight over [ALL_BLOCKS], the same to the last bit in every thread: float32.

    The sum of bare products need not be. The compiler may fuse a thread's own product with the addition of its
    neighbour's, which has been rounded; the neighbour does so with the roles exchanged. Threads that disagree about a
    number that they branch on wait for each other for ever. No product that was chosen over 0 is fused.
    """
    return tl.sum(tl.where(mass > 0.0, mass * weight, 0.0), axis=0)


@triton.jit
def _mass_of(stats, i_row, which: tl.constexpr, M, temperature, ALL_BLOCKS: tl.constexpr):
    """The sum over a row of a mass that each block has relative to its own largest logit: float32."""
    best = _floats_of(stats, i_row, _MAX, NEG_INF, ALL_BLOCKS)
    return _weighted_sum(_floats_of(stats, i_row, which, 0.0, ALL_BLOCKS), weigh(best, M, temperature))


@triton.jit
def _draft_mass_of(stats, i_row, temperature, ALL_BLOCKS: tl.constexpr):
    """The largest logit of the draft model's row, -inf if it has no distribution, and its mass: float32."""
    best = _floats_of(stats, i_row, _DRAFT_MAX, NEG_INF, ALL_BLOCKS)
    M = tl.max(best, axis=0)
    return M, _weighted_sum(_floats_of(stats, i_row, _DRAFT_SUM, 0.0, ALL_BLOCKS), weigh(best, M, temperature))


@triton.jit
def _kept_by_count(row, groups, filters, total, ALL_GROUPS: tl.constexpr, TILE_GROUPS: tl.constexpr):
    """What min-p and top-k leave of a row: the logit that none of it is below, and its mass; float32."""
    _, top_k, min_p = filters
    floor, mass = -LARGEST, total
    if (top_k < row[1]) | (min_p > 0.0):
        no_limit = tl.full((), POS_INF, tl.float32)
        floor, mass = find_cut(row, groups, top_k, total, no_limit, ALL_GROUPS, TILE_GROUPS)
    return floor, mass


@triton.jit
def _nucleus_mass(row, groups, filters, total, ALL_GROUPS: tl.constexpr, TILE_GROUPS: tl.constexpr):
    """The mass of a row's nucleus: float32."""
    top_p, top_k, _ = filters
    _, mass = _kept_by_count(row, groups, filters, total, ALL_GROUPS, TILE_GROUPS)
    if top_p < 1.0:
        _, mass = find_cut(row, groups, top_k, mass, top_p * mass, ALL_GROUPS, TILE_GROUPS)
    return mass


@triton.jit
def _is_candidate(
    row,
    groups,
    filters,
    total,
    standing,
    max_candidates,
    FILTERED: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    """Whether a draft is one of the first `max_candidates` of the nucleus: bool.

    `standing`: the logit of the draft, its rank, and the mass above it.
    """
    top_p, top_k, min_p = filters
    logit, rank, above = standing
    inside = (logit >= row[4]) & (rank < tl.minimum(top_k, max_candidates))
    if FILTERED:
        if inside & (top_p < 1.0):
            # What min-p and top-k leave is at most the total, and at least the draft and what is above it.
            inside = above < top_p * total
            is_open = (top_k < row[1]) | (min_p > 0.0)
            if inside & is_open & (above >= top_p * (above + weigh(logit, row[3], row[2]))):
                _, mass = _kept_by_count(row, groups, filters, total, ALL_GROUPS, TILE_GROUPS)
                inside = above < top_p * mass
    return inside | (rank == 0)


@triton.jit
def _passes(
    row,
    groups,
    filters,
    total,
    standing,
    bar,
    FILTERED: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    """Whether the probability of a draft of the nucleus exceeds `bar`: bool. `standing` as in `_is_candidate`."""
    logit, _, above = standing
    weight = weigh(logit, row[3], row[2])
    passes = weight > bar * total
    if FILTERED:
        # The mass of the nucleus is at most the total, and at least the draft and what is above it.
        if (passes == 0) & (weight > bar * (above + weight)):
            passes = weight > bar * _nucleus_mass(row, groups, filters, total, ALL_GROUPS, TILE_GROUPS)
    return passes


@triton.jit
def _window_agrees(
    logits_ptr,
    logits_stride,
    drafts_ptr,
    stats,
    i_row,
    num_following,
    window,
    temperature,
    vocab_size,
    ALL_BLOCKS: tl.constexpr,
):
    """Whether there are `window` more draft rows and each holds the first token of its order: bool."""
    left = window + 0
    agrees = num_following >= window
    while agrees & (left > 0):
        i_row += 1
        draft, _, usable = _draft_of(logits_ptr + i_row * logits_stride, drafts_ptr, i_row, temperature, vocab_size)
        _, first = _first_of(stats, i_row, ALL_BLOCKS)
        agrees = usable & (draft == first)
        left -= 1
    return agrees


@triton.jit
def _sample_of_row(
    row,
    groups,
    key,
    filters,
    stats,
    i_row,
    first,
    FILTERED: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    """The token that `target_match` samples at a row: int32."""
    score, token = _best_block(
        _floats_of(stats, i_row, _SCORE, NEG_INF, ALL_BLOCKS), _ints_of(stats, i_row, _SAMPLE, _NO_LIMIT, ALL_BLOCKS)
    )
    token = tl.where(score > NEG_INF, token, first)
    if FILTERED:
        if token != first:
            top_p, top_k, _ = filters
            total = _mass_of(stats, i_row, _SUM, row[3], row[2], ALL_BLOCKS)
            floor, mass = _kept_by_count(row, groups, filters, total, ALL_GROUPS, TILE_GROUPS)
            limit = tl.where(top_p < 1.0, top_p * mass, POS_INF)
            residual = (row[0], -1, 0.0, 0.0, POS_INF)
            token = settle_sample(
                row, groups, key, residual, token, floor, top_k, limit, False, ALL_GROUPS, TILE_GROUPS
            )
            token = tl.where(token >= 0, token, first)
    return token


@triton.jit(do_not_specialize=["max_rows", "verify_window", "max_candidates"])
def _accept(
    logits_ptr,  # [num_rows, vocab]
    logits_stride,
    draft_logits_ptr,  # [num_draft_rows, vocab] or None
    draft_logits_stride,
    draft_rows_ptr,  # [num_rows] int64 or None
    cu_ptr,  # [num_reqs + 1] int64
    drafts_ptr,  # [num_rows] int64
    temperature_ptr,  # [num_reqs] float32
    top_p_ptr,  # [num_reqs] float32 or None
    top_k_ptr,  # [num_reqs] int64 or None
    min_p_ptr,  # [num_reqs] float32 or None
    seeds_ptr,  # [num_reqs] int64
    positions_ptr,  # [num_rows] int64
    floats_ptr,  # these three as `_row_stats` left them
    ints_ptr,
    group_max_ptr,
    group_list_ptr,  # scratch [num_reqs, num_groups] int32
    plan_floats_ptr,  # out [num_reqs, _PLAN_FLOATS] float32
    plan_ints_ptr,  # out [num_reqs, _PLAN_INTS] int64
    token_ids_ptr,  # out [num_reqs, max_rows] int64
    num_tokens_ptr,  # out [num_reqs] int32
    vocab_size,
    max_rows,
    num_blocks,
    num_groups,
    verify_window,
    max_candidates,
    STRATEGY: tl.constexpr,
    POLICY: tl.constexpr,
    FILTERED: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    i_req = tl.program_id(0).to(tl.int64)
    start, num_rows = _rows_of(cu_ptr, i_req, max_rows)
    temperature, greedy = _temperature_of(temperature_ptr, i_req, STRATEGY)
    filters = _filters_of(top_p_ptr, top_k_ptr, min_p_ptr, i_req)
    stats = (floats_ptr, ints_ptr, num_blocks)
    p_list = group_list_ptr + i_req * num_groups
    seed = tl.load(seeds_ptr + i_req)

    run = tl.zeros((), tl.int32)  # drafts accepted so far
    token = tl.full((), -1, tl.int32)  # what the row under test emits; -1: not known yet
    going = (num_rows > 1) & (POLICY != _REJECT_ALL)
    while going:
        i_row = start + run
        p_row = logits_ptr + i_row * logits_stride
        draft, logit, accepted = _draft_of(p_row, drafts_ptr, i_row, temperature, vocab_size)
        if (POLICY == _NORMAL) & accepted:
            M, first = _first_of(stats, i_row, ALL_BLOCKS)
            accepted = draft == first
            if greedy == 0:
                row = (p_row, vocab_size, temperature, M, lowest_kept(M, temperature, filters[2]))
                groups = (group_max_ptr + i_row * num_groups, p_list, num_groups)
                position = tl.load(positions_ptr + i_row)
                if STRATEGY == _TARGET_MATCH:
                    token = _sample_of_row(
                        row,
                        groups,
                        (seed, position),
                        filters,
                        stats,
                        i_row,
                        first,
                        FILTERED,
                        ALL_BLOCKS,
                        ALL_GROUPS,
                        TILE_GROUPS,
                    )
                    accepted = draft == token
                elif STRATEGY != _GREEDY:
                    total = _mass_of(stats, i_row, _SUM, M, temperature, ALL_BLOCKS)
                    rank = tl.sum(_ints_of(stats, i_row, _RANK, 0, ALL_BLOCKS), axis=0)
                    above = _mass_of(stats, i_row, _ABOVE, M, temperature, ALL_BLOCKS)
                    standing = (logit, rank, above)
                    accepted = _is_candidate(
                        row, groups, filters, total, standing, max_candidates, FILTERED, ALL_GROUPS, TILE_GROUPS
                    )
                    if STRATEGY == _REJECTION:
                        if accepted:
                            bar = acceptance_uniform(seed, position)
                            if draft_logits_ptr is not None:
                                draft_M, draft_mass = _draft_mass_of(stats, i_row, temperature, ALL_BLOCKS)
                                p_draft_row, _ = _draft_row_of(
                                    draft_logits_ptr, draft_logits_stride, draft_rows_ptr, i_row, vocab_size
                                )
                                q = weigh(load_logits(p_draft_row, draft, vocab_size), draft_M, temperature)
                                bar *= tl.where(draft_M > NEG_INF, q / draft_mass, 1.0)
                            accepted = _passes(
                                row, groups, filters, total, standing, bar, FILTERED, ALL_GROUPS, TILE_GROUPS
                            )
                    elif (accepted == 0) & (rank == 1) & (verify_window > 0):
                        accepted = _window_agrees(
                            logits_ptr,
                            logits_stride,
                            drafts_ptr,
                            stats,
                            i_row,
                            num_rows - 2 - run,
                            verify_window,
                            temperature,
                            vocab_size,
                            ALL_BLOCKS,
                        )
        run += accepted.to(tl.int32)
        token = tl.where(accepted, -1, token)
        going = accepted & (run < num_rows - 1)

    tl.store(plan_ints_ptr + i_req * _PLAN_INTS + _PLAN_ROW, -1)
    if num_rows > 0:
        i_row = start + run
        p_row = logits_ptr + i_row * logits_stride
        M, first = _first_of(stats, i_row, ALL_BLOCKS)
        row = (p_row, vocab_size, temperature, M, lowest_kept(M, temperature, filters[2]))
        groups = (group_max_ptr + i_row * num_groups, p_list, num_groups)
        if (STRATEGY == _GREEDY) | greedy:
            token = first
        elif STRATEGY == _TARGET_MATCH:
            if token < 0:
                key = (seed, tl.load(positions_ptr + i_row))
                token = _sample_of_row(
                    row, groups, key, filters, stats, i_row, first, FILTERED, ALL_BLOCKS, ALL_GROUPS, TILE_GROUPS
                )
        else:
            total = _mass_of(stats, i_row, _SUM, M, temperature, ALL_BLOCKS)
            p_plan = plan_floats_ptr + i_req * _PLAN_FLOATS
            tl.store(p_plan + _PLAN_MAX, M)
            if FILTERED:
                floor, mass = _kept_by_count(row, groups, filters, total, ALL_GROUPS, TILE_GROUPS)
                tl.store(p_plan + _PLAN_LIMIT, tl.where(filters[0] < 1.0, filters[0] * mass, POS_INF))
                if max_candidates < tl.minimum(filters[1], vocab_size):
                    no_limit = tl.full((), POS_INF, tl.float32)
                    floor, _ = find_cut(row, groups, max_candidates, total, no_limit, ALL_GROUPS, TILE_GROUPS)
                tl.store(p_plan + _PLAN_FLOOR, floor)
            excluded = tl.full((), -1, tl.int32)
            draft_log_mass = POS_INF
            if (STRATEGY == _REJECTION) & (POLICY == _NORMAL):
                if run < num_rows - 1:
                    draft, _, _ = _draft_of(p_row, drafts_ptr, i_row, temperature, vocab_size)
                    excluded = draft
                    if draft_logits_ptr is not None:
                        draft_M, draft_mass = _draft_mass_of(stats, i_row, temperature, ALL_BLOCKS)
                        if (draft >= 0) & (draft_M > NEG_INF):
                            excluded = tl.full((), -1, tl.int32)
                            draft_log_mass = tl.log(draft_mass)
                            mass = total
                            if FILTERED:
                                mass = _nucleus_mass(row, groups, filters, total, ALL_GROUPS, TILE_GROUPS)
                            tl.store(p_plan + _PLAN_LOG_MASS, tl.log(mass))
                            tl.store(p_plan + _PLAN_DRAFT_MAX, draft_M)
            tl.store(p_plan + _PLAN_DRAFT_LOG_MASS, draft_log_mass)
            p_plan = plan_ints_ptr + i_req * _PLAN_INTS
            tl.store(p_plan + _PLAN_ROW, i_row)
            tl.store(p_plan + _PLAN_SLOT, run)
            tl.store(p_plan + _PLAN_EXCLUDED, excluded)
            tl.store(p_plan + _PLAN_FIRST, first)

    slots = tl.arange(0, ALL_SLOTS)
    drafts = tl.load(drafts_ptr + start + slots, mask=slots < run, other=-1)
    tokens = tl.where((slots == run) & (num_rows > 0), token, drafts)
    tl.store(token_ids_ptr + i_req * max_rows + slots, tokens, mask=slots < max_rows)
    tl.store(num_tokens_ptr + i_req, tl.where(num_rows > 0, run + 1, 0))


@triton.jit
def _plan_of(
    logits_ptr,
    logits_stride,
    draft_logits_ptr,
    draft_logits_stride,
    draft_rows_ptr,
    temperature_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    plan_floats_ptr,
    plan_ints_ptr,
    vocab_size,
    i_req,
    i_row,
):
    """The tuples `row`, `key` and `residual` of the row that a request is to emit a sample of."""
    p_floats, p_ints = plan_floats_ptr + i_req * _PLAN_FLOATS, plan_ints_ptr + i_req * _PLAN_INTS
    _, _, min_p = _filters_of(None, None, min_p_ptr, i_req)
    p_row = logits_ptr + i_row * logits_stride
    p_draft_row = p_row
    if draft_logits_ptr is not None:
        p_draft_row, _ = _draft_row_of(draft_logits_ptr, draft_logits_stride, draft_rows_ptr, i_row, vocab_size)
    temperature, _ = _temperature_of(temperature_ptr, i_req, _REJECTION)
    M = tl.load(p_floats + _PLAN_MAX)
    row = (p_row, vocab_size, temperature, M, lowest_kept(M, temperature, min_p))
    key = (tl.load(seeds_ptr + i_req), tl.load(positions_ptr + i_row))
    residual = (
        p_draft_row,
        tl.load(p_ints + _PLAN_EXCLUDED),
        tl.load(p_floats + _PLAN_LOG_MASS),
        tl.load(p_floats + _PLAN_DRAFT_MAX),
        tl.load(p_floats + _PLAN_DRAFT_LOG_MASS),
    )
    return row, key, residual


@triton.jit
def _sample(
    logits_ptr,
    logits_stride,
    draft_logits_ptr,
    draft_logits_stride,
    draft_rows_ptr,
    temperature_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    group_max_ptr,
    plan_floats_ptr,  # these two as `_accept` left them
    plan_ints_ptr,
    scores_ptr,  # out [num_reqs, num_blocks] float32
    samples_ptr,  # out [num_reqs, num_blocks] int32
    vocab_size,
    num_blocks,
    num_groups,
    FILTERED: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    i_block, i_req = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_row = tl.load(plan_ints_ptr + i_req * _PLAN_INTS + _PLAN_ROW)
    if i_row < 0:
        return
    groups, tokens = _block_tokens(i_block, BLOCK_GROUPS)
    at = i_req * num_blocks + i_block
    if FILTERED:
        best = tl.load(group_max_ptr + i_row * num_groups + groups, mask=groups < num_groups, other=NEG_INF)
        if tl.max(best, axis=0) < tl.load(plan_floats_ptr + i_req * _PLAN_FLOATS + _PLAN_FLOOR):
            tl.store(scores_ptr + at, NEG_INF)
            tl.store(samples_ptr + at, 0)
            return
    row, key, residual = _plan_of(
        logits_ptr,
        logits_stride,
        draft_logits_ptr,
        draft_logits_stride,
        draft_rows_ptr,
        temperature_ptr,
        min_p_ptr,
        seeds_ptr,
        positions_ptr,
        plan_floats_ptr,
        plan_ints_ptr,
        vocab_size,
        i_req,
        i_row,
    )
    _, score = score_tokens(row, key, residual, tokens, draft_logits_ptr is not None)
    best, best_token = best_of(score, tokens, vocab_size)
    tl.store(scores_ptr + at, best)
    tl.store(samples_ptr + at, best_token)


@triton.jit(do_not_specialize=["max_rows", "max_candidates"])
def _emit(
    logits_ptr,
    logits_stride,
    draft_logits_ptr,
    draft_logits_stride,
    draft_rows_ptr,
    temperature_ptr,
    top_k_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    group_max_ptr,
    group_list_ptr,
    plan_floats_ptr,
    plan_ints_ptr,
    scores_ptr,  # these two as `_sample` left them
    samples_ptr,
    token_ids_ptr,  # out [num_reqs, max_rows] int64: one slot of each request
    vocab_size,
    max_rows,
    num_blocks,
    num_groups,
    max_candidates,
    FILTERED: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    i_req = tl.program_id(0).to(tl.int64)
    p_ints = plan_ints_ptr + i_req * _PLAN_INTS
    i_row = tl.load(p_ints + _PLAN_ROW)
    if i_row < 0:
        return
    blocks = tl.arange(0, ALL_BLOCKS)
    at = i_req * num_blocks + blocks
    score, token = _best_block(
        tl.load(scores_ptr + at, mask=blocks < num_blocks, other=NEG_INF),
        tl.load(samples_ptr + at, mask=blocks < num_blocks, other=_NO_LIMIT),
    )
    token = tl.where(score > NEG_INF, token, -1)
    if FILTERED:
        row, key, residual = _plan_of(
            logits_ptr,
            logits_stride,
            draft_logits_ptr,
            draft_logits_stride,
            draft_rows_ptr,
            temperature_ptr,
            min_p_ptr,
            seeds_ptr,
            positions_ptr,
            plan_floats_ptr,
            plan_ints_ptr,
            vocab_size,
            i_req,
            i_row,
        )
        _, top_k, _ = _filters_of(None, top_k_ptr, None, i_req)
        p_floats = plan_floats_ptr + i_req * _PLAN_FLOATS
        token = settle_sample(
            row,
            (group_max_ptr + i_row * num_groups, group_list_ptr + i_req * num_groups, num_groups),
            key,
            residual,
            token,
            tl.load(p_floats + _PLAN_FLOOR),
            tl.minimum(top_k, max_candidates),
            tl.load(p_floats + _PLAN_LIMIT),
            draft_logits_ptr is not None,
            ALL_GROUPS,
            TILE_GROUPS,
        )
    first = tl.load(p_ints + _PLAN_FIRST).to(tl.int32)
    p_slot = token_ids_ptr + i_req * max_rows + tl.load(p_ints + _PLAN_SLOT)
    tl.store(p_slot, tl.where(token >= 0, token, first))


@dataclass(frozen=True)
class Workspace:
    """Outputs and scratch of a verification, to be made once and used again.

    It fits any inputs with at most so many rows and requests, and with this vocabulary and `max_rows`.
    The result of one verification stands in it until the next.
    """

    token_ids: torch.Tensor  # [num_reqs, max_rows] int64
    num_tokens: torch.Tensor  # [num_reqs] int32
    floats: torch.Tensor  # [num_rows, _NUM_FLOATS, num_blocks] float32
    ints: torch.Tensor  # [num_rows, _NUM_INTS, num_blocks] int32
    group_max: torch.Tensor  # [num_rows, num_groups] float32
    group_list: torch.Tensor  # [num_reqs, num_groups] int32
    plan_floats: torch.Tensor  # [num_reqs, _PLAN_FLOATS] float32
    plan_ints: torch.Tensor  # [num_reqs, _PLAN_INTS] int64
    scores: torch.Tensor  # [num_reqs, num_blocks] float32
    samples: torch.Tensor  # [num_reqs, num_blocks] int32
    vocab_size: int

    @classmethod
    def allocate(
        cls, num_rows: int, num_reqs: int, vocab_size: int, max_rows: int, device: torch.device | str
    ) -> "Workspace":
        """Make one; at a vocabulary of 150,000 it takes some 0.1 byte for each logit of `num_rows` rows."""
        num_blocks = triton.cdiv(vocab_size, _block_size(vocab_size))
        num_groups = triton.cdiv(vocab_size, GROUP_SIZE.value)
        shapes = {
            "token_ids": ((num_reqs, max_rows), torch.int64),
            "num_tokens": ((num_reqs,), torch.int32),
            "floats": ((num_rows, _NUM_FLOATS.value, num_blocks), torch.float32),
            "ints": ((num_rows, _NUM_INTS.value, num_blocks), torch.int32),
            "group_max": ((num_rows, num_groups), torch.float32),
            "group_list": ((num_reqs, num_groups), torch.int32),
            "plan_floats": ((num_reqs, _PLAN_FLOATS.value), torch.float32),
            "plan_ints": ((num_reqs, _PLAN_INTS.value), torch.int64),
            "scores": ((num_reqs, num_blocks), torch.float32),
            "samples": ((num_reqs, num_blocks), torch.int32),
        }
        tensors = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
        return cls(**tensors, vocab_size=vocab_size)

    def check(self, inputs: VerifyInputs) -> None:
        """Raise ValueError unless the inputs fit."""
        made = (self.floats.shape[0], self.token_ids.shape[0], self.vocab_size, self.token_ids.shape[1])
        asked = (inputs.num_rows, inputs.num_reqs, inputs.vocab_size, inputs.max_rows)
        if made[0] < asked[0] or made[1] < asked[1] or made[2:] != asked[2:]:
            raise ValueError(
                f"workspace was made for {made[0]} rows, {made[1]} requests, vocabulary {made[2]} and max_rows "
                f"{made[3]}; asked for: {asked[0]}, {asked[1]}, {asked[2]} and {asked[3]}"
            )
        if self.floats.device != inputs.logits.device:
            raise ValueError(f"workspace is on {self.floats.device}; allowed: {inputs.logits.device}, as logits")


def _block_size(vocab_size: int) -> int:
    return min(BLOCK_SIZE, triton.next_power_of_2(max(vocab_size, GROUP_SIZE.value)))


def verify(inputs: VerifyInputs, workspace: Workspace | None = None) -> VerifyOutput:
    """Verify the drafts of every request; see ``vllm_specplus.verify.verify_draft_tokens``.

    Args:
        inputs: on a CUDA device, or anywhere under Triton's interpreter.
        workspace: where results and scratch go; None: made anew.

    Raises:
        ValueError: the workspace does not fit, there are more than 65,535 requests or rows of one, or nothing
            can run the kernels where the tensors are.
    """
    if inputs.logits.device.type == "cpu" and isinstance(_accept, triton.JITFunction):
        raise ValueError(
            "logits are on cpu; allowed with backend 'triton': an accelerator, or TRITON_INTERPRET=1 in the environment"
        )
    num_rows, num_reqs, vocab_size, max_rows = inputs.num_rows, inputs.num_reqs, inputs.vocab_size, inputs.max_rows
    for name, size in (("temperature", num_reqs), ("max_rows", max_rows)):
        if size > _MOST_PROGRAMS:
            raise ValueError(f"{name} is for {size:,}; allowed with backend 'triton': at most {_MOST_PROGRAMS:,}")
    if workspace is None:
        workspace = Workspace.allocate(num_rows, num_reqs, vocab_size, max_rows, inputs.logits.device)
    workspace.check(inputs)
    w = workspace
    output = VerifyOutput(w.token_ids[:num_reqs], w.num_tokens[:num_reqs])
    if num_reqs == 0 or num_rows == 0:
        output.token_ids.fill_(-1)
        output.num_tokens.zero_()
        return output

    logits = _unit_stride(inputs.logits)
    draft_logits = None if inputs.draft_logits is None else _unit_stride(inputs.draft_logits)
    draft_stride = 0 if draft_logits is None else draft_logits.stride(0)
    both_logits = (logits, logits.stride(0), draft_logits, draft_stride, inputs.draft_rows)
    filters = (inputs.top_p, inputs.top_k, inputs.min_p)
    filtered = inputs.max_candidate_len is not None or any(f is not None for f in filters)
    max_candidates = min(inputs.max_candidate_len or _NO_LIMIT.value, _NO_LIMIT.value)
    strategy, policy = STRATEGIES.index(inputs.strategy), POLICIES.index(inputs.policy)

    block_size = _block_size(vocab_size)
    num_blocks, num_groups = w.floats.shape[2], w.group_max.shape[1]
    wide = {"FILTERED": filtered, "BLOCK_GROUPS": block_size // GROUP_SIZE.value, "num_warps": 8}
    narrow = {
        "FILTERED": filtered,
        "ALL_BLOCKS": triton.next_power_of_2(num_blocks),
        "ALL_GROUPS": triton.next_power_of_2(num_groups),
        "TILE_GROUPS": min(TILE_SIZE // GROUP_SIZE.value, triton.next_power_of_2(num_groups)),
        "num_warps": 16 if filtered else 4,
    }
    with torch.cuda.device_of(logits):
        _row_stats[(num_blocks, max_rows, num_reqs)](
            *both_logits,
            inputs.cu_num_rows,
            inputs.draft_token_ids,
            inputs.temperature,
            inputs.seeds,
            inputs.positions,
            w.floats,
            w.ints,
            w.group_max,
            vocab_size,
            max_rows,
            num_blocks,
            num_groups,
            STRATEGY=strategy,
            **wide,
        )
        _accept[(num_reqs,)](
            *both_logits,
            inputs.cu_num_rows,
            inputs.draft_token_ids,
            inputs.temperature,
            *filters,
            inputs.seeds,
            inputs.positions,
            w.floats,
            w.ints,
            w.group_max,
            w.group_list,
            w.plan_floats,
            w.plan_ints,
            w.token_ids,
            w.num_tokens,
            vocab_size,
            max_rows,
            num_blocks,
            num_groups,
            min(inputs.verify_window, max_rows),
            max_candidates,
            STRATEGY=strategy,
            POLICY=policy,
            ALL_SLOTS=triton.next_power_of_2(max_rows),
            **narrow,
        )
        if inputs.strategy in ("topp", "rejection"):
            _sample[(num_blocks, num_reqs)](
                *both_logits,
                inputs.temperature,
                inputs.min_p,
                inputs.seeds,
                inputs.positions,
                w.group_max,
                w.plan_floats,
                w.plan_ints,
                w.scores,
                w.samples,
                vocab_size,
                num_blocks,
                num_groups,
                **wide,
            )
            _emit[(num_reqs,)](
                *both_logits,
                inputs.temperature,
                inputs.top_k,
                inputs.min_p,
                inputs.seeds,
                inputs.positions,
                w.group_max,
                w.group_list,
                w.plan_floats,
                w.plan_ints,
                w.scores,
                w.samples,
                w.token_ids,
                vocab_size,
                max_rows,
                num_blocks,
                num_groups,
                max_candidates,
                **narrow,
            )
    return output


def _unit_stride(logits: torch.Tensor) -> torch.Tensor:
    """The same logits, each row in one piece; copied only where they are not."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()
