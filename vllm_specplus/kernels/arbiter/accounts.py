"""Enters what the draft model's passes have added and cost, plans later ones, and tells the host of the step."""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.arbiter.keys import class_of_history, halve
from vllm_specplus.kernels.arbiter.state import (
    ASLEEP,
    MAX_GAIN_TRIALS,
    MOST_CREDIT,
    NO_PASS,
    NUM_LENGTHS,
    NUM_TOTALS,
    ONE,
    PASS_PERIOD,
    PRIOR_GAIN,
    PRIOR_GAIN_TRIALS,
    SHIFT,
    Gains,
    Tallies,
)
from vllm_specplus.kernels.drafts import Limits, load_limit
from vllm_specplus.kernels.sizes import next_power_of_2

_BLOCK_LENGTHS = tl.constexpr(next_power_of_2(NUM_LENGTHS.value))
_NUM_TOTALS = tl.constexpr(NUM_TOTALS)


class Accounts(NamedTuple):
    """What a step's passes are entered into, and where the step is reported.

    credits, gains, tallies: of the state, changed in place. foregone_gains, foregone_chances: its `Foregone`. planning,
    totals, report: see `choice.choose_and_settle`.
    """

    credits: torch.Tensor
    gains: Gains
    foregone_gains: torch.Tensor
    foregone_chances: torch.Tensor
    tallies: Tallies
    planning: Limits
    totals: torch.Tensor
    report: torch.Tensor


@triton.jit
def settle(accounts, prices_ptr, chains, values, passes, i_req, row, sizes):
    """Enter what the passes of a request have added and cost; return its credit, int64.

    Each pass is made for all requests together, and its price divided among those that have its drafts.

    Args:
        accounts: Accounts.
        prices_ptr: see `choice.choose_and_settle`.
        chains: Chains, of the request.
        values: [BLOCK_STEPS] int64, of the best drafts with each number of passes.
        passes: int32, how many the model has made for the request.
        i_req, row: int64, its places in the batch and in the state; a negative row: no request.
        sizes: Sizes.
    """
    is_request = row >= 0
    gains, steps = accounts.gains, tl.arange(0, sizes.BLOCK_STEPS)
    is_made = steps < passes
    with_pass = tl.sum(tl.where(steps[None, :] == steps[:, None] + 1, values[None, :], 0), axis=1)
    gain = tl.where(is_made, with_pass - values, 0)
    of_history = class_of_history(chains)
    at = of_history * sizes.NUM_STEPS + steps
    one = tl.full([sizes.BLOCK_STEPS], 1, tl.int64)
    tl.atomic_add(gains.sums + at, gain, mask=is_made, sem="relaxed")
    tl.atomic_add(gains.trials + at, one, mask=is_made, sem="relaxed")
    tl.atomic_add(gains.told_sums + at, gain, mask=is_made, sem="relaxed")
    tl.atomic_add(gains.told_trials + at, one, mask=is_made, sem="relaxed")

    shares = tl.load(prices_ptr + 2 + steps, mask=is_made, other=0)
    shares = shares // tl.maximum(tl.load(accounts.tallies.num_offered), 1)
    profit = tl.sum(tl.where(is_made, gain - shares, 0), axis=0)
    profit = _divide(profit * ONE, tl.load(prices_ptr + 1))
    tl.atomic_add(accounts.totals + 1, profit, mask=passes > 0, sem="relaxed")
    credit = tl.load(accounts.credits + row, mask=is_request, other=ASLEEP)
    settled = tl.minimum(credit + profit, MOST_CREDIT)
    credit = tl.where(passes > 0, tl.where(settled >= 0, settled, ASLEEP), credit)
    tl.debug_barrier()  # other threads of this program may still read the same credit
    tl.store(accounts.credits + row, credit, mask=is_request)

    # A pass that the step before has gone without: its draft would have stood before what is drafted now.
    missed = tl.load(accounts.foregone_gains + row, mask=is_request, other=NO_PASS)
    is_missed = missed != NO_PASS
    chance = tl.load(accounts.foregone_chances + row, mask=is_missed, other=0)
    value = tl.sum(tl.where(steps == 0, values, 0), axis=0)
    gain = chance * tl.maximum(ONE - tl.load(prices_ptr) + value, 0) >> SHIFT
    tl.atomic_add(gains.told_sums + missed, gain, mask=is_missed, sem="relaxed")
    tl.atomic_add(gains.told_trials + missed, tl.full((), 1, tl.int64), mask=is_missed, sem="relaxed")

    is_awake = credit != ASLEEP
    is_drafting = is_awake & (load_limit(accounts.planning, i_req) > 0)
    one = tl.full((), 1, tl.int64)
    tl.atomic_add(accounts.tallies.num_awake, one, mask=is_awake, sem="relaxed")
    tl.atomic_add(accounts.tallies.num_drafting + of_history, one, mask=is_drafting, sem="relaxed")
    return credit


@triton.jit
def report_credit(accounts, i_req, credit):
    """Report the credit of a request; ASLEEP without one."""
    tl.store(accounts.report + _NUM_TOTALS + 1 + i_req, credit)


@triton.jit
def plan_and_report(accounts, prices_ptr, sizes):
    """Plan the passes of a later step and report, once the passes of all requests have been entered."""
    gains, tallies = accounts.gains, accounts.tallies
    steps, classes = tl.arange(0, sizes.BLOCK_STEPS), tl.arange(0, _BLOCK_LENGTHS)
    at = classes[:, None] * sizes.NUM_STEPS + steps[None, :]
    is_gain = (classes < NUM_LENGTHS)[:, None] & (steps < sizes.NUM_STEPS)[None, :]
    sums, trials = _halved(gains.sums, gains.trials, at, is_gain)
    told_sums, told_trials = _halved(gains.told_sums, gains.told_trials, at, is_gain)
    expected = tl.maximum(_expected_gains(sums, trials), _expected_gains(told_sums, told_trials))
    num_requests = tl.load(tallies.num_drafting + classes, mask=classes < NUM_LENGTHS, other=0)
    num_awake = tl.load(tallies.num_awake)
    prices = tl.load(prices_ptr + 2 + steps, mask=steps < sizes.NUM_STEPS, other=0)
    planned = _plan(gains, expected, trials, num_requests, num_awake, prices, sizes)
    which = tl.arange(0, _NUM_TOTALS)
    tl.store(accounts.report + which, tl.load(accounts.totals + which))
    tl.store(accounts.report + _NUM_TOTALS, planned)
    tl.debug_barrier()  # other threads of this program may still read what now begins anew
    tl.store(tallies.num_drafting + classes, tl.zeros_like(num_requests), mask=classes < NUM_LENGTHS)
    tl.store(tallies.num_awake, 0)


@triton.jit
def _halved(sums_ptr, trials_ptr, at, is_gain):
    """Halve sums and trials where there are too many trials, in place; return both."""
    sums = tl.load(sums_ptr + at, mask=is_gain, other=0)
    trials = tl.load(trials_ptr + at, mask=is_gain, other=0)
    sums, trials = halve(sums, trials, MAX_GAIN_TRIALS)
    tl.debug_barrier()  # other threads of this program may still read the same
    tl.store(sums_ptr + at, sums, mask=is_gain)
    tl.store(trials_ptr + at, trials, mask=is_gain)
    return sums, trials


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
def _divide(dividends, divisors):
    """Quotients rounded down; the divisors are positive."""
    return tl.where(dividends >= 0, dividends // divisors, -((divisors - 1 - dividends) // divisors))
