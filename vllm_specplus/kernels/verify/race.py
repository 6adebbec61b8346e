"""`race_kernel` reads each row that is still to be sampled once more, and lists the groups that may hold the sample.

A sample is the token of the best z + noise. The best of tokens that have a mass m together is nearly always above
log(m) - `_MARGIN`, and few tokens are. The noise of a token is at most -log(u), and u is cheap. So all tokens that may
be above are found without a logarithm.
"""

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.arguments import (
    NUM_PLAN_FLOATS,
    NUM_PLAN_INTS,
    PLAN_ACCEPTS,
    PLAN_FLOOR,
    PLAN_MAX,
    PLAN_NUM_LISTED,
    PLAN_REQUEST,
    PLAN_SHARE,
    PLAN_TOKEN,
    REJECTION,
    rows_of,
    temperature_of,
)
from vllm_specplus.kernels.verify.noise import least_uniform
from vllm_specplus.kernels.verify.nucleus import GROUP_SIZE, LOG2_E, NEG_INF, POS_INF, load_logits

# The best of all is below with a probability of exp(-exp(3)), 2e-9.
MARGIN = tl.constexpr(3.0)
# Relative to a unit, and to the largest z: more than the rounding of a bound and of a score.
SLACK, SLACK_OF_Z = tl.constexpr(2.0**-9), tl.constexpr(2.0**-20)
_FAR = tl.constexpr(2.0**100)


@triton.jit
def run_of(plans, start, num_rows, ALL_SLOTS: tl.constexpr):
    """How many drafts of a request are accepted before the first that is not: int32."""
    slots = tl.arange(0, ALL_SLOTS)
    p_accepts = plans.ints_ptr + (start + slots) * NUM_PLAN_INTS + PLAN_ACCEPTS
    accepts = tl.load(p_accepts, mask=slots < num_rows - 1, other=0)
    return tl.min(tl.where(accepts > 0, ALL_SLOTS, slots), axis=0)


@triton.jit(do_not_specialize=["max_rows"])
def race_kernel(
    logits,  # Logits
    rows,  # Rows
    temperature_ptr,  # [num_reqs] float32
    keys,  # NoiseKeys
    groups,  # out: Groups, lists of the rows that are sampled
    plans,  # Plans, out: how many groups are listed
    max_rows,
    EACH_ROW: tl.constexpr,
    WITH_FLOOR: tl.constexpr,
    ALL_SLOTS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Grid (num_rows, num_blocks) if EACH_ROW; else (num_reqs, num_blocks), for the row after the accepted drafts.

    WITH_FLOOR only groups are read that have a token of at least the floor. The others cannot hold the sample.
    """
    i_block = tl.program_id(1)
    i_row = tl.program_id(0).to(tl.int64)
    if not EACH_ROW:
        start, num_rows = rows_of(rows, i_row, max_rows)
        if num_rows == 0:
            return
        i_row = start + run_of(plans, start, num_rows, ALL_SLOTS)
    p_floats, p_ints = plans.floats_ptr + i_row * NUM_PLAN_FLOATS, plans.ints_ptr + i_row * NUM_PLAN_INTS
    if tl.load(p_ints + PLAN_TOKEN) >= 0:
        return
    # Offsets from the block's beginning, so that one address serves all loads of a thread.
    first = i_block * (BLOCK_GROUPS * GROUP_SIZE)
    starts, offsets = (tl.arange(0, BLOCK_GROUPS) * GROUP_SIZE)[:, None], tl.arange(0, GROUP_SIZE)[None, :]
    within = starts + offsets
    is_read = within < logits.vocab_size - first
    if WITH_FLOOR:
        numbers = i_block * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
        best = load_logits(groups.max_ptr + i_row * groups.num_groups, numbers, groups.num_groups)
        is_read = is_read & (best >= tl.load(p_floats + PLAN_FLOOR))[:, None]
    # NaN and infinities need no care: no comparison with NaN holds. A token that is not read has a bound of 0 or NaN.
    p_block = logits.ptr + i_row * logits.stride + first
    values = tl.load(p_block + within, mask=is_read, other=NEG_INF)

    i_req = tl.load(p_ints + PLAN_REQUEST)
    temperature, _ = temperature_of(temperature_ptr, i_req, REJECTION)
    max_logit = tl.load(p_floats + PLAN_MAX)
    slack = SLACK + SLACK_OF_Z * tl.abs(max_logit / temperature)
    least = (MARGIN + slack) * LOG2_E - tl.load(p_floats + PLAN_SHARE)
    # The largest logit is taken off beforehand, which leaves one operation for each logit. `slack` is more than that
    # rounds off. Where it would overflow, all groups that are read are listed.
    scale = LOG2_E / temperature
    is_far = tl.abs(max_logit * scale) > _FAR
    shift = tl.where(is_far, POS_INF, least - max_logit * scale)
    scale = tl.where(is_far, 1.0, scale)

    seed, position = tl.load(keys.seeds_ptr + i_req), tl.load(keys.positions_ptr + i_row)
    bound = tl.exp2(values.to(tl.float32) * scale + shift)
    closest = tl.min(least_uniform(seed, position, first + starts, offsets) - bound, axis=1)
    listed = (closest < 1.0).to(tl.int32)
    num_listed = tl.sum(listed, axis=0)
    if num_listed > 0:
        numbers = i_block * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
        at = tl.atomic_add(p_ints + PLAN_NUM_LISTED, num_listed) + tl.cumsum(listed, axis=0) - 1
        tl.store(groups.list_ptr + i_row * groups.num_groups + at, numbers, mask=listed > 0)
