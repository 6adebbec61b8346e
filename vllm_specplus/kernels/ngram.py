"""N-gram drafting on the device: ``HybridDrafter(NgramMatcher(...)).draft`` for token buffers that never leave it.

With s = a request's tokens followed by the draft model's drafts, an end e < len(s) is as good as the number of tokens
before e that agree with the last tokens of s, counted up to the longest window; of equally good ends the last one wins.
One integer holds both, so that the best end is a maximum:

    key = agreeing tokens << 32 | e        0 = fewer agree than the shortest window has

| kernel | a program | writes |
|---|---|---|
| `_search_kernel` | visits every `num_splits`-th block of ends of one request | its best key |
| `_fill_kernel` | takes one request's best key of all programs | the request's drafts |

A search costs one read of the request's tokens: an end is looked at closer only if the last token agrees. Nothing is
read back by the host, and grids and allocations depend on shapes alone, so both launches can be captured in a graph
(after a first call has compiled them).
"""

# Kernels: their arguments have no Python types, and those in capitals are known when they are compiled.

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # ends that a program tests at a time
_MAX_SPLITS = 128  # programs that share a request: enough for one request alone to occupy a GPU
_MAX_LEN = 2**31 - 2**16  # ends, rounded up to a block, are counted in int32


def scratch_shape(num_reqs: int, max_len: int) -> tuple[int, int, int]:
    """Shape of the int64 scratch that `fill_drafts` needs for so many requests and rows of `max_len` tokens.

    It is [num_reqs, num_splits, 2]: of each program the best key of s, and of the request's tokens alone.
    """
    return num_reqs, min(max(triton.cdiv(max_len, _BLOCK), 1), _MAX_SPLITS), 2


