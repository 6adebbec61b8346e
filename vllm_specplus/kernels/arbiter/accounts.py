"""Enters what the draft model's passes have added and cost, plans later ones, and tells the host of the step."""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.arbiter.keys import halve, length_class
from vllm_specplus.kernels.arbiter.state import (
    ASLEEP,
    MAX_GAIN_TRIALS,
    NO_PASS,
    NUM_LENGTHS,
    NUM_TOTALS,
    ONE,
    PASS_PERIOD,
    PRIOR_GAIN,
    PRIOR_GAIN_TRIALS,
    SHIFT,
    State,
)
from vllm_specplus.kernels.drafts import Limits
from vllm_specplus.kernels.sizes import next_power_of_2

_BLOCK_REQS = 64  # requests that the program takes at a time
_BLOCK_LENGTHS = next_power_of_2(NUM_LENGTHS.value)


def settle_and_plan(
    state: State,
    idx_mapping: torch.Tensor,
    values: torch.Tensor,
    limits: Limits,
    slot_price: torch.Tensor,
    pass_prices: torch.Tensor,
    step_price: torch.Tensor,
    totals: torch.Tensor,
    *,
    most_credit: int,
) -> torch.Tensor:
    """Enter what the passes of a step have added and cost, plan those of a later one, and put together a report.

    Args:
        state: its `credits` and `gains` are changed in place.
        idx_mapping: [B] int32 or int64, the row of each request; negative: no request. One to which the model has
            offered nothing has nothing to enter.
        values: [>= B, S + 1] int64, of `choose`.
        limits: of each request's drafts; one that may not draft needs the first pass, and no other.
        slot_price: [1] int64, of a draft.
        pass_prices: [S] int64, >= 0, of each pass for the whole batch.
        step_price: [1] int64, > 0, what a request gets in a step's time.
        totals: [2] int64, what the host has to know: the tokens that have come, and the profit of all passes in the
            time of a step. The second gets this step's profit added to it.
        most_credit: the largest credit of a request.

    Returns:
        [3 + B] int64: the totals, the number of passes, and the credit of each request; ASLEEP without one.
    """
    num_reqs = idx_mapping.shape[0]
    report = torch.empty(NUM_TOTALS + 1 + num_reqs, dtype=torch.int64, device=totals.device)
    _settle_kernel[(1,)](
        state.offers,
        state.credits,
        state.gains,
        state.foregone,
        idx_mapping,
        values,
        limits,
        slot_price,
        pass_prices,
        step_price,
        totals,
        report,
        num_reqs,
        state.sizes,
        MOST_CREDIT=most_credit,
        NUM_TOTALS=NUM_TOTALS,
        BLOCK_REQS=_BLOCK_REQS,
        BLOCK_LENGTHS=_BLOCK_LENGTHS,
        num_warps=8,
    )
    return report


