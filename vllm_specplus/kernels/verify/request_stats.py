"""What the first pass says of several rows of a request at once, and of their drafts."""

from typing import NamedTuple

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.arguments import (
    FOUND_ABOVE,
    FOUND_DRAFT_MASS,
    FOUND_DRAFT_MAX,
    FOUND_LEAST,
    FOUND_LOGIT,
    FOUND_MAX,
    FOUND_TOKEN,
    FOUND_TOTAL,
    FOUND_VERDICT,
    FOUND_WEIGHT,
    NUM_PLAN_FLOATS,
    NUM_PLAN_INTS,
    PLAN_ACCEPTS,
    PLAN_NUM_LISTED,
    PLAN_REQUEST,
    PLAN_TOKEN,
    REJECTION,
    Draft,
    DraftLogits,
    Groups,
    Logits,
    NoiseKeys,
    RequestFilters,
    Rows,
    Stats,
    draft_row_of,
)
from vllm_specplus.kernels.verify.noise import acceptance_uniform
from vllm_specplus.kernels.verify.nucleus import NEG_INF, POS_INF, load_logits, lowest_kept, weigh
from vllm_specplus.kernels.verify.row_stats import (
    draft_masses_of,
    masses_above_drafts,
    max_logits_of,
    total_masses_of,
)


class Batch(NamedTuple):
    """What is read of all requests."""

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
    filters: RequestFilters


class Statistics(NamedTuple):
    """What the first pass says of rows and their drafts: [n] float32 each, or of one row."""

    max_logit: tl.tensor
    lowest: tl.tensor  # min-p keeps logits of at least this
    total: tl.tensor  # the mass of all tokens
    above: tl.tensor  # the mass of the tokens ordered before the draft; 0 if no top-p asks for it
    # With strategy `rejection`, else 0: the draft's weight, and the part of the nucleus that it must exceed.
    weight: tl.tensor
    least: tl.tensor
    # With draft logits, else 0: the largest of them, -inf if the draft was not sampled, and their mass.
    max_draft_logit: tl.tensor
    draft_mass: tl.tensor


@triton.jit
def statistics_of(batch, request, i_rows, drafts, sizes, STRATEGY: tl.constexpr, WITH_ABOVE: tl.constexpr):
    """The `Statistics` of some rows of a request and their `Draft`s."""
    stats, temperature = batch.stats, request.temperature
    max_logits = max_logits_of(stats, i_rows, sizes)
    lowest = lowest_kept(max_logits, temperature, request.filters.min_p)
    total = total_masses_of(stats, i_rows, max_logits, temperature, sizes)
    above, weight, least = tl.zeros_like(total), tl.zeros_like(total), tl.zeros_like(total)
    max_draft_logits, draft_mass = tl.zeros_like(total), tl.zeros_like(total)
    if WITH_ABOVE:
        above = masses_above_drafts(batch.logits, stats, i_rows, max_logits, drafts, temperature, sizes)
    if STRATEGY == REJECTION:
        weight = weigh(drafts.logit, max_logits, temperature)
        seed, positions = tl.load(batch.keys.seeds_ptr + request.i_req), tl.load(batch.keys.positions_ptr + i_rows)
        least = acceptance_uniform(seed, positions)
        if batch.draft_logits.ptr is not None:
            vocab_size = batch.logits.vocab_size
            max_draft_logits, draft_mass = draft_masses_of(stats, i_rows, temperature, sizes)
            p_draft_rows, _ = draft_row_of(batch.draft_logits, i_rows, vocab_size)
            tokens = tl.where(drafts.is_usable, drafts.token, vocab_size)
            q = weigh(load_logits(p_draft_rows, tokens, vocab_size), max_draft_logits, temperature) / draft_mass
            least *= tl.where(max_draft_logits > NEG_INF, q, 1.0)
    return Statistics(max_logits, lowest, total, above, weight, least, max_draft_logits, draft_mass)


@triton.jit
def note_settled(plans, i_rows, verdicts, tokens, i_req, is_own, is_open):
    """Write the plans of the rows of a request, but for what is open."""
    p_ints = plans.ints_ptr + i_rows * NUM_PLAN_INTS
    tl.store(p_ints + PLAN_ACCEPTS, (verdicts == 1).to(tl.int32), mask=is_own & (is_open == 0))
    tl.store(p_ints + PLAN_TOKEN, tokens, mask=is_own & (is_open == 0))
    tl.store(p_ints + PLAN_REQUEST, tl.zeros_like(verdicts) + i_req.to(tl.int32), mask=is_own)
    tl.store(p_ints + PLAN_NUM_LISTED, tl.zeros_like(verdicts), mask=is_own)


@triton.jit
def note_open(plans, i_rows, found, drafts, verdicts, mask):
    """Write for this program what it knows of some rows, to read it row by row."""
    p_floats, p_ints = plans.floats_ptr + i_rows * NUM_PLAN_FLOATS, plans.ints_ptr + i_rows * NUM_PLAN_INTS
    tl.store(p_floats + FOUND_MAX, found.max_logit, mask=mask)
    tl.store(p_floats + FOUND_TOTAL, found.total, mask=mask)
    tl.store(p_floats + FOUND_ABOVE, found.above, mask=mask)
    tl.store(p_floats + FOUND_WEIGHT, found.weight, mask=mask)
    tl.store(p_floats + FOUND_LEAST, found.least, mask=mask)
    tl.store(p_floats + FOUND_DRAFT_MAX, found.max_draft_logit, mask=mask)
    tl.store(p_floats + FOUND_DRAFT_MASS, found.draft_mass, mask=mask)
    tl.store(p_floats + FOUND_LOGIT, drafts.logit, mask=mask)
    tl.store(p_ints + FOUND_TOKEN, drafts.token, mask=mask)
    tl.store(p_ints + FOUND_VERDICT, verdicts, mask=mask)
    # Other threads of this program will read them.
    tl.debug_barrier()


@triton.jit
def read_notes(plans, i_row, request):
    """The `Statistics` of one row, its `Draft`, and the verdict on it, as `note_open` left them."""
    p_floats, p_ints = plans.floats_ptr + i_row * NUM_PLAN_FLOATS, plans.ints_ptr + i_row * NUM_PLAN_INTS
    max_logit = tl.load(p_floats + FOUND_MAX)
    found = Statistics(
        max_logit,
        lowest_kept(max_logit, request.temperature, request.filters.min_p),
        tl.load(p_floats + FOUND_TOTAL),
        tl.load(p_floats + FOUND_ABOVE),
        tl.load(p_floats + FOUND_WEIGHT),
        tl.load(p_floats + FOUND_LEAST),
        tl.load(p_floats + FOUND_DRAFT_MAX),
        tl.load(p_floats + FOUND_DRAFT_MASS),
    )
    token, logit = tl.load(p_ints + FOUND_TOKEN), tl.load(p_floats + FOUND_LOGIT)
    draft = Draft(token, logit, (token >= 0) & (logit / request.temperature > NEG_INF))
    return found, draft, tl.load(p_ints + FOUND_VERDICT)


@triton.jit
def keeps_one(filters, total):
    """Whether the first token alone has the mass that top-p keeps, of all that there is or of less: bool."""
    return tl.where(filters.top_p < 1.0, filters.top_p * total, POS_INF) <= 1.0
