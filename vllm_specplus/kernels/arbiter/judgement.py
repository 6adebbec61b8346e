"""Judges what was offered by the tokens that came, sets the chances, and offers what the model drafts now."""

# A kernel's arguments have no Python types. Those in capitals are known when it is compiled.

import torch
import triton
import triton.language as tl

from vllm_specplus.kernels.arbiter.keys import (
    MODEL,
    REFERENCE,
    against,
    beside,
    class_of_history,
    copied_keys,
    factors,
    first_keys,
    halve,
    load_chains,
    model_keys,
    records_of,
    scaled,
)
from vllm_specplus.kernels.arbiter.state import (
    ALONE,
    ASLEEP,
    CONTRARY,
    COPIED,
    DERIVED_TRIALS,
    DISPUTED,
    ENDS,
    MAX_COPIED_TRIALS,
    MAX_EXPECTED,
    MAX_MISSES,
    MAX_TRIALS,
    NO_OFFERS,
    NO_PASS,
    NUM_KEYS,
    NUM_RECORDS,
    ONE,
    SETTLED,
    SHIFT,
    TRIAL,
    State,
)
from vllm_specplus.kernels.counts import Counted, count_request
from vllm_specplus.kernels.drafts import Limits, load_limit
from vllm_specplus.kernels.ngram import Texts
from vllm_specplus.kernels.sizes import next_power_of_2

_NOTHING = Counted(None, None, None, None, None, None, None)
_BLOCK_KEYS = next_power_of_2(NUM_KEYS.value)
_BLOCK_RECORDS = tl.constexpr(next_power_of_2(NUM_RECORDS.value))


def judge_and_offer(
    state: State,
    token_ids: torch.Tensor,
    num_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_new: torch.Tensor,
    limits: Limits,
    model_drafts: torch.Tensor,
    counted: Counted | None = None,
) -> None:
    """Judge the last step's offers by the tokens that have come since, set the chances, and offer the model's drafts.

    The last offers are taken away. Those of the draft model go to the requests that have not given it up and may draft;
    for others it has made no passes.

    Args:
        state: changed in place.
        token_ids: [R, max_len] int32, the requests' tokens; rows may be strided.
        num_tokens: [R] int32, known tokens of each request; counts as `max_len` if more.
        idx_mapping: [B] int32 or int64, the row of each request; negative: no request.
        num_new: [1] int64, gets the number of tokens that have come added to it.
        limits: of each request's drafts.
        model_drafts: [B, passes] int64, at most S passes, perhaps none; rows may be strided.
        counted: what became of the last step's drafts, which is counted as `count_drafts` does; None: nothing.
    """
    num_reqs, num_passes = model_drafts.shape
    if num_reqs:
        _judge_kernel[(num_reqs,)](
            Texts(token_ids, token_ids.stride(0), token_ids.shape[1], num_tokens, idx_mapping),
            state.offers,
            state.table,
            state.record,
            state.opposed,
            state.foregone,
            state.offer_positions,
            num_new,
            state.credits,
            limits,
            model_drafts,
            model_drafts.stride(0),
            num_passes,
            state.tallies,
            counted or _NOTHING,
            state.sizes,
            BLOCK_KEYS=_BLOCK_KEYS,
            num_warps=1,
        )


