"""The keys by which the arbiter's kernels look chances up."""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

from typing import NamedTuple

import triton
import triton.language as tl

from vllm_specplus import sources
from vllm_specplus.kernels.arbiter.state import (
    AGREED,
    ALONE,
    CONTRARY,
    COPIED,
    DIFFERED,
    DISPUTED,
    DOUBT,
    LUCKY_DISPUTED_MISSES,
    LUCKY_MISSES,
    NUM_LENGTHS,
    NUM_PLACES,
    NUM_RECORDS,
    ONE,
    PRIOR_DISPUTED,
    PRIOR_DISPUTED_MISSES,
    PRIOR_EXPECTED,
    PRIOR_MISSES,
    PRIOR_VOUCHED,
    SETTLED,
    SHIFT,
    WHOLE_OUTPUT,
)

MODEL = tl.constexpr(sources.MODEL)
_NGRAM = tl.constexpr(sources.NGRAM)
REFERENCE = tl.constexpr(sources.REFERENCE)


class Chains(NamedTuple):
    """The chains of one request: [BLOCK_CHAINS] each. Past the last chain all are empty and start nowhere."""

    starts: tl.tensor  # int32
    sources: tl.tensor  # int32
    lengths: tl.tensor  # int32
    agreed: tl.tensor  # int32
    has_model: tl.tensor  # bool, whether the model drafts at the chain's start
    is_models: tl.tensor  # bool, whether it drafts the chain's first token there


@triton.jit
def length_class(lengths):
    """The class of each agreement, int32: each length up to 6, then 7-8, 9-12, 13-20, 21-36, more; the whole output."""
    longer = (lengths > 6).to(tl.int32) + (lengths > 8) + (lengths > 12) + (lengths > 20) + (lengths > 36)
    return tl.minimum(lengths, 6) + longer + (lengths >= WHOLE_OUTPUT)


@triton.jit
def load_chains(offers, row, passes, sizes):
    """The `Chains` of a request that the model has drafted `passes` tokens for; empty ones if its row is negative."""
    which = tl.arange(0, sizes.BLOCK_CHAINS)
    is_chain = which < sizes.NUM_CHAINS
    is_offered = which < tl.where(row >= 0, sizes.NUM_CHAINS, 0)
    at = row * sizes.NUM_CHAINS + which
    starts = tl.load(offers.starts + which, mask=is_chain, other=-1).to(tl.int32)
    has_model = is_offered & (starts < passes)
    first = tl.load(offers.chains + at * sizes.WIDTH, mask=is_offered, other=0)
    drafted = tl.load(offers.model + row * sizes.NUM_STEPS + starts, mask=has_model, other=0)
    return Chains(
        starts,
        tl.load(offers.sources + which, mask=is_chain, other=_NGRAM).to(tl.int32),
        tl.load(offers.lengths + at, mask=is_offered, other=0),
        tl.load(offers.agreed + at, mask=is_offered, other=0),
        has_model,
        has_model & (first == drafted),
    )


@triton.jit
def class_of_history(chains):
    """The class of the longest agreement that speaks for a chain from the start, int32; 0 where there is none."""
    speaks = (chains.starts == 0) & (chains.lengths > 0)
    return length_class(tl.max(tl.where(speaks, chains.agreed, 0), axis=0))


@triton.jit
def model_keys(chains, sizes):
    """The key of the model's draft at each place: [BLOCK_STEPS] int32."""
    places = tl.arange(0, sizes.BLOCK_STEPS)
    keys = ALONE + tl.minimum(places, NUM_PLACES - 1)
    if not sizes.IS_BLIND:
        speaks = (chains.starts[None, :] == places[:, None]) & (chains.lengths[None, :] > 0)
        agrees = tl.max((speaks & chains.is_models[None, :]).to(tl.int32), axis=1) > 0
        counts = speaks & (chains.is_models[None, :] | (agrees == 0)[:, None])
        length = tl.max(tl.where(counts, chains.agreed[None, :], 0), axis=1)
        with_chains = tl.where(agrees, AGREED, DIFFERED) + length_class(length)
        keys = tl.where(tl.max(speaks.to(tl.int32), axis=1) > 0, with_chains, keys)
    return keys


@triton.jit
def copied_keys(sources, agreed):
    """The keys of chains' tokens where the model says nothing: int32 of the arguments' shape."""
    return COPIED + (sources - _NGRAM) * NUM_LENGTHS + length_class(agreed)


@triton.jit
def first_keys(chains, sizes):
    """The key of each chain's first token: [BLOCK_CHAINS] int32."""
    keys = copied_keys(chains.sources, chains.agreed)
    if not sizes.IS_BLIND:
        # A draft that is the model's too goes by the longest agreement of all chains that have it.
        agrees = (chains.lengths > 0) & chains.is_models
        agrees = agrees[None, :] & (chains.starts[None, :] == chains.starts[:, None])
        length = tl.max(tl.where(agrees, chains.agreed[None, :], 0), axis=1)
        with_model = tl.where(chains.is_models, AGREED + length_class(length), CONTRARY - COPIED + keys)
        keys = tl.where(chains.has_model, with_model, keys)
    return keys


