"""How each strategy tests a draft, in the head of its row and in a row that has none.

`topp` accepts a draft that is a candidate, `rejection` one that is also likely enough. `target_match` accepts the token
that it samples. A verdict is 1 if a draft is accepted, 0 if not, and -1 while that is not known.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.arguments import REJECTION, TOPP, draft_of
from vllm_specplus.kernels.verify.head import Need
from vllm_specplus.kernels.verify.nucleus import (
    GROUP_SIZE,
    LARGEST,
    NEG_INF,
    POS_INF,
    Row,
    find_cut,
    list_groups,
    load_logits,
    tile_of,
    weigh,
)
from vllm_specplus.kernels.verify.order import count_before
from vllm_specplus.kernels.verify.request_stats import keeps_one
from vllm_specplus.kernels.verify.row_stats import first_token

BY_NUCLEUS = ("topp", "rejection")
"""The strategies that ask whether a draft is in its row's nucleus: they need the mass above it."""


class NucleusBounds(NamedTuple):
    """What the filters keep of a row, as far as it is known without a head.

    Of what min-p keeps alone, the mass lies between two bounds: few tokens are asked for more.
    """

    floor: tl.tensor  # float32, no token of the nucleus has a lower logit
    mass: tl.tensor  # float32, of what min-p and top-k keep, or more
    least_mass: tl.tensor  # float32, the same, or less
    limit: tl.tensor  # float32, the mass that may lie before a token of the nucleus


@triton.jit
def need_of(row, filters, total, verify_window, max_candidates):
    """How far down a row its head must reach: `Need`."""
    by_mass, is_open = filters.top_p < 1.0, (filters.top_k < row.vocab_size) | (filters.min_p > 0.0)
    # Where top-p acts on what min-p and top-k keep, all that they keep is needed, for its mass.
    count = tl.where(is_open & by_mass, filters.top_k, tl.minimum(filters.top_k, max_candidates))
    mass = tl.where(by_mass & (is_open == 0), filters.top_p * total, POS_INF)
    logit = tl.where(filters.min_p > 0.0, row.lowest, NEG_INF)
    return Need(count, mass, logit, tl.where(verify_window > 0, 2, 1))


@triton.jit
def _followers_agree(batch, request, i_row, verify_window, sizes):
    """Whether there are `verify_window` more draft rows, and each holds the first token of its order: bool."""
    left = verify_window + 0
    agrees = request.start + request.num_rows - 2 - i_row >= verify_window
    while agrees & (left > 0):
        i_row += 1
        draft = draft_of(batch.logits, batch.rows, i_row, request.temperature)
        agrees = draft.is_usable & (draft.token == first_token(batch.logits, batch.stats, batch.groups, i_row, sizes))
        left -= 1
    return agrees


@triton.jit
def nucleus_bounds(row, groups, filters, total, sizes, FILTERED: tl.constexpr):
    """What the filters keep of a row that has no head: `NucleusBounds`."""
    floor, mass, limit = -LARGEST, total, tl.full((), POS_INF, tl.float32)
    least_mass = total
    if FILTERED:
        if (filters.top_k < row.vocab_size) | ((filters.min_p > 0.0) & (filters.top_p < 1.0)):
            floor, mass = find_cut(row, groups, filters.top_k, total, limit, sizes)
            least_mass = mass
        elif filters.min_p > 0.0:
            floor = row.lowest
            # The first token weighs 1. All that min-p leaves out weigh less than its lowest token each.
            left_out = row.vocab_size * weigh(row.lowest, row.max_logit, row.temperature)
            least_mass = tl.minimum(tl.maximum(total - left_out, 1.0), total)
        limit = tl.where(filters.top_p < 1.0, filters.top_p * mass, limit)
    return NucleusBounds(floor, mass, least_mass, limit)


@triton.jit
def _mass_from(row, groups, num_listed, floor, sizes):
    """The mass of the tokens whose logits are at least `floor`, in groups that were listed by it: float32."""
    mass = tl.zeros((sizes.SCAN_GROUPS, GROUP_SIZE), tl.float32)
    for first in range(0, num_listed, sizes.SCAN_GROUPS):
        _, tokens = tile_of(groups, first, num_listed, sizes.SCAN_GROUPS)
        logits = load_logits(row.ptr, tokens, row.vocab_size)
        mass += tl.where(logits >= floor, weigh(logits, row.max_logit, row.temperature), 0.0)
    return tl.sum(mass)


@triton.jit
def nucleus_mass(row, groups, filters, bounds, sizes):
    """The mass of the nucleus of a row that has no head: float32."""
    mass = bounds.mass
    if filters.top_p < 1.0:
        _, mass = find_cut(row, groups, filters.top_k, bounds.mass, bounds.limit, sizes)
    elif bounds.least_mass < mass:
        mass = _mass_from(row, groups, list_groups(groups, bounds.floor, sizes), bounds.floor, sizes)
    return mass


