"""Counting on the device what became of drafts, so that no step waits for the host.

One program for each request; the counts are read by the host when somebody asks for them.
"""

# Kernels: their arguments have no Python types, and those in capitals are known when they are compiled.

import torch
import triton
import triton.language as tl

from vllm_specplus.sources import MODEL, REFERENCE, SOURCES, UNFILLED


def count_drafts(
    counts: torch.Tensor,
    tallies: torch.Tensor,
    num_sampled: torch.Tensor,
    cu_num_rows: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_drafts: torch.Tensor,
    num_model: torch.Tensor,
    rest: torch.Tensor,
    invalid: torch.Tensor | None = None,
) -> None:
    """Add one step's drafts to the counts.

    Args:
        counts: [2, len(SOURCES), K] int64, contiguous, changed in place: drafted and accepted tokens by source and
            position. A slot that was verified and holds none of the drafts that are meant is ``unfilled``.
        tallies: [max_num_reqs, 3] int64, contiguous, changed in place: drafts of the reference are added to column 1,
            those accepted to column 2.
        num_sampled: [num_reqs] int32 tokens that each request got; 0: it is being prefilled and nothing counts.
        cu_num_rows: [num_reqs + 1] int32, where each request's rows begin; all but the first hold a draft.
        idx_mapping: [num_reqs] int32 or int64, the row of each request in `tallies` and the next three.
        num_drafts, num_model: [max_num_reqs] int32, drafts that are meant, and how many of them are the model's.
        rest: [max_num_reqs] int32, the source of the others.
        invalid: [num_rows] bool, rows whose draft does not count, or None.
    """
    num_reqs, window = idx_mapping.shape[0], counts.shape[2]
    if num_reqs:
        _count_kernel[(num_reqs,)](
            counts,
            tallies,
            num_sampled,
            cu_num_rows,
            idx_mapping,
            num_drafts,
            num_model,
            rest,
            invalid,
            WINDOW=window,
            NUM_SOURCES=len(SOURCES),
            MODEL=MODEL,
            REFERENCE=REFERENCE,
            UNFILLED=UNFILLED,
            BLOCK_WINDOW=triton.next_power_of_2(window),
            num_warps=1,
        )


@triton.jit
def _count_kernel(
    counts_ptr,
    tallies_ptr,
    num_sampled_ptr,
    cu_num_rows_ptr,
    idx_mapping_ptr,
    num_drafts_ptr,
    num_model_ptr,
    rest_ptr,
    invalid_ptr,
    WINDOW: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    MODEL: tl.constexpr,
    REFERENCE: tl.constexpr,
    UNFILLED: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
):
    """Grid (num_reqs,)."""
    i_req = tl.program_id(0)
    row = tl.load(idx_mapping_ptr + i_req).to(tl.int64)
    num_sampled = tl.load(num_sampled_ptr + i_req)
    first = tl.load(cu_num_rows_ptr + i_req) + 1
    num_slots = tl.load(cu_num_rows_ptr + i_req + 1) - first
    num_slots = tl.where(num_sampled > 0, tl.minimum(num_slots, WINDOW), 0)

    slots = tl.arange(0, BLOCK_WINDOW)
    counts = slots < num_slots
    if invalid_ptr is not None:
        counts = counts & (tl.load(invalid_ptr + first + slots, mask=counts, other=1) == 0)
    accepted = counts & (slots < num_sampled - 1)
    source = tl.where(slots < tl.load(num_model_ptr + row), MODEL, tl.load(rest_ptr + row))
    source = tl.where(slots < tl.load(num_drafts_ptr + row), source, UNFILLED)

    at = source * WINDOW + slots
    ones = tl.full((BLOCK_WINDOW,), 1, tl.int64)
    tl.atomic_add(counts_ptr + at, ones, mask=counts)
    tl.atomic_add(counts_ptr + NUM_SOURCES * WINDOW + at, ones, mask=accepted)
    is_reference = source == REFERENCE
    tally_ptr = tallies_ptr + row * 3
    drafted = tl.sum((counts & is_reference).to(tl.int64), axis=0)
    taken = tl.sum((accepted & is_reference).to(tl.int64), axis=0)
    tl.store(tally_ptr + 1, tl.load(tally_ptr + 1) + drafted)
    tl.store(tally_ptr + 2, tl.load(tally_ptr + 2) + taken)
