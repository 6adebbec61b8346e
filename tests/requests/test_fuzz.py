"""Random bodies and messages: each is answered or refused, none brings an exception of the plugin's."""

import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzzing import fuzz
from tests.requests.stand_ins import CHAT, INVOCATIONS, OTHER_ROUTES, PREDICTION, TEXT, Check, Server
from tests.runners.test_live_requests import NOTHING, new_requests
from vllm_specplus.requests.body import decode_object
from vllm_specplus.requests.options import HANDOVER_ENTRY, KEYS, RESOLVED_ENTRY, SCOPE_ENTRY, ResolvedOptions
from vllm_specplus.requests.refusal import RefusedRequestError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.just(PREDICTION)
    | st.sampled_from(["content", "a" * 500]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = [*KEYS, RESOLVED_ENTRY, HANDOVER_ENTRY, SCOPE_ENTRY, "sp_nonsense", "other"]
OPTIONS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4)
BODIES = st.fixed_dictionaries(
    {"model": st.just("m")},
    optional={
        "prediction": VALUES,
        "aux_info": VALUES,
        "stream": VALUES,
        "stream_options": VALUES,
        "vllm_xargs": OPTIONS | VALUES,
        "extra_config": OPTIONS | VALUES,
        "n": VALUES,
    },
)


@st.composite
def sent_bodies(draw: st.DrawFn) -> list[bytes]:
    """A body in pieces: JSON in some encoding, perhaps cut, with a few bytes changed."""
    text = json.dumps(draw(BODIES), ensure_ascii=draw(st.booleans()))
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
    server = Server()
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


WIRES = st.fixed_dictionaries({}, optional=dict.fromkeys(ResolvedOptions.model_fields, VALUES)) | VALUES


@fuzz
@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(WIRES, st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), st.sampled_from([np.int32, np.int64, np.float64]))
def test_worker_messages(wire: Any, tokens: list[int], dtype: Any) -> None:
    """A message that nothing of the plugin's has written is ignored, and its request has no entry left."""
    if isinstance(wire, dict) and "token_ids" in wire and len(tokens) % 2:
        wire = wire | {"token_ids": np.array(tokens, dtype).tobytes()}
    requests = new_requests(warns=False)
    params = type("Params", (), {"extra_args": {RESOLVED_ENTRY: wire}})
    requests.begin([type("New", (), {"req_id": "a", "sampling_params": params})])
    assert requests.faults.counts == {}
    requests.finish(["a"])
    assert requests.sizes() | {"request_counts": 0} == NOTHING
