"""Suffix decoding on Model Runner V2 with asynchronous scheduling, where a kernel continues what the host forecasts."""

import numpy as np
import pytest

from tests.kernels.test_drafts import Request, continued
from tests.proposers.reference import make_history
from tests.runners.v2.suffix_engine import MAX_LEN, Engine, Event
from vllm_specplus.proposers import SuffixMatcher

pytestmark = pytest.mark.interpreter

PERIOD = [3, 8, 5, 9, 4, 7, 6]


@pytest.fixture(autouse=True)
def events(monkeypatch):
    Event.install(monkeypatch)


def replay(engine, req_id, truth):
    """Serve a request whose output is `truth`; returns the drafts of each step."""
    steps, drafts, at = [], [], 0
    while at < len(truth):
        right = 0
        while right < len(drafts) and drafts[right] == truth[at + right]:
            right += 1
        new = truth[at : at + right + 1]
        at += len(new)
        (drafts,), _ = engine.step({req_id: new})
        drafts = drafts[: len(truth) - at - 1]
        steps.append(drafts)
    return steps


@pytest.mark.parametrize("width", [1, 3, 4])
def test_a_text_that_repeats_itself_is_drafted_one_step_later(width):
    """The drafts are right although the host does not have the latest tokens."""
    truth, steps = PERIOD * 5, {}
    for is_async in (False, True):
        engine = Engine(width=width, is_async=is_async, suffix_decoding_max_tree_depth=48)
        engine.add("a", 1, PERIOD * 4)
        steps[is_async] = replay(engine, "a", truth)
    assert len(steps[False][0]) == width
    assert steps[True][0] == []
    assert len(steps[True][1]) == width
    # From then on all drafts are right.
    assert len(steps[True]) == 2 + -(-(len(truth) - 2) // (width + 1))
    assert len(steps[True]) <= len(steps[False]) + 1


class Expected:
    """The drafts of a matcher that sees the texts as they were one step before."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.matcher = engine.matcher()
        self.texts: dict[str, list[int]] = {}
        self.next_texts: dict[str, list[int]] = {}

    def add(self, req_id):
        self.next_texts.pop(req_id, None)
        self.texts[req_id] = self.engine.text(req_id)

    def step(self, sampled, model):
        engine = self.engine
        alive = engine.states.req_id_to_index
        for req_id, text in self.next_texts.items():
            if req_id not in alive:  # its end is part of its response
                history = make_history({req_id: text}, MAX_LEN)
                history.num_prompt_tokens[:] = engine.prompt_len[req_id]
                self.matcher.match(history, None, np.zeros(1, np.int32))
        self.texts |= {req_id: text for req_id, text in self.next_texts.items() if req_id in alive}
        self.next_texts = {req_id: engine.text(req_id) for req_id in sampled}
        self.matcher.retain(alive)
        history = make_history({req_id: self.texts[req_id] for req_id in sampled}, MAX_LEN)
        history.num_prompt_tokens[:] = [engine.prompt_len[req_id] for req_id in sampled]
        match = self.matcher.match(history, None, np.full(len(sampled), 2 * engine.width + 1))
        override, drafted = engine.options.match_override_len, []
        for i, (req_id, forecast) in enumerate(zip(sampled, match.to_lists(), strict=True)):
            request = Request(
                text=engine.text(req_id),
                base_len=len(self.texts[req_id]),
                forecast=forecast,
                model=[] if model is None else model[i],
                limit=engine.width * bool(sampled[req_id]),
                replaces=0 < override <= match.match_len[i],
            )
            drafted.append(continued(request, engine.width))
        return [drafts for drafts, _ in drafted], [count for _, count in drafted]


@pytest.mark.parametrize(("num_steps", "override"), [(0, 0), (1, 0), (2, 4)])
@pytest.mark.parametrize("cached", [0, 100])
def test_a_step_drafts_from_the_texts_of_the_step_before(num_steps, override, cached):
    """Requests begin, end, are preempted and prefilled in chunks. Many of the tokens are accepted drafts."""
    rng = np.random.default_rng(num_steps)
    engine = Engine(is_async=True, match_override_len=override, suffix_decoding_max_cached_requests=cached)
    expected = Expected(engine)
    num_drafts = num_model = 0

    def tokens(count):
        return rng.integers(1, 3, count).tolist()

    free, started = [0, 1, 2, 3], 0
    last: dict[str, list[int]] = {}
    for _ in range(80):
        for req_id in list(engine.states.req_id_to_index):
            if len(engine.text(req_id)) > MAX_LEN - 10 or rng.random() < 0.1:
                text, prompt_len = engine.text(req_id), engine.prompt_len[req_id]
                free.append(engine.states.req_id_to_index[req_id])
                engine.remove(req_id)
                if rng.random() < 0.5 and len(text) < MAX_LEN - 10:
                    engine.add(req_id, free.pop(), text[:prompt_len], text[prompt_len:])
                    expected.add(req_id)
        while len(free) > 1:
            engine.add(f"request-{started}", free.pop(), tokens(rng.integers(1, 12)))
            expected.add(f"request-{started}")
            started += 1
        running = list(engine.states.req_id_to_index)
        chosen = rng.permutation(running)[: rng.integers(1, len(running) + 1)].tolist()
        sampled = {}
        for req_id in chosen:
            accepted = last.get(req_id, [])[: rng.integers(0, engine.width + 1)]
            sampled[req_id] = [] if rng.random() < 0.1 else accepted + tokens(1)
        model = [tokens(num_steps) for _ in chosen] if num_steps else None
        drafted = engine.step(sampled, model)
        assert drafted == expected.step(sampled, model)
        assert {req_id: engine.mirrored(req_id) for req_id in chosen} == {i: expected.texts[i] for i in chosen}
        last |= dict(zip(chosen, drafted[0], strict=True))
        num_drafts += sum(map(len, drafted[0]))
        num_model += sum(drafted[1])
    assert num_drafts > num_model + 10
    assert (num_model > 0) == (num_steps > 0)


def test_a_step_waits_for_the_one_before_only():
    engine = Engine(is_async=True)
    engine.add("a", 2, PERIOD)
    for token in PERIOD[:4]:
        engine.step({"a": [token]})
    assert len(Event.blocking) == 4
    assert Event.waited == [0, 1, 2]
    assert all(Event.blocking)
    assert engine.mirrored("a") == PERIOD + PERIOD[:3]


def test_a_request_gets_no_tokens_of_the_one_that_had_its_place():
    engine = Engine(is_async=True, suffix_decoding_max_cached_requests=0)
    engine.add("a", 1, PERIOD)
    engine.step({"a": PERIOD[:3]})
    engine.remove("a")
    # Of the same length, so that the latest tokens of "a" would fit behind its text.
    engine.add("b", 1, [2] * 7)
    assert engine.step({"b": [1]}) == ([[]], [0])
    assert engine.mirrored("b") == [2] * 7
    assert engine.step({"b": [1]}) == ([[]], [0])
    assert engine.mirrored("b") == [*[2] * 7, 1]
    assert engine.matched_requests == {"b"}


def test_an_ended_request_is_forgotten_though_its_last_match_fails(monkeypatch):
    engine = Engine(is_async=True)
    for index, name in enumerate("ab"):
        engine.add(name, index, PERIOD)
    engine.step({"a": PERIOD[:1], "b": PERIOD[:1]})
    engine.remove("a")
    match = SuffixMatcher.match

    def fails_at_a(matcher, history, *args):
        if "a" in history.req_ids:
            raise ValueError
        return match(matcher, history, *args)

    monkeypatch.setattr(SuffixMatcher, "match", fails_at_a)
    for token in PERIOD[1:3]:
        engine.step({"b": [token]})
    faults = engine.slot_filler._faults
    assert faults.counts == {"drafting": 1}
    assert not faults.without_drafts


def test_a_request_that_comes_back_to_its_place_has_what_it_brings():
    """After preemption its prefill brings its output, with or without the tokens that were on their way."""
    engine = Engine(is_async=True)
    engine.add("a", 1, PERIOD)
    engine.step({"a": PERIOD[:3]})
    engine.remove("a")
    engine.add("a", 1, PERIOD, PERIOD[:2])
    engine.step({"a": []})
    assert engine.mirrored("a") == PERIOD + PERIOD[:2]
    engine.step({"a": PERIOD[2:3]})
    assert engine.step({"a": PERIOD[3:4]})[0] == [PERIOD[4:6]]
    assert engine.mirrored("a") == PERIOD + PERIOD[:3]


def test_a_step_without_drafts_takes_the_tokens_in():
    engine = Engine(is_async=True)
    engine.add("a", 0, PERIOD * 2)
    engine.step({"a": PERIOD[:3]}, width=0)
    assert engine.mirrored("a") == PERIOD * 2
    engine.step({"a": PERIOD[3:6]}, width=0)
    assert engine.mirrored("a") == PERIOD * 2 + PERIOD[:3]
    assert engine.step({"a": PERIOD[6:]}) == ([PERIOD[:4]], [0])
    assert engine.mirrored("a") == PERIOD * 2 + PERIOD[:6]


def test_a_step_may_be_less_wide_than_the_last():
    engine = Engine(is_async=True)
    engine.add("a", 0, PERIOD * 2)
    engine.step({"a": PERIOD[:4]})
    assert engine.step({"a": PERIOD[4:5]}, width=2) == ([PERIOD[5:]], [0])


def test_a_prompt_in_chunks_changes_nothing():
    engine = Engine(is_async=True)
    engine.add("a", 0, PERIOD * 2)
    engine.add("b", 3, PERIOD * 2)
    for _ in range(3):
        assert engine.step({"a": [], "b": []}, model=[[1], [2]]) == ([[], []], [0, 0])
        assert engine.mirrored("a") == engine.mirrored("b") == PERIOD * 2
        assert engine.matched_requests == set()
    engine.step({"a": PERIOD[:4], "b": []})
    assert engine.step({"a": PERIOD[4:5], "b": []})[0] == [[*PERIOD[5:], *PERIOD[:2]], []]
    assert engine.mirrored("b") == PERIOD * 2


def test_a_finished_request_is_dropped():
    engine = Engine(is_async=True)
    engine.add("a", 0, PERIOD)
    engine.add("b", 1, PERIOD)
    for token in PERIOD[:2]:
        engine.step({"a": [token], "b": [token]})
    assert engine.matched_requests == {"a", "b"}
    engine.remove("a")
    engine.step({"b": PERIOD[2:4]}, width=0)
    assert engine.matched_requests == {"b"}


@pytest.mark.parametrize("place", [0, 1], ids=["same place", "another place"])
def test_the_last_tokens_of_a_request_reach_the_next(place: int):
    """They come when the request has ended and another one may have its place."""
    answer = list(range(20, 44))
    engine = Engine(is_async=True)
    for name, index in (("a", 0), ("b", place)):
        engine.add(name, index, [1, 2, 3])
        drafts = [engine.step({name: answer[at : at + 4]})[0][0] for at in range(0, len(answer), 4)]
        engine.remove(name)
    assert drafts[4] == answer[20:]
