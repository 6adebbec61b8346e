"""How each strategy tests a draft.

`topp` accepts a draft that is a candidate, `rejection` one that is also likely enough. Both compare it with the mass of
the nucleus, which is open where filters apply. The mass is found only where bounds of it do not decide.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.arguments import (
    REJECTION,
    TARGET_MATCH,
    TOPP,
    DraftLogits,
    Groups,
    Logits,
    NoiseKeys,
    RequestFilters,
    Rows,
    Stats,
    draft_of,
    draft_row_of,
)
from vllm_specplus.kernels.verify.noise import acceptance_uniform
from vllm_specplus.kernels.verify.nucleus import (
    LARGEST,
    NEG_INF,
    POS_INF,
    NoiseKey,
    Residual,
    Row,
    RowGroups,
    find_cut,
    load_logits,
    lowest_kept,
    settle_sample,
    weigh,
)
from vllm_specplus.kernels.verify.row_stats import (
    best_score_of,
    draft_mass_of,
    first_of,
    mass_above_draft,
    rank_of_draft,
    total_mass_of,
)
from vllm_specplus.strategies import STRATEGIES

SAMPLED_LATER = tuple(name for name in STRATEGIES if name not in ("greedy", "target_match"))
"""The strategies whose last token is sampled in a further pass, when the walk over the rows has found its row."""


class Batch(NamedTuple):
    """What the walk reads of all requests."""

    logits: Logits
    draft_logits: DraftLogits
    rows: Rows
    keys: NoiseKeys
    stats: Stats
    groups: Groups


class Request(NamedTuple):
    """One request: its first row, how many rows it has, and its parameters."""

    i_req: tl.tensor  # int64
    start: tl.tensor  # int64
    num_rows: tl.tensor  # int32
    temperature: tl.tensor
    is_greedy: tl.tensor
    filters: RequestFilters


class Standing(NamedTuple):
    """A draft among the tokens of its row."""

    logit: tl.tensor  # float32
    rank: tl.tensor  # int32, how many tokens are ordered before it
    above: tl.tensor  # float32, the mass of those tokens
    total: tl.tensor  # float32, the mass of all tokens


@triton.jit
def row_at(batch, request, i_row, sizes):
    """The `Row`, its `RowGroups`, and the first token of its order, int32."""
    logits, groups = batch.logits, batch.groups
    max_logit, first = first_of(batch.stats, i_row, sizes)
    lowest = lowest_kept(max_logit, request.temperature, request.filters.min_p)
    row = Row(logits.ptr + i_row * logits.stride, logits.vocab_size, request.temperature, max_logit, lowest)
    p_max, p_list = groups.max_ptr + i_row * groups.num_groups, groups.list_ptr + request.i_req * groups.num_groups
    return row, RowGroups(p_max, p_list, groups.num_groups), first


@triton.jit
def key_of(batch, request, i_row):
    """The `NoiseKey` of a row."""
    return NoiseKey(tl.load(batch.keys.seeds_ptr + request.i_req), tl.load(batch.keys.positions_ptr + i_row))


@triton.jit
def kept_by_count(row, groups, filters, total, sizes):
    """A lower bound of the logits that min-p and top-k keep of a row, and their mass: float32."""
    floor, mass = -LARGEST, total
    if (filters.top_k < row.vocab_size) | (filters.min_p > 0.0):
        no_limit = tl.full((), POS_INF, tl.float32)
        floor, mass = find_cut(row, groups, filters.top_k, total, no_limit, sizes)
    return floor, mass


@triton.jit
def nucleus_mass(row, groups, filters, total, sizes):
    """The mass of a row's nucleus: float32."""
    _, mass = kept_by_count(row, groups, filters, total, sizes)
    if filters.top_p < 1.0:
        _, mass = find_cut(row, groups, filters.top_k, mass, filters.top_p * mass, sizes)
    return mass


@triton.jit
def _is_candidate(row, groups, filters, standing, max_candidates, sizes, FILTERED: tl.constexpr):
    """Whether a draft is one of the first `max_candidates` of the nucleus: bool."""
    top_p, above = filters.top_p, standing.above
    inside = (standing.logit >= row.lowest) & (standing.rank < tl.minimum(filters.top_k, max_candidates))
    if FILTERED:
        if inside & (top_p < 1.0):
            # The mass that min-p and top-k keep is at most the total, and at least the draft's and what is above it.
            inside = above < top_p * standing.total
            is_open = (filters.top_k < row.vocab_size) | (filters.min_p > 0.0)
            weight = weigh(standing.logit, row.max_logit, row.temperature)
            if inside & is_open & (above >= top_p * (above + weight)):
                _, mass = kept_by_count(row, groups, filters, standing.total, sizes)
                inside = above < top_p * mass
    return inside | (standing.rank == 0)


@triton.jit
def _followers_agree(batch, request, i_row, num_followers, verify_window, sizes):
    """Whether there are `verify_window` more draft rows, and each holds the first token of its order: bool."""
    left = verify_window + 0
    agrees = num_followers >= verify_window
    while agrees & (left > 0):
        i_row += 1
        draft = draft_of(batch.logits, batch.rows, i_row, request.temperature)
        _, first = first_of(batch.stats, i_row, sizes)
        agrees = draft.is_usable & (draft.token == first)
        left -= 1
    return agrees