@triton.jit(do_not_specialize=["num_reqs"])
def _settle_kernel(
    offers,  # Offers
    credits_ptr,  # changed in place
    gains,  # Gains, changed in place
    foregone,  # Foregone
    idx_mapping_ptr,
    values_ptr,
    limits,  # Limits
    slot_price_ptr,
    pass_prices_ptr,
    step_price_ptr,
    totals_ptr,  # changed in place
    report_ptr,  # out
    num_reqs,
    sizes,  # Sizes
    MOST_CREDIT: tl.constexpr,
    NUM_TOTALS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    BLOCK_LENGTHS: tl.constexpr,
):
    """Grid (1,): a pass is made for all requests together, and divided among those that have its drafts."""
    num_offered = tl.full((), 0, tl.int64)
    for first in range(0, num_reqs, BLOCK_REQS):
        rows, _ = _load_credits(credits_ptr, idx_mapping_ptr, first + tl.arange(0, BLOCK_REQS), num_reqs)
        num_offered += tl.sum((tl.load(offers.passes + rows, mask=rows >= 0, other=0) > 0).to(tl.int64), axis=0)

    steps = tl.arange(0, sizes.BLOCK_STEPS)
    classes = tl.arange(0, BLOCK_LENGTHS)
    prices = tl.load(pass_prices_ptr + steps, mask=steps < sizes.NUM_STEPS, other=0)
    shares = prices // tl.maximum(num_offered, 1)
    slot_price, step_price = tl.load(slot_price_ptr), tl.load(step_price_ptr)
    at = classes[:, None] * sizes.NUM_STEPS + steps[None, :]
    is_gain = (classes < NUM_LENGTHS)[:, None] & (steps < sizes.NUM_STEPS)[None, :]
    sums = tl.load(gains.sums + at, mask=is_gain, other=0)
    trials = tl.load(gains.trials + at, mask=is_gain, other=0)
    told_sums = tl.load(gains.told_sums + at, mask=is_gain, other=0)
    told_trials = tl.load(gains.told_trials + at, mask=is_gain, other=0)
    total = tl.full((), 0, tl.int64)
    num_requests = tl.zeros((BLOCK_LENGTHS,), tl.int64)  # awake and drafting, of each class
    num_awake = tl.full((), 0, tl.int64)
    for first in range(0, num_reqs, BLOCK_REQS):
        i_reqs = first + tl.arange(0, BLOCK_REQS)
        rows, credits = _load_credits(credits_ptr, idx_mapping_ptr, i_reqs, num_reqs)
        is_class = _classes_of_histories(offers, rows, sizes)[:, None] == classes[None, :]

        passes = tl.load(offers.passes + rows, mask=rows >= 0, other=0)
        is_offered = passes > 0
        is_made = steps[None, :] < passes[:, None]
        p_values = values_ptr + i_reqs[:, None] * (sizes.NUM_STEPS + 1) + steps[None, :]
        gain = tl.load(p_values + 1, mask=is_made, other=0) - tl.load(p_values, mask=is_made, other=0)
        profit = tl.sum(tl.where(is_made, gain - shares[None, :], 0), axis=1)
        profit = _divide(profit * ONE, step_price)
        total += tl.sum(profit, axis=0)
        is_counted = (is_class & is_offered[:, None])[:, :, None] & is_made[:, None, :]
        added, number = (
            tl.sum(tl.where(is_counted, gain[:, None, :], 0), axis=0),
            tl.sum(is_counted.to(tl.int64), axis=0),
        )
        sums, trials = sums + added, trials + number
        told_sums, told_trials = told_sums + added, told_trials + number

        # A pass that the step before has gone without: its draft would have stood before what is drafted now.
        missed = tl.load(foregone.gains + rows, mask=rows >= 0, other=NO_PASS)
        chance = tl.load(foregone.chances + rows, mask=missed != NO_PASS, other=0)
        value = tl.load(values_ptr + i_reqs * (sizes.NUM_STEPS + 1), mask=missed != NO_PASS, other=0)
        gain = chance * tl.maximum(ONE - slot_price + value, 0) >> SHIFT
        is_counted = (
            (missed != NO_PASS)[:, None, None] & (missed[:, None, None] == at[None, :, :]) & is_gain[None, :, :]
        )
        told_sums += tl.sum(tl.where(is_counted, gain[:, None, None], 0), axis=0)
        told_trials += tl.sum(is_counted.to(tl.int64), axis=0)

        settled = tl.minimum(credits + profit, MOST_CREDIT)
        settled = tl.where(settled >= 0, settled, ASLEEP)
        tl.debug_barrier()  # other threads of this program may still read the same credits
        tl.store(credits_ptr + rows, settled, mask=is_offered)
        credits = tl.where(is_offered, settled, credits)
        tl.store(report_ptr + NUM_TOTALS + 1 + i_reqs, credits, mask=i_reqs < num_reqs)

        is_awake = credits != ASLEEP
        num_awake += tl.sum(is_awake.to(tl.int64), axis=0)
        is_drafting = is_awake & (tl.load(limits.num_sampled_ptr + i_reqs, mask=is_awake, other=0) > 0)
        is_drafting = is_drafting & (tl.load(limits.max_drafts_ptr + i_reqs, mask=is_awake, other=0) > 0)
        num_requests += tl.sum((is_class & is_drafting[:, None]).to(tl.int64), axis=0)
    sums, trials = halve(sums, trials, MAX_GAIN_TRIALS)
    tl.store(gains.sums + at, sums, mask=is_gain)
    tl.store(gains.trials + at, trials, mask=is_gain)
    told_sums, told_trials = halve(told_sums, told_trials, MAX_GAIN_TRIALS)
    tl.store(gains.told_sums + at, told_sums, mask=is_gain)
    tl.store(gains.told_trials + at, told_trials, mask=is_gain)

    expected = tl.maximum(_expected_gains(sums, trials), _expected_gains(told_sums, told_trials))
    planned = _plan(gains, expected, trials, num_requests, num_awake, prices, sizes)
    which = tl.arange(0, NUM_TOTALS)
    new_totals = tl.load(totals_ptr + which) + tl.where(which == 1, total, 0)
    tl.debug_barrier()  # other threads of this program may still read the same totals
    tl.store(totals_ptr + which, new_totals)
    tl.store(report_ptr + which, new_totals)
    tl.store(report_ptr + NUM_TOTALS, planned)


