"""The kernels that fill the arbiter's offers against their specification, bit for bit, under Triton's interpreter."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kernels.launches import Launches, OnlyTorch
from tests.kernels.limits import limits_of
from tests.proposers.reference import make_history
from vllm_specplus.kernels import ngram
from vllm_specplus.kernels.arbiter import (
    NUM_TOTALS,
    NgramChains,
    choice,
    choose_and_settle,
    judge_and_offer,
    make_state,
    offer_chains,
    offers,
)
from vllm_specplus.kernels.drafts import DraftCounts
from vllm_specplus.proposers import NgramMatcher
from vllm_specplus.proposers import _arbiter as spec
from vllm_specplus.proposers.adaptive import AdaptiveDrafter
from vllm_specplus.proposers.arbiter import Prices, prior_chances
from vllm_specplus.sources import NGRAM, REFERENCE, SUFFIX
from vllm_specplus.testing.ahead_of_time import AheadOfTime, run_without_interpreter

pytestmark = pytest.mark.interpreter

MAX_LEN = 48
PRIOR = torch.full((spec.NUM_KEYS,), spec.ONE // 2)


def new_state(num_rows, num_steps, width, matchers=(NGRAM,), prior=PRIOR):
    """A state with the chains of `AdaptiveDrafter`."""
    return make_state(
        num_rows,
        num_model_steps=num_steps,
        num_speculative_tokens=width,
        chain_sources=[*matchers] * (num_steps + 1) + [REFERENCE],
        starts=[start for start in range(num_steps + 1) for _ in matchers] + [0],
        prior=prior,
    )


def search_ngrams(state, token_ids, num_tokens, idx_mapping, limits, longest=None, **sizes):
    """A single search."""
    return NgramChains(state, token_ids, num_tokens, **sizes).search(idx_mapping, limits, longest)


def search_after_another(*args, longest=None, **sizes):
    """A search after one that has found huge keys: one would win if it were read."""
    state, token_ids, num_tokens, *batch = args
    chains = NgramChains(state, token_ids, num_tokens, **sizes)
    chains._keys.fill_(2**62)
    return chains.search(*batch, longest)


def choose_of(state, num_tokens, idx_mapping, limits, matches):
    """`choose_and_settle` with matches, whose drafts nobody reads."""
    drafts = torch.zeros(len(idx_mapping), state.offers.chains.shape[2], dtype=torch.int64)
    by_state = torch.zeros(3, len(num_tokens), dtype=torch.int32)
    prices = torch.ones(2 + state.offers.model.shape[1], dtype=torch.int64)
    outputs = drafts, DraftCounts(*by_state[:2]), by_state[2], *totals_and_report(len(idx_mapping))
    choose_and_settle(state, num_tokens, idx_mapping, limits, prices, *outputs, matches=matches)


def totals_and_report(num_reqs):
    """Where `choose_and_settle` writes what the host has to know."""
    totals = torch.zeros(NUM_TOTALS, dtype=torch.int64)
    return totals, totals.new_zeros(NUM_TOTALS + 1 + num_reqs)


class Pair:
    """The same offers of the specification and of the kernels, on which random values stand at first.

    Args:
        texts: of each place of the batch; None is a place without a request.
        model: [B][passes], the model's drafts for each place.
        stops: of each place, the tokens that end its text; those that are left out have none.
    """

    def __init__(self, texts, model, *, num_steps, width, matchers=(NGRAM,), asleep=(), seed=0, stops=()):
        self.random = np.random.default_rng(seed)
        self.texts, self.num_steps, self.width, self.matchers = texts, num_steps, width, matchers
        self.num_rows = len(texts) + 2
        self.model = np.array(model, np.int64).reshape(len(texts), -1)
        self.rows = self.random.permutation(self.num_rows)[: len(texts)]
        self.is_request = np.array([text is not None for text in texts], bool)
        self.idx_mapping = torch.from_numpy(np.where(self.is_request, self.rows, -1)).to(torch.int32)
        self.kernels = new_state(self.num_rows, num_steps, width, matchers)
        for field in self.kernels.offers[:5]:
            field.copy_(torch.from_numpy(self.random.integers(-9, 9, field.shape)))
        self.kernels.offers.passes.clamp_(0, num_steps)
        self.kernels.offers.lengths.clamp_(0, width)
        for row, tokens in zip(self.rows, stops, strict=False):
            self.kernels.offers.stops[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        arrays = [field.clone().numpy() for field in self.kernels.offers]
        self.offers = spec.Offers(*arrays, is_blind=False)
        self.offers.passes[self.rows[self.is_request]] = 0
        self.credits = np.ones(self.num_rows, np.int64)
        self.credits[[self.rows[i] for i in asleep]] = spec.ASLEEP
        self.kernels.credits.copy_(torch.from_numpy(self.credits))
        unused = np.zeros(0, np.int64)
        groups = (spec.Table(*[unused] * 6), *[spec.Record(*[unused] * 3)] * 2, spec.Gains(*[unused] * 5))
        groups += (spec.Foregone(unused, unused),)
        self.state = spec.to_addresses(
            unused,
            self.credits,
            self.offers,
            *groups,
            unused,
            spec.ListPrices(np.zeros(width + 1, np.int64), np.zeros(width, np.int64)),
        )
        self.token_ids = torch.zeros(self.num_rows, 1, dtype=torch.int32)
        self.num_tokens = torch.ones(self.num_rows, dtype=torch.int32)

    def assert_same(self):
        for name, tensor in self.kernels.offers._asdict().items():
            np.testing.assert_array_equal(tensor.numpy(), getattr(self.offers, name), name)

    def offer_model(self):
        rows = self.rows[self.is_request]
        model = self.model[self.is_request]
        limits = np.ones(len(rows), np.int64)
        spec.offer_model(self.state, rows, limits, model)
        strided = torch.full((len(self.texts), self.model.shape[1] + 3), -99)[:, 1 : self.model.shape[1] + 1]
        strided.copy_(torch.from_numpy(self.model))
        num_new, limits = torch.zeros(1, dtype=torch.int64), limits_of([1] * len(self.texts))
        judge_and_offer(self.kernels, self.token_ids, self.num_tokens, self.idx_mapping, num_new, limits, strided)
        self.offers.lengths[rows] = 0
        self.assert_same()
        num_offered = np.count_nonzero(self.credits[rows] != spec.ASLEEP) if strided.shape[1] else 0
        assert self.kernels.tallies.num_offered == num_offered

    def offer_ngrams(self, limits, sizes, cap, *, takes_first=False, max_len=MAX_LEN, pad=0, longest=None):
        """Rows are strided, and all tokens behind a text and of other rows are `pad`."""
        options = {"min_ngram_size": sizes[0], "max_ngram_size": sizes[1], "match_len_cap": cap}
        order = "first" if takes_first else "recent"
        self._offer_matches(NgramMatcher(self.num_rows, max_len, **options, match_order=order), limits, max_len)
        token_ids = torch.full((self.num_rows, max_len + 3), pad, dtype=torch.int32)[:, :max_len]
        num_tokens = self.num_tokens.clone()
        for row, text in zip(self.rows, self.texts, strict=True):
            if text is not None:
                token_ids[row, : len(text)] = torch.tensor(text)
                num_tokens[row] = len(text)
        given = limits_of(limits)
        matches = search_after_another(
            self.kernels,
            token_ids,
            num_tokens,
            self.idx_mapping,
            given,
            **options,
            takes_first=takes_first,
            first_chain=self.matchers.index(NGRAM),
            chains_per_start=len(self.matchers),
            longest=longest,
        )
        choose_of(self.kernels, num_tokens, self.idx_mapping, given, matches)
        self.offers.limits[self.rows[self.is_request]] = np.minimum(np.array(limits)[self.is_request], self.width)
        self.assert_same()

    def _offer_matches(self, matcher, limits, max_len):
        places = np.flatnonzero(self.is_request)
        if not len(places):
            return
        history = make_history({str(i): self.texts[i] for i in places}, max_len)
        limits = np.minimum(np.array(limits)[places], self.width)
        rows = self.rows[places]
        for start in range(self.num_steps + 1):
            chain = start * len(self.matchers) + self.matchers.index(NGRAM)
            self.offers.lengths[rows, chain] = self.offers.agreed[rows, chain] = 0
            if start <= self.model.shape[1]:
                match = matcher.match(history, self.model[places, :start], np.maximum(limits - start, 0))
                awake = self.offers.passes[rows] >= start
                found = [array[awake] for array in (match.token_ids, match.num_tokens, match.match_len)]
                spec.offer(self.state, rows[awake], chain, *found)

    def chain(self, i, start):
        """Tokens and agreement of a chain of matches, as the kernels have it."""
        row, chain = self.rows[i], start * len(self.matchers) + self.matchers.index(NGRAM)
        state = self.kernels.offers
        return state.chains[row, chain, : state.lengths[row, chain]].tolist(), int(state.agreed[row, chain])


@st.composite
def batches(draw):
    """Texts of few distinct tokens, so that matches abound, of all lengths."""
    tokens = st.sampled_from([0, 1, 2**31 - 1, 7][: draw(st.integers(1, 4))])
    num_reqs = draw(st.integers(1, 3))
    lengths = st.sampled_from([0, 1, 2, MAX_LEN]) | st.integers(0, MAX_LEN)
    texts = []
    for _ in range(num_reqs):
        size, is_request = draw(lengths), draw(st.integers(0, 7)) > 0
        texts.append(draw(st.lists(tokens, min_size=size, max_size=size)) if is_request else None)
    num_steps, width = draw(st.integers(0, 3)), draw(st.integers(1, 8))
    num_passes = draw(st.just(num_steps) | st.integers(0, num_steps))
    min_size = draw(st.sampled_from([1, 1, 2, 3]))
    stops = st.lists(tokens, max_size=2) | st.just([])
    return {
        "texts": texts,
        "stops": [draw(stops) for _ in texts],
        "model": [draw(st.lists(tokens, min_size=num_passes, max_size=num_passes)) for _ in texts],
        "num_steps": num_steps,
        "width": width,
        "matchers": draw(st.sampled_from([(NGRAM,), (NGRAM, SUFFIX), (SUFFIX, NGRAM)])),
        "asleep": [i for i in range(num_reqs) if draw(st.integers(0, 5)) == 0],
        "seed": draw(st.integers(0, 99)),
        "limits": draw(st.lists(st.just(width) | st.integers(0, width + 2), min_size=num_reqs, max_size=num_reqs)),
        "sizes": (min_size, draw(st.sampled_from([min_size, 5]))),
        "cap": draw(st.sampled_from([1, 3, 6, 8, 64])),
    }


@settings(max_examples=200)
@given(batches(), st.sampled_from([4, 16]), st.integers(1, 3), st.booleans())
def test_the_models_drafts_and_the_matches_behind_them(batch, block, max_splits, takes_first):
    batch = dict(batch)
    limits, sizes, cap = batch.pop("limits"), batch.pop("sizes"), batch.pop("cap")
    pair = Pair(**batch)
    with pytest.MonkeyPatch.context() as patch:
        # A text has several blocks, and a program takes several of them.
        patch.setattr(ngram, "_BLOCK", block)
        patch.setattr(ngram, "_MAX_SPLITS", max_splits)
        pair.offer_model()
        pair.offer_ngrams(limits, sizes, cap, takes_first=takes_first)


TEXT = [1, 2, 3, 4, 5, 1, 2, 9, 1, 2]


@pytest.mark.parametrize(
    ("text", "model", "options", "expected"),
    [
        pytest.param(TEXT, [3], {}, [([9, 1, 2, 9], 2), ([4, 5, 1], 3), ([], 0)], id="behind the drafts"),
        pytest.param(TEXT, [3, 4], {"limit": 2}, [([9, 1], 2), ([4], 3), ([], 0)], id="limited"),
        pytest.param(TEXT, [3, 4], {"limit": 0}, [([], 0)] * 3, id="limited to none"),
        pytest.param(TEXT, [3, 4], {"asleep": [0]}, [([9, 1, 2, 9], 2), ([], 0), ([], 0)], id="asleep"),
        pytest.param([], [6, 6], {}, [([], 0), ([], 0), ([6, 6], 1)], id="the model's drafts alone"),
        pytest.param([7, 8] * 2, [7, 8], {"cap": 3}, [([7, 8] * 2, 2), ([8, 7, 8], 3), ([7, 8], 4)], id="period"),
        pytest.param([7, 8] * 2, [7, 8], {"width": 1}, [([7], 2), ([], 0), ([], 0)], id="one slot"),
        pytest.param(TEXT, [3], {"stops": [[5, 2]]}, [([9, 1], 2), ([4], 3), ([], 0)], id="before a stop"),
        pytest.param(TEXT, [3], {"stops": [[3]]}, [([9, 1, 2, 9], 2), ([], 3), ([], 0)], id="behind a stop"),
    ],
)
def test_expected_chains(text, model, options, expected):
    options = {"width": 4, "asleep": [], "limit": 4, "cap": 64, "stops": []} | options
    of_pair = {name: options[name] for name in ("width", "asleep", "stops")}
    pair = Pair([text], [model], num_steps=2, **of_pair)
    pair.offer_model()
    pair.offer_ngrams([options["limit"]], (1, 5), options["cap"])
    assert [pair.chain(0, start) for start in range(3)] == expected


@pytest.mark.parametrize(("size", "agreed"), [(60, 61), (63, 64), (64, 64), (90, 64)])
def test_agreements_are_measured_up_to_the_cap(size, agreed):
    """They go on into the model's drafts, and far beyond the longest n-gram."""
    text = [5, *range(100, 100 + size), 3, 4, 6, *range(100, 100 + size)]
    pair = Pair([text], [[3]], num_steps=1, width=3)
    pair.offer_model()
    pair.offer_ngrams([3], (1, 3), 64, max_len=256)
    assert [pair.chain(0, start) for start in (0, 1)] == [([3, 4, 6], min(size, 64)), ([4, 6], agreed)]


