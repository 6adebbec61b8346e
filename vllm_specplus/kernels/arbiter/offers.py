"""Fills the arbiter's offers: the n-gram match behind each number of the model's drafts, and any other chains."""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.arbiter.state import MAX_STOPS, State, check_texts
from vllm_specplus.kernels.checks import check_vector, describe
from vllm_specplus.kernels.drafts import Limits
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


def offer_chains(
    state: State,
    idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    lengths: torch.Tensor,
    agreed: torch.Tensor,
    *,
    first_chain: int = 0,
    chains_per_start: int = 1,
) -> None:
    """Offer chains that somebody else has made, N to each request. Each ends before a token that ends the text.

    Args:
        state: `chains`, `lengths` and `agreed` of its `offers` are changed in place.
        idx_mapping: [B] int32 or int64, the row of each request; negative: no request.
        token_ids: [N, B, <= K] int32 or int64; may be strided but for the last dimension, and what stands behind a
            chain's end is not read.
        lengths: [N, B] int32, tokens of each chain, counting as 0 if negative and as all columns if more.
        agreed: [N, B] int32, how many tokens before it agree, or `WHOLE_OUTPUT` and some; 0 = it is a guess.
        first_chain: the index of the first of them among the chains that the state was made for.
        chains_per_start: from there, the distance of the second, and so on.

    Raises:
        ValueError: there is no such chain, or a tensor of another shape, dtype or layout.
    """
    num_reqs, num_offered = idx_mapping.shape[0], len(token_ids)
    width = state.offers.chains.shape[2]
    _check_chains(state, first_chain, chains_per_start, num_offered)
    check_vector("idx_mapping", idx_mapping, num_reqs, torch.int32, torch.int64)
    is_dense = token_ids.ndim == 3 and (token_ids.shape[2] <= 1 or token_ids.stride(2) == 1)
    if not is_dense or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"token_ids must be int32 or int64, 3-D, with contiguous rows, got {describe(token_ids)}")
    if token_ids.shape[1] != num_reqs or token_ids.shape[2] > width:
        raise ValueError(f"token_ids must be [{num_offered}, {num_reqs}, <= {width}], got {describe(token_ids)}")
    for name, numbers in (("lengths", lengths), ("agreed", agreed)):
        if numbers.shape != (num_offered, num_reqs) or numbers.dtype != torch.int32 or not numbers.is_contiguous():
            shape = num_offered, num_reqs
            raise ValueError(f"{name} must be contiguous int32 of {shape}, got {describe(numbers)}")
    if num_reqs and num_offered:
        _offer_kernel[(num_reqs, num_offered)](
            state.offers,
            idx_mapping,
            token_ids,
            token_ids.stride(0),
            token_ids.stride(1),
            token_ids.shape[2],
            lengths,
            agreed,
            first_chain,
            chains_per_start,
            state.sizes,
            num_warps=1,
        )


def _check_chains(state: State, first_chain: int, chains_per_start: int, number: int) -> None:
    """Raise ValueError where these name `number` chains that are not all there."""
    num_chains = state.offers.chains.shape[1]
    if first_chain < 0 or chains_per_start < 1 or first_chain + (number - 1) * chains_per_start >= num_chains:
        raise ValueError(
            f"first_chain={first_chain} and chains_per_start={chains_per_start} must name {number} of the "
            f"{num_chains} chains"
        )


