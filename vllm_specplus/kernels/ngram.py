"""N-gram drafting on the device: ``HybridDrafter(NgramMatcher(...)).draft`` for token buffers that never leave it.

Let s be a request's tokens followed by the draft model's drafts. The quality of an end e < len(s) is the number of
tokens before e that agree with the last tokens of s. It is counted up to the longest n-gram. The last of equally good
ends wins. One integer holds both, so that the best end is a maximum:

    key = agreeing tokens << 32 | rank     0 = fewer agree than the shortest n-gram has
    rank = e, or _MAX_END - e where the first end wins (`takes_first`)

| kernel | a program | writes |
|---|---|---|
| `_search_kernel` | visits every `num_splits`-th block of ends of one request | its best key |
| `_fill_kernel` | takes one request's best key of all programs | the request's drafts |

A search reads the request's tokens once. It looks closer at an end only if the last token agrees. The host reads
nothing back. Grids and allocations depend on shapes and on `longest` alone, which the host knows. So a CUDA graph can
capture both launches once they are compiled. `arbiter/offers.py` searches in the same way for its chains.
"""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.checks import check_rows, check_vector, describe
from vllm_specplus.kernels.drafts import DraftCounts, Drafts, Limits, load_limit, store_counts
from vllm_specplus.kernels.sizes import cdiv, next_power_of_2

_BLOCK = 1024  # ends that a program tests at a time
_MAX_SPLITS = 128  # programs that share a request: enough for one request alone to occupy a GPU
_MAX_LEN = 2**31 - 2**16  # ends, rounded up to a block, are counted in int32
_MAX_END = tl.constexpr(2**31 - 1)


class Texts(NamedTuple):
    """The tokens of each request of the batch."""

    ptr: torch.Tensor
    stride: int
    max_len: int
    num_tokens_ptr: torch.Tensor
    idx_mapping_ptr: torch.Tensor


def split_text(max_len: int, longest: int | None = None) -> tuple[int, int, int]:
    """How a search is divided among programs.

    Args:
        max_len: tokens that a text may have.
        longest: tokens of the longest text as far as the host knows; None: `max_len`. A longer text is searched too.

    Returns:
        How many programs share a text, the most for any `longest`, and how many ends each tests at a time.
    """
    most = min(max(cdiv(max_len, _BLOCK), 1), _MAX_SPLITS)
    return most if longest is None else min(max(cdiv(longest, _BLOCK), 1), most), most, _BLOCK


def check_search(min_ngram_size: int, max_ngram_size: int, max_len: int, width: int) -> None:
    """Raise ValueError for n-gram sizes out of range, and for rows too long to count the ends behind `width` drafts."""
    if not 1 <= min_ngram_size <= max_ngram_size:
        raise ValueError(f"min_ngram_size={min_ngram_size} must lie between 1 and max_ngram_size={max_ngram_size}")
    if max_len + width > _MAX_LEN:
        raise ValueError(f"token_ids has rows of {max_len} tokens, more than {_MAX_LEN - width}")


