"""An arbiter's state on the device. R, S, C and K are as in `proposers/_arbiter.py`, the specification."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl

from vllm_specplus import sources
from vllm_specplus.kernels.checks import check_rows, check_vector
from vllm_specplus.kernels.drafts import DraftCounts
from vllm_specplus.kernels.sizes import next_power_of_2

# As in the specification, which cannot be imported here since it imports numba. A test compares them.
SHIFT = tl.constexpr(16)
ONE = tl.constexpr(1 << 16)
NUM_SOURCES = tl.constexpr(sources.REFERENCE - sources.NGRAM + 1)
NUM_PLACES = tl.constexpr(8)
NUM_LENGTHS = tl.constexpr(13)
WHOLE_OUTPUT = tl.constexpr(sources.WHOLE_OUTPUT)
ALONE = tl.constexpr(0)
AGREED = tl.constexpr(ALONE + NUM_PLACES)
DIFFERED = tl.constexpr(AGREED + NUM_LENGTHS)
CONTRARY = tl.constexpr(DIFFERED + NUM_LENGTHS)
COPIED = tl.constexpr(CONTRARY + NUM_SOURCES * NUM_LENGTHS)
NUM_KEYS = tl.constexpr(COPIED + NUM_SOURCES * NUM_LENGTHS)
TRIAL = tl.constexpr(1 << 8)
PRIOR_TRIALS = tl.constexpr(4 * TRIAL)
DERIVED_TRIALS = tl.constexpr(6 * TRIAL)
MAX_TRIALS = tl.constexpr(32 * TRIAL)
MAX_COPIED_TRIALS = tl.constexpr(128 * TRIAL)
MAX_MISSES = tl.constexpr(4)
SETTLED = tl.constexpr(0)
DISPUTED = tl.constexpr(SETTLED + sources.REFERENCE + 1)
ENDS = tl.constexpr(DISPUTED + sources.REFERENCE + 1)
NUM_RECORDS = tl.constexpr(ENDS + 1)
PRIOR_EXPECTED = tl.constexpr(6 * ONE.value)
PRIOR_VOUCHED = tl.constexpr(24 * ONE.value)
PRIOR_MISSES = tl.constexpr(3 * ONE.value)
LUCKY_MISSES = tl.constexpr(2 * ONE.value)
PRIOR_DISPUTED = tl.constexpr(2 * ONE.value)
PRIOR_DISPUTED_MISSES = tl.constexpr(2 * ONE.value)
LUCKY_DISPUTED_MISSES = tl.constexpr(1 * ONE.value)
MAX_EXPECTED = tl.constexpr(32 * ONE.value)
DOUBT = tl.constexpr(ONE.value >> 8)
MAX_GAIN_TRIALS = tl.constexpr(16)
PRIOR_GAIN = tl.constexpr(ONE.value * 3 // 10)
PRIOR_GAIN_TRIALS = tl.constexpr(2)
PASS_PERIOD = tl.constexpr(32)
MAX_STOPS = tl.constexpr(4)
NO_TOKEN = tl.constexpr(-1)
NO_OFFERS = tl.constexpr(-1)
NO_PASS = tl.constexpr(-1)
ASLEEP = tl.constexpr(-1)
MOST_CREDIT = tl.constexpr(8 * ONE.value)
NUM_TOTALS = 2


class Offers(NamedTuple):
    """What the sources offer, as in the specification, but for `is_blind`."""

    model: torch.Tensor  # [R, S] int32
    passes: torch.Tensor  # [R] int64
    chains: torch.Tensor  # [R, C, K] int32
    lengths: torch.Tensor  # [R, C] int32
    agreed: torch.Tensor  # [R, C] int32
    starts: torch.Tensor  # [C] int64
    sources: torch.Tensor  # [C] int64
    stops: torch.Tensor  # [R, MAX_STOPS] int32
    limits: torch.Tensor  # [R] int64


class Table(NamedTuple):
    """What is known of each key, as in the specification: [NUM_KEYS] int64 each."""

    new_hits: torch.Tensor  # of this step, and 0 between the calls
    new_trials: torch.Tensor
    hits: torch.Tensor
    trials: torch.Tensor
    misses: torch.Tensor
    chances: torch.Tensor


class Record(NamedTuple):
    """How each source has done, as in the specification: [R, NUM_RECORDS] int64 each, or [1, NUM_RECORDS]."""

    trials: torch.Tensor
    expected: torch.Tensor
    hits: torch.Tensor


class Beliefs(NamedTuple):
    """What is believed of what is offered, as in the specification."""

    chances: torch.Tensor  # [NUM_KEYS] int64
    record: Record
    opposed: Record


class Gains(NamedTuple):
    """What passes have added, by the class of the agreement that spoke for the history, as in the specification."""

    sums: torch.Tensor  # [NUM_LENGTHS, S] int64
    trials: torch.Tensor  # [NUM_LENGTHS, S] int64
    told_sums: torch.Tensor  # [NUM_LENGTHS, S] int64
    told_trials: torch.Tensor  # [NUM_LENGTHS, S] int64
    steps_since_all: torch.Tensor  # [NUM_LENGTHS] int64


class Foregone(NamedTuple):
    """The pass behind the last one of each request's last step, as in the specification: [R] int64 each."""

    gains: torch.Tensor
    chances: torch.Tensor