@triton.jit(do_not_specialize=["drafts_stride", "num_passes"])
def _judge_kernel(
    texts,  # Texts
    offers,  # Offers, changed in place
    table,  # Table, changed in place
    record,  # Record, changed in place
    opposed,  # Record, changed in place
    foregone,  # Foregone, changed in place
    positions_ptr,
    num_new_ptr,  # changed in place
    credits_ptr,
    limits,  # Limits
    drafts_ptr,
    drafts_stride,
    num_passes,
    tallies,  # Tallies, changed in place
    counted,  # Counted, changed in place; all None if nothing is counted
    sizes,  # Sizes
    BLOCK_KEYS: tl.constexpr,
):
    """Grid (num_reqs,). The last program to end takes over what all of them have counted."""
    i_req = tl.program_id(0).to(tl.int64)
    row = tl.load(texts.idx_mapping_ptr + i_req).to(tl.int64)
    if row >= 0:
        _judge(texts, offers, table, record, opposed, foregone, positions_ptr, num_new_ptr, row, sizes)
        p_drafts = drafts_ptr + i_req * drafts_stride
        _offer_model(offers, credits_ptr, limits, p_drafts, num_passes, tallies, i_req, row, sizes)
    if counted.counts is not None:
        count_request(counted, i_req, row, sizes.WIDTH, sizes.BLOCK_WIDTH)
    tl.debug_barrier()  # all that this program has counted comes before its place among those that have ended
    if tl.atomic_add(tallies.num_ended, 1) == tl.num_programs(0) - 1:
        tl.debug_barrier()  # and what the others have counted is read after it
        _update(table, BLOCK_KEYS)
        # What all programs have added is halved where it has grown too large.
        nothing = tl.zeros([_BLOCK_RECORDS], tl.int64)
        _add_to_record(opposed, tl.full((), 0, tl.int64), nothing, nothing, nothing, True)
        tl.store(tallies.num_offered, tl.load(tallies.new_offered))
        tl.debug_barrier()  # other threads of this program may still read what now begins anew
        tl.store(tallies.new_offered, 0)
        tl.store(tallies.num_ended, 0)


