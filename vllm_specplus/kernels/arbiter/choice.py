"""Chooses the drafts of each request by their values, and settles what the draft model's passes have earned."""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_specplus import sources
from vllm_specplus.kernels.arbiter.accounts import Accounts, plan_and_report, report_credit, settle
from vllm_specplus.kernels.arbiter.keys import (
    MODEL,
    REFERENCE,
    against,
    beside,
    copied_keys,
    factors,
    first_keys,
    load_chains,
    model_keys,
    records_of,
    scaled,
)
from vllm_specplus.kernels.arbiter.offers import NgramMatches, write_matches
from vllm_specplus.kernels.arbiter.state import DISPUTED, ENDS, ONE, SETTLED, SHIFT, Beliefs, State
from vllm_specplus.kernels.drafts import DraftCounts, Drafts, Limits, load_limit, store_counts

_UNFILLED = tl.constexpr(sources.UNFILLED)


class Chosen(NamedTuple):
    """What `choose_and_settle` has chosen, beside the drafts. A place without a request has no drafts or chances.

    All but `num_drafts_ptr` are of the state's `scratch`, with the requests of the batch first.

    counts: [B], and [R] of the model's.
    chances: [R, K] int64, of each draft if those before it are right, in units of 1 / ONE; 0 after the last draft.
    """

    counts: DraftCounts
    chances: torch.Tensor


def choose_and_settle(
    state: State,
    num_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    limits: Limits,
    prices: torch.Tensor,
    drafts: torch.Tensor,
    by_state: DraftCounts,
    sources: torch.Tensor,
    totals: torch.Tensor,
    report: torch.Tensor,
    *,
    planning: Limits | None = None,
    matches: NgramMatches | None = None,
) -> Chosen:
    """Choose the drafts of each request, enter what the model's passes have earned, plan those of a later step.

    Args:
        state: its `offer_positions`, `credits` and `gains` are changed in place, `limits` of its `offers`, and all of
            these where there are `matches`.
        num_tokens: [R] int32, known tokens of each request.
        idx_mapping: [B <= R] int32 or int64, the row of each request; negative: no request, and no drafts.
        limits: of each request's drafts; counts as K if more.
        prices: [2 + S] int64 in units of 1 / ONE tokens: of a draft, >= 0; what a request gets in a step's time, > 0;
            of each pass for the whole batch, >= 0.
        drafts: [B, K] int64, takes the drafts, padded with token 0; rows may be strided.
        by_state: [R], takes the counts.
        sources: [R] int32, takes the source of the drafts that are not the model's; UNFILLED where there are none.
        totals: [2] int64, what the host has to know: the tokens that have come, and the profit of all passes in the
            time of a step. The second gets this step's profit added to it.
        report: [>= 3 + B] int64, takes the totals, the number of passes, and the credit of each request; ASLEEP without
            one. It may be memory of the host.
        planning: `limits` of the step that is planned: a request that may not draft needs the first pass, and no other.
            None: the same.
        matches: are offered first, as the chains that `NgramChains` was made for.
    """
    num_reqs = drafts.shape[0]
    num_model, chances = state.scratch
    # Not from step to step the same: vLLM may copy it to the host while the next step runs.
    num_drafts = torch.empty(num_reqs, dtype=torch.int32, device=drafts.device)
    chosen = Chosen(DraftCounts(num_drafts, num_model), chances)
    if num_reqs:
        texts, keys, num_splits, match_sizes = matches or (None, None, 0, None)
        _choose_kernel[(num_reqs,)](
            state.offers,
            Beliefs(state.table.chances, state.record, state.opposed),
            state.offer_positions,
            num_tokens,
            idx_mapping,
            limits,
            prices,
            Drafts(drafts, drafts.stride(0)),
            chosen.counts,
            by_state,
            sources,
            chances,
            texts,
            keys,
            num_splits,
            match_sizes,
            Accounts(state.credits, state.gains, *state.foregone, state.tallies, planning or limits, totals, report),
            state.sizes,
            num_warps=1,
        )
    return chosen


