"""The arbiter: its choice against every possible one, what it learns, and when it gives the draft model up."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_specplus.proposers import History, _arbiter
from vllm_specplus.proposers._arbiter import ALONE, ASLEEP, CONTRARY, COPIED, NUM_LENGTHS, ONE
from vllm_specplus.proposers.arbiter import Arbiter, Choice, CommonAccount, Prices
from vllm_specplus.sources import NGRAM, REFERENCE, SUFFIX, UNFILLED, WHOLE_OUTPUT

MAX_LEN = 2000
AGREEMENTS = [0, 1, 3, 6, 7, 12, 13, 36, 37, 500, WHOLE_OUTPUT]


def length_class(length: int) -> int:
    bounds = (0, 1, 2, 3, 4, 5, 6, 8, 12, 20, 36, WHOLE_OUTPUT - 1)
    return next((i for i, bound in enumerate(bounds) if length <= bound), NUM_LENGTHS - 1)


class Play:
    """One request whose steps a test plays: it writes text and makes the offers."""

    def __init__(self, chains: Sequence[tuple[int, int]], num_slots: int, num_steps: int = 0, **more: Any):
        sources, starts = zip(*chains, strict=True) if chains else ((), ())
        self.arbiter = Arbiter(
            2,
            num_model_steps=num_steps,
            num_speculative_tokens=num_slots,
            sources=sources,
            starts=starts,
            **more,
        )
        self.num_slots = num_slots
        self.text: list[int] = [0]
        self.name = "a"
        self.chances: Sequence[int] | None = None  # instead of the learned ones

    def step(self, offers: dict[int, tuple[list[int], int]], model: list[int] | None = None, limit: int = 99) -> Choice:
        """Offer chains, (tokens, agreement) by number, and as many of the model's drafts as it wants passes."""
        self.begin()
        for chain, (token_ids, agreed) in offers.items():
            tokens = np.array([token_ids], np.int32).reshape(1, -1)
            self.arbiter.offer(chain, tokens, np.array([len(token_ids)], np.int32), np.array([agreed], np.int32))
        limits = np.array([min(limit, self.num_slots)])
        self.num_passes = self.arbiter.plan_passes(limits)
        self.arbiter.offer_model(np.array([(model or [])[: self.num_passes]], np.int32).reshape(1, -1), limits)
        return self.arbiter.choose(limits)

    def begin(self) -> None:
        row = np.zeros((1, MAX_LEN), np.int32)
        row[0, : len(self.text)] = self.text
        self.arbiter.begin_step(History([self.name], row, np.array([len(self.text)]), np.array([1])))
        if self.chances is not None:
            self.arbiter.table.chances[:] = self.chances

    def new_request(self, name: str) -> None:
        self.arbiter.retain([])
        self.text, self.name = [0], name


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    num_steps, num_slots = draw(st.integers(0, 3)), draw(st.integers(1, 6))
    tokens = st.integers(0, draw(st.integers(0, 2)))
    chains = [(source, start) for source in (NGRAM, SUFFIX) for start in range(num_steps + 1)] + [(REFERENCE, 0)]
    return {
        "num_steps": num_steps,
        "num_slots": num_slots,
        "chains": chains,
        "offers": {
            c: (draw(st.lists(tokens, max_size=num_slots)), draw(st.sampled_from(AGREEMENTS)))
            for c in range(len(chains))
            if draw(st.booleans())
        },
        "model": draw(st.lists(tokens, min_size=num_steps, max_size=num_steps)),
        "chances": draw(
            st.lists(
                st.sampled_from([0, ONE // 9, ONE // 2, ONE - 99, ONE]),
                min_size=_arbiter.NUM_KEYS,
                max_size=_arbiter.NUM_KEYS,
            )
        ),
        "price": draw(st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0, 3.0])),
        "more": draw(st.lists(st.sampled_from([-0.7, 0.0, 0.1, 1.3]), max_size=num_slots)),
        "limit": draw(st.integers(0, num_slots)),
    }


def chance(case: dict[str, Any], drafts: Sequence[tuple[int, int]]) -> list[int]:
    """The chance of each draft, given as (-1, place) for the model's and as (chain, n) for a chain's."""
    model, found = case["model"], []

    def voices(place: int) -> list[tuple[int, int]]:
        return [(t[0], agreed) for c, (t, agreed) in case["offers"].items() if case["chains"][c][1] == place and t]

    def of_model(n: int) -> int:
        same = [agreed for token, agreed in voices(n) if token == model[n]]
        other = [agreed for token, agreed in voices(n) if token != model[n]]
        key = ALONE + n
        if same and other:
            chains = [c for c in case["offers"] if case["chains"][c][1] == n and case["offers"][c][0]]
            is_models = {c: case["offers"][c][0][0] == model[n] for c in chains}
            return against(
                max(of_chain(c, 0) for c in chains if is_models[c]),
                max(of_chain(c, 0) for c in chains if not is_models[c]),
            )
        if same:
            key = _arbiter.AGREED + length_class(max(same))
        elif other:
            key = _arbiter.DIFFERED + length_class(max(other))
        return case["chances"][key]

    def by_source(which: int, n: int, kind: int = COPIED) -> int:
        (source, _), (_, agreed) = case["chains"][which], case["offers"][which]
        return case["chances"][kind + (source - NGRAM) * NUM_LENGTHS + length_class(agreed + n)]

    def of_chain(which: int, n: int) -> int:
        (source, start), (tokens, _) = case["chains"][which], case["offers"][which]
        copied = by_source(which, n)
        if n > 0 or start >= len(model):
            return copied
        if tokens[0] != model[start]:
            return by_source(which, n, CONTRARY)
        same = [length for token, length in voices(start) if token == tokens[0]]
        agreed_chance = case["chances"][_arbiter.AGREED + length_class(max(same))]
        return max(agreed_chance, copied) if source == REFERENCE else agreed_chance

    for which, n in drafts:
        if which < 0:
            found.append(of_model(n))
            continue
        said = case["offers"][which][0][: n + 1]
        start = case["chains"][which][1]
        at_start = [c for c in case["offers"] if case["chains"][c][1] == start and len(case["offers"][c][0]) > n]
        agreed_before = [c for c in at_start if case["offers"][c][0][:n] == said[:n]]
        same = [of_chain(c, n) for c in agreed_before if case["offers"][c][0][n] == said[n]]
        rivals = [of_chain(c, n) for c in agreed_before if case["offers"][c][0][n] != said[n]]
        ends = [
            by_source(c, len(tokens))
            for c, (tokens, _) in case["offers"].items()
            if case["chains"][c] == (REFERENCE, 0) and tokens == model[:start] + said[:n] and n > 0
        ]
        best = max(same) * (ONE - max(ends, default=0)) // ONE
        found.append(against(best, max(rivals)) if rivals else best)
    return found


