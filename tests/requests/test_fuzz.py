"""Random bodies and messages: each is answered or refused, none brings an exception of the plugin's."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.fuzzing import HUGE_INTEGERS, fuzz, to_json
from tests.requests.stand_ins import CHAT, COUNTS, INVOCATIONS, OTHER_ROUTES, PREDICTION, TEXT, Check, Server
from tests.runners.test_live_requests import NOTHING
from tests.runners.v1.test_requests import Steps
from vllm_specplus.engine.worker import SpecPlusWorkerMixin
from vllm_specplus.requests.body import decode_object
from vllm_specplus.requests.faults import request_faults
from vllm_specplus.requests.options import HANDOVER_ENTRY, KEYS, RESOLVED_ENTRY, SCOPE_ENTRY, ResolvedOptions
from vllm_specplus.requests.refusal import RefusedRequestError

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.just(PREDICTION)
    | st.sampled_from(["content", "a" * 500])
)
# Drawn by their place: hypothesis writes what it draws from.
_HUGE_INTEGERS = st.integers(0, len(HUGE_INTEGERS) - 1).map(lambda i: HUGE_INTEGERS[i])
HUGE = _HUGE_INTEGERS | _HUGE_INTEGERS.map(to_json)


def values(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of JSON."""
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=8,
    )


# No message between vLLM's processes holds a huge integer.
MESSAGE_VALUES, VALUES = values(LEAVES), values(LEAVES | HUGE)
NAMES = [*KEYS, RESOLVED_ENTRY, HANDOVER_ENTRY, SCOPE_ENTRY, "sp_nonsense", "other"]
OPTIONS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4)
BODIES = st.fixed_dictionaries(
    {"model": st.just("m")},
    optional={
        "prediction": st.just(PREDICTION) | VALUES,
        "aux_info": VALUES,
        "stream": VALUES,
        "stream_options": VALUES,
        "vllm_xargs": OPTIONS | VALUES,
        "extra_config": OPTIONS | VALUES,
        "n": HUGE | VALUES,
    },
)


@st.composite
def sent_bodies(draw: st.DrawFn) -> list[bytes]:
    """A body in pieces: JSON in some encoding, perhaps cut, with a few bytes changed."""
    text = to_json(draw(BODIES), ensure_ascii=draw(st.booleans()))
    encoding = draw(st.sampled_from(["utf-8", "utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1"]))
    data = bytearray(text.encode(encoding, "surrogatepass" if encoding.startswith("utf") else "replace"))
    for _ in range(draw(st.integers(0, 3))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    end = draw(st.integers(0, len(data))) if draw(st.booleans()) else len(data)
    at = draw(st.integers(0, end))
    return [bytes(data[:at]), bytes(data[at:end])]


@fuzz
@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(sent_bodies(), st.sampled_from([CHAT, TEXT, INVOCATIONS, *OTHER_ROUTES]))
def test_bodies(pieces: list[bytes], path: str) -> None:
    """`Server.post` sees to it that nothing of the request stays behind. What passes is checked again by the engine."""
    server, faults_before = Server(), request_faults.counts.copy()
    got = server.post(pieces, path=path)
    assert got.status in (200, 400)
    assert len(server.bodies) == (got.status == 200)
    if got.status == 400:
        assert set(got.json["error"]) == {"message", "type", "param", "code"}
    for xargs in ((decode_object(body) or {}).get("vllm_xargs") for body in server.bodies):
        if isinstance(xargs, dict):
            params = SimpleNamespace(extra_args=xargs)
            with suppress(RefusedRequestError):
                Check.validate_params(params)
    assert request_faults.counts == faults_before


WIRES = st.fixed_dictionaries({}, optional=dict.fromkeys(ResolvedOptions.model_fields, MESSAGE_VALUES))


@fuzz
@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(
    WIRES | MESSAGE_VALUES,
    MESSAGE_VALUES,
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
    st.sampled_from([np.int32, np.int64, np.float64]),
)
def test_worker_messages(wire: Any, scope: Any, tokens: list[int], dtype: Any) -> None:
    """A message that nothing of the plugin's has written is ignored, and its request has no entry left."""
    if isinstance(wire, dict) and "token_ids" in wire and len(tokens) % 2:
        wire = wire | {"token_ids": np.array(tokens, dtype).tobytes()}
    steps = Steps(method="suffix")
    params = SimpleNamespace(extra_args={RESOLVED_ENTRY: wire, SCOPE_ENTRY: scope})
    steps.begin(SimpleNamespace(req_id="a", sampling_params=params))
    tracker = steps.tracker
    assert tracker.scopes.of(["a"]) == [scope if isinstance(scope, str) else None]
    assert tracker.live_requests.faults.counts == {}
    steps.begin(ended=["a"])
    steps.begin()
    assert tracker.live_requests.sizes() | {"request_counts": 0} == NOTHING
    assert len(tracker.scopes) == 0


@fuzz
@settings(max_examples=300)
@given(MESSAGE_VALUES)
def test_questions_to_workers(key: Any) -> None:
    """A question by a key of no request has no answer, and takes no request's counts."""
    assume(key != "key")
    steps = Steps()
    steps.begin(steps.add("a", counts_key="key"))
    worker = SpecPlusWorkerMixin()
    worker._tracker = steps.tracker
    assert worker.specplus_collect_request_stats(key) is None
    assert worker.specplus_collect_request_stats("key") == dict.fromkeys(COUNTS, 0) | {"num_requests": 1}
    # A list or a dict is no key of a dict.
    assert steps.tracker.live_requests.faults.counts.keys() <= {"counting"}