@triton.jit
def _judge(texts, offers, table, record, opposed, foregone, positions_ptr, num_new_ptr, row, sizes):
    """Judge the offers of a request, count them, and take away the chains."""
    first = tl.load(positions_ptr + row)
    num_new = tl.minimum(tl.load(texts.num_tokens_ptr + row), texts.max_len) - first
    num_new = tl.where(first == NO_OFFERS, 0, tl.maximum(num_new, 0)).to(tl.int32)
    tl.atomic_add(num_new_ptr, num_new.to(tl.int64), sem="relaxed")
    p_new = texts.ptr + row * texts.stride + first
    passes = tl.load(offers.passes + row).to(tl.int32)
    chains = load_chains(offers, row, passes, sizes)

    places = tl.arange(0, sizes.BLOCK_STEPS)
    is_judged = places < tl.minimum(passes, num_new)
    drafted = tl.load(offers.model + row * sizes.NUM_STEPS + places, mask=is_judged, other=0)
    is_hit = is_judged & (drafted == tl.load(p_new + places, mask=is_judged, other=0))
    right = tl.min(tl.where(is_hit, sizes.BLOCK_STEPS, places), axis=0)
    is_judged = is_judged & (places <= right)
    keys = model_keys(chains, sizes)
    which = records_of(keys, MODEL)
    expected = _by_record(_count(table, keys, is_judged, is_hit), which)
    trials = _by_record(is_judged.to(tl.int64), which)
    hits = _by_record((is_judged & is_hit).to(tl.int64), which)

    which = tl.arange(0, sizes.BLOCK_CHAINS)
    slots = tl.arange(0, sizes.BLOCK_WIDTH)[None, :]
    p_chains = offers.chains + (row * sizes.NUM_CHAINS + which) * sizes.WIDTH
    is_token = slots < chains.lengths[:, None]
    tokens = tl.load(p_chains[:, None] + slots, mask=is_token, other=-1)
    is_out = (passes > 0) & (passes < sizes.NUM_STEPS) & (num_new > 0)
    is_missed = is_out & (right == passes) & (num_new == passes + 1)
    next_token = tl.load(p_new + passes, mask=is_missed, other=0)
    is_known = is_token & (slots == 0) & (chains.starts == passes)[:, None] & (tokens == next_token)
    is_missed = is_missed & (tl.max(is_known.to(tl.int32)) == 0)
    _note_foregone(foregone, table, record, row, chains, passes, is_out, is_missed, sizes)
    is_reached = (chains.starts <= right) & (_repeats(offers, row, chains, passes, tokens, sizes) == 0)
    at = chains.starts[:, None] + slots
    is_judged = is_token & is_reached[:, None] & (at < num_new)
    is_hit = is_judged & (tokens == tl.load(p_new + at, mask=is_judged, other=0))
    num_right = _num_first(is_hit, sizes.BLOCK_WIDTH)
    is_judged = is_judged & (slots <= num_right[:, None])
    keys = copied_keys(chains.sources[:, None], chains.agreed[:, None] + slots)
    _count_opposed(opposed, table, chains, keys, tokens, is_token, is_judged, is_hit, sizes)
    keys_of_first = first_keys(chains, sizes)
    if not sizes.IS_BLIND:
        # Whatever the model says, it tells of the source.
        _count(table, keys, is_judged & (slots == 0) & chains.has_model[:, None], is_hit)
        # A draft that is the model's as well has been judged as the model's.
        is_judged = is_judged & ((slots > 0) | (chains.is_models == 0)[:, None])
        keys = tl.where(slots == 0, keys_of_first[:, None], keys)
    expected += _of_chains(_count(table, keys, is_judged, is_hit), chains.sources, keys_of_first)
    trials += _of_chains(is_judged.to(tl.int64), chains.sources, keys_of_first)
    hits += _of_chains((is_judged & is_hit).to(tl.int64), chains.sources, keys_of_first)
    # Texts that have gone on behind the end of a reference.
    is_passed = is_reached & (num_right == chains.lengths) & (chains.starts + num_right < num_new)
    is_passed = is_passed & (chains.sources == REFERENCE) & (num_right > 0)
    is_passed = is_passed & (num_right < tl.load(offers.limits + row))
    chances = tl.load(table.chances + copied_keys(chains.sources, chains.agreed + num_right), mask=is_passed, other=0)
    ends = tl.zeros_like(chains.starts) + ENDS
    expected += _by_record(chances, ends)
    trials += _by_record(is_passed.to(tl.int64), ends)
    _add_to_record(record, row, trials * ONE, expected, hits * ONE, num_new > 0)

    tl.debug_barrier()  # other threads of this program may still read what is now taken away
    tl.store(offers.lengths + row * sizes.NUM_CHAINS + which, tl.zeros_like(which), mask=which < sizes.NUM_CHAINS)


@triton.jit
def _offer_model(offers, credits_ptr, limits, p_drafts, num_passes, tallies, i_req, row, sizes):
    """Offer the model's drafts to a request, and count it; those of the last step have been judged."""
    # In its prompt, which has a limit of 0, the model has drafted tokens that are known.
    is_offered = (load_limit(limits, i_req) > 0) & (tl.load(credits_ptr + row) != ASLEEP)
    passes = tl.where(is_offered, num_passes, 0)
    places = tl.arange(0, sizes.BLOCK_STEPS)
    drafted = tl.load(p_drafts + places, mask=places < passes, other=0)
    tl.store(offers.model + row * sizes.NUM_STEPS + places, drafted.to(tl.int32), mask=places < passes)
    tl.store(offers.passes + row, passes.to(tl.int64))
    tl.atomic_add(tallies.new_offered, tl.full((), 1, tl.int64), mask=passes > 0, sem="relaxed")


@triton.jit
def _note_foregone(foregone, table, record, row, chains, passes, is_out, is_missed, sizes):
    """Note what one pass more would have brought.

    is_out: whether there is such a pass. is_missed: whether the step came to its draft, and no chain knew the token.
    """
    tl.store(foregone.gains + row, tl.where(is_out, class_of_history(chains) * sizes.NUM_STEPS + passes, NO_PASS))
    key = tl.sum(tl.where(tl.arange(0, sizes.BLOCK_STEPS) == passes, model_keys(chains, sizes), 0), axis=0)
    chance = tl.load(table.chances + key, mask=is_missed, other=0)
    chance = scaled(chance, factors(record, row, records_of(key, MODEL)))
    tl.store(foregone.chances + row, tl.where(is_missed, chance, 0), mask=is_out)