def fill_drafts(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    drafts: torch.Tensor,
    *,
    num_model_steps: int,
    min_ngram_size: int,
    max_ngram_size: int,
    match_override_len: int = 0,
    max_drafts: torch.Tensor | None = None,
    num_drafts: torch.Tensor | None = None,
    num_model: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill a window of drafts behind the draft model's with what followed the same words earlier in each request.

    The drafts and counts are those of `HybridDrafter` with an `NgramMatcher`; with `num_model_steps=0`, those of
    `NgramMatcher.match` alone. There is no `match_len_cap`: a match is measured up to `match_override_len` only, which
    gives the same answer for every threshold that a matcher can reach.

    Args:
        token_ids: [max_num_reqs, max_len] int32, the requests' tokens; rows may be strided.
        num_tokens: [max_num_reqs] int32, tokens known of each request, no drafts; counts as `max_len` if more.
        idx_mapping: [num_reqs] int32 or int64, the row of each request in the two above; negative = no request, which
            gets no drafts.
        drafts: [num_reqs, K] int64, changed in place; rows may be strided. The first `num_model_steps` columns hold the
            model's drafts. After the call a request's drafts come first and the rest of its row is -1.
        num_model_steps: drafts that the model made for each request, 0..K.
        min_ngram_size: shortest window, >= 1.
        max_ngram_size: longest window, >= min_ngram_size.
        match_override_len: when the request's tokens alone match at least so many, what followed there takes the place
            of the model's drafts; 0 = never. It means nothing without model steps.
        max_drafts: [num_reqs] int32, the longest list each request may get; None = K for all.
        num_drafts: [num_reqs] int32, where the number of drafts goes; None = a new tensor.
        num_model: [num_reqs] int32, where the number of drafts that are the model's goes; None = a new tensor.
        scratch: int64, contiguous, at least `scratch_shape(num_reqs, max_len)`; None = a new tensor. It holds nothing
            from one call to the next.

    Returns:
        `num_drafts` and `num_model`.

    Raises:
        ValueError: a size out of range, or a tensor of another shape, dtype or layout.
    """
    num_reqs, window = drafts.shape
    max_len = token_ids.shape[1]
    if not 0 <= num_model_steps <= window or window < 1:
        raise ValueError(f"num_model_steps={num_model_steps} must lie between 0 and the {window} columns of drafts")
    if not 1 <= min_ngram_size <= max_ngram_size:
        raise ValueError(f"min_ngram_size={min_ngram_size} must lie between 1 and max_ngram_size={max_ngram_size}")
    if match_override_len < 0:
        raise ValueError(f"match_override_len={match_override_len} must be 0 (off) or more")
    if max_len + window > _MAX_LEN:
        raise ValueError(f"token_ids has rows of {max_len} tokens, more than {_MAX_LEN - window}")

    device = drafts.device
    if num_drafts is None:
        num_drafts = torch.empty(num_reqs, dtype=torch.int32, device=device)
    if num_model is None:
        num_model = torch.empty(num_reqs, dtype=torch.int32, device=device)
    shape = scratch_shape(num_reqs, max_len)
    if scratch is None:
        scratch = torch.empty(shape, dtype=torch.int64, device=device)
    _check_rows("token_ids", token_ids, torch.int32)
    _check_rows("drafts", drafts, torch.int64)
    _check_vector("num_tokens", num_tokens, token_ids.shape[0], torch.int32)
    _check_vector("idx_mapping", idx_mapping, num_reqs, torch.int32, torch.int64)
    _check_vector("num_drafts", num_drafts, num_reqs, torch.int32)
    _check_vector("num_model", num_model, num_reqs, torch.int32)
    if max_drafts is not None:
        _check_vector("max_drafts", max_drafts, num_reqs, torch.int32)
    if scratch.dtype != torch.int64 or not scratch.is_contiguous() or scratch.numel() < num_reqs * shape[1] * shape[2]:
        raise ValueError(f"scratch must be contiguous int64 of at least {shape}, got {_describe(scratch)}")
    if num_reqs == 0:
        return num_drafts, num_model

    _launch(
        (token_ids, token_ids.stride(0), max_len, num_tokens, idx_mapping, max_drafts),
        drafts,
        scratch,
        num_drafts,
        num_model,
        num_splits=shape[1],
        num_model_steps=num_model_steps,
        ngram_sizes=(min_ngram_size, max_ngram_size),
        # Without model steps both matches are the same one.
        override_len=match_override_len if num_model_steps else 0,
    )
    return num_drafts, num_model


def _check_rows(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.ndim != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        raise ValueError(f"{name} must be {dtype}, 2-D, with contiguous rows, got {_describe(tensor)}")


def _check_vector(name: str, tensor: torch.Tensor, size: int, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes or tensor.shape != (size,) or not tensor.is_contiguous():
        choices = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} must be {choices}, contiguous, of shape ({size},), got {_describe(tensor)}")


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} with strides {tensor.stride()}"


def _launch(
    texts: tuple[Any, ...],
    drafts: torch.Tensor,
    scratch: torch.Tensor,
    num_drafts: torch.Tensor,
    num_model: torch.Tensor,
    *,
    num_splits: int,
    num_model_steps: int,
    ngram_sizes: tuple[int, int],
    override_len: int,
) -> None:
    """Run both kernels; `texts` are the arguments that lead to a request's tokens, the same in both."""
    num_reqs, window = drafts.shape
    same = {
        "WINDOW": window,
        "NUM_STEPS": num_model_steps,
        "OVERRIDE_LEN": override_len,
        "NUM_SPLITS": num_splits,
        "BLOCK": _BLOCK,
    }
    _search_kernel[(num_reqs, num_splits)](
        *texts,
        drafts,
        drafts.stride(0),
        scratch,
        MIN_SIZE=ngram_sizes[0],
        MAX_SIZE=ngram_sizes[1],
        **same,
    )
    _fill_kernel[(num_reqs,)](
        *texts,
        drafts,
        drafts.stride(0),
        scratch,
        num_drafts,
        num_model,
        BLOCK_WINDOW=triton.next_power_of_2(window),
        BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        BLOCK_OVERRIDE=triton.next_power_of_2(max(override_len, 1)),
        num_warps=1,
        **same,
    )


@triton.jit
def _load_request(
    i_req,
    max_len,
    num_tokens_ptr,
    idx_mapping_ptr,
    max_drafts_ptr,
    WINDOW: tl.constexpr,
):
    """A request's row, its tokens, and how many drafts it may get; without a request 0 of all."""
    row = tl.load(idx_mapping_ptr + i_req).to(tl.int64)
    is_request = row >= 0
    row = tl.maximum(row, 0)
    num_tokens = tl.minimum(tl.load(num_tokens_ptr + row, mask=is_request, other=0), max_len)
    limit = tl.where(is_request, WINDOW, 0)
    if max_drafts_ptr is not None:
        limit = tl.minimum(limit, tl.maximum(tl.load(max_drafts_ptr + i_req), 0))
    return row, num_tokens, limit


@triton.jit
def _load_tokens(
    text_ptr,
    drafts_ptr,
    positions,
    num_tokens,
    mask,
    NUM_STEPS: tl.constexpr,
):
    """Tokens of s at int32 `positions` (a block or a scalar) where `mask`: int32."""
    tokens = tl.load(text_ptr + positions, mask=mask & (positions < num_tokens), other=0)
    if NUM_STEPS > 0:
        is_draft = positions >= num_tokens
        drafted = tl.load(drafts_ptr + (positions - num_tokens), mask=mask & is_draft, other=0)
        tokens = tl.where(is_draft, drafted.to(tl.int32), tokens)
    return tokens


@triton.jit
def _best_key(
    text_ptr,
    drafts_ptr,
    ends,
    agrees,
    tail_end,
    num_tokens,
    MIN_SIZE: tl.constexpr,
    MAX_SIZE: tl.constexpr,
    NUM_STEPS: tl.constexpr,
):
    """The greatest key of [BLOCK] `ends`, whose last tokens agree with the one before `tail_end` where `agrees`."""
    size = agrees.to(tl.int32)
    for back in range(1, MAX_SIZE):
        at = tail_end - 1 - back
        wanted = _load_tokens(text_ptr, drafts_ptr, at, num_tokens, at >= 0, NUM_STEPS)
        agrees = agrees & (ends > back)
        agrees = agrees & (wanted == _load_tokens(text_ptr, drafts_ptr, ends - 1 - back, num_tokens, agrees, NUM_STEPS))
        size += agrees.to(tl.int32)
    return tl.max(tl.where(size >= MIN_SIZE, (size.to(tl.int64) << 32) | ends, 0), axis=0)


@triton.jit
def _search_kernel(
    token_ids_ptr,
    token_ids_stride,
    max_len,
    num_tokens_ptr,
    idx_mapping_ptr,
    max_drafts_ptr,
    drafts_ptr,
    drafts_stride,
    scratch_ptr,
    WINDOW: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    OVERRIDE_LEN: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_SIZE: tl.constexpr,
    MAX_SIZE: tl.constexpr,
):
    """Grid (num_reqs, NUM_SPLITS). A program without a block writes nothing."""
    i_req = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1)
    row, num_tokens, limit = _load_request(i_req, max_len, num_tokens_ptr, idx_mapping_ptr, max_drafts_ptr, WINDOW)
    end = num_tokens + NUM_STEPS
    num_blocks = tl.cdiv(end - 1, BLOCK)
    # Without free slots behind the model's drafts there is nothing to look for, unless they may be replaced.
    if (i_split >= num_blocks) | (limit <= (0 if OVERRIDE_LEN > 0 else NUM_STEPS)):
        return

    text_ptr = token_ids_ptr + row * token_ids_stride
    drafts_ptr += i_req * drafts_stride
    last = _load_tokens(text_ptr, drafts_ptr, end - 1, num_tokens, end > 0, NUM_STEPS)
    best = tl.full((), 0, tl.int64)
    best_alone = tl.full((), 0, tl.int64)
    if OVERRIDE_LEN > 0:
        last_alone = tl.load(text_ptr + num_tokens - 1, mask=num_tokens > 0, other=0)
    for i_block in range(i_split, num_blocks, NUM_SPLITS):
        ends = i_block * BLOCK + 1 + tl.arange(0, BLOCK)
        tokens = _load_tokens(text_ptr, drafts_ptr, ends - 1, num_tokens, ends < end, NUM_STEPS)
        agrees = (tokens == last) & (ends < end)
        if tl.max(agrees.to(tl.int32), axis=0) > 0:
            key = _best_key(text_ptr, drafts_ptr, ends, agrees, end, num_tokens, MIN_SIZE, MAX_SIZE, NUM_STEPS)
            best = tl.maximum(best, key)
        if OVERRIDE_LEN > 0:
            agrees = (tokens == last_alone) & (ends < num_tokens)
            if tl.max(agrees.to(tl.int32), axis=0) > 0:
                key = _best_key(text_ptr, drafts_ptr, ends, agrees, num_tokens, num_tokens, MIN_SIZE, MAX_SIZE, 0)
                best_alone = tl.maximum(best_alone, key)

    scratch_ptr += (i_req * NUM_SPLITS + i_split) * 2
    tl.store(scratch_ptr, best)
    if OVERRIDE_LEN > 0:
        tl.store(scratch_ptr + 1, best_alone)


