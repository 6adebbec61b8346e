"""The arbiter's choice and judgement: the compiled half of `proposers.arbiter`.

Importing this module imports numba, which must not happen before a vLLM worker has started. `Arbiter` imports it when
it is constructed.

R are the rows of state, one for each request. B are the requests of the batch, and `rows` ([B] int64) says where each
has its state. S is the most passes, C the number of chains, K the number of slots.
"""

from typing import NamedTuple

import numba as nb
import numpy as np

from vllm_specplus._numba import compiled, to_pointer
from vllm_specplus.sources import MODEL, NGRAM, REFERENCE, UNFILLED, WHOLE_OUTPUT

SHIFT = 16
ONE = 1 << SHIFT
"""A chance of 1, and the worth of one token."""
NUM_SOURCES = REFERENCE - NGRAM + 1  # those that offer chains
NUM_PLACES = 8
NUM_LENGTHS = 13
# Where each kind of key begins. Those after ALONE go by the length of the agreement, and the last two by source too.
ALONE = 0
AGREED = ALONE + NUM_PLACES
DIFFERED = AGREED + NUM_LENGTHS
CONTRARY = DIFFERED + NUM_LENGTHS
COPIED = CONTRARY + NUM_SOURCES * NUM_LENGTHS
NUM_KEYS = COPIED + NUM_SOURCES * NUM_LENGTHS
TRIAL = 1 << 8
"""What a trial adds to the counts, which are halved to forget."""
PRIOR_TRIALS = 4 * TRIAL
DERIVED_TRIALS = 6 * TRIAL  # the weight of what other keys tell of one
MAX_TRIALS = 32 * TRIAL  # then hits and trials are halved
MAX_COPIED_TRIALS = 128 * TRIAL  # of the keys from COPIED on: a step of a long chain has many trials of one
MAX_MISSES = 4  # in a row; then too, as the source seems to have turned
# Where a request's records begin: those of each source, and of each source's disputed drafts. A draft is disputed where
# the model says one thing and the chains another. Behind them is one of a kind that knows no hits: see `_count_end`.
SETTLED = 0
DISPUTED = SETTLED + REFERENCE + 1
ENDS = DISPUTED + REFERENCE + 1  # of references' ends, where a text is expected to end too
NUM_RECORDS = ENDS + 1
PRIOR_EXPECTED = 6 * ONE  # hits of a record, as many as came
PRIOR_VOUCHED = 24 * ONE  # of a reference's, for which a client vouches: one edit tells little of the others
PRIOR_MISSES = 3 * ONE  # of a record, as many as were expected
LUCKY_MISSES = 2 * ONE  # this many below what was expected mean nothing
# The same of a disputed record, which has far fewer trials.
PRIOR_DISPUTED = 2 * ONE
PRIOR_DISPUTED_MISSES = 2 * ONE
LUCKY_DISPUTED_MISSES = 1 * ONE
MAX_EXPECTED = 32 * ONE  # hits of a record; then all of it is halved
DOUBT = ONE >> 8  # what is added to the chance that a token is wrong where chains differ, since two may seem certain
MAX_GAIN_TRIALS = 16
PRIOR_GAIN = ONE * 3 // 10  # what a pass is expected to add
PRIOR_GAIN_TRIALS = 2  # one less for every four trials; so with half of the most trials there is none
PASS_PERIOD = 32  # steps until passes that seem useless are made once more
MAX_STOPS = 4  # tokens known to end a request's text; any others are taken for common ones
NO_TOKEN = -1
NO_CHAIN = -1
ALL_CHAINS = -1  # of a start, a bit for each
NO_OFFERS = -1
NO_PASS = -1
ASLEEP = -1  # the credit of a request that has given the draft model up
MOST_CREDIT = 8 * ONE  # of a request
# The fate of a step's drafts.
NO_DRAFTS, VERIFIED, DROPPED = 0, 1, 2


class Offers(NamedTuple):
    """What the sources offer.

    model: [R, S] int32 drafts of the model, of which `passes` ([R] int64) were made for the request.
    chains: [R, C, K] int32; lengths, agreed: [R, C] int32, tokens of each chain, and how many before them agree, or
        `WHOLE_OUTPUT` and some.
    starts, sources: [C] int64, how many of the model's drafts a chain follows, and its source, of `sources.py`.
    stops: [R, MAX_STOPS] int32, the tokens that end each request's text, and NO_TOKEN behind them. No chain has one.
    limits: [R] int64, the most drafts of each request when it was last chosen for.
    is_blind: whether nothing may depend on the model's drafts that might be left out because of it.
    """

    model: np.ndarray
    passes: np.ndarray
    chains: np.ndarray
    lengths: np.ndarray
    agreed: np.ndarray
    starts: np.ndarray
    sources: np.ndarray
    stops: np.ndarray
    limits: np.ndarray
    is_blind: bool


class Table(NamedTuple):
    """What is known of each key: [NUM_KEYS] int64 each.

    new_hits, new_trials: of this step, which `update_chances` takes over. hits, trials: in units of 1 / TRIAL, as if
    PRIOR_TRIALS had been seen before the first. misses: trials in a row without a hit. chances: in units of 1 / ONE.
    """

    new_hits: np.ndarray
    new_trials: np.ndarray
    hits: np.ndarray
    trials: np.ndarray
    misses: np.ndarray
    chances: np.ndarray


class Record(NamedTuple):
    """How each source has done in each request, or in all: [R or 1, NUM_RECORDS] int64 each, in units of 1 / ONE.

    trials: what was judged. expected: the sum of its chances. hits: what came of it.
    """

    trials: np.ndarray
    expected: np.ndarray
    hits: np.ndarray


class Beliefs(NamedTuple):
    """What the chances of drafts go by: those of each key, [NUM_KEYS] int64, and records.

    record: of each request. opposed: of all requests together, how each source has done where chains differ. It stands
        under DISPUTED, as it is to be trusted as soon.
    """

    chances: np.ndarray
    record: Record
    opposed: Record


class ListPrices(NamedTuple):
    """What a request's drafts cost, in units of 1 / ONE tokens, by their number.

    totals: [K + 1] int64, of all of them together; 0 of none. least: [K] int64, of a draft more, the smallest average
    over all larger numbers.
    """

    totals: np.ndarray
    least: np.ndarray


