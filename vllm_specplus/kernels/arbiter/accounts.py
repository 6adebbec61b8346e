"""Enters what the draft model's passes have added and cost."""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.arbiter.keys import halve, length_class
from vllm_specplus.kernels.arbiter.state import ASLEEP, MAX_GAIN_TRIALS, NUM_LENGTHS, ONE, State, sizes_of
from vllm_specplus.kernels.checks import check_vector, describe
from vllm_specplus.kernels.sizes import next_power_of_2

_BLOCK_REQS = 64  # requests that the program takes at a time
_BLOCK_LENGTHS = next_power_of_2(NUM_LENGTHS.value)


def settle(
    state: State,
    idx_mapping: torch.Tensor,
    values: torch.Tensor,
    pass_prices: torch.Tensor,
    step_price: torch.Tensor,
    profit: torch.Tensor,
    *,
    most_credit: int,
) -> None:
    """Enter what the passes of a step have added and cost. Without model steps there is nothing to enter.

    Args:
        state: its `credits` and `gains` are changed in place.
        idx_mapping: [B] int32 or int64, the row of each request; negative: no request. One to which the model has
            offered nothing is left out.
        values: [B, S + 1] int64, of `choose`.
        pass_prices: [S] int64, >= 0, of each pass for the whole batch.
        step_price: [1] int64, > 0, what a request gets in a step's time.
        profit: [1] int64, gets the profit of all requests together, in the time of a step, added to it.
        most_credit: the largest credit of a request.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
    """
    num_reqs, num_steps = idx_mapping.shape[0], state.offers.model.shape[1]
    check_vector("idx_mapping", idx_mapping, num_reqs, torch.int32, torch.int64)
    if values.shape != (num_reqs, num_steps + 1) or values.dtype != torch.int64 or not values.is_contiguous():
        raise ValueError(f"values must be contiguous int64 of {(num_reqs, num_steps + 1)}, got {describe(values)}")
    check_vector("pass_prices", pass_prices, num_steps, torch.int64)
    check_vector("step_price", step_price, 1, torch.int64)
    check_vector("profit", profit, 1, torch.int64)
    if num_reqs and num_steps:
        _settle_kernel[(1,)](
            state.offers,
            state.credits,
            state.gains,
            idx_mapping,
            values,
            pass_prices,
            step_price,
            profit,
            num_reqs,
            sizes_of(state),
            MOST_CREDIT=most_credit,
            BLOCK_REQS=_BLOCK_REQS,
            BLOCK_LENGTHS=_BLOCK_LENGTHS,
        )


@triton.jit(do_not_specialize=["num_reqs"])
def _settle_kernel(
    offers,  # Offers
    credits_ptr,  # changed in place
    gains,  # Gains, changed in place
    idx_mapping_ptr,
    values_ptr,
    pass_prices_ptr,
    step_price_ptr,
    profit_ptr,  # changed in place
    num_reqs,
    sizes,  # Sizes
    MOST_CREDIT: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    BLOCK_LENGTHS: tl.constexpr,
):
    """Grid (1,): the passes are divided among all requests to which the model has offered its drafts."""
    num_offered = tl.full((), 0, tl.int64)
    for first in range(0, num_reqs, BLOCK_REQS):
        rows, _ = load_credits(credits_ptr, idx_mapping_ptr, first + tl.arange(0, BLOCK_REQS), num_reqs)
        num_offered += tl.sum((tl.load(offers.passes + rows, mask=rows >= 0, other=0) > 0).to(tl.int64), axis=0)

    steps = tl.arange(0, sizes.BLOCK_STEPS)
    classes = tl.arange(0, BLOCK_LENGTHS)
    pass_prices = tl.load(pass_prices_ptr + steps, mask=steps < sizes.NUM_STEPS, other=0)
    pass_prices = pass_prices // tl.maximum(num_offered, 1)
    step_price = tl.load(step_price_ptr)
    at = classes[:, None] * sizes.NUM_STEPS + steps[None, :]
    is_gain = (classes < NUM_LENGTHS)[:, None] & (steps < sizes.NUM_STEPS)[None, :]
    sums = tl.load(gains.sums + at, mask=is_gain, other=0)
    trials = tl.load(gains.trials + at, mask=is_gain, other=0)
    total = tl.full((), 0, tl.int64)
    for first in range(0, num_reqs, BLOCK_REQS):
        i_reqs = first + tl.arange(0, BLOCK_REQS)
        rows, credits = load_credits(credits_ptr, idx_mapping_ptr, i_reqs, num_reqs)
        passes = tl.load(offers.passes + rows, mask=rows >= 0, other=0)
        is_offered = passes > 0
        is_made = steps[None, :] < passes[:, None]
        p_values = values_ptr + i_reqs[:, None] * (sizes.NUM_STEPS + 1) + steps[None, :]
        gain = tl.load(p_values + 1, mask=is_made, other=0) - tl.load(p_values, mask=is_made, other=0)
        profit = tl.sum(tl.where(is_made, gain - pass_prices[None, :], 0), axis=1)
        profit = divide(profit * ONE, step_price)
        total += tl.sum(profit, axis=0)
        credits = tl.minimum(credits + profit, MOST_CREDIT)
        tl.debug_barrier()  # other threads of this program may still read the same credits
        tl.store(credits_ptr + rows, tl.where(credits >= 0, credits, ASLEEP), mask=is_offered)

        is_class = classes_of_histories(offers, rows, is_offered, sizes)[:, None] == classes[None, :]
        is_counted = is_class[:, :, None] & is_made[:, None, :]
        sums += tl.sum(tl.where(is_counted, gain[:, None, :], 0), axis=0)
        trials += tl.sum(is_counted.to(tl.int64), axis=0)
    sums, trials = halve(sums, trials, MAX_GAIN_TRIALS)
    tl.store(gains.sums + at, sums, mask=is_gain)
    tl.store(gains.trials + at, trials, mask=is_gain)
    tl.store(profit_ptr, tl.load(profit_ptr) + total)


@triton.jit
def load_credits(credits_ptr, idx_mapping_ptr, i_reqs, num_reqs):
    """The rows and credits of some requests, int64; a credit of ASLEEP without a request."""
    rows = tl.load(idx_mapping_ptr + i_reqs, mask=i_reqs < num_reqs, other=-1).to(tl.int64)
    return rows, tl.load(credits_ptr + rows, mask=rows >= 0, other=ASLEEP)


@triton.jit
def classes_of_histories(offers, rows, is_request, sizes):
    """The class of the longest agreement that speaks for a chain from the start of each request: int32."""
    which = tl.arange(0, sizes.BLOCK_CHAINS)
    starts = tl.load(offers.starts + which, mask=which < sizes.NUM_CHAINS, other=-1)
    at = rows[:, None] * sizes.NUM_CHAINS + which[None, :]
    is_read = is_request[:, None] & (starts == 0)[None, :]
    speaks = tl.load(offers.lengths + at, mask=is_read, other=0) > 0
    return length_class(tl.max(tl.load(offers.agreed + at, mask=speaks, other=0), axis=1))


@triton.jit
def divide(dividends, divisors):
    """Quotients rounded down; the divisors are positive."""
    return tl.where(dividends >= 0, dividends // divisors, -((divisors - 1 - dividends) // divisors))
