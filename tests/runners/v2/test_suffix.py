"""Suffix decoding on Model Runner V2 with synchronous scheduling."""

import numpy as np
import pytest

from tests.proposers.reference import make_history
from tests.runners.v2.suffix_engine import MAX_LEN, Engine, Event
from vllm_specplus.proposers import HybridDrafter
from vllm_specplus.runners.v2.host_tokens import TokenMirror

pytestmark = pytest.mark.interpreter

PERIOD = [3, 8, 5, 9, 4, 7, 6]


@pytest.fixture(autouse=True)
def events(monkeypatch):
    Event.install(monkeypatch)


def test_a_mirror_grows_at_its_end():
    mirror = TokenMirror(3, 16)
    mirror.add(1, 2, [5, 6, 7])
    assert mirror.num_tokens.tolist() == [0, 3, 0]
    assert mirror.num_prompt_tokens.tolist() == [0, 2, 0]
    mirror.extend(1, 5, np.array([8, 9]))
    assert mirror.token_ids[1].tolist() == [5, 6, 7, 8, 9, *[0] * 11]
    assert mirror.num_tokens.tolist() == [0, 5, 0]
    assert not mirror.token_ids[[0, 2]].any()


def test_a_mirror_tells_a_request_from_the_next():
    mirror = TokenMirror(2, 16)
    mirror.add(0, 3, [5, 6, 7])
    before = mirror.generation.copy()
    mirror.extend(0, 4, np.array([8]))
    assert np.array_equal(mirror.generation, before)
    mirror.add(0, 1, [4])
    assert mirror.generation[0] != before[0]
    assert mirror.generation[1] == before[1]
    assert (mirror.num_tokens[0], mirror.num_prompt_tokens[0]) == (1, 1)


class Expected:
    """The drafts of a matcher that sees the texts of each step."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.matcher = engine.matcher()

    def step(self, sampled, model):
        engine = self.engine
        self.matcher.retain(engine.states.req_id_to_index)
        history = make_history({req_id: engine.text(req_id) for req_id in sampled}, MAX_LEN)
        history.num_prompt_tokens[:] = [engine.prompt_len[req_id] for req_id in sampled]
        limits = np.array([engine.width * bool(new) for new in sampled.values()])
        if model is None:
            return self.matcher.match(history, None, limits).to_lists(), [0] * len(sampled)
        drafter = HybridDrafter(
            self.matcher,
            num_model_steps=len(model[0]),
            num_speculative_tokens=engine.width,
            match_override_len=engine.options.match_override_len,
        )
        hybrid = drafter.draft(history, np.array(model), limits)
        return hybrid.token_ids, hybrid.num_model.tolist()


@pytest.mark.parametrize(("num_steps", "override"), [(0, 0), (1, 0), (2, 4), (4, 2)])
@pytest.mark.parametrize("cached", [0, 100])
def test_a_synchronous_step_drafts_as_the_matcher_does(num_steps, override, cached):
    """Requests begin, end, are preempted and prefilled in chunks; rows change their order."""
    rng = np.random.default_rng(num_steps)
    engine = Engine(match_override_len=override, suffix_decoding_max_cached_requests=cached)
    expected = Expected(engine)
    num_drafts = num_model = 0

    def tokens(count):
        return rng.integers(1, 4, count).tolist()

    free, started = [0, 1, 2, 3], 0
    for _ in range(60):
        running = list(engine.states.req_id_to_index)
        # They end by length or by chance. Half of them come back in another place, with their output in the prefill.
        for req_id in running:
            if len(engine.text(req_id)) > MAX_LEN - 10 or rng.random() < 0.05:
                text, prompt_len = engine.text(req_id), engine.prompt_len[req_id]
                free.insert(0, engine.states.req_id_to_index[req_id])
                engine.remove(req_id)
                if rng.random() < 0.5 and len(text) < MAX_LEN - 10:
                    engine.add(req_id, free.pop(), text[:prompt_len], text[prompt_len:])
        while len(free) > 1:
            engine.add(f"request-{started}", free.pop(), tokens(rng.integers(1, 12)))
            started += 1
        running = list(engine.states.req_id_to_index)
        chosen = rng.permutation(running)[: rng.integers(1, len(running) + 1)].tolist()
        sampled = {req_id: tokens(rng.integers(0, engine.width + 2)) for req_id in chosen}
        model = [tokens(num_steps) for _ in chosen] if num_steps else None
        drafted = engine.step(sampled, model)
        assert drafted == expected.step(sampled, model)
        assert all(engine.mirrored(req_id) == engine.text(req_id) for req_id in chosen)
        num_drafts += sum(map(len, drafted[0]))
        num_model += sum(drafted[1])
    assert num_drafts > num_model
    assert (num_model > 0) == (num_steps > 0)


def test_a_synchronous_step_waits_for_its_own_tokens():
    engine = Engine()
    engine.add("a", 2, PERIOD * 2)
    assert engine.step({"a": PERIOD[:1]}) == ([[*PERIOD[1:5]]], [0])
    assert engine.step({"a": PERIOD[1:6]}) == ([[PERIOD[6], *PERIOD[:3]]], [0])
    assert Event.waited == [0, 1]
    assert not any(Event.blocking)


def test_a_step_without_drafts_takes_the_tokens_in():
    engine = Engine()
    engine.add("a", 0, PERIOD)
    engine.step({"a": PERIOD[:3]}, width=0)
    assert engine.mirrored("a") == PERIOD + PERIOD[:3]
    # The matcher now gets more new tokens than one step brings.
    engine.step({"a": PERIOD[3:]}, width=0)
    assert engine.step({"a": PERIOD[:2]}) == ([PERIOD[2:6]], [0])


def test_a_step_may_be_less_wide_than_the_last():
    engine = Engine()
    engine.add("a", 0, PERIOD * 2)
    assert engine.step({"a": PERIOD[:1]}, width=2) == ([PERIOD[1:3]], [0])
    assert engine.step({"a": PERIOD[1:4]}, model=[[4]], width=2) == ([PERIOD[4:6]], [1])


def test_a_finished_request_is_dropped():
    engine = Engine()
    engine.add("a", 0, PERIOD)
    engine.add("b", 1, PERIOD)
    engine.step({"a": PERIOD[:2], "b": PERIOD[:2]})
    assert engine.matched_requests == {"a", "b"}
    engine.remove("a")
    engine.step({"b": PERIOD[2:4]}, width=0)
    assert engine.matched_requests == {"b"}