class Chosen(NamedTuple):
    """Where `choose` writes what it has chosen.

    token_ids: [B, K] int32, -1 after the last draft. num_drafts, num_model: [B] int32. source: [B] int64, of the drafts
    that are not the model's; UNFILLED where there are none.
    values: [B, S + 1] int64, the value of the best drafts with each number of passes.
    chances: [B, K] int64, of each draft if those before it are right, in units of 1 / ONE; 0 after the last draft.
    """

    token_ids: np.ndarray
    num_drafts: np.ndarray
    num_model: np.ndarray
    source: np.ndarray
    values: np.ndarray
    chances: np.ndarray


class Gains(NamedTuple):
    """What passes have added, by the class of the agreement that spoke for the history.

    sums, trials: [NUM_LENGTHS, S] int64, of those that were made. told_sums, told_trials: likewise, with what the text
    has told of those that were not. steps_since_all: [NUM_LENGTHS] int64, since all passes were made.
    """

    sums: np.ndarray
    trials: np.ndarray
    told_sums: np.ndarray
    told_trials: np.ndarray
    steps_since_all: np.ndarray


class Foregone(NamedTuple):
    """The pass behind the last one of each request's last step, which was not made: what it would have brought.

    gains: [R] int64, where in `Gains` it counts, class * S + pass; NO_PASS: all were made, or none.
    chances: [R] int64, of its draft, in units of 1 / ONE; 0 where the step never came to it, or the chains knew better.
    """

    gains: np.ndarray
    chances: np.ndarray


# The classes of agreements: each length up to 6, then 7-8, 9-12, 13-20, 21-36, more. The last one is not in here: the
# whole output.
_LENGTH_CLASS = np.searchsorted([1, 2, 3, 4, 5, 6, 7, 9, 13, 21, 37], np.arange(38), side="right")


@compiled(allocates=False, forceinline=True)
def length_class(length: int) -> int:
    """The class of an agreement of some tokens, or of `WHOLE_OUTPUT` and some."""
    if length >= WHOLE_OUTPUT:
        return NUM_LENGTHS - 1
    return _LENGTH_CLASS[min(length, len(_LENGTH_CLASS) - 1)]


@compiled(allocates=False, forceinline=True)
def _is_stop(offers: Offers, row: int, token_id: int) -> bool:
    """Whether a token ends a request's text."""
    found = False
    for k in range(MAX_STOPS):
        found |= offers.stops[row, k] == token_id
    return found


@compiled(allocates=False, forceinline=True)
def _agreement(offers: Offers, row: int, place: int, passes: int) -> tuple[bool, bool, int]:
    """Whether chains speak of the token at a place, whether one says the model's, and how long those agreed."""
    speaks, agrees, length = False, False, 0
    for c in range(len(offers.starts)):
        if offers.starts[c] != place or offers.lengths[row, c] == 0:
            continue
        speaks = True
        same = place < passes and offers.chains[row, c, 0] == offers.model[row, place]
        if same and not agrees:
            agrees, length = True, offers.agreed[row, c]
        elif same == agrees:
            length = max(length, offers.agreed[row, c])
    return speaks, agrees, length


@compiled(allocates=False, forceinline=True)
def _model_key(offers: Offers, row: int, place: int, passes: int) -> int:
    """The key of the model's draft at a place."""
    speaks, agrees, length = False, False, 0
    if not offers.is_blind:
        speaks, agrees, length = _agreement(offers, row, place, passes)
    if not speaks:
        return ALONE + min(place, NUM_PLACES - 1)
    return (AGREED if agrees else DIFFERED) + length_class(length)


@compiled(allocates=False, forceinline=True)
def _copied_key(offers: Offers, row: int, c: int, n: int) -> int:
    """The key of token n of a chain, whatever the model says."""
    return COPIED + (offers.sources[c] - NGRAM) * NUM_LENGTHS + length_class(offers.agreed[row, c] + n)


@compiled(allocates=False, forceinline=True)
def _chain_key(offers: Offers, row: int, c: int, n: int, passes: int) -> int:
    """The key of token n of a chain."""
    start, copied = offers.starts[c], _copied_key(offers, row, c, n)
    if n > 0 or start >= passes or offers.is_blind:
        return copied
    if offers.chains[row, c, 0] != offers.model[row, start]:
        return copied - COPIED + CONTRARY
    return AGREED + length_class(_agreement(offers, row, start, passes)[2])


@compiled(allocates=False, forceinline=True)
def _record_of(key: int, source: int) -> int:
    """Where the record of a source's drafts with a key is."""
    return (DISPUTED if DIFFERED <= key < COPIED else SETTLED) + source


