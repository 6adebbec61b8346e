"""The bounds of docs/limits.md on Model Runner V2, each driven to where it holds."""

import numpy as np
import pytest

from tests.runners.v2.suffix_engine import MAX_LEN, Engine, Event
from tests.runners.v2.test_requests import TEXT
from tests.runners.v2.test_requests import Engine as ReferenceEngine
from vllm_specplus.runners.v2.host_tokens import TokenMirror

pytestmark = pytest.mark.interpreter

NUM_REQS = 4


@pytest.fixture(autouse=True)
def events(monkeypatch):
    Event.install(monkeypatch)


def num_token_bytes(mirror: TokenMirror) -> int:
    """Bytes of the tokens of all requests, and of those that had their places before."""
    return mirror.token_ids.nbytes + sum(token_ids.nbytes for _, token_ids, _ in mirror._before.values())


@pytest.mark.parametrize("keeps_last", [False, True])
def test_a_mirror_full_of_requests_that_come_and_go(keeps_last):
    """4 bytes for each place and token, twice where the request before is kept."""
    mirror = TokenMirror(NUM_REQS, MAX_LEN, keeps_last=keeps_last)
    bound = 4 * MAX_LEN * NUM_REQS * (1 + keeps_last)
    text = np.arange(MAX_LEN, dtype=np.int32)
    for _ in range(3):
        for index in range(NUM_REQS):
            mirror.add(index, 5, text[:6].tolist())
            mirror.extend(index, MAX_LEN, text[6:])
            assert num_token_bytes(mirror) <= bound
    assert num_token_bytes(mirror) == bound
    for index in range(NUM_REQS):
        mirror.add_unfollowed(index)
    assert num_token_bytes(mirror) == bound


@pytest.mark.parametrize("is_async", [False, True])
def test_suffix_decoding_with_every_place_full_to_the_models_length(is_async):
    """Three rounds of requests fill all places. Their trees go with them, and the mirror stays within its bound."""
    engine = Engine(is_async=is_async, suffix_decoding_max_cached_requests=0)
    rng = np.random.default_rng(0)
    for number in range(3):
        names = [f"{number}-{index}" for index in range(NUM_REQS)]
        for index, name in enumerate(names):
            engine.add(name, index, rng.integers(1, 4, 6).tolist())
        while len(engine.text(names[0])) < MAX_LEN:
            engine.step({name: rng.integers(1, 4, min(5, MAX_LEN - len(engine.text(name)))).tolist() for name in names})
            assert num_token_bytes(engine.mirror) <= 4 * MAX_LEN * NUM_REQS * (1 + is_async)
        engine.step({name: [] for name in names})
        assert engine.matched_requests == set(names)
        for name in names:
            engine.remove(name)
    assert num_token_bytes(engine.mirror) == 4 * MAX_LEN * NUM_REQS * (1 + is_async)


def test_counts_of_a_request_that_is_preempted_again_and_again():
    engine, num_turns = ReferenceEngine(), 40
    output: list[int] = []
    for _ in range(num_turns):
        engine.add("a", 1, TEXT, output=output, counts_key="one")
        output.append(TEXT[len(output) % len(TEXT)])
        engine.step({"a": output[-1:]})
        engine.preempt("a")
    entries = {"requests": 1, "references": 1, "request_counts": 1}
    assert engine.tracker.stats()["entries"] == entries
    (counts,) = engine.tracker.live_requests.counts._counts_by_key.values()
    assert counts.tensor.tolist()[0] == num_turns
    assert engine.collect("one")["num_steps"] == num_turns