def fill_drafts(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    drafts: torch.Tensor,
    model_drafts: torch.Tensor,
    limits: Limits,
    by_state: DraftCounts,
    *,
    min_ngram_size: int,
    max_ngram_size: int,
    match_override_len: int = 0,
    takes_first: bool = False,
    longest: int | None = None,
    scratch: torch.Tensor | None = None,
) -> DraftCounts:
    """Fill the slots behind the draft model's drafts with the tokens that followed the same n-gram earlier.

    The drafts and counts are those of `HybridDrafter` with an `NgramMatcher`; without model drafts, those of
    `NgramMatcher.match` alone. There is no `match_len_cap`: a match is measured up to `match_override_len` only. The
    answer is the same for every threshold that a matcher can reach.

    Args:
        token_ids: [max_num_reqs, max_len] int32, the requests' tokens; rows may be strided.
        num_tokens: [max_num_reqs] int32, known tokens of each request, without drafts; counts as `max_len` if more.
        idx_mapping: [num_reqs] int32 or int64, the row of each request in the two above; negative: no request, and no
            drafts.
        drafts: [num_reqs <= max_num_reqs, K] int64, takes the drafts, padded with token 0; rows may be strided.
        model_drafts: [num_reqs, <= K] int64, apart from `drafts`; rows may be strided.
        limits: of each request's drafts; both [num_reqs].
        by_state: [max_num_reqs] by request state, takes the counts.
        min_ngram_size: tokens of the shortest n-gram, >= 1.
        max_ngram_size: tokens of the longest n-gram, >= min_ngram_size.
        match_override_len: a match of at least this many of the request's own tokens takes the place of the model's
            drafts; 0 = never. Without model steps it has no effect.
        takes_first: whether the first occurrence of an n-gram wins, or the latest.
        longest: see `split_text`.
        scratch: int64, contiguous, of at least [num_reqs, the most programs that share a text, 2]; None = a new tensor.
            It takes each program's best key, and its best key of the request's tokens alone. It holds nothing from one
            call to the next.

    Returns:
        [num_reqs] the counts.

    Raises:
        ValueError: a size out of range, or a tensor of another shape, dtype or layout.
    """
    num_reqs, width = drafts.shape
    if num_reqs > token_ids.shape[0]:
        raise ValueError(f"drafts has {num_reqs} rows, more than the {token_ids.shape[0]} of token_ids")
    if model_drafts.shape[0] != num_reqs or model_drafts.shape[1] > width or width < 1:
        raise ValueError(f"model_drafts must be [{num_reqs}, <= {width}], got {describe(model_drafts)}")
    shape = num_reqs, split_text(token_ids.shape[1])[1], 2
    if scratch is None:
        scratch = torch.empty(shape, dtype=torch.int64, device=drafts.device)
    search = NgramSearch(
        token_ids,
        num_tokens,
        by_state,
        scratch,
        width=width,
        ngram_sizes=(min_ngram_size, max_ngram_size),
        match_override_len=match_override_len,
        takes_first=takes_first,
    )
    check_rows("drafts", drafts, torch.int64)
    check_rows("model_drafts", model_drafts, torch.int64)
    check_vector("idx_mapping", idx_mapping, num_reqs, torch.int32, torch.int64)
    check_vector("max_drafts", limits.max_drafts_ptr, num_reqs, torch.int32)
    if scratch.dtype != torch.int64 or not scratch.is_contiguous() or scratch.numel() < math.prod(shape):
        raise ValueError(f"scratch must be contiguous int64 of at least {shape}, got {describe(scratch)}")
    counts = search.fill(idx_mapping, drafts, model_drafts, limits, longest)
    return counts._replace(num_model_ptr=search.num_model[:num_reqs])


