"""Kernels around a step's drafts, forecasts made one step earlier, and the distribution of drafts not sampled.

| kernel             | programs                            | does                                                     |
|--------------------|-------------------------------------|----------------------------------------------------------|
| `_report_kernel`   | requests                            | gathers for the host the latest tokens, and the model's  |
|                    |                                     | drafts                                                   |
| `_place_kernel`    | requests                            | takes over drafts that the host has made                 |
| `_continue_kernel` | requests                            | compares a forecast with the tokens that came, and       |
|                    |                                     | drafts its tokens behind them                            |
| `_prefer_kernel`   | requests                            | puts a forecast in the place of other drafts             |
| `_one_hot_kernel`  | requests x slots x blocks of tokens | writes the distribution of a draft that was not sampled  |

No call waits for the device, and grids depend on shapes alone.
"""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.sizes import cdiv, next_power_of_2

_BLOCK = 4096  # tokens that a program writes


class Drafts(NamedTuple):
    ptr: torch.Tensor  # [num_reqs, K] int64
    stride: int


class DraftCounts(NamedTuple):
    """Both int32: drafts of each request, and how many of them are the model's.

    By request state, or of the batch. The latter are [num_reqs] and [>= num_reqs].
    """

    num_drafts_ptr: torch.Tensor | None
    num_model_ptr: torch.Tensor | None


class Limits(NamedTuple):
    """What limits the drafts of each request of the batch."""

    max_drafts_ptr: torch.Tensor  # [>= num_reqs] int32
    num_sampled_ptr: torch.Tensor  # [>= num_reqs] int32 tokens that it got in this step; without any it has no drafts


def make_counts(num_reqs: int, device: torch.device) -> DraftCounts:
    """New counts, [num_reqs], that a kernel is to write."""
    num_drafts = torch.empty(num_reqs, dtype=torch.int32, device=device)
    return DraftCounts(num_drafts, torch.empty_like(num_drafts))


@triton.jit
def load_limit(limits, i_req):
    """The most drafts of a request: int32."""
    return tl.where(tl.load(limits.num_sampled_ptr + i_req) > 0, tl.load(limits.max_drafts_ptr + i_req), 0)


@triton.jit
def store_counts(counts, by_state, i_req, row, num_drafts, num_model):
    """Store the counts of a request twice; without a request, which has a negative `row`, once."""
    tl.store(counts.num_drafts_ptr + i_req, num_drafts)
    tl.store(counts.num_model_ptr + i_req, num_model)
    if by_state.num_drafts_ptr is not None:
        tl.store(by_state.num_drafts_ptr + row, num_drafts, mask=row >= 0)
        tl.store(by_state.num_model_ptr + row, num_model, mask=row >= 0)


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


def report_tokens(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    limits: Limits,
    model_drafts: torch.Tensor,
    width: int,
    report: torch.Tensor,
) -> int:
    """Gather what the host is to know of a step.

    Args:
        token_ids, num_tokens, idx_mapping, limits: as for `continue_forecasts`.
        model_drafts: [num_reqs, num_steps] int64, at most K of them; rows may be strided.
        width: K, the most drafts of a request.
        report: [>= num_reqs * (3 + K + num_steps)] int32, takes a row for each request: known tokens, most drafts, the
            K + 1 latest tokens (newest first), the model's drafts. Before a text's beginning stands its first token. It
            may be memory of the host.

    Returns:
        The columns of a row.
    """
    num_reqs, num_steps = model_drafts.shape
    if num_reqs:
        _report_kernel[(num_reqs,)](
            _Texts(token_ids, token_ids.stride(0), num_tokens, idx_mapping),
            model_drafts,
            model_drafts.stride(0),
            limits,
            report,
            num_steps,
            WIDTH=width,
            BLOCK_WIDTH=next_power_of_2(width + 1),
            num_warps=1,
        )
    return 3 + width + num_steps