class Tallies(NamedTuple):
    """What the programs of a kernel count together. All but `num_offered` are 0 between the calls.

    num_ended: [1] int32, programs that have ended. num_offered: [1] int64, requests that the model has drafted for in
    this step. new_offered: [1] int64, the same while they are counted. num_awake: [1] int64, requests that have not
    given the model up. num_drafting: [NUM_LENGTHS] int64, those of them that may draft, by the class of `Gains`.
    """

    num_ended: torch.Tensor
    num_offered: torch.Tensor
    new_offered: torch.Tensor
    num_awake: torch.Tensor
    num_drafting: torch.Tensor


class Scratch(NamedTuple):
    """What `choose_and_settle` writes for others in the same step."""

    num_model: torch.Tensor  # [R] int32
    chances: torch.Tensor  # [R, K] int64


class Sizes(NamedTuple):
    """Constants; those named BLOCK are powers of 2.

    Each field is a constant, not the argument: Triton 3.6 cannot pass a constant group on to a function.
    """

    NUM_CHAINS: tl.constexpr
    NUM_STEPS: tl.constexpr
    WIDTH: tl.constexpr
    BLOCK_CHAINS: tl.constexpr
    BLOCK_STEPS: tl.constexpr  # of more than NUM_STEPS
    BLOCK_WIDTH: tl.constexpr
    IS_BLIND: tl.constexpr


class State(NamedTuple):
    """All that lasts from step to step. Tensors are contiguous; see `make_state`.

    offers: written by the sources between `judge_and_offer` and `choose_and_settle`.
    record: of each request. opposed: of all together, where chains differ.
    offer_positions: [R] int64, where in its text each request's offers begin; NO_OFFERS: there are none.
    credits: [R] int64 in the time of a step; ASLEEP for a request that has given the draft model up.
    tallies: of a step.
    scratch: holds nothing from one step to the next.
    sizes: as the kernels are compiled for them.
    """

    offers: Offers
    table: Table
    record: Record
    opposed: Record
    gains: Gains
    foregone: Foregone
    offer_positions: torch.Tensor
    credits: torch.Tensor
    tallies: Tallies
    scratch: Scratch
    sizes: Sizes


