"""Plans the draft model's passes, and tells the host of the step."""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.arbiter.accounts import classes_of_histories, divide, load_credits
from vllm_specplus.kernels.arbiter.state import (
    ASLEEP,
    NUM_LENGTHS,
    PASS_PERIOD,
    PRIOR_GAIN,
    PRIOR_GAIN_TRIALS,
    State,
    sizes_of,
)
from vllm_specplus.kernels.checks import check_vector
from vllm_specplus.kernels.drafts import Limits
from vllm_specplus.kernels.sizes import next_power_of_2

_BLOCK_REQS = 64  # requests that the program takes at a time
_BLOCK_LENGTHS = next_power_of_2(NUM_LENGTHS.value)
NUM_TOTALS = 2


def plan_passes(
    state: State,
    idx_mapping: torch.Tensor,
    limits: Limits,
    pass_prices: torch.Tensor,
    totals: torch.Tensor,
) -> torch.Tensor:
    """Plan the passes of the draft model for a batch, and put together what the host has to know.

    Args:
        state: `gains.steps_since_all` is changed in place.
        idx_mapping: [B] int32 or int64, the row of each request; negative: no request.
        limits: of each request's drafts; one that may not draft needs the first pass, and no other.
        pass_prices: [S] int64, >= 0, of each pass for the whole batch.
        totals: [2] int64, copied into the result.

    Returns:
        [3 + B] int64: the totals, the number of passes, and the credit of each request; ASLEEP without one.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
    """
    num_reqs, num_steps = idx_mapping.shape[0], state.offers.model.shape[1]
    check_vector("idx_mapping", idx_mapping, num_reqs, torch.int32, torch.int64)
    check_vector("max_drafts", limits.max_drafts_ptr, num_reqs, torch.int32)
    check_vector("pass_prices", pass_prices, num_steps, torch.int64)
    check_vector("totals", totals, NUM_TOTALS, torch.int64)
    report = torch.empty(NUM_TOTALS + 1 + num_reqs, dtype=torch.int64, device=totals.device)
    _plan_kernel[(1,)](
        state.offers,
        state.credits,
        state.gains,
        idx_mapping,
        limits,
        pass_prices,
        totals,
        report,
        num_reqs,
        sizes_of(state),
        NUM_TOTALS=NUM_TOTALS,
        BLOCK_REQS=_BLOCK_REQS,
        BLOCK_LENGTHS=_BLOCK_LENGTHS,
    )
    return report


@triton.jit(do_not_specialize=["num_reqs"])
def _plan_kernel(
    offers,  # Offers
    credits_ptr,
    gains,  # Gains; steps_since_all is changed in place
    idx_mapping_ptr,
    limits,  # Limits
    pass_prices_ptr,
    totals_ptr,
    report_ptr,  # out
    num_reqs,
    sizes,  # Sizes
    NUM_TOTALS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    BLOCK_LENGTHS: tl.constexpr,
):
    """Grid (1,): a pass is made for all requests together."""
    steps = tl.arange(0, sizes.BLOCK_STEPS)
    classes = tl.arange(0, BLOCK_LENGTHS)
    num_requests = tl.zeros((BLOCK_LENGTHS,), tl.int64)  # awake and drafting, of each class
    num_awake = tl.full((), 0, tl.int64)
    for first in range(0, num_reqs, BLOCK_REQS):
        i_reqs = first + tl.arange(0, BLOCK_REQS)
        rows, credits = load_credits(credits_ptr, idx_mapping_ptr, i_reqs, num_reqs)
        tl.store(report_ptr + NUM_TOTALS + 1 + i_reqs, credits, mask=i_reqs < num_reqs)
        is_awake = credits != ASLEEP
        num_awake += tl.sum(is_awake.to(tl.int64), axis=0)
        is_drafting = is_awake & (tl.load(limits.num_sampled_ptr + i_reqs, mask=is_awake, other=0) > 0)
        is_drafting = is_drafting & (tl.load(limits.max_drafts_ptr + i_reqs, mask=is_awake, other=0) > 0)
        is_class = classes_of_histories(offers, rows, is_drafting, sizes)[:, None] == classes[None, :]
        num_requests += tl.sum((is_class & is_drafting[:, None]).to(tl.int64), axis=0)

    at = classes[:, None] * sizes.NUM_STEPS + steps[None, :]
    is_gain = (classes < NUM_LENGTHS)[:, None] & (steps < sizes.NUM_STEPS)[None, :]
    gain_sums = tl.load(gains.sums + at, mask=is_gain, other=0) + PRIOR_GAIN * PRIOR_GAIN_TRIALS
    trials = tl.load(gains.trials + at, mask=is_gain, other=0) + PRIOR_GAIN_TRIALS
    gain = tl.sum(divide(gain_sums, trials) * num_requests[:, None], axis=0)
    gain -= tl.load(pass_prices_ptr + steps, mask=steps < sizes.NUM_STEPS, other=0)
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
    last_trials = tl.sum(tl.where(steps[None, :] == sizes.NUM_STEPS - 1, trials - PRIOR_GAIN_TRIALS, 0), axis=1)
    is_due = since_all >= tl.minimum(PASS_PERIOD, 2 + 2 * last_trials)
    planned = tl.where(tl.max((is_present & is_due).to(tl.int32), axis=0) > 0, sizes.NUM_STEPS, planned)
    since_all = tl.where(planned == sizes.NUM_STEPS, 0, since_all)
    tl.store(gains.steps_since_all + classes, since_all, mask=is_present)

    which = tl.arange(0, NUM_TOTALS)
    tl.store(report_ptr + which, tl.load(totals_ptr + which))
    tl.store(report_ptr + NUM_TOTALS, planned)