@triton.jit(do_not_specialize=["chain_stride", "request_stride", "num_columns", "first_chain", "chains_per_start"])
def _offer_kernel(
    offers,  # Offers, changed in place
    idx_mapping_ptr,
    tokens_ptr,
    chain_stride,
    request_stride,
    num_columns,
    lengths_ptr,
    agreed_ptr,
    first_chain,
    chains_per_start,
    sizes,  # Sizes
):
    """Grid (num_reqs, N)."""
    i_req = tl.program_id(0).to(tl.int64)
    i_chain = tl.program_id(1)
    row = tl.load(idx_mapping_ptr + i_req).to(tl.int64)
    i_given = i_chain * tl.num_programs(0) + i_req
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + i_given), 0), num_columns)
    chain = first_chain + i_chain * chains_per_start
    is_open = tl.load(offers.starts + chain) <= _num_before_stop(offers, row, sizes)
    length = tl.where((row >= 0) & is_open, length, 0)
    at = row * sizes.NUM_CHAINS + chain
    slots = tl.arange(0, sizes.BLOCK_WIDTH)
    p_tokens = tokens_ptr + i_chain * chain_stride + i_req * request_stride
    tokens = tl.load(p_tokens + slots, mask=slots < length, other=0)
    length = tl.minimum(length, tl.min(tl.where(_is_stop(offers, row, tokens), slots, sizes.BLOCK_WIDTH), axis=0))
    is_token = slots < length
    tl.store(offers.chains + at * sizes.WIDTH + slots, tokens.to(tl.int32), mask=is_token)
    tl.store(offers.lengths + at, length, mask=row >= 0)
    tl.store(offers.agreed + at, tl.load(agreed_ptr + i_given), mask=row >= 0)


class MatchSizes(NamedTuple):
    """Constants of a search; see the arguments of `NgramChains`. Those named BLOCK are powers of 2."""

    MIN_SIZE: tl.constexpr
    MAX_SIZE: tl.constexpr
    TAKES_FIRST: tl.constexpr
    FIRST_CHAIN: tl.constexpr
    CHAINS_PER_START: tl.constexpr
    MATCH_LEN_CAP: tl.constexpr
    BLOCK: tl.constexpr  # ends that a program tests at a time
    BLOCK_CAP: tl.constexpr
    BLOCK_SPLITS: tl.constexpr  # of at least the most programs that share a text


class NgramMatches(NamedTuple):
    """What `NgramChains.search` has found. `choose_and_settle` makes chains of it.

    keys: int64, contiguous, [B, S + 1, num_splits] at its begin: of each share of the text; see `kernels/ngram.py`.
    """

    texts: Texts
    keys: torch.Tensor
    num_splits: int
    sizes: MatchSizes


class NgramChains:
    """Finds where the same n-gram ended earlier, behind each number of the model's drafts, from 0 to S.

    The chain behind j drafts is what `NgramMatcher` finds for the request's tokens and these drafts. Where the model
    has made fewer passes, the chain is empty. Arguments are checked here, and none in a step.

    Args:
        state: what the model has drafted.
        token_ids: [R, max_len] int32, the requests' tokens; rows may be strided.
        num_tokens: [R] int32, known tokens of each request; counts as `max_len` if more.
        min_ngram_size: tokens of the shortest n-gram, >= 1.
        max_ngram_size: tokens of the longest n-gram, >= min_ngram_size.
        match_len_cap: agreements are measured up to this many tokens; raised to `max_ngram_size`.
        takes_first: whether the first occurrence of an n-gram wins, or the latest.
        first_chain: the index of the chain behind no drafts.
        chains_per_start: from there, the distance of the chain behind one draft, and so on.

    Raises:
        ValueError: a size or index out of range, or a tensor of another shape, dtype or layout.
    """

    def __init__(
        self,
        state: State,
        token_ids: torch.Tensor,
        num_tokens: torch.Tensor,
        *,
        min_ngram_size: int,
        max_ngram_size: int,
        match_len_cap: int,
        takes_first: bool = False,
        first_chain: int = 0,
        chains_per_start: int = 1,
    ):
        self._max_len = token_ids.shape[1]
        max_num_reqs, _, width = state.offers.chains.shape
        self._num_starts = state.offers.model.shape[1] + 1
        check_search(min_ngram_size, max_ngram_size, self._max_len, width)
        _check_chains(state, first_chain, chains_per_start, self._num_starts)
        check_texts(token_ids, num_tokens, max_num_reqs)
        self._token_ids, self._stride, self._num_tokens = token_ids, token_ids.stride(0), num_tokens
        self._offers, self._sizes_of_state = state.offers, state.sizes
        _, most_splits, block = split_text(self._max_len)
        cap = max(match_len_cap, max_ngram_size)
        which = takes_first, first_chain, chains_per_start
        blocks = block, next_power_of_2(cap), next_power_of_2(most_splits)
        self._sizes = MatchSizes(*map(tl.constexpr, (min_ngram_size, max_ngram_size, *which, cap, *blocks)))
        keys = max_num_reqs * self._num_starts * most_splits
        self._keys = torch.empty(keys, dtype=torch.int64, device=token_ids.device)

    def search(self, idx_mapping: torch.Tensor, limits: Limits, longest: int | None = None) -> NgramMatches:
        """Search the texts of a batch, after `judge_and_offer`; the next search overwrites what this one has found.

        Args:
            idx_mapping: [B] int32 or int64, the row of each request; negative: no request. B <= R.
            limits: of each request's drafts, the model's too; counts as K if more.
            longest: see `split_text`.
        """
        num_splits = split_text(self._max_len, longest)[0]
        texts = Texts(self._token_ids, self._stride, self._max_len, self._num_tokens, idx_mapping)
        num_reqs = idx_mapping.shape[0]
        if num_reqs:
            _search_kernel[(num_reqs, num_splits, self._num_starts)](
                texts, limits, self._offers, self._keys, num_splits, self._sizes, self._sizes_of_state
            )
        return NgramMatches(texts, self._keys, num_splits, self._sizes)