@pytest.mark.parametrize(("max_splits", "longest"), [(1, None), (2, None), (128, None), (128, 2000)])
@pytest.mark.parametrize("at", [1, 1022, 1023, 1024, 2500])
def test_several_blocks(monkeypatch, at, max_splits, longest):
    """A match of three tokens beats a later one of two in another block."""
    monkeypatch.setattr(ngram, "_MAX_SPLITS", max_splits)
    text = list(range(100, 3400))
    text[at : at + 3] = [1, 2, 3]
    text[3100:3102] = [2, 3]
    text[-2:] = [1, 2]
    pair = Pair([text], [[3]], num_steps=1, width=4)
    pair.offer_model()
    pair.offer_ngrams([4], (1, 4), 64, max_len=3300, longest=longest)
    assert pair.chain(0, 1) == (text[at + 3 : at + 6], 3)


def test_tokens_behind_the_text_are_not_looked_at():
    """The tokens behind the text would match and continue."""
    pair = Pair([[5, 6, 7], [7, 7], None], [[7], [7], [7]], num_steps=1, width=4)
    pair.offer_model()
    pair.offer_ngrams([4, 4, 4], (2, 4), 64, pad=7)
    assert [pair.chain(i, 1) for i in range(2)] == [([], 0), ([7, 7, 7], 2)]