@triton.jit(do_not_specialize=["model_stride", "num_steps"])
def _report_kernel(
    texts,  # _Texts
    model_ptr,
    model_stride,
    limits,  # Limits
    report_ptr,  # out
    num_steps,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Grid (num_reqs,)."""
    i_req = tl.program_id(0).to(tl.int64)
    row = tl.load(texts.idx_mapping_ptr + i_req).to(tl.int64)
    num_tokens = tl.load(texts.num_tokens_ptr + row)
    p_report = report_ptr + i_req * (3 + WIDTH + num_steps)
    tl.store(p_report, num_tokens)
    tl.store(p_report + 1, load_limit(limits, i_req))
    columns = tl.arange(0, BLOCK_WIDTH)
    at = tl.maximum(num_tokens - 1 - columns, 0)
    latest = tl.load(texts.ptr + row * texts.stride + at, mask=columns <= WIDTH)
    tl.store(p_report + 2 + columns, latest, mask=columns <= WIDTH)
    is_model = columns < num_steps
    model = tl.load(model_ptr + i_req * model_stride + columns, mask=is_model)
    tl.store(p_report + 3 + WIDTH + columns, model.to(tl.int32), mask=is_model)


def place_drafts(
    drafts: torch.Tensor,
    token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    num_model: torch.Tensor,
    idx_mapping: torch.Tensor,
    by_state: DraftCounts,
) -> None:
    """Take over drafts that the host has made.

    Args:
        drafts: [num_reqs, K] int64, takes the drafts, padded with token 0; rows may be strided.
        token_ids: [num_reqs, >= K] int32 or int64; rows may be strided, and what stands behind the drafts is not read.
        num_drafts, num_model: [num_reqs] int32, drafts of each request, and how many of them are the model's.
        idx_mapping: [num_reqs] int32 or int64, the request states.
        by_state: [max_num_reqs] by request state, takes the counts.
    """
    num_reqs, width = drafts.shape
    if num_reqs:
        _place_kernel[(num_reqs,)](
            Drafts(drafts, drafts.stride(0)),
            Drafts(token_ids, token_ids.stride(0)),
            DraftCounts(num_drafts, num_model),
            idx_mapping,
            by_state,
            WIDTH=width,
            BLOCK_WIDTH=next_power_of_2(width),
            num_warps=1,
        )


@triton.jit
def _place_kernel(
    drafts,  # out: Drafts
    tokens,  # Drafts
    counts,  # DraftCounts
    idx_mapping_ptr,
    by_state,  # out: DraftCounts
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Grid (num_reqs,)."""
    i_req = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + i_req).to(tl.int64)
    num_drafts = tl.load(counts.num_drafts_ptr + i_req)
    columns = tl.arange(0, BLOCK_WIDTH)
    token_ids = tl.load(tokens.ptr + i_req * tokens.stride + columns, mask=columns < num_drafts, other=0)
    tl.store(drafts.ptr + i_req * drafts.stride + columns, token_ids.to(tl.int64), mask=columns < WIDTH)
    tl.store(by_state.num_drafts_ptr + row, num_drafts)
    tl.store(by_state.num_model_ptr + row, tl.load(counts.num_model_ptr + i_req))


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
    model_drafts: torch.Tensor | None,
    limits: Limits,
    agreed: torch.Tensor | None = None,
    by_state: DraftCounts | None = None,
) -> DraftCounts:
    """Draft from forecasts that were made of each request before its latest tokens were known.

    A forecast continues a request if it agrees with the tokens that came since, and then with the model's drafts. One
    that `replaces_model` has to agree with the tokens only. The model's drafts stand alone where the forecast
    disagrees or is at its end.

    Args:
        token_ids: [max_num_reqs, max_len] int32, the requests' tokens; rows may be strided.
        num_tokens: [max_num_reqs] int32, known tokens of each request, without drafts.
        idx_mapping: [num_reqs] int32 or int64, the row of each request in the two above.
        drafts: [num_reqs, K] int64, takes the drafts, padded with token 0; rows may be strided.
        forecast: [num_reqs, P] int32, contiguous, the tokens that may follow the first `base_len` ones.
        num_forecast: [num_reqs] int32, the tokens of each forecast.
        base_len: [num_reqs] int32, known tokens of each request when the forecast was made.
        replaces_model: [num_reqs] int32, whether the forecast takes the place of the model's drafts.
        model_drafts: [num_reqs, <= K] int64, apart from `drafts`; rows may be strided. None: there are none.
        limits: of each request's drafts.
        agreed: [num_reqs] int32, changed in place: how many tokens before a forecast agree, and then before its rest;
            or `WHOLE_OUTPUT`.
        by_state: [max_num_reqs] by request state, takes the counts; None: they are not of the step's drafts.

    Returns:
        [num_reqs] the counts.
    """
    num_reqs, width = drafts.shape
    counts = make_counts(num_reqs, drafts.device)
    model = drafts if model_drafts is None else model_drafts
    if num_reqs:
        _continue_kernel[(num_reqs,)](
            _Texts(token_ids, token_ids.stride(0), num_tokens, idx_mapping),
            Drafts(drafts, drafts.stride(0)),
            model,
            model.stride(0),
            _Forecasts(forecast, forecast.shape[1], num_forecast, base_len, replaces_model),
            limits,
            counts,
            by_state or DraftCounts(None, None),
            agreed,
            WIDTH=width,
            NUM_STEPS=0 if model_drafts is None else model_drafts.shape[1],
            BLOCK_WIDTH=next_power_of_2(width),
            BLOCK_FORECAST=next_power_of_2(max(forecast.shape[1], 1)),
            num_warps=1,
        )
    return counts