@triton.jit(do_not_specialize=["num_splits"])
def _search_kernel(
    texts,  # Texts
    limits,  # Limits
    offers,  # Offers
    keys_ptr,  # out
    num_splits,
    match_sizes,  # MatchSizes
    sizes,  # Sizes
):
    """Grid (num_reqs, num_splits, S + 1). A program without a block writes nothing."""
    i_req = tl.program_id(0).to(tl.int64)
    i_split = tl.program_id(1)
    start = tl.program_id(2)
    row, num_tokens, limit = load_request(texts, limits, i_req, sizes.WIDTH)
    p_text, p_drafts, end = texts.ptr + row * texts.stride, offers.model + row * sizes.NUM_STEPS, num_tokens + start
    num_blocks = tl.cdiv(end - 1, match_sizes.BLOCK)
    if (i_split >= num_blocks) | (_rooms(limit, start, tl.load(offers.passes + row)) == 0):
        return

    last = load_tokens(p_text, p_drafts, end - 1, num_tokens, end > 0, sizes.NUM_STEPS)
    best = tl.full((), 0, tl.int64)
    for i_block in range(i_split, num_blocks, num_splits):
        ends = i_block * match_sizes.BLOCK + 1 + tl.arange(0, match_sizes.BLOCK)
        tokens = load_tokens(p_text, p_drafts, ends - 1, num_tokens, ends < end, sizes.NUM_STEPS)
        best = best_of_block(
            best,
            p_text,
            p_drafts,
            ends,
            tokens,
            end,
            last,
            num_tokens,
            match_sizes.MIN_SIZE,
            match_sizes.MAX_SIZE,
            sizes.NUM_STEPS,
            match_sizes.TAKES_FIRST,
        )
    tl.store(keys_ptr + (i_req * (sizes.NUM_STEPS + 1) + start) * num_splits + i_split, best)