def test_more_tokens_than_a_row_holds():
    """A count past the row's end must not lead into the next row."""
    state = new_state(2, 0, 2)
    token_ids, num_tokens = torch.tensor([[1, 2, 1], [2, 2, 2]], dtype=torch.int32), torch.tensor([5, 3]).int()
    rest, sizes = (torch.tensor([0]), limits_of([2])), {"min_ngram_size": 1, "max_ngram_size": 2}
    matches = search_ngrams(state, token_ids, num_tokens, *rest, **sizes, match_len_cap=8)
    choose_of(state, num_tokens, *rest, matches)
    assert state.offers.lengths[0, 0] == 2
    assert state.offers.chains[0, 0].tolist() == [2, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_chain(dtype):
    stops = [[1], [0], [0, 2], []]
    pair = Pair([[], None, [], []], [[]] * 4, num_steps=1, width=5, seed=3, stops=stops)
    token_ids = torch.from_numpy(pair.random.integers(0, 9, (2, 4, 7))).to(dtype)[:, :, 1:5]
    lengths, agreed = np.array([[2, 3, 0, 4], [1, 0, 4, 2]], np.int32), np.array([[5, 6, 7, 0], [8] * 4], np.int32)
    pair.kernels.offers.passes.copy_(torch.from_numpy(pair.offers.passes))
    for number, chains in ((1, [1]), (2, [0, 2]), (0, [])):
        for i, chain in enumerate(chains):
            found = [array[i][pair.is_request] for array in (token_ids.numpy(), lengths, agreed)]
            spec.offer(pair.state, pair.rows[pair.is_request], chain, *found)
        given = torch.from_numpy(lengths[:number]), torch.from_numpy(agreed[:number])
        which = {"first_chain": 2 - number, "chains_per_start": 2}
        offer_chains(pair.kernels, pair.idx_mapping, token_ids[:number], *given, **which)
        pair.assert_same()


def test_lengths_of_a_chain_that_cannot_be():
    state = new_state(2, 0, 5)
    lengths, agreed = torch.tensor([[-1, 9]], dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    offer_chains(state, torch.arange(2), torch.ones(1, 2, 3, dtype=torch.int32), lengths, agreed)
    assert state.offers.lengths[:, 0].tolist() == [0, 3]
    assert state.offers.chains[:, 0].tolist() == [[0] * 5, [1, 1, 1, 0, 0]]


class Steps:
    """Requests whose steps `AdaptiveDrafter` and the kernels draft for, from the same texts and model's drafts."""

    NUM_ROWS, PRICES = 4, Prices(slot=0.02, step=1.0, first_pass=0.3, later_pass=0.2)

    def __init__(self, *, num_steps, width, vocab_size, sizes, seed):
        self.random = np.random.default_rng(seed)
        self.num_steps, self.width, self.vocab_size = num_steps, width, vocab_size
        self.sizes = {"min_ngram_size": sizes[0], "max_ngram_size": sizes[1], "match_len_cap": 64}
        self.stops: dict[str, list[int]] = {}
        self.drafter = AdaptiveDrafter(
            {NGRAM: NgramMatcher(self.NUM_ROWS, MAX_LEN, **self.sizes)},
            stop_token_ids=self.stops,
            max_num_reqs=self.NUM_ROWS,
            num_model_steps=num_steps,
            num_speculative_tokens=width,
        )
        self.drafter.set_prices(self.PRICES)
        self.arbiter = self.drafter.arbiter
        prior = torch.from_numpy(prior_chances())
        self.state = new_state(self.NUM_ROWS + 1, num_steps, width, prior=prior)
        self.texts: dict[str, list[int]] = {}
        self.rows: dict[str, int] = {}
        self.new: list[str] = []
        self.num_requests = 0

    def tokens(self, count):
        return self.random.integers(0, self.vocab_size, count).tolist()

    def change_requests(self):
        """Requests come and go, each in the place of another."""
        for request in list(self.texts):
            if self.random.random() < 0.15 or len(self.texts[request]) > MAX_LEN - self.width - 1:
                del self.texts[request], self.rows[request]
        self.drafter.retain(self.texts)
        free = [row for row in range(self.NUM_ROWS) if row not in self.rows.values()]
        for row in free[: self.random.integers(0, len(free) + 1)]:
            name = f"request {self.num_requests}"
            self.num_requests += 1
            self.texts[name], self.rows[name] = self.tokens(self.random.integers(0, 20)), row
            self.stops[name] = self.tokens(1) if self.random.random() < 0.5 else []
            self.new.append(name)

    def step(self):
        self.change_requests()
        order = [str(name) for name in self.random.permutation(list(self.texts))]
        limits = self.random.choice([0, 1, self.width, self.width, self.width + 1], len(order))
        if not order:
            return
        history = make_history({name: self.texts[name] for name in order}, MAX_LEN)
        passes = self.drafter.plan(history, limits, [None] * len(order))
        model = np.array([self.tokens(passes) for _ in order], np.int64).reshape(len(order), passes)
        # Often the model says what the text goes on with.
        goes_on = np.array([(self.texts[name] * passes)[:passes] or [0] * passes for name in order], np.int64)
        model = np.where(self.random.random(model.shape) < 0.5, model, goes_on.reshape(model.shape))
        self.begin_new()
        expected = self.drafter.draft(history, limits, model)
        self.assert_same(order, expected, self.draft(order, limits, model))
        for name, drafts in zip(order, expected.to_lists(), strict=True):
            accepted = drafts[: self.random.integers(0, len(drafts) + 1)]
            self.texts[name] += [*accepted, *self.tokens(1)]

    def begin_new(self):
        """The runner sets the row of a new request; the arbiter's accounts say with what credit."""
        for name in self.new:
            self.state.offer_positions[self.rows[name]] = spec.NO_OFFERS
            self.state.credits[self.rows[name]] = self.credit(name)
            stops = [*self.stops[name], *[spec.NO_TOKEN] * spec.MAX_STOPS][: spec.MAX_STOPS]
            self.state.offers.stops[self.rows[name]] = torch.tensor(stops, dtype=torch.int32)
            for numbers in self.state.record:
                numbers[self.rows[name]] = 0
        self.new = []

    def row_in_arbiter(self, name):
        return self.arbiter._state_rows.assign([name])[0][0]

    def credit(self, name):
        return int(self.arbiter._credits[self.row_in_arbiter(name)])

    def draft(self, order, limits, model):
        token_ids = torch.full((self.NUM_ROWS + 1, MAX_LEN), -7, dtype=torch.int32)
        num_tokens = torch.zeros(self.NUM_ROWS + 1, dtype=torch.int32)
        for name in order:
            token_ids[self.rows[name], : len(self.texts[name])] = torch.tensor(self.texts[name], dtype=torch.int32)
            num_tokens[self.rows[name]] = len(self.texts[name])
        # Places of the batch beyond its requests, as in a padded batch.
        idx_mapping = torch.tensor([self.rows[name] for name in order] + [-1], dtype=torch.int32)
        given = limits_of([*limits, 3])
        drafted = torch.from_numpy(np.pad(model, ((0, 1), (0, 0))))
        num_new = torch.zeros(1, dtype=torch.int64)
        judge_and_offer(self.state, token_ids, num_tokens, idx_mapping, num_new, given, drafted)
        matches = search_after_another(self.state, token_ids, num_tokens, idx_mapping, given, **self.sizes)
        drafts = torch.zeros(len(idx_mapping), self.width, dtype=torch.int64)
        noted = torch.zeros(3, self.NUM_ROWS + 1, dtype=torch.int32)
        scaled = self.arbiter._scaled
        prices = torch.tensor([scaled.slot, scaled.step, *scaled.passes])
        outputs = drafts, DraftCounts(*noted[:2]), noted[2], *totals_and_report(len(idx_mapping))
        chosen = choose_and_settle(self.state, num_tokens, idx_mapping, given, prices, *outputs, matches=matches)
        return drafts, chosen, noted[2]

    def assert_same(self, order, expected, found):
        drafts, chosen, sources = found
        for array, tensor in (
            (np.maximum(expected.token_ids, 0), drafts),
            (expected.num_drafts, chosen.counts.num_drafts_ptr),
            (expected.num_model, chosen.counts.num_model_ptr),
        ):
            np.testing.assert_array_equal(tensor.numpy()[: len(order)], array)
        np.testing.assert_array_equal(sources[[self.rows[name] for name in order]].numpy(), expected.sources)
        assert chosen.counts.num_drafts_ptr[len(order)] == 0
        for name in order:
            assert self.state.credits[self.rows[name]] == self.credit(name)
            for tensor, array in zip(self.state.record, self.arbiter._record, strict=True):
                np.testing.assert_array_equal(tensor.numpy()[self.rows[name]], array[self.row_in_arbiter(name)])
        for tensor, array in zip(self.state.opposed, self.arbiter._opposed, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
        for tensor, array in zip(self.state.table, self.arbiter.table, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
        for tensor, array in zip(self.state.gains[:2], self.arbiter._gains[:2], strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)


@settings(max_examples=8)
@given(
    st.fixed_dictionaries(
        {
            "num_steps": st.integers(0, 3),
            "width": st.integers(1, 6),
            "vocab_size": st.integers(2, 4),
            "sizes": st.sampled_from([(1, 1), (1, 5), (2, 4)]),
            "seed": st.integers(0, 2**32),
        }
    )
)
@example({"num_steps": 3, "width": 8, "vocab_size": 3, "sizes": (1, 5), "seed": 5})
def test_whole_steps_equal_the_adaptive_drafter(case):
    steps = Steps(**case)
    for _ in range(8):
        steps.step()


def test_whole_steps_draft_from_every_source():
    """The steps above would also be equal if there were nothing to choose."""
    steps, counts = Steps(num_steps=2, width=5, vocab_size=2, sizes=(1, 5), seed=1), np.zeros(3, int)
    compare = steps.assert_same

    def note(order, expected, found):
        compare(order, expected, found)
        both = (expected.num_model > 0) & (expected.num_drafts > expected.num_model)
        counts[:] += (expected.num_model > 0).sum(), (expected.sources == NGRAM).sum(), both.sum()

    steps.assert_same = note
    for _ in range(12):
        steps.step()
    assert np.all(counts > 0), counts
    assert set(steps.state.credits.tolist()) != {spec.ASLEEP}


def arguments(num_reqs=2, num_steps=2, width=4, max_len=16, **changes):
    """Valid arguments of both functions, with `changes`: of all that take an argument of that name."""
    batch = {
        "state": new_state(4, num_steps, width, (NGRAM, SUFFIX)),
        "idx_mapping": torch.arange(num_reqs, dtype=torch.int32),
    }
    counts = torch.full((num_reqs,), width, dtype=torch.int32)
    calls = {
        search_ngrams: batch
        | {
            "token_ids": torch.zeros(4, max_len, dtype=torch.int32),
            "num_tokens": torch.full((4,), max_len, dtype=torch.int32),
            "limits": limits_of(counts),
            "min_ngram_size": 1,
            "max_ngram_size": 3,
            "match_len_cap": 64,
            "longest": None,
            "first_chain": 1,
            "chains_per_start": 2,
        },
        offer_chains: batch
        | {
            "token_ids": torch.zeros(num_steps + 1, num_reqs, width, dtype=torch.int32),
            "lengths": counts.repeat(num_steps + 1, 1),
            "agreed": counts.repeat(num_steps + 1, 1),
            "first_chain": 1,
            "chains_per_start": 2,
        },
    }
    return {
        function: call | {name: value for name, value in changes.items() if name in call}
        for function, call in calls.items()
    }


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (search_ngrams, {"min_ngram_size": 0}, "min_ngram_size=0"),
        (search_ngrams, {"max_ngram_size": 0}, "max_ngram_size=0"),
        (search_ngrams, {"first_chain": -1}, "first_chain=-1"),
        (search_ngrams, {"first_chain": 3}, "first_chain=3 and chains_per_start=2 must name 3 of the 7 chains"),
        (search_ngrams, {"chains_per_start": 0}, "chains_per_start=0"),
        (search_ngrams, {"token_ids": torch.zeros(4, 16)}, r"token_ids must be torch\.int32"),
        (search_ngrams, {"num_tokens": torch.zeros(2, dtype=torch.int32)}, "num_tokens must"),
        (offer_chains, {"first_chain": 3}, "first_chain=3 and chains_per_start=2 must name 3 of the 7 chains"),
        (offer_chains, {"first_chain": -1}, "first_chain=-1"),
        (offer_chains, {"chains_per_start": 0}, "chains_per_start=0"),
        (offer_chains, {"token_ids": torch.zeros(3, 2, 4)}, "token_ids must be int32 or int64, 3-D"),
        (offer_chains, {"token_ids": torch.zeros(3, 2, dtype=torch.int32)}, "token_ids must be int32 or int64, 3-D"),
        (offer_chains, {"token_ids": torch.zeros(3, 2, 5).long()}, r"token_ids must be \[3, 2, <= 4\]"),
        (offer_chains, {"lengths": torch.zeros(3, 2)}, r"lengths must be contiguous int32 of \(3, 2\)"),
        (offer_chains, {"agreed": torch.zeros(3, 3, dtype=torch.int32)}, "agreed must be contiguous int32"),
        (offer_chains, {"idx_mapping": torch.zeros(2)}, "idx_mapping must"),
    ],
)
def test_arguments_out_of_range(function, changes, message):
    with pytest.raises(ValueError, match=message):
        function(**arguments(**changes)[function])


def test_no_requests():
    for function, call in arguments(0).items():
        function(**call)


KERNELS = ["_search_kernel", "_offer_kernel"]


def test_launches_depend_on_shapes_alone(monkeypatch):
    """A CUDA graph can capture the calls, and they never wait."""
    launches = [Launches() for _ in KERNELS]
    for name, launch in zip(KERNELS, launches, strict=True):
        monkeypatch.setattr(offers, name, launch)
    nobody = torch.full((3,), -1, dtype=torch.int32)
    calls = [arguments(3, max_len=5000), arguments(3, max_len=5000, idx_mapping=nobody, limits=limits_of([0] * 3))]
    with OnlyTorch(torch.ops.aten.empty):
        for functions in calls:
            for function, call in functions.items():
                function(**call)
    assert [launch.grids for launch in launches] == [[(3, 5, 3)] * 2, [(3, 3)] * 2]
    search_ngrams(**arguments(3, max_len=5000, longest=1500)[search_ngrams])
    assert launches[0].grids[2:] == [(3, 2, 3)]


def compile_ahead_of_time():
    """Run in a process of its own: compile the kernels as the functions launch them, and the one that takes matches."""
    for name in KERNELS:
        setattr(offers, name, AheadOfTime(getattr(offers, name)))
    choice._choose_kernel = AheadOfTime(choice._choose_kernel)
    for options in (
        {"num_steps": 3, "width": 8, "max_len": 200_000},
        {"num_steps": 1, "width": 1, "idx_mapping": torch.arange(2), "max_ngram_size": 1, "match_len_cap": 1},
        {"num_steps": 0},
    ):
        calls = arguments(**options)
        offer_chains(**calls[offer_chains])
        about = calls[search_ngrams]
        matches = search_ngrams(**about)
        choose_of(about["state"], about["num_tokens"], about["idx_mapping"], about["limits"], matches)
    kernels = [getattr(offers, name) for name in KERNELS]
    print("compiled", *(len(kernel.compiled) for kernel in [*kernels, choice._choose_kernel]))


def test_kernels_compile_for_a_gpu(tmp_path):
    code = "from tests.kernels.arbiter import test_offers; test_offers.compile_ahead_of_time()"
    assert "compiled 3 3 3" in run_without_interpreter(code, tmp_path)
