"""The arguments of the verification's kernels in groups, and the functions that read one request or row of them.

Fields ending in ``ptr`` are tensors. Triton compiles a kernel for each combination of three properties of a field:
whether it is None, whether it is 1, and whether it is divisible by 16. `do_not_specialize` does not reach into a group.
So a number that changes between steps is an argument of its own. No kernel gets a field that it does not read, if the
field may be None.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.verify.nucleus import GROUP_SIZE, NEG_INF, load_logits
from vllm_specplus.strategies import POLICIES, STRATEGIES

GREEDY = tl.constexpr(STRATEGIES.index("greedy"))
TARGET_MATCH = tl.constexpr(STRATEGIES.index("target_match"))
TOPP = tl.constexpr(STRATEGIES.index("topp"))
REJECTION = tl.constexpr(STRATEGIES.index("rejection"))
NORMAL = tl.constexpr(POLICIES.index("normal"))
REJECT_ALL = tl.constexpr(POLICIES.index("reject_all"))

NO_LIMIT = tl.constexpr(2**31 - 1)
# A temperature outside of these acts as the nearer one: its reciprocal is not an ordinary float.
_SEARCH_SIZE, _FAR_ROW = tl.constexpr(128), tl.constexpr(2**62)
_COLDEST, _HOTTEST = tl.constexpr(1e-30), tl.constexpr(1e30)

# Fields of `Stats`, for each block of a row. MAX: the largest logit. SUM: the mass of all tokens. ABOVE: the mass of
# the tokens ordered before the draft, without the draft's own group. DRAFT_MAX and DRAFT_SUM: the draft model's
# largest logit and mass. Masses are relative to the block's largest logit.
STAT_MAX, STAT_SUM, STAT_ABOVE, STAT_DRAFT_MAX, STAT_DRAFT_SUM, NUM_STATS = (tl.constexpr(i) for i in range(6))

# Fields of `Plans`. PLAN_LIMIT is the mass that may lie before a sample, and no token of the nucleus has a logit below
# PLAN_FLOOR. PLAN_SHARE is the log2 of the part of the row's mass that is sampled from, or of less. LOG_MASS, DRAFT_MAX
# and DRAFT_LOG_MASS are those of `Residual`. FOUND fields are the `Statistics` of a row, its
# draft, and the verdict on it, for `judge_kernel` alone.
(
    PLAN_MAX,
    PLAN_LIMIT,
    PLAN_FLOOR,
    PLAN_SHARE,
    PLAN_LOG_MASS,
    PLAN_DRAFT_MAX,
    PLAN_DRAFT_LOG_MASS,
    FOUND_MAX,
    FOUND_TOTAL,
    FOUND_ABOVE,
    FOUND_WEIGHT,
    FOUND_LEAST,
    FOUND_DRAFT_MAX,
    FOUND_DRAFT_MASS,
    FOUND_LOGIT,
    NUM_PLAN_FLOATS,
) = (tl.constexpr(i) for i in range(16))
# PLAN_ACCEPTS is 1 if the row's draft is accepted. PLAN_TOKEN is what the row emits if the run of accepted drafts ends
# there, -1 if that is still to be sampled. PLAN_NUM_LISTED counts the groups that `race_kernel` lists.
# The next two are for `emit_kernel` where it has a program for each row. PLAN_REQUEST is -1 if the request cannot come
# to the row. PLAN_NUM_LEFT of a request's first row counts its programs that have still to end.
(
    PLAN_ACCEPTS,
    PLAN_TOKEN,
    PLAN_EXCLUDED,
    PLAN_REQUEST,
    PLAN_NUM_LISTED,
    PLAN_NUM_LEFT,
    FOUND_TOKEN,
    FOUND_VERDICT,
    NUM_PLAN_INTS,
) = (tl.constexpr(i) for i in range(9))


class Logits(NamedTuple):
    ptr: torch.Tensor  # [num_rows, vocab]
    stride: int
    vocab_size: int


class DraftLogits(NamedTuple):
    """The draft model's logits, of the same vocabulary; None without."""

    ptr: torch.Tensor | None  # [num_draft_rows, vocab]
    stride: int
    rows_ptr: torch.Tensor | None  # [num_rows] int64, the draft row of each row; None: its own


class Rows(NamedTuple):
    """Where each request's rows lie, and the draft that each row tests."""

    cu_ptr: torch.Tensor  # [num_reqs + 1] int64
    drafts_ptr: torch.Tensor  # [num_rows] int64


class Filters(NamedTuple):
    """None: off for all requests."""

    top_p_ptr: torch.Tensor | None  # [num_reqs] float32
    top_k_ptr: torch.Tensor | None  # [num_reqs] int64
    min_p_ptr: torch.Tensor | None  # [num_reqs] float32


class NoiseKeys(NamedTuple):
    seeds_ptr: torch.Tensor  # [num_reqs] int64
    positions_ptr: torch.Tensor  # [num_rows] int64


class Stats(NamedTuple):
    """What `row_stats_kernel` finds in each block of each row."""

    ptr: torch.Tensor  # [num_rows, NUM_STATS, num_blocks] float32
    num_blocks: int


class Groups(NamedTuple):
    """The largest logit of each `GROUP_SIZE` tokens of a row, and scratch to list groups in."""

    max_ptr: torch.Tensor  # [num_rows, num_groups], of the type of the logits
    list_ptr: torch.Tensor  # [num_rows, num_groups] int32
    num_groups: int


class Heads(NamedTuple):
    """Scratch: the likeliest tokens of each row, in order of their ids."""

    tokens_ptr: torch.Tensor  # [num_rows, HEAD_SIZE] int32
    logits_ptr: torch.Tensor  # [num_rows, HEAD_SIZE] float32