@triton.jit
def write_matches(
    texts,  # Texts
    limits,  # Limits
    offers,  # Offers, changed in place
    keys_ptr,
    num_splits,
    i_req,
    match_sizes,  # MatchSizes
    sizes,  # Sizes
):
    """Write a request's chains: what followed at the best end of each of its searches."""
    row, num_tokens, limit = load_request(texts, limits, i_req, sizes.WIDTH)
    is_request = tl.load(texts.idx_mapping_ptr + i_req) >= 0
    p_text, p_drafts = texts.ptr + row * texts.stride, offers.model + row * sizes.NUM_STEPS
    starts = tl.arange(0, sizes.BLOCK_STEPS)
    ends = num_tokens + starts
    rooms = _rooms(limit, starts, tl.load(offers.passes + row))

    # Only keys that this step's searches have written: their programs may return early.
    splits = tl.arange(0, match_sizes.BLOCK_SPLITS)[None, :]
    num_written = tl.minimum(tl.cdiv(ends - 1, match_sizes.BLOCK), num_splits)
    is_read = splits < tl.where(rooms > 0, num_written, 0)[:, None]
    p_keys = keys_ptr + (i_req * (sizes.NUM_STEPS + 1) + starts[:, None]) * num_splits
    found = end_of_key(tl.max(tl.load(p_keys + splits, mask=is_read, other=0), axis=1), match_sizes.TAKES_FIRST)
    lengths = tl.where((found > 0) & (starts <= _num_before_stop(offers, row, sizes)), rooms, 0)

    # Behind the last token the copy goes on with the tokens it has copied.
    slots = tl.arange(0, sizes.BLOCK_WIDTH)[None, :]
    is_token = slots < lengths[:, None]
    copied = found[:, None] + slots % tl.maximum(ends - found, 1)[:, None]
    tokens = load_tokens(p_text, p_drafts, copied, num_tokens, is_token, sizes.NUM_STEPS)
    stops = tl.where(_is_stop(offers, row, tokens), slots, sizes.BLOCK_WIDTH)
    lengths = tl.minimum(lengths, tl.min(stops, axis=1))

    back = tl.arange(0, match_sizes.BLOCK_CAP)[None, :]
    at = found[:, None] - 1 - back
    is_compared = back < tl.minimum(found, match_sizes.MATCH_LEN_CAP)[:, None]
    earlier = load_tokens(p_text, p_drafts, at, num_tokens, is_compared, sizes.NUM_STEPS)
    late = load_tokens(p_text, p_drafts, at + (ends - found)[:, None], num_tokens, is_compared, sizes.NUM_STEPS)
    agreed = tl.min(tl.where(is_compared & (earlier == late), match_sizes.BLOCK_CAP, back), axis=1)

    chains = row * sizes.NUM_CHAINS + match_sizes.FIRST_CHAIN + starts * match_sizes.CHAINS_PER_START
    is_chain = starts < tl.where(is_request, sizes.NUM_STEPS + 1, 0)
    tl.store(offers.chains + chains[:, None] * sizes.WIDTH + slots, tokens, mask=slots < lengths[:, None])
    tl.store(offers.lengths + chains, lengths, mask=is_chain)
    tl.store(offers.agreed + chains, agreed, mask=is_chain)


@triton.jit
def _is_stop(offers, row, tokens):
    """Whether each token ends a request's text; without a request anything."""
    p_stops = offers.stops + tl.maximum(row, 0) * MAX_STOPS
    is_stop = tokens == tl.load(p_stops)
    for i in tl.static_range(1, MAX_STOPS):
        is_stop |= tokens == tl.load(p_stops + i)
    return is_stop


@triton.jit
def _num_before_stop(offers, row, sizes):
    """How many of the model's first drafts stand before one that ends the text; S or more if none of them does."""
    steps = tl.arange(0, sizes.BLOCK_STEPS)
    is_step = steps < sizes.NUM_STEPS
    drafts = tl.load(offers.model + tl.maximum(row, 0) * sizes.NUM_STEPS + steps, mask=is_step, other=0)
    return tl.min(tl.where(is_step & _is_stop(offers, row, drafts), steps, sizes.BLOCK_STEPS), axis=0)


@triton.jit
def _rooms(limit, starts, passes):
    """How many tokens each chain may have behind `starts` drafts: 0 if the model has made fewer passes."""
    return tl.where(starts <= passes, tl.maximum(limit - starts, 0), 0)