@triton.jit
def _is_likely(row, groups, filters, bounds, found, draft_logit, sizes):
    """Whether a draft in the nucleus of a row that has no head has more than `least` of its mass: bool.

    All before the last token of the nucleus weigh less than the limit. So the nucleus weighs too much only if the limit
    is reached by tokens that each weigh as much as is left beyond it. Without a limit all of its tokens are weighed.
    """
    left = tl.maximum(found.weight / found.least - bounds.limit, 1e-37)
    logit = tl.minimum(row.max_logit + row.temperature * tl.log(left), draft_logit)
    floor = tl.maximum(tl.maximum(logit, bounds.floor), row.lowest)
    num_listed = list_groups(groups, floor, sizes)
    mass = _mass_from(row, groups, num_listed, floor, sizes)
    is_likely = mass < bounds.limit
    if bounds.limit == POS_INF:
        is_likely = found.weight > found.least * mass
    elif is_likely == 0:
        # The nucleus has no token below the floor.
        rest = Row(row.ptr, row.vocab_size, row.temperature, row.max_logit, floor)
        _, mass = find_cut(rest, groups, filters.top_k, bounds.mass, bounds.limit, sizes)
        is_likely = found.weight > found.least * mass
    return is_likely


@triton.jit
def judge_by_bounds(found, draft_logit, bounds, STRATEGY: tl.constexpr):
    """What `Statistics` say of drafts where the number of candidates has no limit: verdicts, int32."""
    # Only the first token has no mass before it. It is always kept.
    inside = (draft_logit >= found.lowest) & ((found.above < bounds.limit) | (found.above == 0.0))
    verdict = inside.to(tl.int32)
    if STRATEGY == REJECTION:
        # All before the last token of the nucleus weigh less than the limit, the last no more than the draft.
        most = tl.minimum(bounds.mass, bounds.limit + found.weight)
        fewest = tl.minimum(bounds.least_mass, tl.maximum(bounds.limit, found.above + found.weight))
        is_likely, may_be = found.weight > found.least * most, found.weight > found.least * fewest
        verdict = tl.where(inside, tl.where(is_likely, 1, tl.where(may_be, -1, 0)), 0)
    return verdict


@triton.jit
def judge_by_statistics(found, drafts, filters, vocab_size, verify_window, max_candidates, STRATEGY: tl.constexpr):
    """The verdicts of `topp` or `rejection` on drafts where statistics are enough: [n] int32."""
    is_one = keeps_one(filters, found.total)
    limit = tl.where(filters.top_p < 1.0, filters.top_p * found.total, POS_INF)
    mass = tl.where(is_one, 1.0, found.total)
    bounds = NucleusBounds(-LARGEST, mass, mass, limit)
    verdict = judge_by_bounds(found, drafts.logit, bounds, STRATEGY)
    if STRATEGY == TOPP:
        is_open = tl.where(verdict == 1, (max_candidates < vocab_size) & (is_one == 0), verify_window > 0)
        verdict = tl.where(is_open, -1, verdict)
    return tl.where(((filters.top_k >= vocab_size) & (filters.min_p <= 0.0)) | is_one, verdict, -1)


@triton.jit
def judge_in_head(
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
    STRATEGY: tl.constexpr,
):
    """The verdict of `topp` or `rejection` on a draft of a row whose nucleus is in its head: int32."""
    is_draft = head.tokens == draft.token
    is_candidate = is_draft & inside & (head.rank < max_candidates)
    passes = tl.sum(is_candidate.to(tl.int32), axis=0) > 0
    if STRATEGY == REJECTION:
        passes = passes & (found.weight > found.least * mass)
    if STRATEGY == TOPP:
        is_second = tl.sum((is_draft & (head.rank == 1)).to(tl.int32), axis=0) > 0
        if (passes == 0) & is_second & (verify_window > 0):
            passes = _followers_agree(batch, request, i_row, verify_window, sizes)
    return passes.to(tl.int32)


@triton.jit
def _rank_in_row(row, groups, draft, sizes):
    """The number of tokens that a row orders before its draft: int32."""
    num_listed = list_groups(groups, draft.logit, sizes)
    return count_before(row, groups, num_listed, draft.token, draft.logit, sizes)


@triton.jit
def judge_in_row(
    batch,
    request,
    i_row,
    row,
    groups,
    bounds,
    found,
    draft,
    verify_window,
    max_candidates,
    sizes,
    STRATEGY: tl.constexpr,
):
    """The verdict of `topp` or `rejection` on a draft of a row that has no head: int32."""
    verdict = judge_by_bounds(found, draft.logit, bounds, STRATEGY)
    max_count = tl.minimum(request.filters.top_k, max_candidates)
    if (verdict != 0) & (max_count < row.vocab_size):
        if _rank_in_row(row, groups, draft, sizes) >= max_count:
            verdict = tl.zeros((), tl.int32)
    if STRATEGY == REJECTION:
        if verdict < 0:
            verdict = _is_likely(row, groups, request.filters, bounds, found, draft.logit, sizes).to(tl.int32)
    if STRATEGY == TOPP:
        if (verdict == 0) & (verify_window > 0):
            if _rank_in_row(row, groups, draft, sizes) == 1:
                verdict = _followers_agree(batch, request, i_row, verify_window, sizes).to(tl.int32)
    return verdict
