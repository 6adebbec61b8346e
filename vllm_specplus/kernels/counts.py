"""Counts on the device steps and how drafts fared, so that no step waits for the host, and tells drafts from padding.

A program counts for some requests, or tells for one block of rows. The host reads the counts when somebody asks.
"""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_specplus import sources
from vllm_specplus.kernels.sizes import cdiv, next_power_of_2

_BLOCK = 256  # rows or requests of a program
_NUM_SOURCES = tl.constexpr(len(sources.SOURCES))
_MODEL = tl.constexpr(sources.MODEL)
_REFERENCE = tl.constexpr(sources.REFERENCE)
_UNFILLED = tl.constexpr(sources.UNFILLED)


class Counted(NamedTuple):
    """What is counted of a step's drafts, and where; see `count_drafts`. All None: nothing."""

    counts: torch.Tensor | None
    request_counts: torch.Tensor | None
    num_sampled: torch.Tensor | None
    cu_num_rows: torch.Tensor | None
    num_drafts: torch.Tensor | None
    num_model: torch.Tensor | None
    fill_source: torch.Tensor | None
    invalid: torch.Tensor | None = None


def count_drafts(counted: Counted, idx_mapping: torch.Tensor) -> None:
    """Add one step's drafts to the counts.

    Args:
        counted: has these fields:

            - counts: [2, len(SOURCES), K] int64, contiguous, changed in place: drafted and accepted tokens by source
              and slot. A verified slot without a draft counts as ``unfilled``.
            - request_counts: [max_num_reqs, 3] int64, contiguous, changed in place. Column 1 counts drafts of the
              reference, column 2 those of them that were accepted. Column 0 is that of `count_steps`.
            - num_sampled: [num_reqs] int32, tokens that each request got. A request with 0 is in its prefill and counts
              nothing.
            - cu_num_rows: [num_reqs + 1] int32, where each request's rows begin; all but the first have a slot.
            - num_drafts, num_model: [max_num_reqs] int32, drafts of each request, and how many of them are the model's.
            - fill_source: [max_num_reqs] int32, the source of the others.
            - invalid: [num_rows] bool, the rows whose draft does not count; None: all count.
        idx_mapping: [num_reqs] int32 or int64, the row of each request in `request_counts` and in the last three.
    """
    assert counted.counts is not None
    num_reqs, width = idx_mapping.shape[0], counted.counts.shape[2]
    if num_reqs:
        _count_kernel[(num_reqs,)](counted, idx_mapping, WIDTH=width, BLOCK_WIDTH=next_power_of_2(width), num_warps=1)


