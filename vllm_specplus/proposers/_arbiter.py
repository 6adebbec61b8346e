"""The arbiter's choice and judgement: the compiled half of `proposers.arbiter`.

Importing this module imports numba, which must not happen before a vLLM worker has started. `Arbiter` imports it when
it is constructed.

Shapes, for R rows of state, B requests in the batch, S passes, C chains and K slots:

| array | shape, dtype | holds |
|---|---|---|
| rows | [B] int64 | the state's row of each request |
| model | [R, S] int32 | the model's drafts, of which `passes` ([R]) were made |
| chains | [R, C, K] int32 | the chains; `lengths` and `agreed` ([R, C] int32) are their tokens and the agreement before them |
| starts, sources | [C] int64 | how many of the model's drafts a chain follows, and which source offers it |
| hits, trials, chances | [NUM_KEYS] int64 | the table; chances are in units of 1 / ONE |

Arguments are plain arrays: numba counts references at each access to a tuple of arrays.
"""

import numpy as np

from vllm_specplus.proposers._numba import compiled

SHIFT = 16
ONE = 1 << SHIFT
"""A chance of 1, and the worth of one token."""
NUM_SOURCES = 3
NUM_PLACES = 8
NUM_LENGTHS = 12
# Where each kind of key begins; those after ALONE go by the length of the agreement, and the last two by source too.
ALONE = 0
AGREED = ALONE + NUM_PLACES
DIFFERED = AGREED + NUM_LENGTHS
CONTRARY = DIFFERED + NUM_LENGTHS
COPIED = CONTRARY + NUM_SOURCES * NUM_LENGTHS
NUM_KEYS = COPIED + NUM_SOURCES * NUM_LENGTHS
PRIOR_TRIALS = 4
MAX_TRIALS = 32
_MODEL_ALONE = -1


@compiled()
def length_class(length: int) -> int:
    """The class of an agreement: each length up to 6, then 7-8, 9-12, 13-20, 21-36, more."""
    if length <= 6:
        return length
    shared = 7
    last = 8
    while shared < NUM_LENGTHS - 1 and length > last:
        last += 4 << (shared - 7)
        shared += 1
    return shared


@compiled()
def _agreement(model, row, place, passes, chains, lengths, agreed, starts):
    """Whether the chains at a place speak of its token, whether one agrees with the model, and how long they agreed."""
    speaks, agrees, length = False, False, 0
    for c in range(len(starts)):
        if starts[c] != place or lengths[row, c] == 0:
            continue
        same = place < passes and chains[row, c, 0] == model[row, place]
        if same and not agrees:
            agrees, length = True, agreed[row, c]
        elif same == agrees:
            length = max(length, agreed[row, c])
        speaks = True
    return speaks, agrees, length


@compiled()
def _model_key(model, row, place, passes, chains, lengths, agreed, starts, is_blind):
    """The key of the model's draft at a place."""
    speaks, agrees, length = False, False, 0
    if not is_blind:
        speaks, agrees, length = _agreement(model, row, place, passes, chains, lengths, agreed, starts)
    if not speaks:
        return ALONE + min(place, NUM_PLACES - 1)
    return (AGREED if agrees else DIFFERED) + length_class(length)


@compiled()
def _chain_key(model, row, c, n, passes, chains, lengths, agreed, starts, sources, is_blind):
    """The key of token n of a chain."""
    start, length = starts[c], agreed[row, c] + n
    by_source = sources[c] * NUM_LENGTHS + length_class(length)
    if n > 0 or start >= passes or is_blind:
        return COPIED + by_source
    if chains[row, c, 0] != model[row, start]:
        return CONTRARY + by_source
    return AGREED + length_class(_agreement(model, row, start, passes, chains, lengths, agreed, starts)[2])


@compiled()
def _value_of_chain(
    model, row, c, passes, chains, lengths, agreed, starts, sources, chances, is_blind, survival, room, price
):
    """What a chain adds behind drafts that survive, and how many of its tokens are worth their slots."""
    value = 0
    for n in range(min(lengths[row, c], room)):
        key = _chain_key(model, row, c, n, passes, chains, lengths, agreed, starts, sources, is_blind)
        survival = survival * chances[key] >> SHIFT
        if survival <= price:
            return value, n
        value += survival - price
    return value, max(min(lengths[row, c], room), 0)


@compiled()
def _value_of_drafts(model, row, c, size, passes, chains, lengths, agreed, starts, sources, chances, price):
    """The value of the first tokens of a chain from the start, worth their slots or not."""
    survival, value = ONE, 0
    for n in range(size):
        key = _chain_key(model, row, c, n, passes, chains, lengths, agreed, starts, sources, False)
        survival = survival * chances[key] >> SHIFT
        value += survival - price
    return value