@triton.jit
def records_of(keys, sources):
    """Where the records of sources' drafts with these keys are: int32."""
    return tl.where((keys >= DIFFERED) & (keys < COPIED), DISPUTED, SETTLED) + sources


@triton.jit
def factors(record, row, which):
    """How a request changes the chances of the drafts of these records, for `scaled`: int64."""
    at = row * NUM_RECORDS + which
    is_read = which < tl.where(row >= 0, NUM_RECORDS, 0)
    trials = tl.load(record.trials + at, mask=is_read, other=0)
    expected = tl.load(record.expected + at, mask=is_read, other=0)
    hits = tl.load(record.hits + at, mask=is_read, other=0)
    prior = tl.where(which == SETTLED + REFERENCE, PRIOR_VOUCHED, PRIOR_EXPECTED)
    prior = tl.where(which >= DISPUTED, PRIOR_DISPUTED, prior).to(tl.int64)
    lower = (hits + prior) * ONE // (expected + prior)
    prior = tl.where(which >= DISPUTED, PRIOR_DISPUTED_MISSES, PRIOR_MISSES).to(tl.int64)
    lucky = tl.where(which >= DISPUTED, LUCKY_DISPUTED_MISSES, LUCKY_MISSES).to(tl.int64)
    misses = (trials - hits + prior + lucky) * ONE // (trials - expected + prior)
    return tl.where(hits <= expected, lower, 2 * ONE - tl.minimum(misses, ONE))


@triton.jit
def scaled(chances, factors):
    """Keys' chances by the factors of their records in a request; see `_scaled` of the specification."""
    higher = ONE - ((ONE - chances) * (2 * ONE - factors) >> SHIFT)
    return tl.where(factors <= ONE, chances * factors >> SHIFT, higher)


class Beside(NamedTuple):
    """The best chance of the chains that say a token, and of those that agreed until then and say another one.

    best, rival: [BLOCK_CHAINS, BLOCK_WIDTH] int64, of each token. best_first, rival_first: [BLOCK_CHAINS] int64, of the
    first one with what the model's drafts tell. A rival's is -1 where there is none.
    """

    best: tl.tensor
    rival: tl.tensor
    best_first: tl.tensor
    rival_first: tl.tensor


@triton.jit
def beside(own, own_first, tokens, is_token, starts, sizes):
    """The `Beside` of chains.

    own: [BLOCK_CHAINS, BLOCK_WIDTH] int64, the chance of each chain's tokens by itself; 0 where `is_token` is false.
    own_first: [BLOCK_CHAINS] int64, that of the first one with what the model's drafts tell. tokens: of the chains, -1
    where `is_token` is false. starts: of `Chains`.
    """
    which, slots = tl.arange(0, sizes.BLOCK_CHAINS), tl.arange(0, sizes.BLOCK_WIDTH)[None, :]
    best, rival = own, tl.zeros_like(own) - 1
    best_first, rival_first = own_first, tl.zeros_like(own_first) - 1
    for other in range(sizes.NUM_CHAINS):
        is_other = which == other
        says = tl.sum(tl.where(is_other[:, None], tokens, 0), axis=0)
        is_beside = is_token & (starts == tl.sum(tl.where(is_other, starts, 0), axis=0))[:, None]
        both = is_beside & (says >= 0)[None, :]
        agreeing = tl.min(tl.where(both & (tokens == says[None, :]), sizes.BLOCK_WIDTH, slots), axis=1)
        chance = tl.sum(tl.where(is_other[:, None], own, 0), axis=0)[None, :]
        best = tl.maximum(best, tl.where(slots < agreeing[:, None], chance, 0))
        is_rival = both & (slots == agreeing[:, None])
        rival = tl.maximum(rival, tl.where(is_rival, chance, -1))
        chance = tl.sum(tl.where(is_other, own_first, 0), axis=0)
        best_first = tl.maximum(best_first, tl.where(agreeing > 0, chance, 0))
        is_rival_first = tl.max((is_rival & (slots == 0)).to(tl.int32), axis=1) > 0
        rival_first = tl.maximum(rival_first, tl.where(is_rival_first, chance, -1))
    return Beside(best, rival, best_first, rival_first)


@triton.jit
def against(chances, rivals):
    """The chances of tokens that have rivals; see `_chance_against` of the specification."""
    right = chances * (ONE - rivals + DOUBT) >> SHIFT
    return right * ONE // (right + ONE - chances + DOUBT)


@triton.jit
def halve(sums, trials, limits):
    """Halve both where there are as many trials as the limit or more, until nowhere."""
    is_full = trials >= limits
    while tl.max(tl.ravel(is_full).to(tl.int32), axis=0) > 0:
        sums = tl.where(is_full, sums >> 1, sums)
        trials = tl.where(is_full, trials >> 1, trials)
        is_full = trials >= limits
    return sums, trials
