"""Gathers what the requests of a batch ask of sampling, in one launch, from device memory or the host's."""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_BLOCK = 128  # requests of a program


class Parameters(NamedTuple):
    """One number of each request or request state; None: nobody asks for a filter."""

    temperature: torch.Tensor  # float32
    seeds: torch.Tensor  # int64
    top_p: torch.Tensor | None = None  # float32
    top_k: torch.Tensor | None = None  # int32
    min_p: torch.Tensor | None = None  # float32


def gather_parameters(parameters: Parameters, idx_mapping: torch.Tensor) -> Parameters:
    """Gather the parameters of a batch.

    Args:
        parameters: [max_num_reqs] each. The filters are all there, or none is.
        idx_mapping: [num_reqs] int32 or int64, the row of each request in them.

    Returns:
        [num_reqs] each, of the same dtypes.
    """
    num_reqs = len(idx_mapping)
    made = [None if p is None else torch.empty(num_reqs, dtype=p.dtype, device=idx_mapping.device) for p in parameters]
    gathered = Parameters(*made)
    if num_reqs:
        grid = (triton.cdiv(num_reqs, _BLOCK),)
        _gather_kernel[grid](parameters, idx_mapping, gathered, num_reqs, BLOCK=_BLOCK, num_warps=1)
    return gathered


@triton.jit(do_not_specialize=["num_reqs"])
def _gather_kernel(
    parameters,  # Parameters
    idx_mapping_ptr,
    gathered,  # out: Parameters
    num_reqs,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of requests,)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = at < num_reqs
    rows = tl.load(idx_mapping_ptr + at, mask=is_request, other=0).to(tl.int64)
    tl.store(gathered.temperature + at, tl.load(parameters.temperature + rows, mask=is_request), mask=is_request)
    tl.store(gathered.seeds + at, tl.load(parameters.seeds + rows, mask=is_request), mask=is_request)
    if parameters.top_p is not None:
        tl.store(gathered.top_p + at, tl.load(parameters.top_p + rows, mask=is_request), mask=is_request)
        tl.store(gathered.top_k + at, tl.load(parameters.top_k + rows, mask=is_request), mask=is_request)
        tl.store(gathered.min_p + at, tl.load(parameters.min_p + rows, mask=is_request), mask=is_request)
