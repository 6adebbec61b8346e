"""A kernel for `test_static_cost.py`; a program does more the higher its number is."""

import torch
import triton
import triton.language as tl


@triton.jit
def _scaled(p_row, block, BLOCK: tl.constexpr):  # noqa: N803
    values = tl.load(p_row + block * BLOCK + tl.arange(0, BLOCK))
    for _ in tl.static_range(3):
        values = values * 2.0
    return values


@triton.jit(do_not_specialize=["num_blocks"])
def looping_kernel(row_ptr, out_ptr, num_blocks, BLOCK: tl.constexpr):  # noqa: N803
    """Grid (n,). Program i adds up i times `num_blocks` blocks; the first does nothing."""
    i = tl.program_id(0)
    if i == 0:
        return
    total = 0.0
    for _ in range(i):
        for block in range(num_blocks):
            total += tl.sum(_scaled(row_ptr, block, BLOCK), axis=0)
    tl.store(out_ptr + i, total)


def launch(num_programs: int, num_blocks: int, device: str) -> torch.Tensor:
    row = torch.ones(num_blocks * 1024, device=device)
    out = torch.zeros(num_programs, device=device)
    looping_kernel[(num_programs,)](row, out, num_blocks, BLOCK=1024)
    return out
