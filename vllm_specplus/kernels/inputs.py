"""Makes a verification's arguments of vLLM's batch, in one launch, from device memory or the host's.

A program takes some requests and as many rows.
"""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.sizes import cdiv

_BLOCK = 128  # requests and rows of a program


class Parameters(NamedTuple):
    """One number of each request or request state; None: nobody asks for a filter."""

    temperature: torch.Tensor  # float32
    seeds: torch.Tensor  # int64
    top_p: torch.Tensor | None = None  # float32
    top_k: torch.Tensor | None = None  # int32 of a state, int64 of a request
    min_p: torch.Tensor | None = None  # float32


class Batch(NamedTuple):
    """The requests of a step, and their rows of logits.

    Attributes:
        idx_mapping: ``[num_reqs]`` int32 or int64, the state of each request.
        cu_num_rows: ``[num_reqs + 1]`` int, where each request's rows begin; None: each has one.
        tokens: ``[num_rows]`` int, the token that was fed in to get each row. So a request's draft stands in the row
            after the one that judges it. Negative: no draft. None: there are no drafts.
    """

    idx_mapping: torch.Tensor
    cu_num_rows: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


class SampledDrafts(NamedTuple):
    """The drafts that were sampled from a draft model's logits.

    Attributes:
        states: ``[num_rows]`` int, the request state of each row.
        slots: ``[num_rows]`` int, the place of each row among its request's, from 0.
        num_model: ``[max_num_reqs]`` int, how many drafts of each state the model made; None: all.
        num_slots: the logits that each state has.
    """

    states: torch.Tensor
    slots: torch.Tensor
    num_model: torch.Tensor | None
    num_slots: int


class Gathered(NamedTuple):
    """What ``VerifyInputs`` asks for, under its names."""

    parameters: Parameters  # [num_reqs] each
    cu_num_rows: torch.Tensor  # [num_reqs + 1] int64
    draft_token_ids: torch.Tensor  # [num_rows] int64
    draft_rows: torch.Tensor | None  # [num_rows] int64; None: no draft was sampled


def gather_inputs(
    parameters: Parameters, batch: Batch, num_rows: int, sampled_drafts: SampledDrafts | None = None
) -> Gathered:
    """Gather what a step's verification needs.

    Args:
        parameters: ``[max_num_reqs]`` each. The filters are all there, or none is.
        batch: the requests.
        num_rows: of all of them together.
        sampled_drafts: None: no draft was sampled from logits.
    """
    num_reqs, device = len(batch.idx_mapping), batch.idx_mapping.device

    def made(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    gathered = Gathered(
        Parameters(
            made(num_reqs, torch.float32),
            made(num_reqs),
            None if parameters.top_p is None else made(num_reqs, torch.float32),
            None if parameters.top_k is None else made(num_reqs),
            None if parameters.min_p is None else made(num_reqs, torch.float32),
        ),
        made(num_reqs + 1),
        made(num_rows),
        None if sampled_drafts is None else made(num_rows),
    )
    states, slots, num_model, num_slots = sampled_drafts or (None, None, None, 0)
    grid = (cdiv(max(num_reqs + 1, num_rows), _BLOCK),)
    _gather_kernel[grid](
        parameters,
        *batch,
        states,
        slots,
        num_model,
        gathered,
        num_reqs,
        num_rows,
        num_slots,
        BLOCK=_BLOCK,
        num_warps=1,
    )
    return gathered


# vLLM cuts these out of longer ones where it takes a batch in parts, so they may begin anywhere.
@triton.jit(
    do_not_specialize=["num_reqs", "num_rows", "num_slots"],
    do_not_specialize_on_alignment=["idx_mapping_ptr", "cu_num_rows_ptr", "tokens_ptr", "states_ptr", "slots_ptr"],
)
def _gather_kernel(
    parameters,  # Parameters
    idx_mapping_ptr,
    cu_num_rows_ptr,
    tokens_ptr,
    states_ptr,
    slots_ptr,
    num_model_ptr,
    gathered,  # out: Gathered
    num_reqs,
    num_rows,
    num_slots,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of requests or rows, whichever are more,)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = at < num_reqs
    state = tl.load(idx_mapping_ptr + at, mask=is_request, other=0).to(tl.int64)
    out = gathered.parameters
    tl.store(out.temperature + at, tl.load(parameters.temperature + state, mask=is_request), mask=is_request)
    tl.store(out.seeds + at, tl.load(parameters.seeds + state, mask=is_request), mask=is_request)
    if parameters.top_p is not None:
        tl.store(out.top_p + at, tl.load(parameters.top_p + state, mask=is_request), mask=is_request)
        tl.store(out.top_k + at, tl.load(parameters.top_k + state, mask=is_request), mask=is_request)
        tl.store(out.min_p + at, tl.load(parameters.min_p + state, mask=is_request), mask=is_request)

    begin = at
    if cu_num_rows_ptr is not None:
        begin = tl.load(cu_num_rows_ptr + at, mask=at <= num_reqs, other=0)
    tl.store(gathered.cu_num_rows + at, begin, mask=at <= num_reqs)

    is_row = at < num_rows
    # A request's last row gets the next one's token. It has no draft, whatever stands there.
    draft = at * 0 - 1
    if tokens_ptr is not None:
        draft = tl.load(tokens_ptr + at + 1, mask=at + 1 < num_rows, other=-1)
    tl.store(gathered.draft_token_ids + at, draft, mask=is_row)

    if slots_ptr is not None:
        state = tl.load(states_ptr + at, mask=is_row, other=0).to(tl.int64)
        slot = tl.load(slots_ptr + at, mask=is_row, other=0)
        num_model = num_slots
        if num_model_ptr is not None:
            num_model = tl.load(num_model_ptr + state, mask=is_row, other=0)
        tl.store(gathered.draft_rows + at, tl.where(slot < num_model, state * num_slots + slot, -1), mask=is_row)