@triton.jit
def _expected_gains(sums, trials):
    """What each pass adds on average, with what is expected of one that little is known of."""
    prior = tl.maximum(PRIOR_GAIN_TRIALS - trials // 4, 0)
    return _divide(sums + PRIOR_GAIN * prior, trials + prior)


@triton.jit
def _plan(gains, expected, trials, num_requests, num_awake, prices, sizes):
    """How many passes to make, int64.

    Args:
        gains: `steps_since_all` is changed in place.
        expected: [BLOCK_LENGTHS, BLOCK_STEPS] int64, what each pass adds, by class.
        trials: [BLOCK_LENGTHS, BLOCK_STEPS] int64, of the gains.
        num_requests: [BLOCK_LENGTHS] int64, that draft and have not given the model up, of each class.
        num_awake: int64, that have not given the model up.
        prices: [BLOCK_STEPS] int64, of each pass for the whole batch.
        sizes: Sizes.
    """
    steps = tl.arange(0, sizes.BLOCK_STEPS)
    classes = tl.arange(0, num_requests.shape[0])
    gain = tl.sum(expected * num_requests[:, None], axis=0) - prices
    num_requests = tl.where(sizes.NUM_STEPS > 0, num_requests, 0)
    is_anyone_awake = (num_awake > 0) & (sizes.NUM_STEPS > 0)
    planned = is_anyone_awake.to(tl.int64)
    value, best = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for step in range(sizes.NUM_STEPS):
        value += tl.sum(tl.where(steps == step, gain, 0), axis=0)
        is_better = is_anyone_awake & (value > best)
        planned = tl.where(is_better, step + 1, planned)
        best = tl.where(is_better, value, best)

    # Passes that seem useless are made once more from time to time.
    is_present = (classes < NUM_LENGTHS) & (num_requests > 0)
    since_all = tl.load(gains.steps_since_all + classes, mask=is_present, other=0) + is_present.to(tl.int64)
    # The less is known of the last pass, the sooner it is made again.
    last_trials = tl.sum(tl.where(steps[None, :] == sizes.NUM_STEPS - 1, trials, 0), axis=1)
    is_due = since_all >= tl.where(last_trials < MAX_GAIN_TRIALS // 2, 2 + 2 * last_trials, PASS_PERIOD)
    planned = tl.where(tl.max((is_present & is_due).to(tl.int32), axis=0) > 0, sizes.NUM_STEPS, planned)
    since_all = tl.where(planned == sizes.NUM_STEPS, 0, since_all)
    tl.store(gains.steps_since_all + classes, since_all, mask=is_present)
    return planned


@triton.jit
def _load_credits(credits_ptr, idx_mapping_ptr, i_reqs, num_reqs):
    """The rows and credits of some requests, int64; a credit of ASLEEP without a request."""
    rows = tl.load(idx_mapping_ptr + i_reqs, mask=i_reqs < num_reqs, other=-1).to(tl.int64)
    return rows, tl.load(credits_ptr + rows, mask=rows >= 0, other=ASLEEP)


@triton.jit
def _classes_of_histories(offers, rows, sizes):
    """The class of the longest agreement that speaks for a chain from the start of each request: int32."""
    which = tl.arange(0, sizes.BLOCK_CHAINS)
    starts = tl.load(offers.starts + which, mask=which < sizes.NUM_CHAINS, other=-1)
    at = rows[:, None] * sizes.NUM_CHAINS + which[None, :]
    is_read = (rows >= 0)[:, None] & (starts == 0)[None, :]
    speaks = tl.load(offers.lengths + at, mask=is_read, other=0) > 0
    return length_class(tl.max(tl.load(offers.agreed + at, mask=speaks, other=0), axis=1))


@triton.jit
def _divide(dividends, divisors):
    """Quotients rounded down; the divisors are positive."""
    return tl.where(dividends >= 0, dividends // divisors, -((divisors - 1 - dividends) // divisors))