@triton.jit
def _least_probability(batch, row, i_row, key, draft, sizes):
    """The probability that `rejection` asks of a draft: u q(draft), or u for a draft that was not sampled; float32."""
    least = acceptance_uniform(key.seed, key.position)
    if batch.draft_logits.ptr is not None:
        max_draft_logit, draft_mass = draft_mass_of(batch.stats, i_row, row.temperature, sizes)
        p_draft_row, _ = draft_row_of(batch.draft_logits, i_row, row.vocab_size)
        q = weigh(load_logits(p_draft_row, draft.token, row.vocab_size), max_draft_logit, row.temperature)
        least *= tl.where(max_draft_logit > NEG_INF, q / draft_mass, 1.0)
    return least


@triton.jit
def _exceeds(row, groups, filters, standing, least, sizes, FILTERED: tl.constexpr):
    """Whether the probability of a draft of the nucleus exceeds `least`: bool."""
    weight = weigh(standing.logit, row.max_logit, row.temperature)
    exceeds = weight > least * standing.total
    if FILTERED:
        # The mass of the nucleus is at most the total, and at least the draft's and what is above it.
        if (exceeds == 0) & (weight > least * (standing.above + weight)):
            exceeds = weight > least * nucleus_mass(row, groups, filters, standing.total, sizes)
    return exceeds


@triton.jit
def sample_of_row(batch, row, groups, filters, i_row, key, first, sizes, FILTERED: tl.constexpr):
    """The token that `target_match` samples at a row: int32."""
    score, token = best_score_of(batch.stats, i_row, sizes)
    token = tl.where(score > NEG_INF, token, first)
    if FILTERED:
        if token != first:
            top_p, top_k = filters.top_p, filters.top_k
            total = total_mass_of(batch.stats, i_row, row, sizes)
            floor, mass = kept_by_count(row, groups, filters, total, sizes)
            limit = tl.where(top_p < 1.0, top_p * mass, POS_INF)
            all_of_row = Residual(row.ptr, -1, 0.0, 0.0, POS_INF)
            token = settle_sample(row, groups, key, all_of_row, token, floor, top_k, limit, sizes, False)
            token = tl.where(token >= 0, token, first)
    return token


@triton.jit
def _standing_of(batch, row, i_row, draft, sizes):
    """The `Standing` of a row's draft."""
    total = total_mass_of(batch.stats, i_row, row, sizes)
    rank = rank_of_draft(batch.stats, i_row, sizes)
    return Standing(draft.logit, rank, mass_above_draft(batch.stats, i_row, row, sizes), total)


@triton.jit
def _passes_topp(batch, request, run, row, groups, draft, verify_window, max_candidates, sizes, FILTERED: tl.constexpr):
    """Whether `topp` accepts a draft: a candidate, or a second choice that first choices follow; bool."""
    i_row = request.start + run
    standing = _standing_of(batch, row, i_row, draft, sizes)
    passes = _is_candidate(row, groups, request.filters, standing, max_candidates, sizes, FILTERED)
    if (passes == 0) & (standing.rank == 1) & (verify_window > 0):
        num_followers = request.num_rows - 2 - run
        passes = _followers_agree(batch, request, i_row, num_followers, verify_window, sizes)
    return passes


@triton.jit
def _passes_rejection(batch, request, run, row, groups, key, draft, max_candidates, sizes, FILTERED: tl.constexpr):
    """Whether `rejection` accepts a draft: a candidate, and likely enough; bool."""
    i_row, filters = request.start + run, request.filters
    standing = _standing_of(batch, row, i_row, draft, sizes)
    passes = _is_candidate(row, groups, filters, standing, max_candidates, sizes, FILTERED)
    if passes:
        least = _least_probability(batch, row, i_row, key, draft, sizes)
        passes = _exceeds(row, groups, filters, standing, least, sizes, FILTERED)
    return passes


@triton.jit
def judge_draft(
    batch, request, run, draft, verify_window, max_candidates, sizes, STRATEGY: tl.constexpr, FILTERED: tl.constexpr
):
    """Whether the strategy accepts a usable draft, bool, and the token that `target_match` emits there, int32."""
    i_row = request.start + run
    row, groups, first = row_at(batch, request, i_row, sizes)
    token = tl.full((), -1, tl.int32)
    passes = draft.token == first
    if request.is_greedy == 0:
        key = key_of(batch, request, i_row)
        if STRATEGY == TARGET_MATCH:
            token = sample_of_row(batch, row, groups, request.filters, i_row, key, first, sizes, FILTERED)
            passes = draft.token == token
        elif STRATEGY == TOPP:
            passes = _passes_topp(
                batch, request, run, row, groups, draft, verify_window, max_candidates, sizes, FILTERED
            )
        elif STRATEGY == REJECTION:
            passes = _passes_rejection(batch, request, run, row, groups, key, draft, max_candidates, sizes, FILTERED)
    return passes, token
