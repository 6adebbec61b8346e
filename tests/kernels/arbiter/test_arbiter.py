"""The arbiter's kernels against their specification, bit for bit, under Triton's interpreter (TRITON_INTERPRET=1)."""

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kernels.launches import Launches, OnlyTorch
from tests.kernels.limits import limits_of
from vllm_specplus.kernels.arbiter import (
    NUM_TOTALS,
    check_lasting,
    choice,
    choose_and_settle,
    judge_and_offer,
    judgement,
    make_state,
    state,
)
from vllm_specplus.kernels.counts import Counted, count_drafts
from vllm_specplus.kernels.drafts import DraftCounts
from vllm_specplus.proposers import _arbiter as spec
from vllm_specplus.proposers.arbiter import Arbiter, prior_chances
from vllm_specplus.sources import NGRAM, REFERENCE, SOURCES, SUFFIX, WHOLE_OUTPUT
from vllm_specplus.testing.ahead_of_time import AheadOfTime, run_without_interpreter

pytestmark = pytest.mark.interpreter

ONE = spec.ONE
SENTINEL = -99
MAX_LEN = 64
NUM_ROWS = 8
PRIOR = torch.full((spec.NUM_KEYS,), ONE // 2)
BY_STATE = torch.zeros(3, 4, dtype=torch.int32)


class Pair:
    """A specification's state and the kernels', which are given the same offers and texts.

    Texts and offers are of few distinct tokens, so that they often agree. What is out of use holds other values.

    Args:
        text_lengths, lengths: tokens of a text before the first step, and of a chain; each is one of these.
        hit_rate: of each key; None: drawn.
        is_full: whether each key and each gain has as many trials as are kept; else they are drawn.
    """

    def __init__(
        self,
        *,
        num_steps,
        width,
        sources,
        starts,
        is_blind,
        vocab_size,
        text_lengths,
        lengths,
        hit_rate,
        is_full,
        seed,
    ):
        self.random = np.random.default_rng(seed)
        self.width, self.num_steps, self.vocab_size, self.lengths = width, num_steps, vocab_size, lengths
        num_keys = (spec.NUM_KEYS,)
        self.kernels = make_state(
            NUM_ROWS,
            num_model_steps=num_steps,
            num_speculative_tokens=width,
            chain_sources=sources,
            starts=starts,
            prior=PRIOR,
            is_blind=is_blind,
        )
        # A large batch leaves several times as many trials as are kept.
        counts = [0, 1, spec.MAX_TRIALS - 1, 9 * spec.MAX_TRIALS, *self.integers(0, spec.MAX_TRIALS, (3,))]
        trials = self.random.choice(counts[2:3] if is_full else counts, num_keys)
        trials[spec.COPIED :] *= spec.MAX_COPIED_TRIALS // spec.MAX_TRIALS
        hits = self.integers(0, trials + 1, num_keys) if hit_rate is None else trials * hit_rate
        misses = self.integers(0, spec.MAX_MISSES, num_keys)
        chances = self.random.choice([0, ONE, *self.integers(0, ONE + 1, (9,))], num_keys)
        nothing = np.zeros(num_keys, np.int64)
        self.table = spec.Table(nothing, nothing.copy(), hits, trials, misses, chances)
        shape = (NUM_ROWS, len(starts))
        self.offers = spec.Offers(
            self.integers(0, self.vocab_size, (NUM_ROWS, num_steps), np.int32),
            np.zeros(NUM_ROWS, np.int64),
            self.integers(0, self.vocab_size, (*shape, width), np.int32),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int32),
            np.array(starts, np.int64),
            np.array(sources, np.int64),
            np.full((NUM_ROWS, spec.MAX_STOPS), spec.NO_TOKEN, np.int32),
            self.integers(0, width + 1, (NUM_ROWS,)),
            is_blind,
        )
        by_length = (spec.NUM_LENGTHS, num_steps)
        counts = [0, 5, spec.MAX_GAIN_TRIALS - 1, 9 * spec.MAX_GAIN_TRIALS]
        sums_and_trials = []
        for _ in range(2):
            trials = self.random.choice(counts[2:3] if is_full else counts, by_length)
            sums_and_trials += [trials * self.integers(-ONE // 4, ONE, by_length), trials]
        self.gains = spec.Gains(*sums_and_trials, self.integers(0, spec.PASS_PERIOD, spec.NUM_LENGTHS))
        counts = [0, ONE, 2 * spec.MAX_EXPECTED - ONE, 9 * spec.MAX_EXPECTED]
        for name, num_rows in (("record", NUM_ROWS), ("opposed", 1)):
            trials = self.random.choice(counts, (num_rows, spec.NUM_RECORDS))
            expected, hits = (trials * self.integers(0, 9, trials.shape) // 8 for _ in range(2))
            setattr(self, name, spec.Record(trials, expected, hits))
        self.foregone = spec.Foregone(np.full(NUM_ROWS, spec.NO_PASS), np.zeros(NUM_ROWS, np.int64))
        self.offer_positions = np.full(NUM_ROWS, spec.NO_OFFERS)
        self.credits = self.random.choice([spec.ASLEEP, 0, ONE, spec.MOST_CREDIT, spec.MOST_CREDIT], NUM_ROWS)
        self.token_ids = self.integers(0, self.vocab_size, (NUM_ROWS, MAX_LEN), np.int32)
        self.num_tokens = self.random.choice(text_lengths, NUM_ROWS)
        self.limits = np.zeros(NUM_ROWS, np.int64)

    def integers(self, low, high, shape, dtype=np.int64):
        return self.random.integers(low, high, shape).astype(dtype)

    def share(self):
        """Give the kernels what the specification has."""
        state = self.kernels
        pairs = [*zip(state.offers, self.offers[:-1], strict=True), *zip(state.table, self.table, strict=True)]
        pairs += [*zip(state.gains, self.gains, strict=True), *zip(state.record, self.record, strict=True)]
        pairs += [*zip(state.foregone, self.foregone, strict=True), *zip(state.opposed, self.opposed, strict=True)]
        for tensor, array in [*pairs, (state.offer_positions, self.offer_positions), (state.credits, self.credits)]:
            tensor.copy_(torch.from_numpy(array))

    def assert_same(self):
        state = self.kernels
        named = [*self.offers._asdict().items()][:-1]
        pairs = [(name, getattr(state.offers, name), array) for name, array in named]
        pairs += [(name, getattr(state.table, name), array) for name, array in self.table._asdict().items()]
        pairs += [(name, getattr(state.record, name), array) for name, array in self.record._asdict().items()]
        for group in ("opposed", "gains", "foregone"):
            arrays = getattr(self, group)._asdict().items()
            pairs += [(f"{group}.{name}", getattr(getattr(state, group), name), array) for name, array in arrays]
        pairs += [(name, getattr(state, name), getattr(self, name)) for name in ("offer_positions", "credits")]
        for name, tensor, array in pairs:
            np.testing.assert_array_equal(tensor.numpy(), array, name)

    def draw_batch(self, batch_size):
        """Rows of the batch in any order, [B] int64, and the kernels' `idx_mapping`, with places without a request."""
        rows = self.random.permutation(NUM_ROWS)[:batch_size]
        is_request = self.random.random(batch_size) < 0.8
        idx_mapping = torch.from_numpy(np.where(is_request, rows, -1))
        return rows[is_request], is_request, idx_mapping.to(torch.int32) if self.random.random() < 0.5 else idx_mapping

    def grow_texts(self):
        """Each text goes on, often as an offer said; some rows begin a new request, and some have no new tokens."""
        for row in range(NUM_ROWS):
            if self.random.random() < 0.1:
                self.offer_positions[row] = spec.NO_OFFERS
                self.credits[row] = self.random.choice([spec.ASLEEP, spec.MOST_CREDIT])
                self.num_tokens[row] = self.random.choice([0, 3])
            new = self.integers(0, self.vocab_size, (int(self.random.integers(0, self.width + 2)),), np.int32)
            if len(self.offers.starts) and self.random.random() < 0.8:
                c = self.random.integers(0, len(self.offers.starts))
                start = self.offers.starts[c] if self.random.random() < 0.8 else 0
                said = np.concatenate([self.offers.model[row, :start], self.offers.chains[row, c]])[: len(new)]
                new[: len(said)] = said
            # Where the model was right, the step often ends with the token behind its drafts.
            passes = self.offers.passes[row]
            if self.random.random() < 0.3:
                new = new[: passes + 1]
                new[:passes] = self.offers.model[row, : min(passes, len(new))]
            end = min(self.num_tokens[row] + len(new), MAX_LEN)
            self.token_ids[row, self.num_tokens[row] : end] = new[: end - self.num_tokens[row]]
            self.num_tokens[row] = end

    def draw_offers(self, rows):
        """Offers to the rows of the batch, those of the model but to the ones that have not given it up."""
        num_passes = self.random.choice([self.num_steps, self.random.integers(0, self.num_steps + 1)])
        for row in rows:
            shape = self.offers.lengths[row].shape
            self.offers.lengths[row] = self.random.choice(self.lengths, shape)
            agreements = [0, 1, 6, 7, 36, 37, WHOLE_OUTPUT, self.integers(0, 60, ())]
            self.offers.agreed[row] = self.random.choice(agreements, shape)
            self.offers.chains[row] = self.integers(0, self.vocab_size, (*shape, self.width))
            if self.credits[row] != spec.ASLEEP:
                self.offers.passes[row] = num_passes
                self.offers.model[row, :num_passes] = self.integers(0, self.vocab_size, (num_passes,))
        # Where the model's drafts are a chain's, those behind them often repeat it, up to its end or past it.
        from_start = np.flatnonzero(self.offers.starts == 0)
        for row in rows[self.random.random(len(rows)) < 0.4]:
            if len(from_start) and any(self.lengths):
                first = self.random.choice(from_start)
                said = self.offers.chains[row, first].copy()
                self.offers.lengths[row, first] = self.random.integers(1, self.width + 1)
                self.offers.model[row, : min(num_passes, self.width)] = said[:num_passes]
                for c, start in enumerate(self.offers.starts):
                    self.offers.chains[row, c, : max(self.width - start, 0)] = said[start:]

    def begin(self, batch):
        rows, _, idx_mapping = batch
        num_new = torch.tensor([1000])
        num_tokens = self.num_tokens[rows]
        prices = np.zeros(self.num_steps, np.int64)
        groups = self.offers, self.table, self.record, self.opposed, self.gains, self.foregone
        state = spec.to_addresses(self.offer_positions, self.credits, *groups, prices, self.list_prices(0))
        total, is_anyone_awake = spec.begin_step(state, self.token_ids[rows], num_tokens, rows)
        assert is_anyone_awake == np.any(self.credits[rows] != spec.ASLEEP)
        texts, num_places = (torch.from_numpy(self.token_ids), self.device_lengths()), len(idx_mapping)
        no_drafts = torch.zeros(num_places, 0, dtype=torch.int64)
        judge_and_offer(self.kernels, *texts, idx_mapping, num_new, limits_of([1] * num_places), no_drafts)
        self.assert_nothing_is_counted()
        assert num_new.tolist() == [1000 + total]
        self.assert_same()

    def list_prices(self, slot_price):
        """The kernels know prices of slots alone."""
        return spec.ListPrices(np.arange(self.width + 1) * slot_price, np.full(self.width, slot_price))

    def device_lengths(self):
        return torch.from_numpy(self.num_tokens).to(torch.int32)

    def choose_and_settle(self, batch, prices):
        rows, is_request, idx_mapping = batch
        slot_price, step_price, *pass_prices = prices
        num_places = len(idx_mapping)
        limits = self.random.choice([0, 1, self.width, self.width, self.width], num_places)
        # A step without drafts plans one that may have some.
        planning = limits if self.random.random() < 0.5 else self.random.choice([0, 1], num_places)
        expected = self.chosen(rows, limits[is_request], slot_price)
        total, planned = self.settle(rows, planning[is_request], expected.values, slot_price, step_price, pass_prices)
        self.offer_positions[rows] = self.num_tokens[rows]
        drafts = torch.full((num_places, self.width + 2), SENTINEL)
        by_state = torch.full((3, len(self.num_tokens)), SENTINEL, dtype=torch.int32)
        totals, report = torch.tensor([11, 1000]), torch.full((NUM_TOTALS + 2 + num_places,), SENTINEL)
        for tensor in self.kernels.scratch:
            tensor.fill_(SENTINEL)
        # As the last `judge_and_offer` counts them.
        self.kernels.tallies.num_offered.fill_(np.count_nonzero(self.offers.passes[rows]))
        chosen = choose_and_settle(
            self.kernels,
            self.device_lengths(),
            idx_mapping,
            limits_of(limits),
            torch.tensor(prices),
            drafts[:, : self.width],
            DraftCounts(*by_state[:2]),
            by_state[2],
            totals,
            report,
            planning=None if planning is limits else limits_of(planning),
        )
        self.assert_same()
        self.assert_nothing_is_counted()
        assert torch.all(drafts[:, self.width :] == SENTINEL)
        outputs = [drafts[:, : self.width], chosen.counts.num_drafts_ptr, chosen.counts.num_model_ptr[:num_places]]
        padded = np.maximum(expected.token_ids, 0)
        for tensor, array in zip(outputs, (padded, expected.num_drafts, expected.num_model), strict=True):
            np.testing.assert_array_equal(tensor.numpy()[is_request], array)
            assert np.all(tensor.numpy()[~is_request] == 0)
        noted = np.full(by_state.shape, SENTINEL)
        noted[:, rows] = expected.num_drafts, expected.num_model, expected.source
        np.testing.assert_array_equal(by_state.numpy(), noted)
        chances = chosen.chances.numpy()[:num_places]
        np.testing.assert_array_equal(chances[is_request], expected.chances)
        assert np.all(chances[~is_request] == 0)

        assert totals.tolist() == [11, 1000 + total]
        credits = np.full(num_places, spec.ASLEEP)
        credits[is_request] = self.credits[rows]
        assert report.tolist() == [11, 1000 + total, planned, *credits, SENTINEL]

    def chosen(self, rows, limits, slot_price):
        """What the specification chooses."""
        chosen = spec.Chosen(
            np.full((len(rows), self.width), SENTINEL, np.int32),
            *(np.full(len(rows), SENTINEL, np.int32) for _ in range(2)),
            np.full(len(rows), SENTINEL),
            np.full((len(rows), self.num_steps + 1), SENTINEL),
            np.full((len(rows), self.width), SENTINEL),
        )
        beliefs = spec.Beliefs(self.table.chances, self.record, self.opposed)
        spec.choose(rows, limits, self.offers, beliefs, self.list_prices(slot_price), chosen)
        self.assert_chances_give_the_value(rows, chosen, slot_price)
        return chosen

    def settle(self, rows, limits, values, slot_price, step_price, pass_prices):
        """What the passes have earned by the specification, and how many it plans."""
        total, pass_prices = 0, np.array(pass_prices, np.int64)
        groups = self.offers, values, self.credits, self.gains
        if self.num_steps:
            total = spec.settle(rows, *groups, pass_prices, step_price, self.foregone, slot_price)
        return total, spec.plan_passes(rows, limits, self.offers, self.credits, self.gains, pass_prices)

    def assert_nothing_is_counted(self):
        """What programs count together begins anew in each call."""
        for name, counts in self.kernels.tallies._asdict().items():
            assert name == "num_offered" or not counts.any(), name

    def assert_chances_give_the_value(self, rows, expected, slot_price):
        """A blind choice has no value of its own: its chain may be another than the one it was valued with."""
        for row, drafts, chances, values in zip(
            rows, expected.token_ids, expected.chances, expected.values, strict=True
        ):
            survival, value = ONE, 0
            for chance in chances[drafts >= 0]:
                survival = survival * chance >> spec.SHIFT
                value += survival - slot_price
            assert self.offers.is_blind or value == values[self.offers.passes[row]]
            assert np.all(chances[drafts < 0] == 0)


@st.composite
def chains(draw, num_steps):
    """Sources and starts of all chains, as `AdaptiveDrafter` has them, or some of them in any order."""
    matchers = draw(st.sampled_from([[NGRAM], [NGRAM, SUFFIX], [NGRAM, SUFFIX], [NGRAM, NGRAM]]))
    named = [(source, start) for start in range(num_steps + 1) for source in matchers] + [(REFERENCE, 0)]
    if draw(st.booleans()):
        named = draw(st.permutations(named))[: draw(st.integers(0, len(named)))]
    return [source for source, _ in named], [start for _, start in named]


@st.composite
def cases(draw):
    num_steps, width = draw(st.integers(0, 3)), draw(st.integers(1, 8))
    sources, starts = draw(chains(num_steps))
    prices = st.sampled_from([0, 1, ONE // 50, ONE // 5, ONE - 1, ONE, 3 * ONE])
    return {
        "num_steps": num_steps,
        "width": width,
        "sources": sources,
        "starts": starts,
        "is_blind": draw(st.booleans()),
        "vocab_size": draw(st.sampled_from([1, 2, 2, 3])),
        "text_lengths": draw(st.sampled_from([[0], [0, 1, 5]])),
        "lengths": draw(st.lists(st.sampled_from([0, 1, min(2, width), width, width]), min_size=1, max_size=4)),
        "hit_rate": draw(st.sampled_from([None, None, 0, 1])),
        "is_full": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32)),
        "batch_sizes": draw(st.lists(st.integers(1, 5), min_size=2, max_size=3)),
        "prices": [draw(prices), draw(prices), draw(prices | st.just(2**36))],
    }


WIDE = {
    "num_steps": 3,
    "width": 24,
    "sources": [NGRAM, SUFFIX] * 4 + [REFERENCE],
    "starts": [0, 0, 1, 1, 2, 2, 3, 3, 0],
    "is_blind": False,
    "vocab_size": 2,
    "text_lengths": [0, 1, 5],
    "lengths": [0, 1, 2, 24],
    "hit_rate": None,
    "is_full": False,
    "seed": 7,
    "batch_sizes": [5, 5, 5],
    "prices": [ONE // 50, ONE // 10, ONE],
}
USUAL = WIDE | {"width": 6, "lengths": [0, 1, 2, 6]}
EMPTY = USUAL | {"text_lengths": [0], "lengths": [0]}


@settings(max_examples=75)
@given(cases())
@example(WIDE)
@example(EMPTY)
@example(USUAL | {"vocab_size": 1})  # all sources say the same
@example(USUAL | {"width": 1, "lengths": [0, 1]})
@example(USUAL | {"is_full": True})
@example(USUAL | {"hit_rate": 0})
@example(USUAL | {"hit_rate": 1})
def test_equals_the_specification(case):
    slot_price, pass_price, step_price = case["prices"]
    pair = Pair(**{name: value for name, value in case.items() if name not in ("batch_sizes", "prices")})
    pair.share()
    pass_prices = [pass_price, pass_price // 3, pass_price // 3][: pair.num_steps]
    for batch_size in case["batch_sizes"]:
        batch = pair.draw_batch(batch_size)
        pair.grow_texts()
        pair.share()
        pair.begin(batch)
        pair.draw_offers(batch[0])
        pair.share()
        pair.choose_and_settle(batch, [slot_price, max(step_price, 1), *pass_prices])


def test_constants_are_those_of_the_specification():
    """The kernels cannot import the specification, which imports numba."""
    constants = {name: value.value for name, value in vars(state).items() if isinstance(value, tl.constexpr)}
    assert len(constants) > 15
    assert constants == {name: getattr(spec, name) for name in constants}


def test_a_new_state_is_that_of_a_new_arbiter():
    pair = Arbiter(
        4, num_model_steps=2, num_speculative_tokens=5, sources=[NGRAM, SUFFIX], starts=[0, 1], is_blind=True
    )
    made = make_state(
        4,
        num_model_steps=2,
        num_speculative_tokens=5,
        chain_sources=[NGRAM, SUFFIX],
        starts=[0, 1],
        prior=torch.from_numpy(prior_chances()),
        is_blind=True,
    )
    # All but the chances, which the first step computes before it chooses.
    groups = [(made.offers, pair._offers[:-1]), (made.table[:-1], pair.table[:-1]), (made.gains, pair._gains)]
    groups += [(made.record, pair._record), (made.opposed, pair._opposed), (made.foregone, pair._foregone)]
    groups.append(((made.offer_positions, made.credits), (pair._offer_positions, pair._credits)))
    for tensors, arrays in groups:
        for tensor, array in zip(tensors, arrays, strict=True):
            assert tensor.numpy().dtype == array.dtype
            np.testing.assert_array_equal(tensor.numpy(), array)
    assert made.sizes.IS_BLIND.value


def test_more_tokens_than_a_row_holds():
    """A count past the row's end must not lead into the next row."""
    made = make_state(2, num_model_steps=0, num_speculative_tokens=4, chain_sources=[NGRAM], starts=[0], prior=PRIOR)
    made.offer_positions[0], made.offers.lengths[0], num_new = 2, 4, torch.zeros(1, dtype=torch.int64)
    token_ids, num_tokens = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32)
    no_drafts = torch.zeros(1, 0, dtype=torch.int64)
    judge_and_offer(made, token_ids, num_tokens, torch.tensor([0]), num_new, limits_of([4]), no_drafts)
    assert num_new.tolist() == [1]
    assert (made.table.trials - spec.PRIOR_TRIALS).sum() == spec.TRIAL


def counted(num_reqs, width, is_masked=False):
    """Drafts of the first rows, of which some were accepted; rows of the batch have all slots."""
    random = torch.Generator().manual_seed(0)
    num_drafts, num_model, num_sampled = torch.randint(width + 1, (3, num_reqs), generator=random, dtype=torch.int32)
    bounds = torch.arange(num_reqs + 1, dtype=torch.int32) * (width + 1)
    return Counted(
        torch.zeros(2, len(SOURCES), width, dtype=torch.int64),
        torch.zeros(num_reqs, 3, dtype=torch.int64),
        num_sampled,
        bounds,
        num_drafts,
        num_model,
        torch.randint(NGRAM, REFERENCE + 1, (num_reqs,), generator=random, dtype=torch.int32),
        torch.arange(num_reqs * (width + 1)) % 3 == 0 if is_masked else None,
    )


@pytest.mark.parametrize("is_masked", [True, False])
def test_drafts_are_counted_as_by_their_own_kernel(is_masked):
    """But those of a place without a request."""
    found, wanted = counted(4, 4, is_masked), counted(4, 4, is_masked)
    rows = torch.tensor([2, -1, 0, 3])
    judge_and_offer(**arguments(4, idx_mapping=rows, counted=found)[judge_and_offer])
    num_sampled = torch.where(rows >= 0, wanted.num_sampled, 0)
    count_drafts(wanted._replace(num_sampled=num_sampled), rows.clamp(min=0))
    assert found.counts.sum() > 8
    assert torch.equal(found.counts, wanted.counts)
    assert torch.equal(found.request_counts, wanted.request_counts)


def arguments(num_reqs=2, num_steps=2, width=4, num_chains=3, **changes):
    """Valid arguments of each of the functions, with `changes`: of all that take an argument of that name."""
    made = make_state(
        4,
        num_model_steps=num_steps,
        num_speculative_tokens=width,
        chain_sources=[NGRAM] * num_chains,
        starts=[min(c, num_steps) for c in range(num_chains)],
        prior=PRIOR,
        is_blind=changes.pop("is_blind", False),
    )
    one = torch.ones(1, dtype=torch.int64)
    batch = {"state": made, "idx_mapping": torch.arange(num_reqs, dtype=torch.int32)}
    num_tokens = {"num_tokens": torch.full((4,), 3, dtype=torch.int32)}
    limits = {"limits": limits_of([width] * num_reqs)}
    calls = {
        judge_and_offer: batch
        | num_tokens
        | limits
        | {"counted": None}
        | {"token_ids": torch.zeros(4, 16, dtype=torch.int32), "num_new": one}
        | {"model_drafts": torch.zeros(num_reqs, num_steps, dtype=torch.int64)},
        choose_and_settle: batch
        | num_tokens
        | limits
        | {"prices": torch.ones(2 + num_steps, dtype=torch.int64)}
        | {"drafts": torch.zeros(num_reqs, width, dtype=torch.int64)}
        | {"by_state": DraftCounts(*BY_STATE[:2]), "sources": BY_STATE[2]}
        | {"totals": torch.zeros(2, dtype=torch.int64), "report": torch.zeros(3 + num_reqs, dtype=torch.int64)},
    }
    return {
        function: call | {name: value for name, value in changes.items() if name in call}
        for function, call in calls.items()
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": torch.zeros(4, 16)}, r"token_ids must be torch\.int32"),
        ({"token_ids": torch.zeros(16, 4, dtype=torch.int32).T}, "token_ids must .* contiguous rows"),
        ({"num_tokens": torch.zeros(3, dtype=torch.int32)}, "num_tokens must"),
        ({"by_state": DraftCounts(BY_STATE[0], BY_STATE[1].long())}, "by_state.num_model_ptr must"),
        ({"by_state": DraftCounts(BY_STATE[0, :3], BY_STATE[1])}, "by_state.num_drafts_ptr must"),
        ({"sources": torch.zeros(4)}, "sources must"),
        ({"totals": torch.zeros(3, dtype=torch.int64)}, "totals must"),
    ],
)
def test_lasting_arguments_of_another_layout(changes, message):
    calls = arguments()
    names = "state", "num_tokens", "by_state", "sources", "totals"
    lasting = {"token_ids": calls[judge_and_offer]["token_ids"]}
    lasting |= {name: calls[choose_and_settle][name] for name in names}
    check_lasting(**lasting)
    with pytest.raises(ValueError, match=message):
        check_lasting(**lasting | changes)


def test_no_requests():
    for function, call in arguments(0).items():
        function(**call)


KERNELS = [
    (judgement, "_judge_kernel"),
    (choice, "_choose_kernel"),
]


def test_launches_depend_on_shapes_alone(monkeypatch):
    """A CUDA graph can capture the calls, and they never wait."""
    launches = []
    for module, name in KERNELS:
        launches.append(Launches())
        monkeypatch.setattr(module, name, launches[-1])
    nobody = torch.full((3,), -1, dtype=torch.int32)
    calls = [
        arguments(3),
        arguments(3, idx_mapping=nobody, limits=limits_of([0] * 3), prices=torch.tensor([7, 1, 1, 1])),
    ]
    with OnlyTorch(torch.ops.aten.empty):
        for functions in calls:
            for function, call in functions.items():
                function(**call)
    assert [launch.grids for launch in launches] == [[(3,)] * 2, [(3,)] * 2]


def compile_ahead_of_time():
    """Run in a process of its own: compile the kernels as the functions launch them."""
    for module, name in KERNELS:
        setattr(module, name, AheadOfTime(getattr(module, name)))
    for options in (
        {"num_steps": 3, "width": 8, "num_chains": 7},
        {"num_steps": 1, "width": 1, "num_chains": 0, "is_blind": True, "idx_mapping": torch.arange(2)},
        {"num_steps": 0, "num_chains": 2},
        {"counted": counted(2, 4)},
        {"counted": counted(2, 4, is_masked=True)},
    ):
        for function, call in arguments(**options).items():
            function(**call)
    print("compiled", *(len(getattr(module, name).compiled) for module, name in KERNELS))


def test_kernels_compile_for_a_gpu(tmp_path):
    code = "from tests.kernels.arbiter import test_arbiter; test_arbiter.compile_ahead_of_time()"
    assert "compiled 5 5" in run_without_interpreter(code, tmp_path)