@triton.jit
def _count(table, keys, is_judged, is_hit):
    """Count trials, and those of them that were hits; returns the chance of each, and 0 where there was no trial."""
    one = tl.full(keys.shape, 1, tl.int64)
    tl.atomic_add(table.new_trials + keys, one, mask=is_judged, sem="relaxed")
    tl.atomic_add(table.new_hits + keys, one, mask=is_judged & is_hit, sem="relaxed")
    return tl.load(table.chances + keys, mask=is_judged, other=0)


@triton.jit
def _count_opposed(opposed, table, chains, keys, tokens, is_token, is_judged, is_hit, sizes):
    """Count the tokens of chains, [BLOCK_CHAINS, BLOCK_WIDTH], that are judged and have rivals."""
    own = tl.load(table.chances + keys, mask=is_token, other=0)
    others = beside(own, tl.zeros_like(chains.starts).to(tl.int64), tokens, is_token, chains.starts, sizes)
    is_counted = is_judged & (others.rival >= 0)
    at = chains.sources + DISPUTED
    trials = tl.sum(is_counted.to(tl.int64), axis=1)
    expected = tl.sum(tl.where(is_counted, against(others.best, others.rival), 0), axis=1)
    hits = tl.sum((is_counted & is_hit).to(tl.int64), axis=1)
    tl.atomic_add(opposed.trials + at, trials * ONE, mask=trials > 0, sem="relaxed")
    tl.atomic_add(opposed.expected + at, expected, mask=trials > 0, sem="relaxed")
    tl.atomic_add(opposed.hits + at, hits * ONE, mask=trials > 0, sem="relaxed")


@triton.jit
def _by_record(values, which):
    """[lanes] int64 values, summed by the records that `which`, [lanes] int32, names: [_BLOCK_RECORDS] int64."""
    is_record = which[:, None] == tl.arange(0, _BLOCK_RECORDS)[None, :]
    return tl.sum(tl.where(is_record, values[:, None], 0), axis=0)


@triton.jit
def _of_chains(values, sources, keys_of_first):
    """[chains, slots] int64 values of the tokens of chains, summed by record: [_BLOCK_RECORDS] int64."""
    is_first = tl.arange(0, values.shape[1])[None, :] == 0
    first = tl.sum(tl.where(is_first, values, 0), axis=1)
    later = tl.sum(tl.where(is_first, 0, values), axis=1)
    return _by_record(first, records_of(keys_of_first, sources)) + _by_record(later, sources + SETTLED)


@triton.jit
def _add_to_record(record, row, trials, expected, hits, is_changed):
    """Add to a request's record, [_BLOCK_RECORDS] int64 each, and halve what has grown too large."""
    which = tl.arange(0, _BLOCK_RECORDS)
    is_read = which < tl.where(is_changed, NUM_RECORDS, 0)
    at = row * NUM_RECORDS + which
    trials += tl.load(record.trials + at, mask=is_read, other=0)
    expected += tl.load(record.expected + at, mask=is_read, other=0)
    hits += tl.load(record.hits + at, mask=is_read, other=0)
    hits, _ = halve(hits, expected, MAX_EXPECTED)
    trials, expected = halve(trials, expected, MAX_EXPECTED)
    tl.debug_barrier()  # other threads of this program may still read the same
    tl.store(record.trials + at, trials, mask=is_read)
    tl.store(record.expected + at, expected, mask=is_read)
    tl.store(record.hits + at, hits, mask=is_read)


