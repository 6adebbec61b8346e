"""Fills the arbiter's offers: the model's drafts, the n-gram match behind each number of them, any other chain."""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.arbiter.state import ASLEEP, State, sizes_of
from vllm_specplus.kernels.checks import check_rows, check_vector, describe
from vllm_specplus.kernels.drafts import Limits, load_limit
from vllm_specplus.kernels.ngram import (
    Texts,
    best_of_block,
    check_search,
    end_of_key,
    load_request,
    load_tokens,
    split_text,
)
from vllm_specplus.kernels.sizes import next_power_of_2


def offer_model(state: State, idx_mapping: torch.Tensor, limits: Limits, model_drafts: torch.Tensor) -> None:
    """Offer the draft model's drafts to the requests that have not given it up and may draft.

    Args:
        state: `offers.model` and `offers.passes` are changed in place, but not of a request that may not draft; one
            that is asleep has made no passes.
        idx_mapping: [B] int32 or int64, the row of each request; negative: no request.
        limits: of each request's drafts.
        model_drafts: [B, passes] int64, at most S passes, perhaps none; rows may be strided.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
    """
    num_reqs, num_steps = idx_mapping.shape[0], state.offers.model.shape[1]
    check_vector("idx_mapping", idx_mapping, num_reqs, torch.int32, torch.int64)
    check_vector("max_drafts", limits.max_drafts_ptr, num_reqs, torch.int32)
    check_rows("model_drafts", model_drafts, torch.int64)
    num_passes = model_drafts.shape[1]
    if model_drafts.shape[0] != num_reqs or num_passes > num_steps:
        raise ValueError(f"model_drafts must be [{num_reqs}, <= {num_steps}], got {describe(model_drafts)}")
    if num_reqs:
        _offer_model_kernel[(num_reqs,)](
            state.offers,
            state.credits,
            idx_mapping,
            limits,
            model_drafts,
            model_drafts.stride(0),
            num_passes,
            sizes_of(state),
            num_warps=1,
        )


@triton.jit(do_not_specialize=["drafts_stride", "num_passes"])
def _offer_model_kernel(
    offers,  # Offers, changed in place
    credits_ptr,
    idx_mapping_ptr,
    limits,  # Limits
    drafts_ptr,
    drafts_stride,
    num_passes,
    sizes,  # Sizes
):
    """Grid (num_reqs,)."""
    i_req = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + i_req).to(tl.int64)
    # In its prompt, which has a limit of 0, the model has drafted tokens that are known.
    is_offered = (row >= 0) & (load_limit(limits, i_req) > 0)
    credits = tl.load(credits_ptr + row, mask=is_offered, other=ASLEEP)
    passes = tl.where(credits != ASLEEP, num_passes, 0)
    places = tl.arange(0, sizes.BLOCK_STEPS)
    drafted = tl.load(drafts_ptr + i_req * drafts_stride + places, mask=places < passes, other=0)
    tl.store(offers.model + row * sizes.NUM_STEPS + places, drafted.to(tl.int32), mask=places < passes)
    tl.store(offers.passes + row, passes.to(tl.int64), mask=is_offered)


def offer_chain(
    state: State,
    chain: int,
    idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    agreed: torch.Tensor,
) -> None:
    """Offer a chain to each request.

    Args:
        state: `chains`, `lengths` and `agreed` of its `offers` are changed in place.
        chain: its index among the chains that the state was made for.
        idx_mapping: [B] int32 or int64, the row of each request; negative: no request.
        token_ids: [B, <= K] int32 or int64; rows may be strided, and what stands behind a chain's end is not read.
        lengths: [B] int32, tokens of each request's chain, counting as 0 if negative and as all columns if more.
        agreed: [B] int32, how many tokens before it agree; 0 = it is a guess.

    Raises:
        ValueError: there is no such chain, or a tensor of another shape, dtype or layout.
    """
    num_reqs = idx_mapping.shape[0]
    _, num_chains, width = state.offers.chains.shape
    if not 0 <= chain < num_chains:
        raise ValueError(f"chain={chain} must lie between 0 and {num_chains - 1}")
    check_vector("idx_mapping", idx_mapping, num_reqs, torch.int32, torch.int64)
    check_rows("token_ids", token_ids, torch.int64 if token_ids.dtype == torch.int64 else torch.int32)
    if token_ids.shape[0] != num_reqs or token_ids.shape[1] > width:
        raise ValueError(f"token_ids must be [{num_reqs}, <= {width}], got {describe(token_ids)}")
    check_vector("lengths", lengths, num_reqs, torch.int32)
    check_vector("agreed", agreed, num_reqs, torch.int32)
    if num_reqs:
        _offer_chain_kernel[(num_reqs,)](
            state.offers,
            idx_mapping,
            token_ids,
            token_ids.stride(0),
            token_ids.shape[1],
            lengths,
            agreed,
            chain,
            sizes_of(state),
            num_warps=1,
        )