class Plans(NamedTuple):
    """What `judge_kernel` finds out about each row."""

    floats_ptr: torch.Tensor  # [num_rows, NUM_PLAN_FLOATS] float32
    ints_ptr: torch.Tensor  # [num_rows, NUM_PLAN_INTS] int32


class Output(NamedTuple):
    token_ids_ptr: torch.Tensor  # [num_reqs, max_rows] int64
    num_tokens_ptr: torch.Tensor  # [num_reqs] int32


class Sizes(NamedTuple):
    """How much one program takes at a time: constants, powers of 2.

    Each field is a constant, not the argument: Triton 3.6 cannot pass a constant group on to a function. Functions pass
    the group on as it is. An assignment in a kernel or a return value would turn its constants into tensors.
    """

    ALL_BLOCKS: tl.constexpr  # at least the blocks of a row
    ALL_GROUPS: tl.constexpr  # at least the groups of a row
    BLOCK_GROUPS: tl.constexpr  # groups of a block
    TILE_GROUPS: tl.constexpr  # groups that a step takes, in the search for a cut and in filling a head,
    SCAN_GROUPS: tl.constexpr  # in summing what lies before a token,
    LIST_GROUPS: tl.constexpr  # in sampling from a list of groups,
    LISTED_GROUPS: tl.constexpr  # and in making such a list
    ALL_SLOTS: tl.constexpr  # at least the rows of a request
    JUDGED_ROWS: tl.constexpr  # rows of a request whose statistics are looked at together
    HEAD_GROUPS: tl.constexpr  # the most groups that a head is read from
    HEAD_SIZE: tl.constexpr  # the most tokens of a head


class RequestFilters(NamedTuple):
    """The filters of one request; `NO_LIMIT` is no top-k."""

    top_p: tl.tensor  # float32
    top_k: tl.tensor  # int32
    min_p: tl.tensor  # float32


class Draft(NamedTuple):
    """The draft of one row."""

    token: tl.tensor  # int32, -1 if there is none
    logit: tl.tensor  # float32
    is_usable: tl.tensor  # bool, whether any policy may accept it


@triton.jit
def request_of(rows, i_row, num_reqs):
    """The request that a row belongs to, int64; `num_reqs` past the last row."""
    before = tl.zeros((), tl.int32)
    for first in range(0, num_reqs, _SEARCH_SIZE):
        requests = first + tl.arange(0, _SEARCH_SIZE)
        ends = tl.load(rows.cu_ptr + 1 + requests, mask=requests < num_reqs, other=_FAR_ROW)
        before += tl.sum((ends <= i_row).to(tl.int32), axis=0)
    return before.to(tl.int64)


@triton.jit
def rows_of(rows, i_req, max_rows):
    """First row of a request, int64, and how many of its rows count, int32."""
    start = tl.load(rows.cu_ptr + i_req)
    end = tl.load(rows.cu_ptr + i_req + 1)
    return start, tl.minimum(end - start, max_rows).to(tl.int32)


@triton.jit
def temperature_of(temperature_ptr, i_req, STRATEGY: tl.constexpr):
    """The divisor of a request's logits, and whether the request is greedy."""
    temperature = tl.load(temperature_ptr + i_req)
    is_greedy = (temperature == 0.0) | (STRATEGY == GREEDY)
    return tl.where(is_greedy, 1.0, tl.minimum(tl.maximum(temperature, _COLDEST), _HOTTEST)), is_greedy


@triton.jit
def filters_of(filters, i_req):
    """The `RequestFilters` of a request."""
    top_p, min_p = tl.full((), 1.0, tl.float32), tl.full((), 0.0, tl.float32)
    top_k = tl.full((), NO_LIMIT, tl.int32)
    if filters.top_p_ptr is not None:
        top_p = tl.load(filters.top_p_ptr + i_req)
    if filters.top_k_ptr is not None:
        limit = tl.load(filters.top_k_ptr + i_req)
        top_k = tl.where((limit > 0) & (limit < NO_LIMIT), limit, NO_LIMIT).to(tl.int32)
    if filters.min_p_ptr is not None:
        min_p = tl.load(filters.min_p_ptr + i_req)
    return RequestFilters(top_p, top_k, min_p)


@triton.jit
def draft_of(logits, rows, i_row, temperature):
    """The `Draft` of a row."""
    token = tl.load(rows.drafts_ptr + i_row)
    token = tl.where((token >= 0) & (token < logits.vocab_size), token, -1).to(tl.int32)
    logit = load_logits(logits.ptr + i_row * logits.stride, tl.maximum(token, 0), logits.vocab_size)
    # A quotient of -inf: the target masks the token, or all but masks it.
    return Draft(token, logit, (token >= 0) & (logit / temperature > NEG_INF))


@triton.jit
def draft_row_of(draft_logits, i_row, vocab_size):
    """Pointer to the draft logits of a row, and how many there are: 0 where the draft was not sampled."""
    i_draft_row = i_row
    if draft_logits.rows_ptr is not None:
        i_draft_row = tl.load(draft_logits.rows_ptr + i_row)
    size = tl.where(i_draft_row >= 0, vocab_size, 0)
    return draft_logits.ptr + tl.maximum(i_draft_row, 0) * draft_logits.stride, size


@triton.jit
def block_tokens(i_block, BLOCK_GROUPS: tl.constexpr):
    """[BLOCK_GROUPS] groups and [BLOCK_GROUPS, GROUP_SIZE] tokens of a block, int32."""
    groups = i_block * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    return groups, groups[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