@triton.jit
def _num_first(is_true, COLUMNS: tl.constexpr):
    """How many columns of each row are true before the first that is not: [rows, COLUMNS] bool -> [rows] int32."""
    return tl.min(tl.where(is_true, COLUMNS, tl.arange(0, COLUMNS)[None, :]), axis=1)


@triton.jit
def _repeats(offers, row, chains, passes, tokens, sizes):
    """Whether each chain behind the model's drafts says what the same source has said from the start.

    tokens: [BLOCK_CHAINS, BLOCK_WIDTH] int32, of the chains.
    """
    which = tl.arange(0, sizes.BLOCK_CHAINS)
    slots = tl.arange(0, sizes.BLOCK_WIDTH)
    is_drafted = (slots < passes)[None, :]
    model = tl.load(offers.model + row * sizes.NUM_STEPS + slots, mask=slots < passes, other=0)
    num_same = _num_first(is_drafted & (tokens == model[None, :]), sizes.BLOCK_WIDTH)
    # [a chain, another]
    p_chains = offers.chains + (row * sizes.NUM_CHAINS + which) * sizes.WIDTH
    starts = chains.starts[:, None]
    repeats = (chains.starts == 0)[None, :] & (chains.sources[None, :] == chains.sources[:, None]) & (starts > 0)
    repeats = repeats & (chains.lengths[None, :] > starts) & (num_same[None, :] >= starts)
    first = tl.load(p_chains, mask=chains.lengths > 0, other=0)
    repeats = repeats & (tl.load(p_chains[None, :] + starts, mask=repeats, other=0) == first[:, None])
    return tl.max(repeats.to(tl.int32), axis=1) > 0


@triton.jit
def _update(table, BLOCK_KEYS: tl.constexpr):
    """Take the new trials over, forget old ones, and set the chances."""
    keys = tl.arange(0, BLOCK_KEYS)
    is_key = keys < NUM_KEYS
    new_hits = tl.load(table.new_hits + keys, mask=is_key, other=0)
    new_trials = tl.load(table.new_trials + keys, mask=is_key, other=0)
    hits = tl.load(table.hits + keys, mask=is_key, other=0) + new_hits * TRIAL
    trials = tl.load(table.trials + keys, mask=is_key, other=0) + new_trials * TRIAL
    misses = tl.load(table.misses + keys, mask=is_key, other=0) + new_trials
    misses = tl.where(new_hits > 0, 0, misses)
    has_turned = misses >= MAX_MISSES
    hits = tl.where(has_turned, hits >> 1, hits)
    trials = tl.where(has_turned, trials >> 1, trials)
    hits, trials = halve(hits, trials, tl.where(keys < COPIED, MAX_TRIALS, MAX_COPIED_TRIALS))
    tl.debug_barrier()  # other threads of this program may still read the same counts
    tl.store(table.new_hits + keys, tl.zeros_like(hits), mask=is_key)
    tl.store(table.new_trials + keys, tl.zeros_like(hits), mask=is_key)
    tl.store(table.hits + keys, hits, mask=is_key)
    tl.store(table.trials + keys, trials, mask=is_key)
    tl.store(table.misses + keys, tl.where(has_turned, 0, misses), mask=is_key)
    tl.store(table.chances + keys, hits * ONE // tl.maximum(trials, 1), mask=is_key)
    tl.debug_barrier()  # the chances that others are derived from are read after it
    is_derived = (keys >= CONTRARY) & (keys < COPIED)
    chain = tl.load(table.chances + keys + (COPIED - CONTRARY), mask=is_derived, other=0)
    right = chain * (ONE - tl.load(table.chances + ALONE)) >> SHIFT
    derived = right * ONE // tl.maximum(right + ONE - chain, 1)
    derived = (hits * ONE + DERIVED_TRIALS * derived) // (trials + DERIVED_TRIALS)
    tl.debug_barrier()  # other threads of this program may still read the same chances
    tl.store(table.chances + keys, derived, mask=is_derived)