@triton.jit(do_not_specialize=["num_splits"])
def _choose_kernel(
    offers,  # Offers; `limits` are set, and where there are keys chains are written
    beliefs,  # Beliefs
    positions_ptr,  # changed in place
    num_tokens_ptr,
    idx_mapping_ptr,
    limits,  # Limits
    prices_ptr,
    drafts,  # out: Drafts
    counts,  # out: DraftCounts
    by_state,  # out: DraftCounts
    sources_ptr,  # out, by request state
    chances_ptr,  # out
    texts,  # Texts; None without keys
    keys_ptr,
    num_splits,
    match_sizes,  # MatchSizes; None without keys
    accounts,  # Accounts, changed in place
    sizes,  # Sizes
):
    """Grid (num_reqs,). The last program to end plans and reports, by what all of them have entered."""
    i_req = tl.program_id(0).to(tl.int64)
    if keys_ptr is not None:
        write_matches(texts, limits, offers, keys_ptr, num_splits, i_req, match_sizes, sizes)
        tl.debug_barrier()  # other threads of this program read what is now written
    row = tl.load(idx_mapping_ptr + i_req).to(tl.int64)
    is_request = row >= 0
    num_tokens = tl.load(num_tokens_ptr + row, mask=is_request, other=0)
    tl.store(positions_ptr + row, num_tokens.to(tl.int64), mask=is_request)
    limit = tl.minimum(load_limit(limits, i_req), sizes.WIDTH)
    tl.store(offers.limits + row, limit.to(tl.int64), mask=is_request)
    price = tl.load(prices_ptr)
    passes = tl.load(offers.passes + row, mask=is_request, other=0).to(tl.int32)
    chains = load_chains(offers, row, passes, sizes)

    rooms = tl.minimum(chains.lengths, limit - chains.starts)
    known = _chances_of_chains(offers, beliefs, row, chains, rooms, sizes)

    # The value of the model's first drafts by their number. What survives before each chain is 0 where the drafts
    # before it are not worth their slots.
    numbers = tl.arange(0, sizes.BLOCK_STEPS)
    chances = _chances_of_model(beliefs, row, chains, known, passes, sizes)
    values = tl.zeros_like(chances)
    survival, value = tl.full((), ONE, tl.int64), tl.full((), 0, tl.int64)
    before = tl.where(chains.starts == 0, survival, 0)
    for place in range(sizes.NUM_STEPS):
        survival = survival * _take(chances, place) >> SHIFT
        survival = tl.where((place < limit) & (survival > price), survival, 0)
        value = tl.where(survival > 0, value + survival - price, 0)
        values = tl.where(numbers == place + 1, value, values)
        before = tl.where(chains.starts == place + 1, survival, before)

    worth = _value_chains(known, price, rooms, before, sizes)
    # What the best chain behind each number of the model's drafts adds: with the next draft known, and without it. That
    # draft also tells more of the chain which is the best without it.
    is_behind = chains.starts[None, :] == numbers[:, None]
    more, behind = _best_of_each(tl.where(is_behind, worth.value[None, :], 0))
    alone, behind_alone = _best_of_each(tl.where(is_behind, worth.alone[None, :], 0))
    with_model = _take_each(worth.with_model[None, :], behind_alone)
    if sizes.IS_BLIND:
        # Only what stands behind all of the model's drafts may depend on them.
        more = tl.where(numbers == 0, more, 0)
        alone, with_model = more, more

    # By the passes made, and by how many of the model's drafts are taken.
    is_known = numbers[None, :] < numbers[:, None]
    expected = values[None, :] + tl.where(is_known, more[None, :], alone[None, :])
    _, num_best = _best_of_each(tl.where(numbers[None, :] <= numbers[:, None], expected, 0))
    values = _take_each(values[None, :] + tl.where(is_known, more[None, :], with_model[None, :]), num_best)

    num_model = tl.maximum(_take(num_best, sizes.NUM_STEPS), 0)
    chain = _take(behind, num_model)
    num_drafts = num_model + _take(worth.size, chain)
    store_counts(counts, by_state, i_req, row, num_drafts, num_model)
    source = tl.where(chain >= 0, _take(chains.sources, chain), _UNFILLED)
    tl.store(sources_ptr + row, source.to(tl.int32), mask=is_request)

    slots = tl.arange(0, sizes.BLOCK_WIDTH)
    is_model = slots < num_model
    p_chain = offers.chains + (row * sizes.NUM_CHAINS + chain) * sizes.WIDTH
    drafted = tl.load(offers.model + row * sizes.NUM_STEPS + slots, mask=is_model, other=0)
    copied = tl.load(p_chain + slots - num_model, mask=(slots >= num_model) & (slots < num_drafts), other=0)
    p_drafts = drafts.ptr + i_req * drafts.stride
    tl.store(p_drafts + slots, tl.where(is_model, drafted, copied).to(tl.int64), mask=slots < sizes.WIDTH)

    of_chain = tl.zeros([sizes.BLOCK_WIDTH], tl.int64)
    for n in range(num_drafts - num_model):
        of_chain = tl.where(slots == num_model + n, _take(_nth(known, n), chain), of_chain)
    of_model = _take_each(chances[None, :], tl.where(is_model, slots, -1))
    tl.store(chances_ptr + i_req * sizes.WIDTH + slots, of_model + of_chain, mask=slots < sizes.WIDTH)

    credit = settle(accounts, prices_ptr, chains, values, passes, i_req, row, sizes)
    tl.debug_barrier()  # all that this program has entered comes before its place among those that have ended
    if tl.atomic_add(accounts.tallies.num_ended, 1) == tl.num_programs(0) - 1:
        tl.debug_barrier()  # and what the others have entered is read after it
        plan_and_report(accounts, prices_ptr, sizes)
        tl.store(accounts.tallies.num_ended, 0)
    # Last, so that no program waits for the host's memory.
    report_credit(accounts, i_req, credit)