@compiled(allocates=False, forceinline=True)
def _factor(record: Record, row: int, which: int) -> int:
    """How a request changes the chances of a record's drafts, for `_scaled`: 0 to 2 * ONE, ONE if they do as expected.

    With fewer hits than expected it is the hits over those expected. With more, the misses over those expected count,
    and what they are short of ONE is added to ONE. So a source that nearly always hits is not trusted much more: a long
    copy ends some time, and then long drafts cost most. Nor is one that may have been lucky.
    """
    expected, hits = record.expected[row, which], record.hits[row, which]
    is_disputed = which >= DISPUTED
    if hits <= expected:
        prior = PRIOR_DISPUTED if is_disputed else PRIOR_EXPECTED
        if which == SETTLED + REFERENCE:
            prior = PRIOR_VOUCHED
        return (hits + prior) * ONE // (expected + prior)
    trials = record.trials[row, which]
    prior = PRIOR_DISPUTED_MISSES if is_disputed else PRIOR_MISSES
    misses = trials - hits + prior + (LUCKY_DISPUTED_MISSES if is_disputed else LUCKY_MISSES)
    return 2 * ONE - min(misses * ONE // (trials - expected + prior), ONE)


@compiled(allocates=False, forceinline=True)
def _scaled(chance: int, factor: int) -> int:
    """A key's chance by the factor of its record in a request: the chance of a hit is less, or that of a miss."""
    if factor <= ONE:
        return chance * factor >> SHIFT
    return ONE - ((ONE - chance) * (2 * ONE - factor) >> SHIFT)


@compiled(allocates=False, forceinline=True)
def _chance(beliefs: Beliefs, row: int, key: int, source: int) -> int:
    """The chance of a source's draft with a key in a request."""
    return _scaled(beliefs.chances[key], _factor(beliefs.record, row, _record_of(key, source)))


@compiled(allocates=False, forceinline=True)
def _agreeing(offers: Offers, row: int, c: int, n: int, agreeing: int) -> int:
    """Which of some chains say what chain `c` says up to its token n, if they do up to the one before.

    `agreeing` and the result have a bit for each chain of the same start, the lowest for the first.
    """
    bit = 1
    for other in range(len(offers.starts)):
        if offers.starts[other] == offers.starts[c]:
            if offers.lengths[row, other] <= n or offers.chains[row, other, n] != offers.chains[row, c, n]:
                agreeing &= ~bit
            bit <<= 1
    return agreeing


@compiled(allocates=False, forceinline=True)
def _rivals(offers: Offers, row: int, c: int, n: int, before: int, agreeing: int) -> int:
    """Which chains say something else than chain `c` in its token n, of those that agreed with it before, as bits.

    before, agreeing: of `_agreeing`, for the token before and for this one.
    """
    bit, rivals = 1, 0
    for other in range(len(offers.starts)):
        if offers.starts[other] == offers.starts[c]:
            if before & ~agreeing & bit and offers.lengths[row, other] > n:
                rivals |= bit
            bit <<= 1
    return rivals


@compiled(allocates=False, forceinline=True)
def _chance_of_end(offers: Offers, beliefs: Beliefs, row: int, c: int, n: int) -> int:
    """The chance that the text ends before token n of a chain, as the reference ends there and said the same; else 0.

    It is that of the reference's next token, if there were one. What the model drafts before the chain is compared too.
    The reference's chain is the last, from the start.
    """
    reference, start = len(offers.starts) - 1, offers.starts[c]
    length = offers.lengths[row, reference]
    if offers.sources[reference] != REFERENCE or n == 0 or start + n != length:
        return 0
    for k in range(length):
        token = offers.model[row, k] if k < start else offers.chains[row, c, k - start]
        if token != offers.chains[row, reference, k]:
            return 0
    chance = _chance(beliefs, row, _copied_key(offers, row, reference, length), REFERENCE)
    return _scaled(chance, _factor(beliefs.record, row, ENDS))


@compiled(allocates=False, forceinline=True)
def _chance_against(chance: int, rival: int) -> int:
    """A token's chance where another one has a chance too, among the cases that not both are right."""
    right = chance * (ONE - rival + DOUBT) >> SHIFT
    return right * ONE // (right + ONE - chance + DOUBT)


@compiled(allocates=False, forceinline=True)
def _chance_of_token(
    offers: Offers, beliefs: Beliefs, row: int, c: int, n: int, before: int, agreeing: int, passes: int
) -> int:
    """The chance of token n of a chain, with what other chains say; for `before` and `agreeing` see `_rivals`."""
    start = offers.starts[c]
    chance = _chance_of_chains(offers, beliefs, row, start, agreeing, n, passes)
    chance = chance * (ONE - _chance_of_end(offers, beliefs, row, c, n)) >> SHIFT
    rivals = _rivals(offers, row, c, n, before, agreeing)
    if rivals == 0:
        return chance
    chance = _chance_against(chance, _chance_of_chains(offers, beliefs, row, start, rivals, n, passes))
    return _scaled(chance, _factor(beliefs.opposed, 0, DISPUTED + offers.sources[c]))


@compiled(allocates=False, forceinline=True)
def _chance_of_chains(offers: Offers, beliefs: Beliefs, row: int, start: int, which: int, n: int, passes: int) -> int:
    """The best chance of token n of some chains of a start; see `_agreeing`.

    Where the model agrees too, a reference's chance is not less than without the model.
    """
    best = 0
    for c in range(len(offers.starts)):
        if offers.starts[c] != start:
            continue
        is_meant, which = which & 1, which >> 1
        if is_meant:
            source, key = offers.sources[c], _chain_key(offers, row, c, n, passes)
            best = max(best, _chance(beliefs, row, key, source))
            is_models = key < DIFFERED
            if is_models and source == REFERENCE:
                best = max(best, _chance(beliefs, row, _copied_key(offers, row, c, n), source))
    return best


@compiled(allocates=False, forceinline=True)
def _chance_of_disputed(offers: Offers, beliefs: Beliefs, row: int, place: int, passes: int) -> int:
    """The best chance of the chains that say what the model does at a place, beside others that do not; else -1."""
    best = -1
    for c in range(len(offers.starts)):
        if offers.starts[c] != place or offers.lengths[row, c] == 0:
            continue
        agreeing = _agreeing(offers, row, c, 0, ALL_CHAINS)
        is_models = offers.chains[row, c, 0] == offers.model[row, place]
        if is_models and _rivals(offers, row, c, 0, ALL_CHAINS, agreeing) != 0:
            best = max(best, _chance_of_token(offers, beliefs, row, c, 0, ALL_CHAINS, agreeing, passes))
    return best


@compiled(allocates=False)
def _chance_of_model(offers: Offers, beliefs: Beliefs, row: int, place: int, passes: int) -> int:
    """The chance of the model's draft at a place; where some chains say it too and others do not, that of a chain."""
    key = _model_key(offers, row, place, passes)
    chance = -1
    if AGREED <= key < DIFFERED:
        chance = _chance_of_disputed(offers, beliefs, row, place, passes)
    return chance if chance >= 0 else _chance(beliefs, row, key, MODEL)


@compiled(allocates=False, forceinline=True)
def _value_of_chain(
    offers: Offers, beliefs: Beliefs, prices: ListPrices, row: int, c: int, passes: int, survival: int, max_drafts: int
) -> tuple[int, int]:
    """What a chain adds behind drafts that survive so, and how many of its tokens are worth their slots."""
    start = offers.starts[c]
    size, value, agreeing = max(min(offers.lengths[row, c], max_drafts - start), 0), 0, ALL_CHAINS
    best, worth = 0, 0
    for n in range(size):
        before, agreeing = agreeing, _agreeing(offers, row, c, n, agreeing)
        survival = survival * _chance_of_token(offers, beliefs, row, c, n, before, agreeing, passes) >> SHIFT
        if survival <= prices.least[start + n]:
            break
        value += survival - (prices.totals[start + n + 1] - prices.totals[start + n])
        if value > best:
            best, worth = value, n + 1
    return best, worth


@compiled(allocates=False, forceinline=True)
def _best_chain(
    offers: Offers,
    beliefs: Beliefs,
    prices: ListPrices,
    row: int,
    start: int,
    passes: int,
    survival: int,
    max_drafts: int,
) -> tuple[int, int, int]:
    """The best chain behind `start` drafts of the model: what it adds, the chain or NO_CHAIN, and its tokens.

    max_drafts: with those of the model.
    """
    best, chain, size = 0, NO_CHAIN, 0
    for c in range(len(offers.starts)):
        if offers.starts[c] == start:
            value, worth = _value_of_chain(offers, beliefs, prices, row, c, passes, survival, max_drafts)
            if value > best:
                best, chain, size = value, c, worth
    return best, chain, size


@compiled(allocates=False, forceinline=True)
def _best_drafts(
    offers: Offers, beliefs: Beliefs, prices: ListPrices, row: int, passes: int, max_drafts: int
) -> tuple[int, int, int]:
    """The best drafts by what some passes tell: how many of the model's, the chain or NO_CHAIN, and its tokens."""
    best, chain, size = _best_chain(offers, beliefs, prices, row, 0, passes, ONE, max_drafts)
    num_model, survival, value = 0, ONE, 0
    for place in range(min(passes, max_drafts)):
        survival = survival * _chance_of_model(offers, beliefs, row, place, passes) >> SHIFT
        if survival <= prices.least[place]:
            break
        value += survival - (prices.totals[place + 1] - prices.totals[place])
        more, behind, tokens = 0, NO_CHAIN, 0
        if not offers.is_blind:
            more, behind, tokens = _best_chain(offers, beliefs, prices, row, place + 1, passes, survival, max_drafts)
        if value + more > best:
            best, chain, size, num_model = value + more, behind, tokens, place + 1
    return num_model, chain, size


@compiled(allocates=False, forceinline=True)
def _value_of_drafts(
    offers: Offers, beliefs: Beliefs, prices: ListPrices, row: int, passes: int, num_model: int, chain: int, size: int
) -> int:
    """The value of some drafts, worth their slots or not, by all that is known after some passes."""
    survival, value = ONE, -prices.totals[num_model + size]
    for place in range(num_model):
        survival = survival * _chance_of_model(offers, beliefs, row, place, passes) >> SHIFT
        value += survival
    agreeing = ALL_CHAINS
    for n in range(size):
        before, agreeing = agreeing, _agreeing(offers, row, chain, n, agreeing)
        survival = survival * _chance_of_token(offers, beliefs, row, chain, n, before, agreeing, passes) >> SHIFT
        value += survival
    return value


@compiled(allocates=False)
def _choose_with_model(
    offers: Offers, beliefs: Beliefs, prices: ListPrices, row: int, max_drafts: int, values: np.ndarray
) -> tuple[int, int, int]:
    """The best drafts of a request to which the model has offered its own, as `_best_drafts` tells them.

    values: [S + 1] int64, takes the value of the best with each number of passes.
    """
    passes = offers.passes[row]
    num_model, chain, size = 0, NO_CHAIN, 0
    for k in range(passes + 1):
        num_model, chain, size = _best_drafts(offers, beliefs, prices, row, k, max_drafts)
        num_known = k if offers.is_blind else passes
        values[k] = _value_of_drafts(offers, beliefs, prices, row, num_known, num_model, chain, size)
    return num_model, chain, size


@compiled(allocates=False)
def choose(
    rows: np.ndarray, limits: np.ndarray, offers: Offers, beliefs: Beliefs, prices: ListPrices, chosen: Chosen
) -> None:
    """Choose the drafts of each request, at most `limits` ([B] int64) and K; see `Arbiter.choose`.

    The value of k passes is that of the drafts which would be chosen after them, by what all passes tell. So a pass is
    worth what it tells, and never less than nothing but for the cut.
    """
    for i in range(len(rows)):
        row, max_drafts = rows[i], min(limits[i], offers.chains.shape[2])
        offers.limits[row] = max_drafts
        passes = offers.passes[row]
        num_model, chain, size = 0, NO_CHAIN, 0
        if passes == 0:  # then there is nothing to compare, and the code is far shorter
            chosen.values[i, 0], chain, size = _best_chain(offers, beliefs, prices, row, 0, 0, ONE, max_drafts)
        else:
            num_model, chain, size = _choose_with_model(offers, beliefs, prices, row, max_drafts, chosen.values[i])
        if offers.is_blind and num_model > 0:
            # Only what stands behind all of the model's drafts may depend on them.
            survival = ONE
            for place in range(num_model):
                survival = survival * _chance_of_model(offers, beliefs, row, place, passes) >> SHIFT
            _, chain, size = _best_chain(offers, beliefs, prices, row, num_model, 0, survival, max_drafts)
        num_drafts = num_model + size
        chosen.num_drafts[i], chosen.num_model[i] = num_drafts, num_model
        chosen.source[i] = offers.sources[chain] if chain != NO_CHAIN else UNFILLED
        agreeing = ALL_CHAINS
        for k in range(num_drafts):
            if k < num_model:
                chosen.token_ids[i, k] = offers.model[row, k]
                chosen.chances[i, k] = _chance_of_model(offers, beliefs, row, k, passes)
            else:
                n = k - num_model
                before, agreeing = agreeing, _agreeing(offers, row, chain, n, agreeing)
                chosen.token_ids[i, k] = offers.chains[row, chain, n]
                chosen.chances[i, k] = _chance_of_token(offers, beliefs, row, chain, n, before, agreeing, passes)
        for k in range(num_drafts, chosen.token_ids.shape[1]):
            chosen.token_ids[i, k], chosen.chances[i, k] = -1, 0


@compiled(allocates=False, forceinline=True)
def _repeats(offers: Offers, row: int, c: int) -> bool:
    """Whether a chain behind the model's drafts says what the same source has said from the start."""
    start = offers.starts[c]
    for other in range(len(offers.starts)):
        same = offers.starts[other] == 0 and offers.sources[other] == offers.sources[c]
        if not same or offers.lengths[row, other] <= start:
            continue
        same = offers.chains[row, other, start] == offers.chains[row, c, 0]
        for place in range(start):
            same = same and offers.chains[row, other, place] == offers.model[row, place]
        if same:
            return True
    return False


@compiled(allocates=False, forceinline=True)
def _count_in_table(table: Table, key: int, hit: bool) -> None:
    """Count a trial of a key."""
    table.new_trials[key] += 1
    table.new_hits[key] += hit


@compiled(allocates=False, forceinline=True)
def _count(table: Table, record: Record, key: int, row: int, source: int, hit: bool) -> None:
    """Count a trial of a key, which a source has made for a request."""
    _count_in_table(table, key, hit)
    which = _record_of(key, source)
    record.trials[row, which] += ONE
    record.expected[row, which] += table.chances[key]
    record.hits[row, which] += hit * ONE


@compiled(allocates=False, forceinline=True)
def _best_copied(offers: Offers, chances: np.ndarray, row: int, start: int, which: int, n: int) -> int:
    """The best chance of token n of some chains of a start, whatever the model says and the request's record."""
    best = 0
    for c in range(len(offers.starts)):
        if offers.starts[c] != start:
            continue
        is_meant, which = which & 1, which >> 1
        if is_meant:
            best = max(best, chances[_copied_key(offers, row, c, n)])
    return best


@compiled(allocates=False, forceinline=True)
def _count_opposed(
    opposed: Record,
    offers: Offers,
    chances: np.ndarray,
    row: int,
    c: int,
    n: int,
    agreeing: int,
    rivals: int,
    hit: bool,
) -> None:
    """Count token n of a chain that has rivals there; see `_rivals`."""
    chance = _best_copied(offers, chances, row, offers.starts[c], agreeing, n)
    rival = _best_copied(offers, chances, row, offers.starts[c], rivals, n)
    which = DISPUTED + offers.sources[c]
    opposed.trials[0, which] += ONE
    opposed.expected[0, which] += _chance_against(chance, rival)
    opposed.hits[0, which] += hit * ONE


@compiled(allocates=False, forceinline=True)
def _count_end(offers: Offers, chances: np.ndarray, record: Record, row: int, c: int, num_new: int) -> None:
    """Count that a text has gone on behind the end of a reference, if chain `c` is one and was right to its end."""
    length = offers.lengths[row, c]
    if offers.sources[c] == REFERENCE and 0 < length < min(num_new - offers.starts[c], offers.limits[row]):
        record.trials[row, ENDS] += ONE
        record.expected[row, ENDS] += chances[_copied_key(offers, row, c, length)]


@compiled(allocates=False, forceinline=True)
def _forget(record: Record, row: int) -> None:
    """Halve what a row of a record has of each source until no more hits are expected than are kept."""
    for which in range(NUM_RECORDS):
        while record.expected[row, which] >= MAX_EXPECTED:
            record.trials[row, which] >>= 1
            record.expected[row, which] >>= 1
            record.hits[row, which] >>= 1


@compiled(allocates=False, forceinline=True)
def _note_foregone(
    offers: Offers, beliefs: Beliefs, row: int, right: int, num_new: int, token_id: int, foregone: Foregone
) -> None:
    """Note what one pass more would have brought, of which `right` drafts were right and `num_new` tokens have come.

    token_id: the one at the place of the draft that was not made, if the step came there.
    """
    passes, num_steps = offers.passes[row], offers.model.shape[1]
    if passes == 0 or passes == num_steps:
        return
    foregone.gains[row] = _class_of_history(offers, row) * num_steps + passes
    foregone.chances[row] = 0
    if right < passes or num_new != passes + 1:
        return
    for c in range(len(offers.starts)):
        if offers.starts[c] == passes and offers.lengths[row, c] > 0 and offers.chains[row, c, 0] == token_id:
            return
    foregone.chances[row] = _chance_of_model(offers, beliefs, row, passes, passes)


@compiled(allocates=False)
def judge(
    token_ids: np.ndarray,
    num_tokens: np.ndarray,
    rows: np.ndarray,
    offer_positions: np.ndarray,
    offers: Offers,
    table: Table,
    record: Record,
    opposed: Record,
    foregone: Foregone,
) -> int:
    """Judge what was offered by the tokens that have come since; see `Arbiter.begin_step`.

    Args:
        token_ids: [>=B, max_model_len] int32, the text of each request.
        num_tokens: [B] int64.
        rows: [B] int64.
        offer_positions: [R] int64, where in its text each request's offers begin; NO_OFFERS: there are none.
        offers: of the last step.
        table: takes the new hits and trials.
        record: takes what each source has tried, was expected to hit, and has hit.
        opposed: likewise, in row 0, where chains differ.
        foregone: gets what is told of each request's next pass.

    Returns:
        How many tokens have come.
    """
    total = 0
    for i in range(len(rows)):
        row = rows[i]
        foregone.gains[row] = NO_PASS
        first = offer_positions[row]
        num_new = num_tokens[i] - first
        if first == NO_OFFERS or num_new <= 0:
            continue
        total += num_new
        passes, right = offers.passes[row], 0
        while right < min(passes, num_new) and offers.model[row, right] == token_ids[i, first + right]:
            right += 1
        next_token = token_ids[i, first + min(passes, num_new - 1)]
        _note_foregone(offers, Beliefs(table.chances, record, opposed), row, right, num_new, next_token, foregone)
        for place in range(min(right + 1, passes, num_new)):
            _count(table, record, _model_key(offers, row, place, passes), row, MODEL, place < right)
        for c in range(len(offers.starts)):
            start = offers.starts[c]
            if start > right or (start > 0 and _repeats(offers, row, c)):
                continue
            agreeing = ALL_CHAINS
            for n in range(min(offers.lengths[row, c], num_new - start)):
                hit = offers.chains[row, c, n] == token_ids[i, first + start + n]
                before, agreeing = agreeing, _agreeing(offers, row, c, n, agreeing)
                rivals = _rivals(offers, row, c, n, before, agreeing)
                if rivals != 0:
                    _count_opposed(opposed, offers, table.chances, row, c, n, agreeing, rivals, hit)
                key = _chain_key(offers, row, c, n, passes)
                is_models, is_beside_model = key < DIFFERED, key < COPIED
                if is_beside_model:
                    _count_in_table(table, _copied_key(offers, row, c, n), hit)
                # A draft that is the model's as well has been judged as the model's.
                if not is_models:
                    _count(table, record, key, row, offers.sources[c], hit)
                if not hit:
                    break
            else:
                _count_end(offers, table.chances, record, row, c, num_new)
        _forget(record, row)
    # After the whole batch, so that the order of its requests does not matter.
    _forget(opposed, 0)
    return total


@compiled(allocates=False)
def update_chances(table: Table) -> None:
    """Take this step's hits and trials over, forget some of the older ones, and set the chances."""
    for key in range(NUM_KEYS):
        table.hits[key] += table.new_hits[key] * TRIAL
        table.trials[key] += table.new_trials[key] * TRIAL
        table.misses[key] = 0 if table.new_hits[key] else table.misses[key] + table.new_trials[key]
        table.new_hits[key] = table.new_trials[key] = 0
        if table.misses[key] >= MAX_MISSES:
            table.misses[key] = 0
            table.trials[key] >>= 1
            table.hits[key] >>= 1
        while table.trials[key] >= (MAX_TRIALS if key < COPIED else MAX_COPIED_TRIALS):
            table.trials[key] >>= 1
            table.hits[key] >>= 1
        table.chances[key] = table.hits[key] * ONE // max(table.trials[key], 1)
    for key in range(CONTRARY, COPIED):
        derived = _derived_chance(table.chances[key - CONTRARY + COPIED], table.chances[ALONE])
        hits = table.hits[key] * ONE + DERIVED_TRIALS * derived
        table.chances[key] = hits // (table.trials[key] + DERIVED_TRIALS)


@compiled(allocates=False, forceinline=True)
def _derived_chance(chain: int, model: int) -> int:
    """The chance of a chain's token where the model says otherwise, by the chances of both.

    It is that of a chain which is right while the model is not, among the cases that not both are right.
    """
    right = chain * (ONE - model) >> SHIFT
    return right * ONE // max(right + ONE - chain, 1)


@compiled(allocates=False, forceinline=True)
def _class_of_history(offers: Offers, row: int) -> int:
    """The class of the longest agreement that speaks for a chain from the start; 0 where there is none."""
    length = 0
    for c in range(len(offers.starts)):
        if offers.starts[c] == 0 and offers.lengths[row, c] > 0:
            length = max(length, offers.agreed[row, c])
    return length_class(length)


@compiled(allocates=False, forceinline=True)
def _expected_gain(total: int, trials: int) -> int:
    """What a pass adds on average, with what is expected of one that little is known of."""
    prior = max(PRIOR_GAIN_TRIALS - trials // 4, 0)
    return (total + PRIOR_GAIN * prior) // (trials + prior)


@compiled(allocates=False, forceinline=True)
def _halve(sums: np.ndarray, trials: np.ndarray) -> None:
    """Halve both, [NUM_LENGTHS, S] int64, where there are as many trials as the limit or more, until nowhere."""
    for which in range(NUM_LENGTHS):
        for k in range(trials.shape[1]):
            while trials[which, k] >= MAX_GAIN_TRIALS:
                sums[which, k] >>= 1
                trials[which, k] >>= 1


@compiled(allocates=False, forceinline=True)
def _pay_for_verification(rows: np.ndarray, offers: Offers, values: np.ndarray, price: int) -> None:
    """Take the price of verification from the values: from each request's in proportion, and no more than there is.

    So a pass earns nothing by drafts that only make up for it.

    values: [B, S + 1] int64, of `choose`, changed in place.
    """
    if price == 0:
        return
    # From the last pass back: a request with fewer passes counts with its last value, which is not changed before.
    for k in range(values.shape[1] - 1, -1, -1):
        total = 0
        for i in range(len(rows)):
            total += values[i, min(k, offers.passes[rows[i]])]
        for i in range(len(rows)):
            if k <= offers.passes[rows[i]]:
                values[i, k] = values[i, k] * (total - price) // total if total > price else 0


@compiled()
def plan_passes(
    rows: np.ndarray, limits: np.ndarray, offers: Offers, credits: np.ndarray, gains: Gains, prices: np.ndarray
) -> int:
    """How many passes of the draft model to make for a batch; see `Arbiter.plan_passes`.

    limits: [B] int64; one that may not draft needs the first pass, and no other. credits: [R] int64, ASLEEP for a
    request that has given the model up. prices: [S] int64, of each pass.
    """
    num_passes = len(prices)
    totals = np.zeros(num_passes, np.int64)
    is_present = np.zeros(NUM_LENGTHS, np.bool_)
    is_anyone_awake = False
    for i in range(len(rows)):
        if credits[rows[i]] == ASLEEP:
            continue
        is_anyone_awake = True
        if limits[i] == 0:
            continue
        which = _class_of_history(offers, rows[i])
        is_present[which] = True
        for k in range(num_passes):
            made = _expected_gain(gains.sums[which, k], gains.trials[which, k])
            totals[k] += max(made, _expected_gain(gains.told_sums[which, k], gains.told_trials[which, k]))
    if num_passes == 0 or not is_anyone_awake:
        return 0
    planned, best, value = 1, 0, 0
    for k in range(num_passes):
        value += totals[k] - prices[k]
        if value > best:
            planned, best = k + 1, value
    for which in range(NUM_LENGTHS):
        if is_present[which]:
            gains.steps_since_all[which] += 1
            # The less is known of the last pass, the sooner it is made again.
            trials = gains.trials[which, num_passes - 1]
            period = 2 + 2 * trials if trials < MAX_GAIN_TRIALS // 2 else PASS_PERIOD
            if gains.steps_since_all[which] >= period:
                planned = num_passes
    for which in range(NUM_LENGTHS):
        if is_present[which] and planned == num_passes:
            gains.steps_since_all[which] = 0
    return planned


@compiled()
def settle(
    rows: np.ndarray,
    offers: Offers,
    values: np.ndarray,
    credits: np.ndarray,
    gains: Gains,
    prices: np.ndarray,
    step_price: int,
    foregone: Foregone,
    slot_price: int,
) -> int:
    """Enter what the passes of a step have added and cost; see `Arbiter.choose`.

    A pass that the step before has gone without counts too. Its draft would have stood before what is drafted now.

    Args:
        rows: [B] int64; a request to which the model has offered nothing has made no passes.
        offers: of this step.
        values: [B, S + 1] int64, of `choose`.
        credits: [R] int64 in the time of a step, changed in place.
        gains: changed in place.
        prices: [S] int64, of each pass for the whole batch.
        step_price: what a request gets in a step's time.
        foregone: of `judge` in this step.
        slot_price: of a draft that was not made, whatever the number of the others.

    Returns:
        The profit of all requests together, in the time of a step.
    """
    num_offered = 0
    for i in range(len(rows)):
        num_offered += offers.passes[rows[i]] > 0
    total = 0
    for i in range(len(rows)):
        row = rows[i]
        if offers.passes[row] == 0:
            continue
        which, profit = _class_of_history(offers, row), 0
        for k in range(offers.passes[row]):
            gain = values[i, k + 1] - values[i, k]
            profit += gain - prices[k] // num_offered
            gains.sums[which, k] += gain
            gains.trials[which, k] += 1
            gains.told_sums[which, k] += gain
            gains.told_trials[which, k] += 1
        profit = profit * ONE // step_price
        total += profit
        credit = min(credits[row] + profit, MOST_CREDIT)
        credits[row] = credit if credit >= 0 else ASLEEP
    for i in range(len(rows)):
        at = foregone.gains[rows[i]]
        if at != NO_PASS:
            gain = foregone.chances[rows[i]] * max(ONE - slot_price + values[i, 0], 0) >> SHIFT
            gains.told_sums[at // len(prices), at % len(prices)] += gain
            gains.told_trials[at // len(prices), at % len(prices)] += 1
    # After the whole batch, so that the order of its requests does not matter.
    _halve(gains.sums, gains.trials)
    _halve(gains.told_sums, gains.told_trials)
    return total


# What Python calls. A call unpacks each of its arrays in a third of a microsecond, so the state travels as addresses.


def to_addresses(
    offer_positions: np.ndarray,
    credits: np.ndarray,
    offers: Offers,
    table: Table,
    record: Record,
    opposed: Record,
    gains: Gains,
    foregone: Foregone,
    prices: np.ndarray,
    list_prices: ListPrices,
) -> np.ndarray:
    """The state of an arbiter as the functions below take it: [n] int64, where its arrays lie, and their sizes.

    Args:
        offer_positions: [R] int64, where in its text each request's offers begin.
        credits: [R] int64.
        offers, table, record, gains, foregone, list_prices: as their classes say. All arrays are C-contiguous, and
            live as long as the result.
        opposed: of `Beliefs`.
        prices: [S] int64, of each pass.
    """
    arrays = offer_positions, credits, *offers[:-1], *table, *record, *opposed, *gains, *foregone, prices, *list_prices
    (num_rows, num_passes), (num_chains, num_slots) = offers.model.shape, offers.chains.shape[1:]
    sizes = num_rows, num_passes, num_chains, num_slots, offers.is_blind
    return np.array([*(array.ctypes.data for array in arrays), *sizes], np.int64)


_OFFER_POSITIONS, _CREDITS, _OFFERS = 0, 1, 2
_TABLE = _OFFERS + len(Offers._fields) - 1
_RECORD = _TABLE + len(Table._fields)
_OPPOSED = _RECORD + len(Record._fields)
_GAINS = _OPPOSED + len(Record._fields)
_FOREGONE = _GAINS + len(Gains._fields)
_PRICES = _FOREGONE + len(Foregone._fields)
_LIST_PRICES = _PRICES + 1
_SIZES = _LIST_PRICES + len(ListPrices._fields)


@compiled(forceinline=True)
def _per_request(state: np.ndarray, which: int) -> np.ndarray:
    """An array of the state with an int64 for each row."""
    return nb.carray(to_pointer(state[which]), state[_SIZES], np.int64)


@compiled(forceinline=True)
def _offers_in(state: np.ndarray) -> Offers:
    num_rows, num_passes, num_chains, num_slots = state[_SIZES], state[_SIZES + 1], state[_SIZES + 2], state[_SIZES + 3]
    return Offers(
        nb.carray(to_pointer(state[_OFFERS]), (num_rows, num_passes), np.int32),
        nb.carray(to_pointer(state[_OFFERS + 1]), num_rows, np.int64),
        nb.carray(to_pointer(state[_OFFERS + 2]), (num_rows, num_chains, num_slots), np.int32),
        nb.carray(to_pointer(state[_OFFERS + 3]), (num_rows, num_chains), np.int32),
        nb.carray(to_pointer(state[_OFFERS + 4]), (num_rows, num_chains), np.int32),
        nb.carray(to_pointer(state[_OFFERS + 5]), num_chains, np.int64),
        nb.carray(to_pointer(state[_OFFERS + 6]), num_chains, np.int64),
        nb.carray(to_pointer(state[_OFFERS + 7]), (num_rows, MAX_STOPS), np.int32),
        nb.carray(to_pointer(state[_OFFERS + 8]), num_rows, np.int64),
        state[_SIZES + 4] != 0,
    )


@compiled(forceinline=True)
def _table_in(state: np.ndarray) -> Table:
    return Table(
        nb.carray(to_pointer(state[_TABLE]), NUM_KEYS, np.int64),
        nb.carray(to_pointer(state[_TABLE + 1]), NUM_KEYS, np.int64),
        nb.carray(to_pointer(state[_TABLE + 2]), NUM_KEYS, np.int64),
        nb.carray(to_pointer(state[_TABLE + 3]), NUM_KEYS, np.int64),
        nb.carray(to_pointer(state[_TABLE + 4]), NUM_KEYS, np.int64),
        nb.carray(to_pointer(state[_TABLE + 5]), NUM_KEYS, np.int64),
    )


@compiled(forceinline=True)
def _record_at(state: np.ndarray, where: int, num_rows: int) -> Record:
    shape = num_rows, NUM_RECORDS
    return Record(
        nb.carray(to_pointer(state[where]), shape, np.int64),
        nb.carray(to_pointer(state[where + 1]), shape, np.int64),
        nb.carray(to_pointer(state[where + 2]), shape, np.int64),
    )


@compiled(forceinline=True)
def _record_in(state: np.ndarray) -> Record:
    return _record_at(state, _RECORD, state[_SIZES])


@compiled(forceinline=True)
def _opposed_in(state: np.ndarray) -> Record:
    return _record_at(state, _OPPOSED, 1)


@compiled(forceinline=True)
def _gains_in(state: np.ndarray) -> Gains:
    shape = NUM_LENGTHS, state[_SIZES + 1]
    return Gains(
        nb.carray(to_pointer(state[_GAINS]), shape, np.int64),
        nb.carray(to_pointer(state[_GAINS + 1]), shape, np.int64),
        nb.carray(to_pointer(state[_GAINS + 2]), shape, np.int64),
        nb.carray(to_pointer(state[_GAINS + 3]), shape, np.int64),
        nb.carray(to_pointer(state[_GAINS + 4]), NUM_LENGTHS, np.int64),
    )


@compiled(forceinline=True)
def _foregone_in(state: np.ndarray) -> Foregone:
    return Foregone(_per_request(state, _FOREGONE), _per_request(state, _FOREGONE + 1))


@compiled(forceinline=True)
def _prices_in(state: np.ndarray) -> np.ndarray:
    return nb.carray(to_pointer(state[_PRICES]), state[_SIZES + 1], np.int64)


@compiled(forceinline=True)
def _list_prices_in(state: np.ndarray) -> ListPrices:
    num_slots = state[_SIZES + 3]
    return ListPrices(
        nb.carray(to_pointer(state[_LIST_PRICES]), num_slots + 1, np.int64),
        nb.carray(to_pointer(state[_LIST_PRICES + 1]), num_slots, np.int64),
    )


@compiled()
def set_list_prices(state: np.ndarray, slot_price: int, more: np.ndarray) -> None:
    """Set what drafts cost: each one its slot, and some numbers of them more or less than that.

    more: [any] int64, of one draft, of two, and so on; the last is that of larger numbers too.
    """
    prices = _list_prices_in(state)
    num_slots = len(prices.totals) - 1
    for number in range(num_slots + 1):
        prices.totals[number] = number * slot_price
        if number > 0 and len(more) > 0:
            prices.totals[number] += more[min(number, len(more)) - 1]
    for number in range(num_slots):
        least = prices.totals[number + 1] - prices.totals[number]
        for larger in range(number + 2, num_slots + 1):
            least = min(least, (prices.totals[larger] - prices.totals[number]) // (larger - number))
        prices.least[number] = least


@compiled()
def begin_step(state: np.ndarray, token_ids: np.ndarray, num_tokens: np.ndarray, rows: np.ndarray) -> tuple[int, bool]:
    """Judge the last step's offers and take them away.

    Returns:
        How many tokens have come since, and whether a request has not given the draft model up.
    """
    offers, table = _offers_in(state), _table_in(state)
    positions = _per_request(state, _OFFER_POSITIONS)
    record, opposed, foregone = _record_in(state), _opposed_in(state), _foregone_in(state)
    num_new = judge(token_ids, num_tokens, rows, positions, offers, table, record, opposed, foregone)
    update_chances(table)
    credits, is_anyone_awake = _per_request(state, _CREDITS), False
    for i in range(len(rows)):
        row = rows[i]
        is_anyone_awake |= credits[row] != ASLEEP
        offers.passes[row] = 0
        for c in range(len(offers.starts)):
            offers.lengths[row, c] = 0
    return num_new, is_anyone_awake


@compiled()
def offer(
    state: np.ndarray, rows: np.ndarray, c: int, token_ids: np.ndarray, num_tokens: np.ndarray, match_len: np.ndarray
) -> None:
    """Offer a chain to each request, up to where the text ends; see `Arbiter.offer`."""
    offers = _offers_in(state)
    for i in range(len(rows)):
        row, length = rows[i], min(num_tokens[i], offers.chains.shape[2])
        for place in range(offers.starts[c]):
            if _is_stop(offers, row, offers.model[row, place]):
                length = 0
        n = 0
        while n < length and not _is_stop(offers, row, token_ids[i, n]):
            offers.chains[row, c, n] = token_ids[i, n]
            n += 1
        offers.lengths[row, c], offers.agreed[row, c] = n, match_len[i]


@compiled()
def offer_model(state: np.ndarray, rows: np.ndarray, limits: np.ndarray, model_drafts: np.ndarray) -> None:
    """Offer the model's drafts; see `Arbiter.offer_model`."""
    offers, credits = _offers_in(state), _per_request(state, _CREDITS)
    num_passes = model_drafts.shape[1]
    for i in range(len(rows)):
        row = rows[i]
        if credits[row] != ASLEEP and limits[i] > 0:
            for place in range(num_passes):
                offers.model[row, place] = model_drafts[i, place]
            offers.passes[row] = num_passes


@compiled()
def plan(state: np.ndarray, rows: np.ndarray, limits: np.ndarray) -> int:
    """How many passes of the draft model to make; see `plan_passes`."""
    credits = _per_request(state, _CREDITS)
    return plan_passes(rows, limits, _offers_in(state), credits, _gains_in(state), _prices_in(state))


@compiled()
def choose_and_settle(
    state: np.ndarray,
    num_tokens: np.ndarray,
    rows: np.ndarray,
    limits: np.ndarray,
    slot_price: int,
    step_price: int,
    verification_price: int,
    least_value: int,
    table: np.ndarray,
) -> tuple[int, int]:
    """Choose the drafts, enter what the passes have earned, and return that; see `choose` and `settle`.

    Drafts that all together are worth less than `least_value` are dropped. Also returned is the drafts' fate.

    verification_price: of any drafts of the batch, beside their slots.
    table: as in `arbiter.Choice`.
    """
    offers, positions = _offers_in(state), _per_request(state, _OFFER_POSITIONS)
    values = np.empty((len(rows), offers.model.shape[1] + 1), np.int64)
    num_drafts, num_model, source, token_ids = table[:, 0], table[:, 1], table[:, 2], table[:, 3:]
    chosen = Chosen(token_ids, num_drafts, num_model, source, values, np.empty(token_ids.shape, np.int64))
    beliefs = Beliefs(_table_in(state).chances, _record_in(state), _opposed_in(state))
    choose(rows, limits, offers, beliefs, _list_prices_in(state), chosen)
    fate, value = NO_DRAFTS, 0
    for i in range(len(rows)):
        positions[rows[i]] = num_tokens[i]
        value += values[i, offers.passes[rows[i]]]
        if num_drafts[i] > 0:
            fate = VERIFIED
    if fate == VERIFIED and value < least_value:
        fate = DROPPED
        token_ids[:], num_drafts[:], num_model[:], source[:] = -1, 0, 0, UNFILLED
    if offers.model.shape[1] == 0:
        return 0, fate
    credits, gains, prices = _per_request(state, _CREDITS), _gains_in(state), _prices_in(state)
    foregone = _foregone_in(state)
    _pay_for_verification(rows, offers, values, verification_price)
    profit = settle(rows, offers, values, credits, gains, prices, step_price, foregone, slot_price)
    return profit, fate
