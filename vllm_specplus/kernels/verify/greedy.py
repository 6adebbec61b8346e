"""`accept_greedy_kernel` verifies by the first token of each row alone, as every strategy does at temperature 0."""

import triton
import triton.language as tl

from vllm_specplus.kernels.verify.arguments import NORMAL, REJECT_ALL, draft_of, rows_of
from vllm_specplus.kernels.verify.emit import load_drafts, write_tokens
from vllm_specplus.kernels.verify.row_stats import first_tokens

# Rows that are read at once.
_MOST_ROWS = tl.constexpr(32)


@triton.jit(do_not_specialize=["max_rows"])
def accept_greedy_kernel(
    logits,  # Logits
    rows,  # Rows
    stats,  # Stats
    groups,  # Groups
    output,  # out: Output
    max_rows,
    sizes,  # Sizes
    POLICY: tl.constexpr,
):
    """Grid (num_reqs,). `stats` and the maxima of `groups` are as `row_stats_kernel` left them."""
    i_req = tl.program_id(0).to(tl.int64)
    start, num_rows = rows_of(rows, i_req, max_rows)
    tile: tl.constexpr = min(sizes.ALL_SLOTS, _MOST_ROWS)
    run = tl.zeros((), tl.int32)
    token = tl.full((), -1, tl.int32)
    going = num_rows > 0
    while going:
        slots = run + tl.arange(0, tile)
        i_rows = start + tl.minimum(slots, num_rows - 1)
        first = first_tokens(logits, stats, groups, i_rows, sizes)
        draft = draft_of(logits, rows, i_rows, 1.0)
        accepts = draft.is_usable & (slots < num_rows - 1) & (POLICY != REJECT_ALL)
        if POLICY == NORMAL:
            accepts = accepts & (draft.token == first)
        num_accepted = tl.min(tl.where(accepts, tile, tl.arange(0, tile)), axis=0)
        token = tl.sum(tl.where(tl.arange(0, tile) == num_accepted, first, 0), axis=0)
        run += num_accepted
        going = num_accepted == tile
    drafts = load_drafts(rows, start, num_rows, sizes)
    write_tokens(drafts, output, i_req, num_rows, run, token, max_rows, sizes)