class NgramSearch:
    """What `fill_drafts` does, for many steps with the same texts: it checks when it is made, and nothing in a step.

    Attributes:
        num_model: [max_num_reqs] int32, of the last step: how many drafts of each request are the model's.

    Arguments are those of `fill_drafts`. `scratch` fits the most requests of a step; None = a new tensor, for a step of
    as many requests as `token_ids` has rows.

    Raises:
        ValueError: a size out of range, or texts of another shape, dtype or layout.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        num_tokens: torch.Tensor,
        by_state: DraftCounts,
        scratch: torch.Tensor | None = None,
        *,
        width: int,
        ngram_sizes: tuple[int, int],
        match_override_len: int,
        takes_first: bool,
    ):
        max_num_reqs, self._max_len = token_ids.shape
        check_search(*ngram_sizes, self._max_len, width)
        if match_override_len < 0:
            raise ValueError(f"match_override_len={match_override_len} must be 0 (off) or more")
        check_rows("token_ids", token_ids, torch.int32)
        check_vector("num_tokens", num_tokens, max_num_reqs, torch.int32)
        self._most_splits = split_text(self._max_len)[1]
        if scratch is None:
            scratch = torch.empty(max_num_reqs, self._most_splits, 2, dtype=torch.int64, device=token_ids.device)
        self._token_ids, self._stride, self._num_tokens = token_ids, token_ids.stride(0), num_tokens
        self._by_state, self._scratch = by_state, scratch
        self.num_model = torch.empty(max_num_reqs, dtype=torch.int32, device=token_ids.device)
        self._width, self._ngram_sizes = width, ngram_sizes
        self._override_len, self._takes_first = match_override_len, takes_first
        self._constants: dict[int, tuple[dict[str, int], dict[str, int]]] = {}

    def fill(
        self,
        idx_mapping: torch.Tensor,
        drafts: torch.Tensor,
        model_drafts: torch.Tensor,
        limits: Limits,
        longest: int | None,
    ) -> DraftCounts:
        """Fill the slots of a step; see `fill_drafts`.

        Returns:
            [num_reqs] numbers of drafts, and [max_num_reqs] numbers of the model's, those of the batch first. The next
            step overwrites the latter.
        """
        num_reqs, num_steps = model_drafts.shape
        # Not from step to step the same: vLLM may copy it to the host while the next step runs.
        num_drafts = torch.empty(num_reqs, dtype=torch.int32, device=drafts.device)
        counts = DraftCounts(num_drafts, self.num_model)
        if not num_reqs:
            return counts
        if num_steps not in self._constants:
            self._constants[num_steps] = self._constants_of(num_steps)
        for_search, for_fill = self._constants[num_steps]
        num_splits = split_text(self._max_len, longest)[0]
        texts = Texts(self._token_ids, self._stride, self._max_len, self._num_tokens, idx_mapping)
        model_stride = model_drafts.stride(0)
        _search_kernel[(num_reqs, num_splits)](
            texts, limits, model_drafts, model_stride, self._scratch, num_splits, **for_search
        )
        _fill_kernel[(num_reqs,)](
            texts,
            limits,
            model_drafts,
            model_stride,
            Drafts(drafts, drafts.stride(0)),
            self._scratch,
            counts,
            self._by_state,
            num_splits,
            **for_fill,
        )
        return counts

    def _constants_of(self, num_steps: int) -> tuple[dict[str, int], dict[str, int]]:
        """Of both kernels, for a number of model steps."""
        # Without model steps both matches are the same.
        override_len = self._override_len if num_steps else 0
        both = {
            "WIDTH": self._width,
            "NUM_STEPS": num_steps,
            "OVERRIDE_LEN": override_len,
            "TAKES_FIRST": self._takes_first,
            "BLOCK": _BLOCK,
        }
        for_search = {"MIN_SIZE": self._ngram_sizes[0], "MAX_SIZE": self._ngram_sizes[1]}
        for_fill = {
            "BLOCK_WIDTH": next_power_of_2(self._width),
            "BLOCK_SPLITS": next_power_of_2(self._most_splits),
            "BLOCK_OVERRIDE": next_power_of_2(max(override_len, 1)),
            "num_warps": 1,
        }
        return both | for_search, both | for_fill


@triton.jit
def load_request(texts, limits, i_req, WIDTH: tl.constexpr):
    """A request's row, how many tokens it has, and how many drafts it may get; all 0 without a request."""
    row = tl.load(texts.idx_mapping_ptr + i_req).to(tl.int64)
    is_request = row >= 0
    row = tl.maximum(row, 0)
    num_tokens = tl.minimum(tl.load(texts.num_tokens_ptr + row, mask=is_request, other=0), texts.max_len)
    limit = tl.minimum(tl.maximum(load_limit(limits, i_req), 0), WIDTH)
    return row, num_tokens, tl.where(is_request, limit, 0)


