"""Kernels for drafts on the device: forecasts made one step earlier, and the distribution of drafts not sampled.

| kernel             | programs                            | does                                                     |
|--------------------|-------------------------------------|----------------------------------------------------------|
| `_continue_kernel` | requests                            | compares a forecast with the tokens that came, and       |
|                    |                                     | drafts its tokens behind them                            |
| `_one_hot_kernel`  | requests x slots x blocks of tokens | writes the distribution of a draft that was not sampled  |

The host reads nothing back, and grids depend on shapes alone.
"""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # tokens that a program writes


class Drafts(NamedTuple):
    ptr: torch.Tensor  # [num_reqs, K] int64
    stride: int


class DraftCounts(NamedTuple):
    """Both [num_reqs] int32: drafts of each request, and how many of them are the model's."""

    num_drafts_ptr: torch.Tensor
    num_model_ptr: torch.Tensor


class _Texts(NamedTuple):
    """The tokens of each request of the batch."""

    ptr: torch.Tensor
    stride: int
    num_tokens_ptr: torch.Tensor
    idx_mapping_ptr: torch.Tensor


class _Forecasts(NamedTuple):
    """The forecast tokens of each request of the batch."""

    ptr: torch.Tensor
    stride: int
    num_forecast_ptr: torch.Tensor
    base_len_ptr: torch.Tensor
    replaces_model_ptr: torch.Tensor


