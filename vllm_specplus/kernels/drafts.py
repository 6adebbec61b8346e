"""Drafts that are already on the device: predictions made one step earlier, and what drafts were sampled from.

| kernel                | programs                            | does                                                  |
|-----------------------|-------------------------------------|-------------------------------------------------------|
| `_continue_kernel`    | requests                            | compares a prediction with what came, and drafts what |
|                       |                                     | it says next                                          |
| `_one_hot_kernel`     | requests x slots x blocks of tokens | writes the distribution of a draft that was not       |
|                       |                                     | sampled                                               |

Nothing is read back by the host, and grids depend on shapes alone.
"""

# Kernels: their arguments have no Python types, and those in capitals are known when they are compiled.

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # tokens that a program writes


def continue_predictions(
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    drafts: torch.Tensor,
    predicted: torch.Tensor,
    num_predicted: torch.Tensor,
    base_len: torch.Tensor,
    replaces_model: torch.Tensor,
    *,
    num_model_steps: int,
    max_drafts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft from predictions that were made of each request before its latest tokens were known.

    A prediction counts as far as it agrees with the tokens that came since, and then with the model's drafts, which it
    goes on from. One that `replaces_model` need agree with the tokens only. Where it says something else, or is at its
    end, the model's drafts stand alone.

    Args:
        token_ids: [max_num_reqs, max_len] int32, the requests' tokens; rows may be strided.
        num_tokens: [max_num_reqs] int32, tokens known of each request, no drafts.
        idx_mapping: [num_reqs] int32 or int64, the row of each request in the two above.
        drafts: [num_reqs, K] int64, changed in place; rows may be strided. The first `num_model_steps` columns hold the
            model's drafts. After the call a request's drafts come first and the rest of its row is -1.
        predicted: [num_reqs, P] int32, contiguous, what was predicted to come after the first `base_len` tokens.
        num_predicted: [num_reqs] int32, how much of it is there.
        base_len: [num_reqs] int32, tokens known of each request when the prediction was made.
        replaces_model: [num_reqs] int32, whether the prediction takes the place of the model's drafts.
        num_model_steps: drafts that the model made for each request, 0..K.
        max_drafts: [num_reqs] int32, the longest list each request may get.

    Returns:
        [num_reqs] int32 drafts of each request, and how many of them are the model's.
    """
    num_reqs, window = drafts.shape
    num_drafts = torch.empty(num_reqs, dtype=torch.int32, device=drafts.device)
    num_model = torch.empty_like(num_drafts)
    if num_reqs:
        _continue_kernel[(num_reqs,)](
            token_ids,
            token_ids.stride(0),
            num_tokens,
            idx_mapping,
            drafts,
            drafts.stride(0),
            predicted,
            predicted.shape[1],
            num_predicted,
            base_len,
            replaces_model,
            max_drafts,
            num_drafts,
            num_model,
            WINDOW=window,
            NUM_STEPS=num_model_steps,
            BLOCK_WINDOW=triton.next_power_of_2(window),
            BLOCK_PREDICTED=triton.next_power_of_2(max(predicted.shape[1], 1)),
            num_warps=1,
        )
    return num_drafts, num_model


@triton.jit
def _continue_kernel(
    token_ids_ptr,
    token_ids_stride,
    num_tokens_ptr,
    idx_mapping_ptr,
    drafts_ptr,
    drafts_stride,
    predicted_ptr,
    predicted_stride,
    num_predicted_ptr,
    base_len_ptr,
    replaces_model_ptr,
    max_drafts_ptr,
    num_drafts_ptr,
    num_model_ptr,
    WINDOW: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    BLOCK_WINDOW: tl.constexpr,
    BLOCK_PREDICTED: tl.constexpr,
):
    """Grid (num_reqs,)."""
    i_req = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + i_req).to(tl.int64)
    base_len = tl.load(base_len_ptr + i_req)
    num_predicted = tl.load(num_predicted_ptr + i_req)
    num_new = tl.load(num_tokens_ptr + row) - base_len
    limit = tl.minimum(tl.load(max_drafts_ptr + i_req), WINDOW)
    token_ids_ptr += row * token_ids_stride + base_len
    drafts_ptr += i_req * drafts_stride
    predicted_ptr += i_req * predicted_stride

    at = tl.arange(0, BLOCK_PREDICTED)
    predicted = tl.load(predicted_ptr + at, mask=at < num_predicted, other=-1)
    is_new = at < num_new
    came = tl.load(token_ids_ptr + at, mask=is_new, other=0)
    is_model = (at >= num_new) & (at < num_new + NUM_STEPS)
    drafted = tl.load(drafts_ptr + (at - num_new), mask=is_model, other=0).to(tl.int32)
    misses = tl.sum((is_new & (came != predicted)).to(tl.int32), axis=0)
    misses_model = tl.sum((is_model & (drafted != predicted)).to(tl.int32), axis=0)

    replaces = (tl.load(replaces_model_ptr + i_req) != 0) & (num_predicted > num_new)
    goes_on = (num_new >= 0) & (misses == 0) & (replaces | (misses_model == 0))
    num_model = tl.where(goes_on & replaces, 0, tl.minimum(limit, NUM_STEPS))
    num_drafts = tl.where(goes_on, tl.minimum(limit, num_predicted - num_new), 0)
    num_drafts = tl.maximum(num_drafts, num_model)

    columns = tl.arange(0, BLOCK_WINDOW)
    is_copied = (columns >= num_model) & (columns < num_drafts)
    tokens = tl.load(predicted_ptr + num_new + columns, mask=is_copied, other=-1).to(tl.int64)
    tl.store(drafts_ptr + columns, tokens, mask=(columns >= num_model) & (columns < WINDOW))
    tl.store(num_drafts_ptr + i_req, num_drafts)
    tl.store(num_model_ptr + i_req, num_model)


def write_one_hot_rows(
    draft_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    num_model: torch.Tensor,
) -> None:
    """Make the draft logits of every draft that no model sampled those of a distribution that is sure of it.

    Args:
        draft_logits: [max_num_reqs, K, vocab] float, changed in place: 0 for the draft, -inf for all else.
        idx_mapping: [num_reqs] int32 or int64, the row of each request in `draft_logits`.
        drafts: [num_reqs, K] int64; rows may be strided.
        num_drafts, num_model: [num_reqs] int32, drafts of each request, and how many of them are the model's.
    """
    num_reqs, window = drafts.shape
    vocab_size = draft_logits.shape[2]
    if num_reqs:
        _one_hot_kernel[(triton.cdiv(vocab_size, _BLOCK), window, num_reqs)](
            draft_logits,
            draft_logits.stride(0),
            draft_logits.stride(1),
            idx_mapping,
            drafts,
            drafts.stride(0),
            num_drafts,
            num_model,
            vocab_size,
            BLOCK=_BLOCK,
        )


@triton.jit
def _one_hot_kernel(
    draft_logits_ptr,
    request_stride,
    slot_stride,
    idx_mapping_ptr,
    drafts_ptr,
    drafts_stride,
    num_drafts_ptr,
    num_model_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Grid (blocks, K, num_reqs)."""
    i_slot = tl.program_id(1)
    i_req = tl.program_id(2).to(tl.int64)
    if (i_slot >= tl.load(num_drafts_ptr + i_req)) | (i_slot < tl.load(num_model_ptr + i_req)):
        return
    row = tl.load(idx_mapping_ptr + i_req).to(tl.int64)
    draft = tl.load(drafts_ptr + i_req * drafts_stride + i_slot)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.where(tokens == draft, 0.0, float("-inf"))
    p_row = draft_logits_ptr + row * request_stride + i_slot.to(tl.int64) * slot_stride
    tl.store(p_row + tokens, logits, mask=tokens < vocab_size)