class _ChainChances(NamedTuple):
    """The chance of each token of each chain, with what other chains say. 0 past a chain's room.

    copied: [BLOCK_CHAINS, BLOCK_WIDTH] int64, where the model says nothing. first: [BLOCK_CHAINS] int64, of the first
    token, with what the model's drafts tell. has_rivals: [BLOCK_CHAINS] bool, whether others say another first token.
    """

    copied: tl.tensor
    first: tl.tensor
    has_rivals: tl.tensor


@triton.jit
def _chances_of_chains(offers, beliefs, row, chains, rooms, sizes):
    """The `_ChainChances` of a request's chains, of which `rooms`, [BLOCK_CHAINS] int32, may be taken."""
    which, slots = tl.arange(0, sizes.BLOCK_CHAINS), tl.arange(0, sizes.BLOCK_WIDTH)
    is_token = slots[None, :] < rooms[:, None]
    by_source = factors(beliefs.record, row, chains.sources + SETTLED)
    keys = copied_keys(chains.sources[:, None], chains.agreed[:, None] + slots[None, :])
    chances = tl.load(beliefs.chances + keys, mask=is_token, other=0)
    own = tl.where(is_token, scaled(chances, by_source[:, None]), 0)
    keys = first_keys(chains, sizes)
    chances = tl.load(beliefs.chances + keys, mask=rooms > 0, other=0)
    chances = scaled(chances, factors(beliefs.record, row, records_of(keys, chains.sources)))
    own_first = tl.where(rooms > 0, chances, 0)
    if not sizes.IS_BLIND:
        is_shared = chains.is_models & (chains.sources == REFERENCE)
        alone = tl.sum(tl.where(slots[None, :] == 0, own, 0), axis=1)
        own_first = tl.where(is_shared, tl.maximum(own_first, alone), own_first)

    p_chains = offers.chains + row * sizes.NUM_CHAINS * sizes.WIDTH
    tokens = tl.load(p_chains + which[:, None] * sizes.WIDTH + slots[None, :], mask=is_token, other=-1)
    others = beside(own, own_first, tokens, is_token, chains.starts, sizes)
    end = _chances_of_ends(offers, beliefs, row, chains, tokens, is_token, sizes)
    best = others.best * (ONE - end) >> SHIFT
    learned = factors(beliefs.opposed, tl.full((), 0, tl.int64), chains.sources + DISPUTED)
    copied = scaled(against(best, others.rival), learned[:, None])
    first = scaled(against(others.best_first, others.rival_first), learned)
    has_rivals = others.rival_first >= 0
    return _ChainChances(
        tl.where(others.rival >= 0, copied, best), tl.where(has_rivals, first, others.best_first), has_rivals
    )


@triton.jit
def _chances_of_model(beliefs, row, chains, known, passes, sizes):
    """The chance of each of the model's drafts, [BLOCK_STEPS] int64; 0 behind the last.

    known: `_ChainChances`. Where some chains say a draft too and others do not, it has the best chance of these chains.
    """
    places = tl.arange(0, sizes.BLOCK_STEPS)
    is_drafted = places < passes
    keys = model_keys(chains, sizes)
    chances = tl.load(beliefs.chances + keys, mask=is_drafted, other=0)
    chances = scaled(chances, factors(beliefs.record, row, records_of(keys, MODEL)))
    if not sizes.IS_BLIND:
        is_disputed = chains.is_models & known.has_rivals
        is_disputed = is_disputed[None, :] & (chains.starts[None, :] == places[:, None])
        of_chains = tl.max(tl.where(is_disputed, known.first[None, :], -1), axis=1)
        chances = tl.where(of_chains >= 0, of_chains, chances)
    return tl.where(is_drafted, chances, 0)