@triton.jit
def load_tokens(p_text, p_drafts, positions, num_tokens, mask, NUM_STEPS: tl.constexpr):
    """Tokens of s at int32 `positions` (a block or a scalar) where `mask`: int32."""
    tokens = tl.load(p_text + positions, mask=mask & (positions < num_tokens), other=0)
    if NUM_STEPS > 0:
        is_draft = positions >= num_tokens
        drafted = tl.load(p_drafts + (positions - num_tokens), mask=mask & is_draft, other=0)
        tokens = tl.where(is_draft, drafted.to(tl.int32), tokens)
    return tokens


@triton.jit
def best_of_block(
    best,
    p_text,
    p_drafts,
    ends,
    tokens,
    tail_end,
    last,
    num_tokens,
    MIN_SIZE: tl.constexpr,
    MAX_SIZE: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    TAKES_FIRST: tl.constexpr,
):
    """The greatest of `best` and the keys of [BLOCK] `ends`.

    `tokens` stand before the ends, and `last` before `tail_end`. An end that is not before `tail_end` has no key.
    """
    agrees = (tokens == last) & (ends < tail_end)
    if tl.max(agrees.to(tl.int32), axis=0) > 0:
        size = agrees.to(tl.int32)
        for back in range(1, MAX_SIZE):
            at = tail_end - 1 - back
            wanted = load_tokens(p_text, p_drafts, at, num_tokens, at >= 0, NUM_STEPS)
            agrees = agrees & (ends > back)
            agrees = agrees & (wanted == load_tokens(p_text, p_drafts, ends - 1 - back, num_tokens, agrees, NUM_STEPS))
            size += agrees.to(tl.int32)
        rank = _MAX_END - ends if TAKES_FIRST else ends
        keys = tl.where(size >= MIN_SIZE, (size.to(tl.int64) << 32) | rank, 0)
        best = tl.maximum(best, tl.max(keys, axis=0))
    return best


@triton.jit
def end_of_key(key, TAKES_FIRST: tl.constexpr):
    """The end that a key names, int32; 0 if no n-gram agrees."""
    rank = key.to(tl.int32)  # its low half
    if TAKES_FIRST:
        return tl.where(key > 0, _MAX_END - rank, 0)
    return rank


@triton.jit(do_not_specialize=["model_stride", "num_splits"])
def _search_kernel(
    texts,  # Texts
    limits,  # Limits
    model_ptr,
    model_stride,
    scratch_ptr,
    num_splits,
    WIDTH: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    OVERRIDE_LEN: tl.constexpr,
    TAKES_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_SIZE: tl.constexpr,
    MAX_SIZE: tl.constexpr,
):
    """Grid (num_reqs, num_splits). A program without a block writes nothing."""
    i_req = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1)
    row, num_tokens, limit = load_request(texts, limits, i_req, WIDTH)
    end = num_tokens + NUM_STEPS
    num_blocks = tl.cdiv(end - 1, BLOCK)
    # Without free slots behind the model's drafts a match is useless, unless it may replace them.
    if (i_split >= num_blocks) | (limit <= (0 if OVERRIDE_LEN > 0 else NUM_STEPS)):
        return

    p_text = texts.ptr + row * texts.stride
    p_model = model_ptr + i_req * model_stride
    last = load_tokens(p_text, p_model, end - 1, num_tokens, end > 0, NUM_STEPS)
    best = tl.full((), 0, tl.int64)
    best_alone = tl.full((), 0, tl.int64)
    if OVERRIDE_LEN > 0:
        last_alone = tl.load(p_text + num_tokens - 1, mask=num_tokens > 0, other=0)
    for i_block in range(i_split, num_blocks, num_splits):
        ends = i_block * BLOCK + 1 + tl.arange(0, BLOCK)
        tokens = load_tokens(p_text, p_model, ends - 1, num_tokens, ends < end, NUM_STEPS)
        best = best_of_block(
            best, p_text, p_model, ends, tokens, end, last, num_tokens, MIN_SIZE, MAX_SIZE, NUM_STEPS, TAKES_FIRST
        )
        if OVERRIDE_LEN > 0:
            best_alone = best_of_block(
                best_alone,
                p_text,
                p_model,
                ends,
                tokens,
                num_tokens,
                last_alone,
                num_tokens,
                MIN_SIZE,
                MAX_SIZE,
                0,
                TAKES_FIRST,
            )

    p_keys = scratch_ptr + (i_req * num_splits + i_split) * 2
    tl.store(p_keys, best)
    if OVERRIDE_LEN > 0:
        tl.store(p_keys + 1, best_alone)