def make_state(
    max_num_reqs: int,
    *,
    num_model_steps: int,
    num_speculative_tokens: int,
    chain_sources: Sequence[int],
    starts: Sequence[int],
    prior: torch.Tensor,
    is_blind: bool = False,
) -> State:
    """The state of an arbiter that knows nothing yet, on the device of `prior`; the arguments are those of `Arbiter`.

    In the row of a new request `offer_positions` has to be set to NO_OFFERS, and `record` to 0. `credits` has to be set
    to what it may spend, or to ASLEEP. `stops` of the offers has to be set to the tokens that end its text, with
    NO_TOKEN behind them.

    Args:
        max_num_reqs: R.
        num_model_steps: S.
        num_speculative_tokens: K.
        chain_sources, starts: [C], of each chain. A reference's is the last, and starts at 0.
        prior: [NUM_KEYS] int64, the chances of each key before anything is known, 0 to ONE.
        is_blind: whether nothing may depend on the model's drafts that might be left out because of it.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=prior.device)

    num_chains = len(starts)
    offers = Offers(
        zeros(max_num_reqs, num_model_steps, dtype=torch.int32),
        zeros(max_num_reqs),
        zeros(max_num_reqs, num_chains, num_speculative_tokens, dtype=torch.int32),
        zeros(max_num_reqs, num_chains, dtype=torch.int32),
        zeros(max_num_reqs, num_chains, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int64, device=prior.device),
        torch.tensor(chain_sources, dtype=torch.int64, device=prior.device),
        zeros(max_num_reqs, MAX_STOPS.value, dtype=torch.int32) + NO_TOKEN.value,
        zeros(max_num_reqs),
    )
    new_hits, new_trials, misses = (torch.zeros_like(prior) for _ in range(3))
    trials = torch.full_like(prior, PRIOR_TRIALS.value)
    table = Table(new_hits, new_trials, prior * trials // ONE.value, trials, misses, prior.clone())
    record, opposed = (Record(*zeros(3, num_rows, NUM_RECORDS.value)) for num_rows in (max_num_reqs, 1))
    sums, gain_trials, told_sums, told_trials = zeros(4, NUM_LENGTHS.value, num_model_steps)
    gains = Gains(sums, gain_trials, told_sums, told_trials, zeros(NUM_LENGTHS.value))
    foregone = Foregone(zeros(max_num_reqs) + NO_PASS.value, zeros(max_num_reqs))
    offer_positions = zeros(max_num_reqs) + NO_OFFERS.value
    numbers = num_chains, num_model_steps, num_speculative_tokens
    blocks = [next_power_of_2(size) for size in (max(num_chains, 1), num_model_steps + 1, num_speculative_tokens)]
    sizes = Sizes(*map(tl.constexpr, (*numbers, *blocks, is_blind)))
    tallies = Tallies(zeros(1, dtype=torch.int32), zeros(1), zeros(1), zeros(1), zeros(NUM_LENGTHS.value))
    scratch = Scratch(zeros(max_num_reqs, dtype=torch.int32), zeros(max_num_reqs, num_speculative_tokens))
    credits = zeros(max_num_reqs)
    return State(offers, table, record, opposed, gains, foregone, offer_positions, credits, tallies, scratch, sizes)


def check_texts(token_ids: torch.Tensor, num_tokens: torch.Tensor, max_num_reqs: int) -> None:
    """Raise ValueError for texts of another shape, dtype or layout than `judge_and_offer` takes."""
    check_rows("token_ids", token_ids, torch.int32)
    check_vector("num_tokens", num_tokens, max_num_reqs, torch.int32)


def check_lasting(
    state: State,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    by_state: DraftCounts,
    sources: torch.Tensor,
    totals: torch.Tensor,
) -> None:
    """Check once what is given to the functions of this package in each step. They check nothing themselves.

    The arguments are those of `judge_and_offer` and `choose_and_settle`.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
    """
    max_num_reqs = len(state.offer_positions)
    check_texts(token_ids, num_tokens, max_num_reqs)
    for name, counts in zip(by_state._fields, by_state, strict=True):
        check_vector(f"by_state.{name}", counts, max_num_reqs, torch.int32)
    check_vector("sources", sources, max_num_reqs, torch.int32)
    check_vector("totals", totals, NUM_TOTALS, torch.int64)