@triton.jit
def _count_kernel(
    counted,  # Counted, changed in place
    idx_mapping_ptr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Grid (num_reqs,)."""
    i_req = tl.program_id(0)
    row = tl.load(idx_mapping_ptr + i_req).to(tl.int64)
    count_request(counted, i_req, row, WIDTH, BLOCK_WIDTH)


@triton.jit
def count_request(counted, i_req, row, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Add the drafts of a request to the counts.

    counted: Counted. i_req, row: its place in the batch, and its row; negative: no request.
    """
    is_request = row >= 0
    num_sampled = tl.load(counted.num_sampled + i_req)
    first = tl.load(counted.cu_num_rows + i_req) + 1
    num_slots = tl.load(counted.cu_num_rows + i_req + 1) - first
    num_slots = tl.where(is_request & (num_sampled > 0), tl.minimum(num_slots, WIDTH), 0)

    slots = tl.arange(0, BLOCK_WIDTH)
    counts = slots < num_slots
    if counted.invalid is not None:
        counts = counts & (tl.load(counted.invalid + first + slots, mask=counts, other=1) == 0)
    accepted = counts & (slots < num_sampled - 1)
    num_model = tl.load(counted.num_model + row, mask=is_request, other=0)
    num_drafts = tl.load(counted.num_drafts + row, mask=is_request, other=0)
    source = tl.where(slots < num_model, _MODEL, tl.load(counted.fill_source + row, mask=is_request, other=0))
    source = tl.where(slots < num_drafts, source, _UNFILLED)

    at = source * WIDTH + slots
    ones = tl.full((BLOCK_WIDTH,), 1, tl.int64)
    tl.atomic_add(counted.counts + at, ones, mask=counts, sem="relaxed")
    tl.atomic_add(counted.counts + _NUM_SOURCES * WIDTH + at, ones, mask=accepted, sem="relaxed")
    is_reference = source == _REFERENCE
    p_request = counted.request_counts + row * 3
    drafted = tl.sum((counts & is_reference).to(tl.int64), axis=0)
    num_accepted = tl.sum((accepted & is_reference).to(tl.int64), axis=0)
    tl.store(p_request + 1, tl.load(p_request + 1, mask=is_request, other=0) + drafted, mask=is_request)
    tl.store(p_request + 2, tl.load(p_request + 2, mask=is_request, other=0) + num_accepted, mask=is_request)


def count_steps(request_counts: torch.Tensor, num_sampled: torch.Tensor, idx_mapping: torch.Tensor) -> None:
    """Count a step for each request that got tokens.

    Args:
        request_counts: [max_num_reqs, 3] int64, contiguous, changed in place: column 0 counts the steps.
        num_sampled: [>= num_reqs] int32, tokens that each request got in this step.
        idx_mapping: [num_reqs] int32 or int64, the row of each request in `request_counts`.
    """
    num_reqs = len(idx_mapping)
    if num_reqs:
        grid = (cdiv(num_reqs, _BLOCK),)
        _steps_kernel[grid](request_counts, num_sampled, idx_mapping, num_reqs, BLOCK=_BLOCK, num_warps=1)


@triton.jit(do_not_specialize=["num_reqs"])
def _steps_kernel(
    request_counts_ptr,  # changed in place
    num_sampled_ptr,
    idx_mapping_ptr,
    num_reqs,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of requests,)."""
    i_reqs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_counted = tl.load(num_sampled_ptr + i_reqs, mask=i_reqs < num_reqs, other=0) > 0
    rows = tl.load(idx_mapping_ptr + i_reqs, mask=is_counted, other=0).to(tl.int64)
    p_steps = request_counts_ptr + rows * 3
    tl.store(p_steps, tl.load(p_steps, mask=is_counted, other=0) + 1, mask=is_counted)


def mark_padding(
    local_positions: torch.Tensor,
    row_states: torch.Tensor,
    num_drafts: torch.Tensor,
    invalid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tell which rows got no draft.

    Args:
        local_positions: [num_rows] int32 or int64, the row's place among its request's; slot j, from 1, stands at j.
        row_states: [num_rows] int32 or int64, the request state of each row.
        num_drafts: [max_num_reqs] int32, drafts of each request.
        invalid: [num_rows] bool, rows whose draft is taken for none as well; None: there are none.

    Returns:
        [num_rows] bool.
    """
    num_rows = len(local_positions)
    marks = torch.empty(num_rows, dtype=torch.bool, device=local_positions.device)
    if num_rows:
        _padding_kernel[(cdiv(num_rows, _BLOCK),)](
            local_positions, row_states, num_drafts, invalid, marks, num_rows, BLOCK=_BLOCK, num_warps=1
        )
    return marks


@triton.jit(do_not_specialize=["num_rows"])
def _padding_kernel(
    local_positions_ptr,
    row_states_ptr,
    num_drafts_ptr,
    invalid_ptr,  # or None
    marks_ptr,  # out
    num_rows,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of rows,)."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    states = tl.load(row_states_ptr + rows, mask=is_row, other=0).to(tl.int64)
    num_drafts = tl.load(num_drafts_ptr + states, mask=is_row, other=0)
    marks = tl.load(local_positions_ptr + rows, mask=is_row, other=0) > num_drafts
    if invalid_ptr is not None:
        marks = marks | (tl.load(invalid_ptr + rows, mask=is_row, other=0) != 0)
    tl.store(marks_ptr + rows, marks, mask=is_row)