@triton.jit(do_not_specialize=["tokens_stride", "num_columns", "chain"])
def _offer_chain_kernel(
    offers,  # Offers, changed in place
    idx_mapping_ptr,
    tokens_ptr,
    tokens_stride,
    num_columns,
    lengths_ptr,
    agreed_ptr,
    chain,
    sizes,  # Sizes
):
    """Grid (num_reqs,)."""
    i_req = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + i_req).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + i_req), 0), num_columns)
    length = tl.where(row >= 0, length, 0)
    at = row * sizes.NUM_CHAINS + chain
    slots = tl.arange(0, sizes.BLOCK_WIDTH)
    is_token = slots < length
    tokens = tl.load(tokens_ptr + i_req * tokens_stride + slots, mask=is_token, other=0)
    tl.store(offers.chains + at * sizes.WIDTH + slots, tokens.to(tl.int32), mask=is_token)
    tl.store(offers.lengths + at, length, mask=row >= 0)
    tl.store(offers.agreed + at, tl.load(agreed_ptr + i_req), mask=row >= 0)


def offer_ngrams(
    state: State,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    limits: Limits,
    *,
    min_ngram_size: int,
    max_ngram_size: int,
    match_len_cap: int,
    takes_first: bool = False,
    first_chain: int = 0,
    chains_per_start: int = 1,
    longest: int | None = None,
) -> None:
    """Offer what followed the same n-gram earlier: a chain behind each number of the model's drafts, from 0 to S.

    It comes after `offer_model`. The chain behind j drafts is what `NgramMatcher` finds for the request's tokens and
    these drafts. Where the model has made fewer passes, the chain is empty.

    Args:
        state: `chains`, `lengths` and `agreed` of its `offers` are changed in place.
        token_ids: [R, max_len] int32, the requests' tokens; rows may be strided.
        num_tokens: [R] int32, known tokens of each request; counts as `max_len` if more.
        idx_mapping: [B] int32 or int64, the row of each request; negative: no request.
        limits: of each request's drafts, the model's too; counts as K if more.
        min_ngram_size: tokens of the shortest n-gram, >= 1.
        max_ngram_size: tokens of the longest n-gram, >= min_ngram_size.
        match_len_cap: agreements are measured up to this many tokens; raised to `max_ngram_size`.
        takes_first: whether the first occurrence of an n-gram wins, or the latest.
        first_chain: the index of the chain behind no drafts.
        chains_per_start: from there, the distance of the chain behind one draft, and so on.
        longest: see `split_text`.

    Raises:
        ValueError: a size or index out of range, or a tensor of another shape, dtype or layout.
    """
    num_reqs, max_len = idx_mapping.shape[0], token_ids.shape[1]
    max_num_reqs, num_chains, width = state.offers.chains.shape
    num_starts = state.offers.model.shape[1] + 1
    check_search(min_ngram_size, max_ngram_size, max_len, width)
    last_chain = first_chain + (num_starts - 1) * chains_per_start
    if first_chain < 0 or chains_per_start < 1 or last_chain >= num_chains:
        raise ValueError(
            f"first_chain={first_chain} and chains_per_start={chains_per_start} must name {num_starts} of the "
            f"{num_chains} chains"
        )
    check_rows("token_ids", token_ids, torch.int32)
    check_vector("num_tokens", num_tokens, max_num_reqs, torch.int32)
    check_vector("idx_mapping", idx_mapping, num_reqs, torch.int32, torch.int64)
    check_vector("max_drafts", limits.max_drafts_ptr, num_reqs, torch.int32)
    if not num_reqs:
        return

    num_splits, most_splits, block = split_text(max_len, longest)
    keys = torch.empty((num_reqs, num_starts, num_splits), dtype=torch.int64, device=token_ids.device)
    texts = Texts(token_ids, token_ids.stride(0), max_len, num_tokens, idx_mapping)
    sizes, same = sizes_of(state), {"BLOCK": block, "TAKES_FIRST": takes_first}
    _search_kernel[(num_reqs, num_splits, num_starts)](
        texts, limits, state.offers, keys, num_splits, sizes, MIN_SIZE=min_ngram_size, MAX_SIZE=max_ngram_size, **same
    )
    match_len_cap = max(match_len_cap, max_ngram_size)
    _fill_kernel[(num_reqs, num_starts)](
        texts,
        limits,
        state.offers,
        keys,
        num_splits,
        sizes,
        FIRST_CHAIN=first_chain,
        CHAINS_PER_START=chains_per_start,
        MATCH_LEN_CAP=match_len_cap,
        BLOCK_CAP=next_power_of_2(match_len_cap),
        BLOCK_SPLITS=next_power_of_2(most_splits),
        num_warps=1,
        **same,
    )


class _Tail(NamedTuple):
    """A request's tokens and some of the model's drafts, whose end is looked for."""

    p_text: tl.tensor
    p_drafts: tl.tensor
    num_tokens: tl.tensor
    end: tl.tensor  # tokens and drafts
    room: tl.tensor  # for drafts behind them; 0 if there are fewer drafts of the model, or no request