def against(chance: int, rival: int) -> int:
    """What is left of a chance where a rival has one, and not both can be right; either may be wrong all the same."""
    right = chance * (ONE - rival + ONE // 256) // ONE
    return right * ONE // (right + ONE - chance + ONE // 256)


def value(case: dict[str, Any], drafts: Sequence[tuple[int, int]]) -> int:
    survival, total = ONE, 0
    for one in chance(case, drafts):
        survival = survival * one // ONE
        total += survival - int(case["price"] * ONE)
    more = case["more"]
    return total - int(more[min(len(drafts), len(more)) - 1] * ONE) if drafts and more else total


def all_drafts(case: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """Every list of drafts that may be chosen: some of the model's, then some of one chain behind them."""
    found: list[list[tuple[int, int]]] = []
    for num_model in range(len(case["model"]) + 1):
        first = [(-1, place) for place in range(num_model)]
        found.append(first)
        for c, (tokens, _) in case["offers"].items():
            if case["chains"][c][1] == num_model:
                found += [first + [(c, n) for n in range(size)] for size in range(1, len(tokens) + 1)]
    return [drafts for drafts in found if len(drafts) <= case["limit"]]


def tokens_of(case: dict[str, Any], drafts: Sequence[tuple[int, int]]) -> list[int]:
    return [case["model"][n] if c < 0 else case["offers"][c][0][n] for c, n in drafts]


@settings(max_examples=400)
@given(cases())
def test_no_other_drafts_are_worth_more(case: dict[str, Any]) -> None:
    play = Play(case["chains"], case["num_slots"], case["num_steps"])
    play.arbiter.set_prices(Prices(case["price"], 1.0, more=tuple(case["more"])))
    play.chances = case["chances"]
    choice = play.step(case["offers"], case["model"], case["limit"])
    assert play.num_passes == (case["num_steps"] if case["limit"] else min(case["num_steps"], 1))
    found = choice.to_lists()[0]
    assert len(found) <= case["limit"]
    ways = [d for d in all_drafts(case) if tokens_of(case, d) == found]
    num_model, source = int(choice.num_model[0]), int(choice.sources[0])
    ways = [d for d in ways if sum(c < 0 for c, _ in d) == num_model]
    assert {case["chains"][d[-1][0]][0] if d and d[-1][0] >= 0 else UNFILLED for d in ways} >= {source}
    assert max(value(case, d) for d in ways) == max(value(case, d) for d in all_drafts(case))


@pytest.mark.parametrize("length", [*range(60), 10**6, WHOLE_OUTPUT, WHOLE_OUTPUT + 32])
def test_classes_of_agreement(length: int) -> None:
    assert _arbiter.length_class(length) == length_class(length)


def follow(play: Play, is_right: bool, num_steps: int) -> list[int]:
    """Steps in which one chain offers eight tokens, right or wrong; returns the number of drafts in each."""
    sizes = []
    for _ in range(num_steps):
        tokens = [7] * 8
        size = int(play.step({0: (tokens, 5)}).num_drafts[0])
        sizes.append(size)
        play.text += tokens[: size + 1] if is_right else [8]
    return sizes


def test_a_source_that_turns_bad_and_back_is_followed_within_50_steps() -> None:
    play = Play([(NGRAM, 0)], 8)
    play.arbiter.set_prices(Prices(0.05, 1.0))
    good = follow(play, True, 50)
    assert good[-1] == 8
    bad = follow(play, False, 50)
    assert bad[-1] == 0
    assert sum(bad[30:]) == 0
    assert follow(play, True, 50)[-1] == 8


def test_a_model_that_turns_bad_and_back_is_followed_within_50_steps() -> None:
    play = Play([], 8, num_steps=3)
    play.arbiter.set_prices(Prices(0.02, 1.0, 0.05, 0.05))

    def follow_model(is_right: bool) -> list[tuple[int, int]]:
        """50 steps; of each the passes and the drafts."""
        found = []
        for _ in range(50):
            drafts = int(play.step({}, [7, 7, 7]).num_drafts[0])
            found.append((play.num_passes, drafts))
            play.text += [7] * (drafts + 1) if is_right else [8]
        return found

    assert follow_model(True)[-1] == (3, 3)
    # One pass keeps the draft cache up.
    assert follow_model(False)[-5:] == [(1, 0)] * 5
    assert follow_model(True)[-1] == (3, 3)


def test_passes_that_add_nothing_are_made_once_more_every_32_steps() -> None:
    play = Play([], 8, num_steps=3)
    play.arbiter.set_prices(Prices(0.02, 1.0, 0.0, 0.05))
    tried = []
    for i in range(300):
        play.step({}, [7, 7, 7])
        if play.num_passes == 3:
            tried.append(i)
        play.text.append(8)
    assert {later - earlier for earlier, later in pairwise(tried) if earlier > 100} == {32}


def test_drafts_worth_less_than_verification_are_dropped_and_tried_now_and_then() -> None:
    play = Play([(NGRAM, 0)], 8)
    play.arbiter.set_prices(Prices(0.05, 1.0, verification=2.0))
    # At first a long agreement is trusted.
    assert follow(play, True, 1) == [8]
    coin = [7, 8]
    sizes = []
    for i in range(300):
        sizes.append(int(play.step({0: ([7], 5)}).num_drafts[0]))
        play.text.append(coin[i % 2])
    tried = [i for i, size in enumerate(sizes) if size]
    assert all(later - earlier == 65 for earlier, later in pairwise(tried))
    assert len(tried) >= 3
    # The same drafts are verified where that costs nothing beside their slots.
    play.arbiter.set_prices(Prices(0.05, 1.0, verification=0.0))
    assert play.step({0: ([7], 5)}).num_drafts[0] == 1


def test_the_drafts_of_a_batch_share_the_price_of_verification() -> None:
    arbiter = Arbiter(2, num_model_steps=0, num_speculative_tokens=4, sources=[NGRAM], starts=[0])
    offers = np.full((2, 4), 7, np.int32), np.full(2, 4, np.int32), np.full(2, 12, np.int32)

    def num_drafts(num_reqs: int) -> list[int]:
        arbiter.retain([])
        tokens = np.zeros((num_reqs, 8), np.int32)
        counts = np.full(num_reqs, 3)
        arbiter.begin_step(History(["a", "b"][:num_reqs], tokens, counts, np.ones(num_reqs, np.int64)))
        arbiter.offer(0, *(array[:num_reqs] for array in offers))
        return arbiter.choose(np.full(num_reqs, 4)).num_drafts.tolist()

    arbiter.set_prices(Prices(0.1, 1.0))
    worth = arbiter_value(arbiter, num_drafts)
    arbiter.set_prices(Prices(0.1, 1.0, verification=1.5 * worth))
    assert num_drafts(1) == [0]
    assert num_drafts(2) == [4, 4]


def arbiter_value(arbiter: Arbiter, num_drafts: Callable[[int], list[int]]) -> float:
    """What the drafts of one request are worth: the least price of verification at which they are dropped."""
    low, high = 0.0, 8.0
    for _ in range(30):
        middle = (low + high) / 2
        arbiter.set_prices(Prices(0.1, 1.0, verification=middle))
        low, high = (middle, high) if num_drafts(1) == [4] else (low, middle)
    return high


@pytest.mark.parametrize(("step", "tried"), [(4.0, [8, 25, 58, 123, 188]), (1.0, [30, 91]), (0.5, [60, 182])])
def test_drafts_worth_little_are_left_out_now_and_then(step: float, tried: list[int]) -> None:
    """Only so can the time of a step without drafts be known, where each step has some; those worth more come later."""
    play = Play([(NGRAM, 0)], 1)
    play.arbiter.set_prices(Prices(0.05, step, verification=0.0))
    sizes = []
    for _ in range(200):
        sizes.append(int(play.step({0: ([7], 5)}).num_drafts[0]))
        play.text.append(7)
    assert [i for i, size in enumerate(sizes) if not size] == tried


def test_short_answers_too_are_without_drafts_now_and_then() -> None:
    """The last step of an answer may have no draft, and tells nothing: no step follows it."""
    play = Play([(NGRAM, 0)], 1)
    play.arbiter.set_prices(Prices(0.05, 4.0, verification=0.0))
    tried = 0
    for i in range(300):
        is_last = i % 6 == 5
        tried += not play.step({0: ([7], 5)}, limit=0 if is_last else 1).num_drafts[0] and not is_last
        play.text.append(7)
        if is_last:
            play.new_request(f"request {i}")
    assert tried >= 5


def test_a_pass_earns_nothing_by_drafts_that_only_make_up_for_verification() -> None:
    """The model is right in each step, and a step with its draft takes as long as two without."""

    def steps_with_passes(verification: float) -> int:
        play = Play([], 1, num_steps=1)
        play.arbiter.set_prices(Prices(0.0, 1.0, first_pass=0.1, verification=verification))
        found = 0
        for _ in range(200):
            drafts = int(play.step({}, [7]).num_drafts[0])
            found += play.num_passes
            play.text += [7] * (drafts + 1)
        return found

    assert steps_with_passes(0.5) == 200
    assert steps_with_passes(0.95) < 60


def test_a_price_of_verification_is_shared_by_what_drafts_are_worth() -> None:
    offers = Arbiter(2, num_model_steps=1, num_speculative_tokens=2, sources=[], starts=[])._offers
    offers.passes[:] = [1, 0]
    values = np.array([[60, 120], [40, -1]])
    left = values.copy()
    _arbiter._pay_for_verification(np.arange(2), offers, left, 50)
    assert left.tolist() == [[30, 82], [20, -1]]
    _arbiter._pay_for_verification(np.arange(2), offers, values, 130)
    assert values.tolist() == [[0, 22], [0, -1]]


def test_what_is_not_drafted_is_judged_too() -> None:
    """After nothing has been drafted for long, the source is right again: its offers alone tell so."""
    play = Play([(NGRAM, 0)], 4)
    play.arbiter.set_prices(Prices(0.3, 1.0))
    for _ in range(40):
        play.step({0: ([7, 7], 5)})
        play.text.append(8)
    sizes = []
    for _ in range(40):
        sizes.append(int(play.step({0: ([7, 7], 5)}).num_drafts[0]))
        play.text += [7] * (sizes[-1] + 1)
    assert sizes[0] == 0
    assert sizes[-1] == 2


def test_the_better_of_two_sources_wins() -> None:
    play = Play([(NGRAM, 0), (SUFFIX, 0)], 4)
    play.arbiter.set_prices(Prices(0.1, 1.0))
    for _ in range(30):
        choice = play.step({0: ([1, 1, 1], 4), 1: ([2, 2, 2], 4)})
        play.text += [2, 2]
    assert choice.sources.tolist() == [SUFFIX]
    assert choice.to_lists() == [[2, 2, 2]]


def test_what_two_sources_say_alike_has_the_better_of_their_chances() -> None:
    """Else the longer chain, of the source that knows less of the first tokens, would not be taken."""
    play = Play([(NGRAM, 0), (SUFFIX, 0)], 4)
    play.arbiter.set_prices(Prices(0.3, 1.0))
    play.chances = [9 * ONE // 10] * _arbiter.NUM_KEYS
    play.chances[COPIED + length_class(2)] = play.chances[COPIED + length_class(3)] = ONE // 10
    assert play.step({0: ([1, 2, 3, 4], 2)}).to_lists() == [[]]
    choice = play.step({0: ([1, 2, 3, 4], 2), 1: ([1, 2], 2)})
    assert (choice.to_lists(), choice.sources.tolist()) == ([[1, 2, 3, 4]], [NGRAM])
    assert play.step({0: ([1, 2, 3, 4], 2), 1: ([1, 5], 2)}).to_lists() == [[1, 5]]


@pytest.mark.parametrize("price", [0.2, 0.6])
def test_what_sources_say_otherwise_cannot_all_be_right(price: float) -> None:
    """Each of two sources is right in four cases of five. Where they differ, one is right in less than half of them."""
    for second, is_drafted in (([], True), ([5], True), ([6], price < 0.5)):
        play = Play([(NGRAM, 0), (SUFFIX, 0)], 1)
        play.chances = [4 * ONE // 5] * _arbiter.NUM_KEYS
        play.arbiter.set_prices(Prices(price, 1.0))
        assert play.step({0: ([5], 3), 1: (second, 3)}).to_lists() == [[5] if is_drafted else []]


@pytest.mark.parametrize("right", [0, 1])
def test_who_is_right_where_sources_differ_is_learned(right: int) -> None:
    """By itself the other source is right more often. What is learned from one request holds for the next."""
    sources, play = (NGRAM, SUFFIX), Play([(NGRAM, 0), (SUFFIX, 0)], 1)
    for i in range(60):
        alone = [({1 - right}, 5)] * 4 + [({right}, 5), ({right}, 9)]
        for j, (offered, token) in enumerate([*alone, ({0, 1}, 5 + right)]):
            play.new_request(f"request {i} {j}")
            choice = play.step({c: ([5 + c if len(offered) > 1 else 5], 3) for c in offered})
            play.text.append(token)
            play.begin()
    chances = [play.arbiter.table.chances[COPIED + c * NUM_LENGTHS + length_class(3)] for c in (right, 1 - right)]
    assert chances[0] < chances[1]
    assert choice.sources[0] == sources[right]


@pytest.mark.parametrize(("is_right", "most"), [(True, 3), (False, 0)])
def test_a_request_has_its_own_opinion_of_a_source(is_right: bool, most: int) -> None:
    """Where the source does better or worse than in other texts, that is soon known, and forgotten with the request."""
    play = Play([(NGRAM, 0)], 3)
    play.chances = [ONE // 2] * _arbiter.NUM_KEYS
    sizes = []
    for price in (0.45, 0.6):
        play.arbiter.set_prices(Prices(price, 1.0))
        play.new_request(f"request with {price}")
        for _ in range(20):
            sizes.append(int(play.step({0: ([7] * 3, 4)}).num_drafts[0]))
            play.text += [7] * (sizes[-1] + 1) if is_right else [8]
    assert (sizes[0], sizes[20]) == (1, 0)
    assert sizes[19] == sizes[39] == most


def test_history_goes_on_from_the_models_drafts() -> None:
    play = Play([(NGRAM, 0), (NGRAM, 1)], 4, 1)
    play.arbiter.set_prices(Prices(0.1, 1.0))
    for _ in range(30):
        choice = play.step({0: ([9, 9, 9], 2), 1: ([6, 6, 6], 4)}, [5])
        play.text += [5, 6, 6, 6, 4]
    assert choice.to_lists() == [[5, 6, 6, 6]]
    assert (choice.num_model.tolist(), choice.sources.tolist()) == ([1], [NGRAM])


def steps_with_model(play: Play, num_steps: int, is_right: bool) -> int:
    """Steps without history in which the model is right or wrong; returns the passes that were made."""
    passes = 0
    for _ in range(num_steps):
        choice = play.step({}, [3, 3])
        passes += play.num_passes
        play.text += [3] * (int(choice.num_drafts[0]) + 1) if is_right else [4]
    return passes


def test_more_chains_than_a_number_has_bits() -> None:
    play = Play([(source, start) for start in range(33) for source in (NGRAM, SUFFIX)], 40, 32)
    play.chances = [ONE] * _arbiter.NUM_KEYS
    model = [*range(100, 132)]
    assert play.step({64: ([7, 8, 9], 3), 65: ([7, 8], 3)}, model).to_lists() == [[*model, 7, 8, 9]]


def test_a_model_that_never_pays_sleeps() -> None:
    play = Play([], 4, 2)
    play.arbiter.set_prices(Prices(0.05, 1.0, 0.2, 0.2))
    first = steps_with_model(play, 100, False)
    assert 2 < first < 50
    assert play.num_passes == 0
    passes = 0
    for i in range(100):
        play.new_request(f"r{i}")
        passes += steps_with_model(play, 20, False)
    # Of 2,000 steps' time the passes take a small share; some are made, or a model that has improved would not be seen.
    assert 0 < passes * 0.2 < 0.03 * 2000


def test_a_model_that_pays_does_not_sleep() -> None:
    play = Play([], 4, 2)
    play.arbiter.set_prices(Prices(0.05, 1.0, 0.2, 0.2))
    assert steps_with_model(play, 100, True) == 200
    # Nor does a request sleep for a while in which the model fails.
    steps_with_model(play, 4, False)
    assert play.num_passes > 0
    assert steps_with_model(play, 100, True) > 150


def test_a_model_that_has_improved_is_used_again() -> None:
    play = Play([], 4, 2)
    play.arbiter.set_prices(Prices(0.05, 1.0, 0.2, 0.2))
    for i in range(20):
        play.new_request(f"bad{i}")
        steps_with_model(play, 30, False)
    for i in range(60):
        play.new_request(f"good{i}")
        passes = steps_with_model(play, 30, True)
    assert passes == 60


def test_passes_over_prompts_are_charged() -> None:
    """The model pays in every step, but less than its passes over prompts cost."""
    play = Play([], 4, 2)
    for i in range(8):
        play.arbiter.set_prices(Prices(0.05, 1.0, 0.2, 0.2, prompt_passes=0.0 if i == 0 else 30.0))
        play.new_request(f"r{i}")
        passes = steps_with_model(play, 10, True)
    assert passes == 0


def after(num_reqs: int, profit: float, num_steps: int = 40) -> CommonAccount:
    """The account after steps of a batch, in each of which the model has earned each request so much of a step."""
    account = CommonAccount()
    for _ in range(num_steps):
        step(account, num_reqs, profit)
    return account


def step(account: CommonAccount, num_reqs: int, profit: float = 0.0) -> None:
    account.add_tokens(0, num_reqs, ONE)
    account.add(int(num_reqs * profit * ONE))


def test_a_new_account_allows_each_batch_the_same() -> None:
    account = CommonAccount()
    account.charge(Prices(0.0, 1.0))
    account.add_tokens(0, 0, ONE)
    assert account.allowance(16) == account.allowance(1) > 3 * ONE


def test_a_debt_of_a_large_batch_is_not_forgotten_when_few_of_its_requests_remain() -> None:
    account = after(16, -0.3)
    for num_reqs in (8, 4, 2, 1, 1, 1, 1, 1):
        step(account, num_reqs)
        assert account.allowance(num_reqs) == ASLEEP


def test_a_debt_of_a_large_batch_does_not_keep_the_model_from_small_ones() -> None:
    account = after(16, -0.3)
    for _ in range(40):
        step(account, 1)
    assert account.allowance(1) > ONE
    assert account.allowance(16) == ASLEEP


def test_a_debt_of_a_small_batch_is_one_of_a_large_batch_too() -> None:
    assert after(1, -0.3).allowance(16) == ASLEEP


def test_a_credit_of_one_request_does_not_pay_for_a_large_batch() -> None:
    account = after(1, 3.0)
    assert account.allowance(1) > 4 * ONE
    assert ONE < account.allowance(16) < 2 * ONE
    step(account, 16, -1.0)
    assert account.allowance(16) == ASLEEP


def test_a_credit_survives_batches_that_come_and_go_in_parts() -> None:
    account = after(16, 0.2)
    before = account.allowance(16)
    for _ in range(20):
        for num_reqs in (2, 5, 11, *[16] * 40, 9, 3):
            step(account, num_reqs, 0.2 if num_reqs == 16 else -0.5)
    assert account.allowance(2) == account.allowance(16) == pytest.approx(before, rel=0.05)


def test_a_debt_is_paid_by_a_share_of_the_tokens() -> None:
    account = after(1, -0.3)
    for _ in range(1000):
        account.add_tokens(1, 1, ONE)
    assert account.allowance(1) == ASLEEP
    for _ in range(400):
        account.add_tokens(1, 1, ONE)
    assert account.allowance(1) > 0


def test_requests_that_begin_together_have_the_credit_of_their_batch() -> None:
    arbiter = Play([], 4, 1).arbiter
    arbiter._account = after(2, -0.3)
    lengths = np.ones(2, np.int64)
    arbiter.begin_step(History(["a", "b"], np.zeros((2, 10), np.int32), lengths, lengths))
    assert arbiter._credits[arbiter._rows].tolist() == [ASLEEP] * 2


def test_requests_are_asleep_when_all_have_given_the_model_up() -> None:
    arbiter = Play([], 4, 1).arbiter
    arbiter.begin_step(History(["a", "b"], np.zeros((2, 10), np.int32), np.array([1, 1]), np.array([1, 1])))
    arbiter._credits[arbiter._rows[1]] = ASLEEP
    assert arbiter.is_asleep(["b"])
    assert not arbiter.is_asleep(["a", "b"])
    assert not arbiter.is_asleep(["b", "new"])


@pytest.mark.parametrize("profit", [-0.3, 0.3])
def test_a_new_request_is_asleep_if_it_begins_so(profit: float) -> None:
    """Or a draft model that sleeps would have its inputs prepared for each new prompt."""
    arbiter = Play([], 4, 1).arbiter
    arbiter._account = after(2, profit)
    is_asleep = arbiter.is_asleep(["a", "b"])
    lengths = np.ones(2, np.int64)
    arbiter.begin_step(History(["a", "b"], np.zeros((2, 10), np.int32), lengths, lengths))
    assert is_asleep == arbiter.is_asleep(["a", "b"]) == (profit < 0)


def test_later_passes_are_left_out_where_they_add_nothing() -> None:
    """The model's second draft is never right."""
    play = Play([], 4, 2)
    play.arbiter.set_prices(Prices(0.05, 1.0, 0.05, 0.2))
    counts = []
    for _ in range(120):
        choice = play.step({}, [3, 5])
        counts.append(play.num_passes)
        play.text += [3, 4] if choice.num_drafts[0] else [3]
    assert set(counts[60:]) == {1, 2}
    assert counts[60:].count(2) <= 3


def test_later_passes_are_left_out_where_history_is_trusted() -> None:
    """The model is always right, and so is history where a long agreement speaks for it."""
    play = Play([(NGRAM, 0)], 4, 2)
    play.arbiter.set_prices(Prices(0.05, 1.0, 0.05, 0.2))
    with_history, without = [], []
    for _ in range(120):
        for counts, offers in ((with_history, {0: ([3] * 4, 30)}), (without, {})):
            choice = play.step(offers, [3, 3])
            counts.append(play.num_passes)
            play.text += [3] * (int(choice.num_drafts[0]) + 1)
    assert set(without) == {2}
    assert set(with_history[60:]) == {1, 2}
    assert with_history[60:].count(2) <= 3


def test_a_later_pass_is_made_again_where_the_text_tells_that_it_would_pay() -> None:
    """Only the model knows the first token of each step; later its second one too, as in a list that counts."""
    play = Play([(NGRAM, 0), (NGRAM, 1), (NGRAM, 2)], 4, 2)
    play.arbiter.set_prices(Prices(0.05, 1.0, 0.1, 0.2))
    passes = []
    for truth in [[7, 3, 3, 3, 3]] * 300 + [[7, 8, 3, 3, 3]] * 100:
        drafts = play.step({0: ([3] * 4, 30), 1: ([3] * 3, 5), 2: ([3] * 2, 5)}, truth[:2]).to_lists()[0]
        passes.append(play.num_passes)
        right = max(n for n in range(len(drafts) + 1) if drafts[:n] == truth[:n])
        play.text += truth[: right + 1]
    assert passes[250:300].count(1) >= 48
    assert passes[380:].count(2) >= 18


def test_what_a_pass_more_would_have_brought_is_told_by_the_text() -> None:
    """Where its draft would have stood, and no chain knew the token."""
    chains = [(NGRAM, 0), (NGRAM, 1), (NGRAM, 2)]
    for text, known, is_told in (
        ([7, 8], 3, True),
        ([7, 8], 8, False),  # the chain behind the first draft said so
        ([7, 8, 9], 3, False),  # the step came further
        ([6], 3, False),  # the first draft was wrong
        ([7], 3, False),  # the step did not come there
    ):
        play = Play(chains, 4, 2)
        play.arbiter.set_prices(Prices(0.05, 1.0, 0.1, 9.0))
        play.step({0: ([7] * 4, 30), 1: ([known] * 3, 5)}, [7, 8])
        assert play.num_passes == 1
        sums = play.arbiter._gains.told_sums.copy()
        play.text += text
        play.step({0: ([5] * 4, 30)}, [7, 8])
        added = play.arbiter._gains.told_sums[:, 1] - sums[:, 1]
        assert (added.sum() > ONE // 4) == is_told, (text, known)
        assert np.count_nonzero(play.arbiter._gains.told_trials[:, 1]) == 1


def test_a_request_that_sleeps_gets_no_model_drafts_beside_one_that_is_awake() -> None:
    arbiter = Play([], 4, 1).arbiter
    arbiter.set_prices(Prices(0.05, 1.0, 0.1))
    text = np.zeros((2, 10), np.int32)
    arbiter.begin_step(History(["a", "b"], text, np.array([1, 1]), np.array([1, 1])))
    arbiter._credits[arbiter._rows[1]] = ASLEEP
    limits = np.array([4, 4])
    assert arbiter.plan_passes(limits) == 1
    arbiter.offer_model(np.array([[3], [3]], np.int32), limits)
    assert arbiter.choose(limits).to_lists() == [[3], []]


P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])


def distribution(is_blind: bool, stops: Sequence[int] = ()) -> np.ndarray:
    """The exact distribution of a step's first token, over all drafts that the model may sample from Q.

    The target's is P. Whoever drops the model's draft because history differs from it, drafts history's token instead.
    """
    total = np.zeros(3)
    for draft in range(3):
        play = Play([(NGRAM, 0), (NGRAM, 1)], 2, 1, is_blind=is_blind, stop_token_ids={"a": stops})
        chances = np.full(_arbiter.NUM_KEYS, ONE // 2)
        chances[ALONE] = ONE * 3 // 4
        chances[CONTRARY:] = ONE * 7 // 10
        chances[_arbiter.AGREED : _arbiter.DIFFERED] = ONE
        chances[_arbiter.DIFFERED : CONTRARY] = ONE // 9
        play.chances = chances
        choice = play.step({0: ([0], 4), 1: ([0], 4)}, [draft])
        drafts = choice.to_lists()[0]
        q = Q if choice.num_model[0] else np.eye(3)[drafts[0]]
        accepted = min(1.0, P[drafts[0]] / q[drafts[0]])
        excess = np.maximum(P - q, 0)
        first = accepted * np.eye(3)[drafts[0]] + (1 - accepted) * excess / excess.sum()
        total += Q[draft] * first
    return total


@pytest.mark.parametrize("stops", [[], [0], [1], [2], [0, 1, 2]])
def test_sampled_drafts_keep_the_distribution(stops: list[int]) -> None:
    """A choice that looks at a sampled draft changes what comes out; the blind one does not, whatever ends the text."""
    np.testing.assert_allclose(distribution(is_blind=True, stops=stops), P)


def test_a_choice_that_looks_at_sampled_drafts_changes_the_distribution() -> None:
    assert np.abs(distribution(is_blind=False) - P).max() > 0.05


@settings(max_examples=100)
@given(cases(), st.lists(st.integers(0, 2), max_size=2, unique=True), st.data())
@example(
    {
        "num_steps": 2,
        "num_slots": 4,
        "chains": [(NGRAM, 0), (NGRAM, 1), (NGRAM, 2)],
        "offers": {0: ([1, 1], 9), 1: ([1], 9), 2: ([1, 0], 9)},
        "model": [0, 1],
        "chances": [ONE // 2] * _arbiter.NUM_KEYS,
        "price": 0.02,
        "limit": 4,
    },
    [],
    None,
)
def test_the_blind_choice_does_not_depend_on_what_was_sampled(
    case: dict[str, Any], stops: list[int], data: st.DataObject | None
) -> None:
    """How many of the model's drafts are verified is the same whatever they are, those that end the text among them."""
    counts = set()
    num_steps = case["num_steps"]
    drawn = (0,) * num_steps if data is None else data.draw(st.tuples(*[st.integers(0, 2)] * num_steps))
    for model in {tuple(case["model"]), (2,) * num_steps, drawn}:
        play = Play(case["chains"], case["num_slots"], num_steps, is_blind=True, stop_token_ids={"a": stops})
        play.arbiter.set_prices(Prices(case["price"], 1.0))
        play.chances = case["chances"]
        choice = play.step(case["offers"], list(model), case["limit"])
        drafts = choice.to_lists()[0]
        num_model = int(choice.num_model[0])
        assert drafts[:num_model] == list(model[:num_model])
        counts.add((num_model, tuple(drafts[:1]) if not num_model else ()))
    assert len(counts) == 1


def test_many_requests_at_once_are_each_their_own() -> None:
    arbiter = Arbiter(8, num_model_steps=1, num_speculative_tokens=3, sources=[NGRAM], starts=[0])
    text = np.zeros((8, 50), np.int32)
    names = [f"r{i}" for i in range(8)]
    for step in range(5):
        arbiter.begin_step(History(names, text, np.full(8, step + 1), np.ones(8, np.int64)))
        tokens = np.arange(24, dtype=np.int32).reshape(8, 3)
        arbiter.offer(0, tokens, np.array([3, 0] * 4, np.int32), np.full(8, 30, np.int32))
        limits = np.array([3, 3, 3, 3, 0, 0, 1, 1])
        arbiter.plan_passes(limits)
        arbiter.offer_model(100 + np.arange(8, dtype=np.int32)[:, None], limits)
        lists = arbiter.choose(limits).to_lists()
        for i, drafts in enumerate(lists):
            own = [[], tokens[i].tolist(), [100 + i]]
            assert any(drafts == one[: len(drafts)] for one in own)
        assert lists[4:6] == [[], []]


def test_room_for_requests() -> None:
    play = Play([(NGRAM, 0)], 2)
    for name in "ab":
        play.name = name
        play.begin()
    play.name = "c"
    with pytest.raises(RuntimeError, match="'c': 2 requests"):
        play.begin()
    play.arbiter.retain(["b"])
    play.begin()
    assert play.arbiter.num_requests == 2


def test_a_name_that_comes_back_is_another_request() -> None:
    """What was offered to the first is not judged by the second's text."""
    play = Play([(NGRAM, 0)], 2)
    play.step({0: ([7, 7], 5)})
    play.new_request("a")
    play.text = [0, 8, 8]
    play.begin()
    assert (play.arbiter.table.trials == _arbiter.PRIOR_TRIALS).all()


@pytest.mark.parametrize("order", list(product(range(2), repeat=2)))
def test_ranks_decide_alike(order: tuple[int, int]) -> None:
    """Nothing but the offers and the prices decides."""
    found = []
    for _ in range(2):
        play = Play([(NGRAM, 0), (SUFFIX, 0)], 4, 2)
        play.arbiter.set_prices(Prices(0.1, 1.0, 0.1, 0.1))
        for step in range(40):
            choice = play.step({order[step % 2]: ([step % 3, 1], 3)}, [1, step % 2])
            play.text += [step % 3, 1][: 1 + step % 2]
            found.append((choice.to_lists(), choice.num_model.tolist(), play.num_passes))
    assert found[:40] == found[40:]


def test_constants_are_those_of_the_compiled_half() -> None:
    """The accounts cannot import it, since it imports numba."""
    from vllm_specplus.proposers import _arbiter, arbiter

    assert (arbiter._SHIFT, arbiter._ONE, arbiter.ASLEEP) == (_arbiter.SHIFT, _arbiter.ONE, _arbiter.ASLEEP)
    assert arbiter.MAX_STOPS == _arbiter.MAX_STOPS


def test_a_source_is_known_while_the_model_is_awake() -> None:
    """Its first tokens are judged under the key of a copy too, whether the model says the same or not."""
    play = Play([(NGRAM, 0)], 1, num_steps=1)
    before = play.arbiter.table.chances.copy()
    play.step({0: ([5], 3)}, model=[5])
    play.text.append(5)
    play.step({0: ([6], 3)}, model=[7])
    play.text.append(6)
    play.begin()
    table, copied = play.arbiter.table, COPIED + length_class(3)
    assert table.trials[copied] == _arbiter.PRIOR_TRIALS + 2 * _arbiter.TRIAL
    assert table.chances[copied] > before[copied]
    trials = [table.trials[key + length_class(3)] for key in (_arbiter.AGREED, CONTRARY)]
    assert trials == [_arbiter.PRIOR_TRIALS + _arbiter.TRIAL] * 2


def test_what_is_counted_where_sources_differ() -> None:
    """Behind a token that both say, each says another one; the first is right, and the text ends the chains."""
    play = Play([(NGRAM, 0), (SUFFIX, 0)], 3)
    play.step({0: ([1, 2, 3], 3), 1: ([1, 4, 5], 6)})
    chances = [int(play.arbiter.table.chances[COPIED + at]) for at in (length_class(4), NUM_LENGTHS + length_class(7))]
    play.text += [1, 2, 9]
    play.begin()
    trials, expected, hits = (numbers[0] for numbers in play.arbiter._opposed)
    which = [_arbiter.DISPUTED + source for source in (NGRAM, SUFFIX)]
    assert trials[which].tolist() == [ONE, ONE]
    assert expected[which].tolist() == [against(*chances), against(*chances[::-1])]
    assert hits[which].tolist() == [ONE, 0]
    assert trials.sum() == 2 * ONE


@pytest.mark.parametrize(
    ("chain", "model", "derived"), [(1.0, 0.8, 1.0), (0.0, 0.8, 0.0), (0.5, 0.5, 1 / 3), (0.9, 1.0, 0.0)]
)
def test_a_contrary_draft_goes_by_what_is_known_of_both(chain: float, model: float, derived: float) -> None:
    play = Play([(NGRAM, 0)], 1, num_steps=1)
    table, key = play.arbiter.table, COPIED + length_class(4)
    for which, share in ((key, chain), (ALONE, model)):
        table.hits[which] = share * table.trials[which]
    play.begin()
    contrary = key - COPIED + CONTRARY
    hits = table.hits[contrary] / _arbiter.TRIAL + 6 * derived
    assert table.chances[contrary] / ONE == pytest.approx(hits / (4 + 6), abs=0.001)


def test_a_reference_that_the_model_agrees_with_counts_as_much_as_without_it() -> None:
    play = Play([(NGRAM, 0), (REFERENCE, 0)], 1, num_steps=1)
    chances = np.full(_arbiter.NUM_KEYS, ONE // 2)
    chances[COPIED:] = ONE * 9 // 10
    play.chances = chances
    play.arbiter.set_prices(Prices(0.6, 1.0))
    assert play.step({0: ([5], 3)}, model=[5]).num_drafts[0] == 0
    assert play.step({1: ([5], 3)}, model=[5]).num_drafts[0] == 1


def test_a_text_is_expected_to_end_with_its_reference() -> None:
    """Not where the other source has said something else before, nor in a request whose texts go on all the same."""
    play = Play([(NGRAM, 0), (REFERENCE, 0)], 4)
    play.chances = [9 * ONE // 10] * _arbiter.NUM_KEYS
    play.arbiter.set_prices(Prices(0.6, 1.0))
    assert play.step({0: ([1, 2, 3, 4], 3)}).to_lists() == [[1, 2, 3, 4]]
    assert play.step({0: ([1, 2, 3, 4], 3), 1: ([1, 2], 3)}).to_lists() == [[1, 2]]
    play.chances[COPIED + length_class(3)] = ONE
    assert play.step({0: ([1, 2, 3, 4], 3), 1: ([5, 2], 3)}).to_lists() == [[1, 2, 3, 4]]
    for _ in range(20):
        play.text += [1, 2, 3]
        choice = play.step({0: ([1, 2, 3, 4], 3), 1: ([1, 2], 3)})
    assert choice.to_lists() == [[1, 2, 3, 4]]


def test_a_text_is_expected_to_end_with_its_reference_behind_the_models_drafts_too() -> None:
    play = Play([(NGRAM, 1), (REFERENCE, 0)], 4, 1)
    play.chances = [9 * ONE // 10] * _arbiter.NUM_KEYS
    play.arbiter.set_prices(Prices(0.6, 1.0))
    assert play.step({0: ([2, 3, 4], 3), 1: ([1, 2], 3)}, model=[1]).to_lists() == [[1, 2]]
    for other in ([5, 2], [1, 5]):
        assert play.step({0: ([2, 3, 4], 3), 1: (other, 3)}, model=[1]).to_lists() == [[1, 2, 3, 4]]


def test_a_reference_that_is_the_whole_output_is_known_apart() -> None:
    """It goes by how such references did in earlier requests, and not by how others did after 1 or 40 tokens."""
    play = Play([(NGRAM, 0), (REFERENCE, 0)], 4)
    right, wrong = [5, 6, 7, 8], [1, 2, 3, 4]
    for i in range(8):
        for agreed, text in ((1, wrong), (40, wrong), (WHOLE_OUTPUT, right)):
            play.new_request(f"{agreed} {i}")
            play.step({0: (wrong, 40), 1: (right, agreed)})
            play.text += text
            play.begin()
    for agreed, text in ((1, wrong), (40, wrong), (WHOLE_OUTPUT, right)):
        play.new_request(f"{agreed}")
        assert play.step({0: (wrong, 40), 1: (right, agreed)}).to_lists() == [text]


def test_a_reference_that_was_wrong_once_is_trusted_for_longer_than_a_copy() -> None:
    numbers = []
    for source in (SUFFIX, REFERENCE):
        play = Play([(source, 0)], 8)
        play.chances = [19 * ONE // 20] * _arbiter.NUM_KEYS
        play.arbiter.set_prices(Prices(0.52, 1.0))
        assert len(play.step({0: ([1] * 8, 9)}).to_lists()[0]) == 8
        play.text += [1, 2]
        numbers.append(len(play.step({0: ([1] * 8, 9)}).to_lists()[0]))
    # The chance of a hit is .95, and 1.9 were expected where one came: (1 + 6) / (1.9 + 6) and (1 + 24) / (1.9 + 24).
    copied, vouched = 0.95 * 7 / 7.9, 0.95 * 25 / 25.9
    assert numbers == [math.floor(math.log(0.52) / math.log(chance)) for chance in (copied, vouched)] == [3, 7]


def test_what_is_counted_where_a_text_goes_on_behind_a_reference() -> None:
    play = Play([(NGRAM, 0), (REFERENCE, 0)], 3)
    reference = COPIED + (REFERENCE - NGRAM) * NUM_LENGTHS
    for token_ids, new, is_counted in (([1, 2], [1, 2, 3], True), ([1, 2], [1, 2], False), ([1, 2], [1, 3, 3], False)):
        play.new_request(f"{new}")
        play.step({0: ([1, 2], 3), 1: (token_ids, 3)})
        chance = play.arbiter.table.chances[reference + length_class(5)]
        play.text += new
        play.begin()
        record = play.arbiter._record
        row = play.arbiter._rows[0]
        counted = [int(numbers[row, _arbiter.ENDS]) for numbers in record]
        assert counted == [ONE * is_counted, chance * is_counted, 0]
    # More than these slots hold may follow, or more than the request may have in this step.
    for token_ids, limit in (([1, 2, 3], 3), ([1, 2], 2)):
        play.new_request(f"full {limit}")
        play.step({1: (token_ids, 3)}, limit=limit)
        play.text += [1, 2, 3, 4]
        play.begin()
        assert play.arbiter._record.trials[play.arbiter._rows[0], _arbiter.ENDS] == 0