@triton.jit(do_not_specialize=["model_stride", "num_splits"])
def _fill_kernel(
    texts,  # Texts
    limits,  # Limits
    model_ptr,
    model_stride,
    drafts,  # out: Drafts
    scratch_ptr,
    counts,  # out: DraftCounts
    by_state,  # out: DraftCounts
    num_splits,
    WIDTH: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    OVERRIDE_LEN: tl.constexpr,
    TAKES_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_OVERRIDE: tl.constexpr,
):
    """Grid (num_reqs,)."""
    i_req = tl.program_id(0).to(tl.int64)
    row, num_tokens, limit = load_request(texts, limits, i_req, WIDTH)
    end = num_tokens + NUM_STEPS
    p_text = texts.ptr + row * texts.stride
    p_model = model_ptr + i_req * model_stride

    # Only keys that this call's searches have written: their programs may return early.
    splits = tl.arange(0, BLOCK_SPLITS)
    p_keys = scratch_ptr + (i_req * num_splits + splits) * 2
    num_written = tl.minimum(tl.cdiv(end - 1, BLOCK), num_splits)
    is_read = splits < tl.where(limit > NUM_STEPS, num_written, 0)
    found = end_of_key(tl.max(tl.load(p_keys, mask=is_read, other=0), axis=0), TAKES_FIRST)
    period = end - found
    num_model = tl.minimum(limit, NUM_STEPS)
    num_drafts = tl.where(found > 0, limit, num_model)
    if OVERRIDE_LEN > 0:
        is_read = splits < tl.where(limit > 0, num_written, 0)
        alone = end_of_key(tl.max(tl.load(p_keys + 1, mask=is_read, other=0), axis=0), TAKES_FIRST)
        back = tl.arange(0, BLOCK_OVERRIDE)
        is_compared = back < tl.minimum(alone, OVERRIDE_LEN)
        differs = tl.load(p_text + num_tokens - 1 - back, mask=is_compared, other=0) != tl.load(
            p_text + alone - 1 - back, mask=is_compared, other=0
        )
        is_override = (alone >= OVERRIDE_LEN) & (tl.max(differs.to(tl.int32), axis=0) == 0)
        found = tl.where(is_override, alone, found)
        period = tl.where(is_override, num_tokens - alone, period)
        num_model = tl.where(is_override, 0, num_model)
        num_drafts = tl.where(is_override, limit, num_drafts)

    # At the end of s the copy goes on with the tokens it has copied: it repeats s[found:].
    columns = tl.arange(0, BLOCK_WIDTH)
    is_copied = (columns >= num_model) & (columns < num_drafts)
    positions = found + (columns - num_model) % tl.maximum(period, 1)
    tokens = load_tokens(p_text, p_model, positions, num_tokens, is_copied, NUM_STEPS).to(tl.int64)
    if NUM_STEPS > 0:
        is_model = columns < num_model
        tokens = tl.where(is_model, tl.load(p_model + columns, mask=is_model, other=0), tokens)
    tl.store(drafts.ptr + i_req * drafts.stride + columns, tokens, mask=columns < WIDTH)
    state = tl.load(texts.idx_mapping_ptr + i_req).to(tl.int64)
    store_counts(counts, by_state, i_req, state, num_drafts, num_model)