def continue_forecasts(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    drafts: torch.Tensor,
    forecast: torch.Tensor,
    num_forecast: torch.Tensor,
    base_len: torch.Tensor,
    replaces_model: torch.Tensor,
    *,
    num_model_steps: int,
    max_drafts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft from forecasts that were made of each request before its latest tokens were known.

    A forecast continues a request if it agrees with the tokens that came since, and then with the model's drafts. One
    that `replaces_model` has to agree with the tokens only. The model's drafts stand alone where the forecast
    disagrees or is at its end.

    Args:
        token_ids: [max_num_reqs, max_len] int32, the requests' tokens; rows may be strided.
        num_tokens: [max_num_reqs] int32, known tokens of each request, without drafts.
        idx_mapping: [num_reqs] int32 or int64, the row of each request in the two above.
        drafts: [num_reqs, K] int64, changed in place; rows may be strided. The first `num_model_steps` columns hold the
            model's drafts. After the call a request's drafts come first and the rest of its row is -1.
        forecast: [num_reqs, P] int32, contiguous, the tokens that may follow the first `base_len` ones.
        num_forecast: [num_reqs] int32, the tokens of each forecast.
        base_len: [num_reqs] int32, known tokens of each request when the forecast was made.
        replaces_model: [num_reqs] int32, whether the forecast takes the place of the model's drafts.
        num_model_steps: drafts that the model made for each request, 0..K.
        max_drafts: [num_reqs] int32, the longest list each request may get.

    Returns:
        [num_reqs] int32 drafts of each request, and how many of them are the model's.
    """
    num_reqs, width = drafts.shape
    num_drafts = torch.empty(num_reqs, dtype=torch.int32, device=drafts.device)
    num_model = torch.empty_like(num_drafts)
    if num_reqs:
        _continue_kernel[(num_reqs,)](
            _Texts(token_ids, token_ids.stride(0), num_tokens, idx_mapping),
            Drafts(drafts, drafts.stride(0)),
            _Forecasts(forecast, forecast.shape[1], num_forecast, base_len, replaces_model),
            max_drafts,
            DraftCounts(num_drafts, num_model),
            WIDTH=width,
            NUM_STEPS=num_model_steps,
            BLOCK_WIDTH=triton.next_power_of_2(width),
            BLOCK_FORECAST=triton.next_power_of_2(max(forecast.shape[1], 1)),
            num_warps=1,
        )
    return num_drafts, num_model


@triton.jit
def _continue_kernel(
    texts,  # _Texts
    drafts,  # Drafts, changed in place
    forecasts,  # _Forecasts
    max_drafts_ptr,
    counts,  # out: DraftCounts
    WIDTH: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_FORECAST: tl.constexpr,
):
    """Grid (num_reqs,)."""
    i_req = tl.program_id(0).to(tl.int64)
    row = tl.load(texts.idx_mapping_ptr + i_req).to(tl.int64)
    base_len = tl.load(forecasts.base_len_ptr + i_req)
    num_forecast = tl.load(forecasts.num_forecast_ptr + i_req)
    num_new = tl.load(texts.num_tokens_ptr + row) - base_len
    limit = tl.minimum(tl.load(max_drafts_ptr + i_req), WIDTH)
    p_new = texts.ptr + row * texts.stride + base_len
    p_drafts = drafts.ptr + i_req * drafts.stride
    p_forecast = forecasts.ptr + i_req * forecasts.stride

    at = tl.arange(0, BLOCK_FORECAST)
    forecast = tl.load(p_forecast + at, mask=at < num_forecast, other=-1)
    is_new = at < num_new
    new = tl.load(p_new + at, mask=is_new, other=0)
    is_model = (at >= num_new) & (at < num_new + NUM_STEPS)
    drafted = tl.load(p_drafts + (at - num_new), mask=is_model, other=0).to(tl.int32)
    misses = tl.sum((is_new & (new != forecast)).to(tl.int32), axis=0)
    misses_model = tl.sum((is_model & (drafted != forecast)).to(tl.int32), axis=0)

    replaces = (tl.load(forecasts.replaces_model_ptr + i_req) != 0) & (num_forecast > num_new)
    goes_on = (num_new >= 0) & (misses == 0) & (replaces | (misses_model == 0))
    num_model = tl.where(goes_on & replaces, 0, tl.minimum(limit, NUM_STEPS))
    num_drafts = tl.where(goes_on, tl.minimum(limit, num_forecast - num_new), 0)
    num_drafts = tl.maximum(num_drafts, num_model)

    columns = tl.arange(0, BLOCK_WIDTH)
    is_copied = (columns >= num_model) & (columns < num_drafts)
    tokens = tl.load(p_forecast + num_new + columns, mask=is_copied, other=-1).to(tl.int64)
    tl.store(p_drafts + columns, tokens, mask=(columns >= num_model) & (columns < WIDTH))
    tl.store(counts.num_drafts_ptr + i_req, num_drafts)
    tl.store(counts.num_model_ptr + i_req, num_model)


def write_one_hot_rows(
    draft_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    num_model: torch.Tensor,
) -> None:
    """Write the draft logits of each draft that no model sampled: a distribution of that token alone.

    Args:
        draft_logits: [max_num_reqs, K, vocab] float, changed in place: 0 for the draft, -inf for all other tokens.
        idx_mapping: [num_reqs] int32 or int64, the row of each request in `draft_logits`.
        drafts: [num_reqs, K] int64; rows may be strided.
        num_drafts, num_model: [num_reqs] int32, drafts of each request, and how many of them are the model's.
    """
    num_reqs, width = drafts.shape
    vocab_size = draft_logits.shape[2]
    if num_reqs:
        _one_hot_kernel[(triton.cdiv(vocab_size, _BLOCK), width, num_reqs)](
            draft_logits,
            draft_logits.stride(0),
            draft_logits.stride(1),
            idx_mapping,
            Drafts(drafts, drafts.stride(0)),
            DraftCounts(num_drafts, num_model),
            vocab_size,
            BLOCK=_BLOCK,
        )


@triton.jit
def _one_hot_kernel(
    draft_logits_ptr,
    request_stride,
    slot_stride,
    idx_mapping_ptr,
    drafts,  # Drafts
    counts,  # DraftCounts
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Grid (blocks, K, num_reqs)."""
    i_slot = tl.program_id(1)
    i_req = tl.program_id(2).to(tl.int64)
    if (i_slot >= tl.load(counts.num_drafts_ptr + i_req)) | (i_slot < tl.load(counts.num_model_ptr + i_req)):
        return
    row = tl.load(idx_mapping_ptr + i_req).to(tl.int64)
    draft = tl.load(drafts.ptr + i_req * drafts.stride + i_slot)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.where(tokens == draft, 0.0, float("-inf"))
    p_row = draft_logits_ptr + row * request_stride + i_slot.to(tl.int64) * slot_stride
    tl.store(p_row + tokens, logits, mask=tokens < vocab_size)