@triton.jit
def _load_tail(texts, limits, offers, i_req, start, sizes):
    """The `_Tail` of a request and `start` drafts of the model."""
    row, num_tokens, limit = load_request(texts, limits, i_req, sizes.WIDTH)
    passes = tl.load(offers.passes + row)
    return _Tail(
        texts.ptr + row * texts.stride,
        offers.model + row * sizes.NUM_STEPS,
        num_tokens,
        num_tokens + start,
        tl.where(start <= passes, tl.maximum(limit - start, 0), 0),
    )


@triton.jit(do_not_specialize=["num_splits"])
def _search_kernel(
    texts,  # Texts
    limits,  # Limits
    offers,  # Offers
    keys_ptr,  # out
    num_splits,
    sizes,  # Sizes
    BLOCK: tl.constexpr,
    TAKES_FIRST: tl.constexpr,
    MIN_SIZE: tl.constexpr,
    MAX_SIZE: tl.constexpr,
):
    """Grid (num_reqs, num_splits, S + 1). A program without a block writes nothing."""
    i_req = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1)
    start = tl.program_id(2)
    tail = _load_tail(texts, limits, offers, i_req, start, sizes)
    num_blocks = tl.cdiv(tail.end - 1, BLOCK)
    if (i_split >= num_blocks) | (tail.room == 0):
        return

    last = load_tokens(tail.p_text, tail.p_drafts, tail.end - 1, tail.num_tokens, tail.end > 0, sizes.NUM_STEPS)
    best = tl.full((), 0, tl.int64)
    for i_block in range(i_split, num_blocks, num_splits):
        ends = i_block * BLOCK + 1 + tl.arange(0, BLOCK)
        is_end = ends < tail.end
        tokens = load_tokens(tail.p_text, tail.p_drafts, ends - 1, tail.num_tokens, is_end, sizes.NUM_STEPS)
        best = best_of_block(
            best,
            tail.p_text,
            tail.p_drafts,
            ends,
            tokens,
            tail.end,
            last,
            tail.num_tokens,
            MIN_SIZE,
            MAX_SIZE,
            sizes.NUM_STEPS,
            TAKES_FIRST,
        )
    tl.store(keys_ptr + (i_req * (sizes.NUM_STEPS + 1) + start) * num_splits + i_split, best)


@triton.jit(do_not_specialize=["num_splits"])
def _fill_kernel(
    texts,  # Texts
    limits,  # Limits
    offers,  # Offers, changed in place
    keys_ptr,
    num_splits,
    sizes,  # Sizes
    BLOCK: tl.constexpr,
    TAKES_FIRST: tl.constexpr,
    FIRST_CHAIN: tl.constexpr,
    CHAINS_PER_START: tl.constexpr,
    MATCH_LEN_CAP: tl.constexpr,
    BLOCK_CAP: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Grid (num_reqs, S + 1)."""
    i_req = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1)
    row = tl.load(texts.idx_mapping_ptr + i_req).to(tl.int64)
    if row < 0:
        return
    tail = _load_tail(texts, limits, offers, i_req, start, sizes)

    # Only keys that this call's searches have written: their programs may return early.
    splits = tl.arange(0, BLOCK_SPLITS)
    num_written = tl.minimum(tl.cdiv(tail.end - 1, BLOCK), num_splits)
    is_read = splits < tl.where(tail.room > 0, num_written, 0)
    p_keys = keys_ptr + (i_req * (sizes.NUM_STEPS + 1) + start) * num_splits
    found = end_of_key(tl.max(tl.load(p_keys + splits, mask=is_read, other=0), axis=0), TAKES_FIRST)
    length = tl.where(found > 0, tail.room, 0)

    # At the end of the tail the copy goes on with the tokens it has copied.
    slots = tl.arange(0, sizes.BLOCK_WIDTH)
    is_token = slots < length
    copied = found + slots % tl.maximum(tail.end - found, 1)
    tokens = load_tokens(tail.p_text, tail.p_drafts, copied, tail.num_tokens, is_token, sizes.NUM_STEPS)

    back = tl.arange(0, BLOCK_CAP)
    at = found - 1 - back
    is_compared = back < tl.minimum(found, MATCH_LEN_CAP)
    earlier = load_tokens(tail.p_text, tail.p_drafts, at, tail.num_tokens, is_compared, sizes.NUM_STEPS)
    at += tail.end - found
    late = load_tokens(tail.p_text, tail.p_drafts, at, tail.num_tokens, is_compared, sizes.NUM_STEPS)
    agreed = tl.min(tl.where(is_compared & (earlier == late), BLOCK_CAP, back), axis=0)

    chain = row * sizes.NUM_CHAINS + FIRST_CHAIN + start * CHAINS_PER_START
    tl.store(offers.chains + chain * sizes.WIDTH + slots, tokens, mask=is_token)
    tl.store(offers.lengths + chain, length)
    tl.store(offers.agreed + chain, agreed)