@triton.jit
def _chances_of_ends(offers, beliefs, row, chains, tokens, is_token, sizes):
    """The chance that the text ends before each token, as the reference ends there: see the specification.

    tokens: [BLOCK_CHAINS, BLOCK_WIDTH], of the chains, -1 where `is_token` is false.
    """
    which, slots = tl.arange(0, sizes.BLOCK_CHAINS), tl.arange(0, sizes.BLOCK_WIDTH)[None, :]
    is_reference = (which == sizes.NUM_CHAINS - 1) & (chains.sources == REFERENCE)
    length = tl.sum(tl.where(is_reference, chains.lengths, 0), axis=0)
    said_ptr = offers.chains + (row * sizes.NUM_CHAINS + sizes.NUM_CHAINS - 1) * sizes.WIDTH
    steps = tl.arange(0, sizes.BLOCK_STEPS)
    is_said = steps < tl.minimum(length, sizes.NUM_STEPS)
    drafted = tl.load(offers.model + row * sizes.NUM_STEPS + steps, mask=is_said, other=0)
    is_same = drafted == tl.load(said_ptr + steps, mask=is_said, other=0)
    num_same = tl.min(tl.where(is_said & is_same, sizes.BLOCK_STEPS, steps), axis=0)

    places = chains.starts[:, None] + slots
    said = tl.load(said_ptr + places, mask=(places >= 0) & (places < length), other=-2)
    agreeing = tl.min(tl.where(tokens == said, sizes.BLOCK_WIDTH, slots), axis=1)
    follows = (chains.starts + agreeing == length) & (chains.starts <= num_same) & (agreeing > 0)
    key = copied_keys(REFERENCE, tl.sum(tl.where(is_reference, chains.agreed, 0), axis=0) + length)
    by_source = factors(beliefs.record, row, tl.full((), SETTLED + REFERENCE, tl.int32))
    chance = scaled(tl.load(beliefs.chances + key), by_source)
    chance = scaled(chance, factors(beliefs.record, row, tl.full((), ENDS, tl.int32)))
    return tl.where(is_token & follows[:, None] & (slots == agreeing[:, None]), chance, 0)


@triton.jit
def _nth(known, n):
    """The chance of token n of each chain, with what the model's drafts tell: [BLOCK_CHAINS] int64."""
    return tl.where(n == 0, known.first, _nth_copied(known, n))


@triton.jit
def _nth_copied(known, n):
    return tl.sum(tl.where(tl.arange(0, known.copied.shape[1])[None, :] == n, known.copied, 0), axis=1)


class _Worth(NamedTuple):
    """What each chain adds: [BLOCK_CHAINS] each.

    alone: int64, with what is known without the model's drafts. with_model: int64, the same tokens with what those
    tell. value, size: int64 and int32, as many tokens as are worth their slots with what the model's drafts tell.
    """

    alone: tl.tensor
    with_model: tl.tensor
    value: tl.tensor
    size: tl.tensor


@triton.jit
def _value_chains(known, price, rooms, survival, sizes):
    """The `_Worth` of chains whose first tokens are reached with a chance of `survival`, [BLOCK_CHAINS] int64.

    known: `_ChainChances`. rooms: [BLOCK_CHAINS] int32, how many tokens of each may be taken.

    A survival never rises. So nothing is worth its slot behind a token that is not.
    """
    survival_alone = survival
    alone, with_model, value = tl.zeros_like(survival), tl.zeros_like(survival), tl.zeros_like(survival)
    size = tl.zeros_like(rooms)
    for n in range(tl.max(rooms, axis=0)):
        survival_alone = survival_alone * _nth_copied(known, n) >> SHIFT
        survival = survival * _nth(known, n) >> SHIFT
        alone += tl.maximum(survival_alone - price, 0)
        with_model += tl.where(survival_alone > price, survival - price, 0)
        value += tl.maximum(survival - price, 0)
        size += (survival > price).to(tl.int32)
    return _Worth(alone, with_model, value, size)


@triton.jit
def _best_of_each(values):
    """The best of each row, and which it is, the first of equals: [rows, lanes] int64 -> [rows] int64, int32.

    No value above 0: 0 and -1.
    """
    which = tl.arange(0, values.shape[1])[None, :]
    best = tl.maximum(tl.max(values, axis=1), 0)
    first = tl.min(tl.where(values == best[:, None], which, values.shape[1]), axis=1)
    return best, tl.where(best > 0, first, -1)


@triton.jit
def _take_each(values, which):
    """One of each row of [rows or 1, lanes] values; 0 where `which`, [rows], is negative."""
    return tl.sum(tl.where(tl.arange(0, values.shape[1])[None, :] == which[:, None], values, 0), axis=1)


@triton.jit
def _take(values, which):
    """One of [lanes] values; 0 if `which` is negative."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == which, values, 0), axis=0)