@compiled()
def choose(
    rows,
    limits,
    model,
    passes,
    chains,
    lengths,
    agreed,
    starts,
    sources,
    chances,
    price,
    is_blind,
    token_ids,
    num_drafts,
    num_model,
    chosen,
    values,
):
    """Choose the drafts of each request; see `Arbiter.choose`.

    Out: token_ids [B, K] int32, num_drafts and num_model [B] int32, chosen [B] int64 chain or -1, values [B, S + 1]
    int64: the best value with each number of passes.
    """
    num_chains = len(starts)
    for i in range(len(rows)):
        row, room, made = rows[i], limits[i], passes[rows[i]]
        best, best_chain, best_model, best_size = 0, _MODEL_ALONE, 0, 0
        # Without the model: its drafts say nothing.
        for c in range(num_chains):
            if starts[c] == 0:
                value, size = _value_of_chain(
                    model, row, c, 0, chains, lengths, agreed, starts, sources, chances, is_blind, ONE, room, price
                )
                if value > best:
                    best, best_chain, best_size = value, c, size
        values[i, 0] = best
        if made > 0 and not is_blind:
            # The model's first draft tells more of each chain, that one too which would have been taken without it.
            if best_chain >= 0:
                values[i, 0] = _value_of_drafts(
                    model, row, best_chain, best_size, made, chains, lengths, agreed, starts, sources, chances, price
                )
            best, best_chain, best_size = 0, _MODEL_ALONE, 0
            for c in range(num_chains):
                if starts[c] == 0:
                    value, size = _value_of_chain(
                        model, row, c, made, chains, lengths, agreed, starts, sources, chances, False, ONE, room, price
                    )
                    if value > best:
                        best, best_chain, best_size = value, c, size
        survival, value_of_model = ONE, 0
        for place in range(made):
            if place < room and survival > price:
                key = _model_key(model, row, place, made, chains, lengths, agreed, starts, is_blind)
                survival = survival * chances[key] >> SHIFT
                if survival > price:
                    value_of_model += survival - price
                    if value_of_model > best:
                        best, best_chain, best_model, best_size = value_of_model, _MODEL_ALONE, place + 1, 0
                    if not is_blind:
                        for c in range(num_chains):
                            if starts[c] == place + 1:
                                value, size = _value_of_chain(
                                    model,
                                    row,
                                    c,
                                    made,
                                    chains,
                                    lengths,
                                    agreed,
                                    starts,
                                    sources,
                                    chances,
                                    False,
                                    survival,
                                    room - place - 1,
                                    price,
                                )
                                if value_of_model + value > best:
                                    best, best_chain = value_of_model + value, c
                                    best_model, best_size = place + 1, size
            values[i, place + 1] = best
        if is_blind and best_model > 0:
            # Only what stands behind all of the model's sampled drafts may depend on them.
            survival_of_all = ONE
            for place in range(best_model):
                survival_of_all = survival_of_all * chances[ALONE + min(place, NUM_PLACES - 1)] >> SHIFT
            most = 0
            for c in range(num_chains):
                if starts[c] == best_model:
                    value, size = _value_of_chain(
                        model,
                        row,
                        c,
                        0,
                        chains,
                        lengths,
                        agreed,
                        starts,
                        sources,
                        chances,
                        True,
                        survival_of_all,
                        room - best_model,
                        price,
                    )
                    if value > most:
                        most, best_chain, best_size = value, c, size
        token_ids[i, :best_model] = model[row, :best_model]
        if best_chain >= 0:
            token_ids[i, best_model : best_model + best_size] = chains[row, best_chain, :best_size]
        token_ids[i, best_model + best_size :] = -1
        num_drafts[i], num_model[i], chosen[i] = best_model + best_size, best_model, best_chain


@compiled()
def _repeats(model, row, c, chains, lengths, starts, sources):
    """Whether a chain behind the model's drafts says what the same source has said from the start."""
    start = starts[c]
    for other in range(len(starts)):
        if starts[other] != 0 or sources[other] != sources[c] or lengths[row, other] <= start:
            continue
        same = chains[row, other, start] == chains[row, c, 0]
        for place in range(start):
            same = same and chains[row, other, place] == model[row, place]
        if same:
            return True
    return False