@triton.jit(do_not_specialize=["model_stride"])
def _continue_kernel(
    texts,  # _Texts
    drafts,  # out: Drafts
    model_ptr,
    model_stride,
    forecasts,  # _Forecasts
    limits,  # Limits
    counts,  # out: DraftCounts
    by_state,  # out: DraftCounts
    agreed_ptr,  # changed in place, or None
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
    limit = tl.minimum(load_limit(limits, i_req), WIDTH)
    p_new = texts.ptr + row * texts.stride + base_len
    p_model = model_ptr + i_req * model_stride
    p_forecast = forecasts.ptr + i_req * forecasts.stride

    at = tl.arange(0, BLOCK_FORECAST)
    forecast = tl.load(p_forecast + at, mask=at < num_forecast, other=-1)
    is_new = at < num_new
    new = tl.load(p_new + at, mask=is_new, other=0)
    is_model = (at >= num_new) & (at < num_new + NUM_STEPS)
    drafted = tl.load(p_model + (at - num_new), mask=is_model, other=0).to(tl.int32)
    misses = tl.sum((is_new & (new != forecast)).to(tl.int32), axis=0)
    misses_model = tl.sum((is_model & (drafted != forecast)).to(tl.int32), axis=0)

    replaces = (tl.load(forecasts.replaces_model_ptr + i_req) != 0) & (num_forecast > num_new)
    goes_on = (num_new >= 0) & (misses == 0) & (replaces | (misses_model == 0))
    num_model = tl.where(goes_on & replaces, 0, tl.minimum(limit, NUM_STEPS))
    num_drafts = tl.where(goes_on, tl.minimum(limit, num_forecast - num_new), 0)
    num_drafts = tl.maximum(num_drafts, num_model)

    columns = tl.arange(0, BLOCK_WIDTH)
    is_copied = (columns >= num_model) & (columns < num_drafts)
    tokens = tl.load(p_forecast + num_new + columns, mask=is_copied, other=0).to(tl.int64)
    if NUM_STEPS > 0:
        tokens += tl.load(p_model + columns, mask=columns < num_model, other=0)
    tl.store(drafts.ptr + i_req * drafts.stride + columns, tokens, mask=columns < WIDTH)
    store_counts(counts, by_state, i_req, row, num_drafts, num_model)
    if agreed_ptr is not None:
        tl.store(agreed_ptr + i_req, tl.load(agreed_ptr + i_req) + num_new)


def prefer_forecasts(
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    num_model: torch.Tensor,
    forecast: torch.Tensor,
    num_forecast: torch.Tensor,
    agreed: torch.Tensor,
    idx_mapping: torch.Tensor,
    sources: torch.Tensor,
    forecast_source: int,
    other_source: int,
    by_state: DraftCounts,
) -> DraftCounts:
    """Replace a request's drafts with a forecast.

    A forecast that no token speaks for, not even the newest, is used only where there would be no drafts.

    Args:
        drafts: [num_reqs, K] int64, changed in place; rows may be strided.
        num_drafts: [num_reqs] int32, drafts of each request.
        num_model: [>= num_reqs] int32, how many of them are the model's.
        forecast: [num_reqs, >= K] int64, padded with token 0; rows may be strided.
        num_forecast: [num_reqs] int32, tokens of each forecast.
        agreed: [num_reqs] int32, how many tokens before it agree, or `WHOLE_OUTPUT` and some.
        idx_mapping: [num_reqs] int32 or int64, the row of each request in `sources`.
        sources: [max_num_reqs] int32, takes `forecast_source` or `other_source`, the one whose drafts are used.
        by_state: [max_num_reqs] by request state, takes the new counts.

    Returns:
        [num_reqs] the new counts.
    """
    num_reqs, width = drafts.shape
    counts = make_counts(num_reqs, drafts.device)
    if num_reqs:
        _prefer_kernel[(num_reqs,)](
            Drafts(drafts, drafts.stride(0)),
            DraftCounts(num_drafts, num_model),
            Drafts(forecast, forecast.stride(0)),
            num_forecast,
            agreed,
            idx_mapping,
            sources,
            counts,
            by_state,
            WIDTH=width,
            FORECAST_SOURCE=forecast_source,
            OTHER_SOURCE=other_source,
            BLOCK_WIDTH=next_power_of_2(max(width, 1)),
            num_warps=1,
        )
    return counts


@triton.jit
def _prefer_kernel(
    drafts,  # Drafts, changed in place
    counts,  # DraftCounts
    forecast,  # Drafts
    num_forecast_ptr,
    agreed_ptr,
    idx_mapping_ptr,
    sources_ptr,  # out, by request state
    new_counts,  # out: DraftCounts
    by_state,  # out: DraftCounts
    WIDTH: tl.constexpr,
    FORECAST_SOURCE: tl.constexpr,
    OTHER_SOURCE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Grid (num_reqs,)."""
    i_req = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + i_req).to(tl.int64)
    num_drafts = tl.load(counts.num_drafts_ptr + i_req)
    num_model = tl.load(counts.num_model_ptr + i_req)
    num_forecast = tl.load(num_forecast_ptr + i_req)
    is_first = (num_forecast > 0) & ((tl.load(agreed_ptr + i_req) > 0) | (num_drafts == 0))
    columns = tl.arange(0, BLOCK_WIDTH)
    is_copied = columns < tl.where(is_first, WIDTH, 0)
    tokens = tl.load(forecast.ptr + i_req * forecast.stride + columns, mask=is_copied)
    tl.store(drafts.ptr + i_req * drafts.stride + columns, tokens, mask=is_copied)
    num_drafts, num_model = tl.where(is_first, num_forecast, num_drafts), tl.where(is_first, 0, num_model)
    store_counts(new_counts, by_state, i_req, row, num_drafts, num_model)
    tl.store(sources_ptr + row, tl.where(is_first, FORECAST_SOURCE, OTHER_SOURCE))


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
        num_drafts: [num_reqs] int32, drafts of each request.
        num_model: [>= num_reqs] int32, how many of them are the model's.
    """
    num_reqs, width = drafts.shape
    vocab_size = draft_logits.shape[2]
    if num_reqs:
        _one_hot_kernel[(cdiv(vocab_size, _BLOCK), width, num_reqs)](
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