@triton.jit
def _fill_kernel(
    token_ids_ptr,
    token_ids_stride,
    max_len,
    num_tokens_ptr,
    idx_mapping_ptr,
    max_drafts_ptr,
    drafts_ptr,
    drafts_stride,
    scratch_ptr,
    num_drafts_ptr,
    num_model_ptr,
    WINDOW: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    OVERRIDE_LEN: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_OVERRIDE: tl.constexpr,
):
    """Grid (num_reqs,)."""
    i_req = tl.program_id(0).to(tl.int64)
    row, num_tokens, limit = _load_request(i_req, max_len, num_tokens_ptr, idx_mapping_ptr, max_drafts_ptr, WINDOW)
    end = num_tokens + NUM_STEPS
    text_ptr = token_ids_ptr + row * token_ids_stride
    drafts_ptr += i_req * drafts_stride

    # Only what this call's searches have written: see where a program of theirs returns early.
    splits = tl.arange(0, BLOCK_SPLITS)
    keys_ptr = scratch_ptr + (i_req * NUM_SPLITS + splits) * 2
    num_written = tl.minimum(tl.cdiv(end - 1, BLOCK), NUM_SPLITS)
    is_read = splits < tl.where(limit > NUM_STEPS, num_written, 0)
    found = tl.max(tl.load(keys_ptr, mask=is_read, other=0), axis=0).to(tl.int32)  # the low half of a key
    period = end - found
    num_model = tl.minimum(limit, NUM_STEPS)
    num_drafts = tl.where(found > 0, limit, num_model)
    if OVERRIDE_LEN > 0:
        is_read = splits < tl.where(limit > 0, num_written, 0)
        alone = tl.max(tl.load(keys_ptr + 1, mask=is_read, other=0), axis=0).to(tl.int32)
        back = tl.arange(0, BLOCK_OVERRIDE)
        is_compared = back < tl.minimum(alone, OVERRIDE_LEN)
        differs = tl.load(text_ptr + num_tokens - 1 - back, mask=is_compared, other=0) != tl.load(
            text_ptr + alone - 1 - back, mask=is_compared, other=0
        )
        is_override = (alone >= OVERRIDE_LEN) & (tl.max(differs.to(tl.int32), axis=0) == 0)
        found = tl.where(is_override, alone, found)
        period = tl.where(is_override, num_tokens - alone, period)
        num_model = tl.where(is_override, 0, num_model)
        num_drafts = tl.where(is_override, limit, num_drafts)

    # Where s ends, the copy goes on with what it has copied: it repeats s[found:]. All it reads of the model's drafts
    # is read to append to them, and then they stay where they are.
    columns = tl.arange(0, BLOCK_WINDOW)
    is_copied = (columns >= num_model) & (columns < num_drafts)
    positions = found + (columns - num_model) % tl.maximum(period, 1)
    tokens = _load_tokens(text_ptr, drafts_ptr, positions, num_tokens, is_copied, NUM_STEPS)
    is_rest = (columns >= num_model) & (columns < WINDOW)
    tl.store(drafts_ptr + columns, tl.where(is_copied, tokens, -1).to(tl.int64), mask=is_rest)
    tl.store(num_drafts_ptr + i_req, num_drafts)
    tl.store(num_model_ptr + i_req, num_model)