@compiled()
def judge(
    token_ids, num_tokens, rows, known, model, passes, chains, lengths, agreed, starts, sources, is_blind, hits, trials
):
    """Judge what was offered by the tokens that have come since; see `Arbiter.judge`.

    token_ids: [>=B, max_model_len] int32. num_tokens: [B] int64. known: [R] int64, the tokens that there were when the
    state's offers were made; -1: there are none. Returns the number of tokens that have come.
    """
    total = 0
    for i in range(len(rows)):
        row = rows[i]
        first = known[row]
        num_new = num_tokens[i] - first
        if first < 0 or num_new <= 0:
            continue
        total += num_new
        made, right = passes[row], 0
        while right < min(made, num_new):
            hit = model[row, right] == token_ids[i, first + right]
            key = _model_key(model, row, right, made, chains, lengths, agreed, starts, is_blind)
            trials[key] += 1
            hits[key] += hit
            if not hit:
                break
            right += 1
        for c in range(len(starts)):
            start = starts[c]
            if start > right or lengths[row, c] == 0:
                continue
            if start > 0 and _repeats(model, row, c, chains, lengths, starts, sources):
                continue
            for n in range(min(lengths[row, c], num_new - start)):
                hit = chains[row, c, n] == token_ids[i, first + start + n]
                # What the model drafts as well has been judged as its draft.
                is_shared = n == 0 and start < made and chains[row, c, 0] == model[row, start]
                if not is_shared or is_blind:
                    key = _chain_key(model, row, c, n, made, chains, lengths, agreed, starts, sources, is_blind)
                    trials[key] += 1
                    hits[key] += hit
                if not hit:
                    break
    return total


@compiled()
def update_chances(hits, trials, prior, chances):
    """Set the chances by hits and trials, of which the older count less."""
    for key in range(len(chances)):
        while trials[key] >= MAX_TRIALS:
            trials[key] >>= 1
            hits[key] >>= 1
        chances[key] = (hits[key] * ONE + prior[key] * PRIOR_TRIALS) // (trials[key] + PRIOR_TRIALS)


@compiled()
def _class_of_history(row, lengths, agreed, starts):
    """The class of the longest agreement that speaks for a chain from the start; 0 where there is none."""
    length = 0
    for c in range(len(starts)):
        if starts[c] == 0 and lengths[row, c] > 0:
            length = max(length, agreed[row, c])
    return length_class(length)


@compiled()
def plan_passes(
    rows,
    lengths,
    agreed,
    starts,
    credits,
    gains,
    gain_trials,
    steps_since_all,
    prior_gain,
    prior_trials,
    period,
    prices,
):
    """How many passes of the draft model to make for a batch; see `Arbiter.num_passes`.

    credits: [R] int64, below 0 for a request that has given the model up. gains, gain_trials: [NUM_LENGTHS, S] int64.
    steps_since_all: [NUM_LENGTHS] int64. prices: [S] int64, of each pass.
    """
    num_passes = len(prices)
    seen = np.zeros(NUM_LENGTHS, np.bool_)
    totals = np.zeros(num_passes, np.int64)
    num_awake = 0
    for i in range(len(rows)):
        row = rows[i]
        if credits[row] < 0:
            continue
        num_awake += 1
        which = _class_of_history(row, lengths, agreed, starts)
        seen[which] = True
        for k in range(num_passes):
            totals[k] += (gains[which, k] + prior_gain * prior_trials) // (gain_trials[which, k] + prior_trials)
    if num_awake == 0 or num_passes == 0:
        return 0
    planned, best, value = 1, 0, 0
    for k in range(num_passes):
        value += totals[k] - prices[k]
        if value > best:
            planned, best = k + 1, value
    for which in range(NUM_LENGTHS):
        if seen[which]:
            steps_since_all[which] += 1
            if steps_since_all[which] >= period:
                planned = num_passes
    if planned == num_passes:
        for which in range(NUM_LENGTHS):
            if seen[which]:
                steps_since_all[which] = 0
    return planned


@compiled()
def settle(
    rows,
    limits,
    passes,
    values,
    lengths,
    agreed,
    starts,
    credits,
    gains,
    gain_trials,
    max_trials,
    most_credit,
    prices,
    step_price,
):
    """Enter what the passes of a step have added and cost; see `Arbiter.choose`. Returns the sum over the batch.

    Accounts are in the time of steps: `step_price` is what a request gets in a step's time, in tokens.
    """
    num_awake = 0
    for i in range(len(rows)):
        if credits[rows[i]] >= 0:
            num_awake += 1
    if num_awake == 0:
        return 0
    total = 0
    for i in range(len(rows)):
        row = rows[i]
        if credits[row] < 0 or limits[i] == 0:
            continue
        which = _class_of_history(row, lengths, agreed, starts)
        profit = 0
        for k in range(passes[row]):
            gain = values[i, k + 1] - values[i, k]
            gains[which, k] += gain
            gain_trials[which, k] += 1
            if gain_trials[which, k] >= max_trials:
                gains[which, k] >>= 1
                gain_trials[which, k] >>= 1
            profit += gain - prices[k] // num_awake
        profit = profit * ONE // step_price
        total += profit
        credits[row] = max(min(credits[row] + profit, most_credit), -1)
    return total
