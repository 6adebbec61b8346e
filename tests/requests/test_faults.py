"""A fault of the plugin's own code where requests are taken costs what it was about, and never the answer."""

from typing import Any

import pytest
from vllm import SamplingParams

from tests.requests.stand_ins import (
    ALL_FIELDS,
    CHAT,
    COUNTS,
    SECRET,
    STREAM,
    TEXT,
    Check,
    Server,
    answer,
    engine_with,
    streams,
)
from vllm_specplus.requests.body import RequestBody
from vllm_specplus.requests.check import handover
from vllm_specplus.requests.faults import request_faults
from vllm_specplus.requests.options import RESOLVED_ENTRY
from vllm_specplus.requests.response import Report
from vllm_specplus.requests.steps import StepCounter, Steps


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(SECRET)


def check_log(log: pytest.LogCaptureFixture, part: str) -> None:
    """The fault is logged once, with its stack and without the client's text."""
    assert log.text.count(f"a fault in {part}, RuntimeError") == 1
    assert "in fail" in log.text
    assert SECRET not in log.text


def test_reading_a_request(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(RequestBody, "encode", fail)
    for path in (CHAT, TEXT):
        server = Server()
        body = ALL_FIELDS | {"n": 1, "extra_config": {"sp_edit": 1}, "vllm_xargs": {"mine": 1, "spec_tokens": 2}}
        assert server.post(body, path=path).status == 200
        # Nothing is left that vLLM's server would have to refuse.
        assert server.body == {"n": 1, "vllm_xargs": {"mine": 1}}
    check_log(log, "reading a request")
    assert request_faults.counts == {"reading a request": 2}
    assert not handover


def test_checking_a_request(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Check, "resolve", fail)
    for _ in range(2):
        params = SamplingParams(extra_args={"spec_tokens": 1, RESOLVED_ENTRY: {}})
        Check.validate_params(params)
        assert RESOLVED_ENTRY not in params.extra_args
    check_log(log, "checking a request")


def test_reading_a_reference(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Check.tokenizer, "encode", fail)
    for _ in range(2):
        server = Server()
        got = server.post(ALL_FIELDS)
        assert got.status == 200
        assert got.json["aux_info"]["iter_count"] == COUNTS["num_steps"]
        ((token_ids, *_),) = server.resolved
        assert token_ids is None
    check_log(log, "reading a reference")


@pytest.mark.parametrize("name", ["aux_info", "_counted"])
@pytest.mark.parametrize("stream", [False, True])
def test_reporting_counts(
    name: str, stream: bool, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Steps if name == "aux_info" else Report, name, fail)
    for _ in range(2):
        server = Server(streams(STREAM)) if stream else Server()
        # The usage at the stream's end, for which the client has asked, is vLLM's.
        got = server.post(ALL_FIELDS | {"stream": stream, "stream_options": {"include_usage": True}})
        assert got.status == 200
        assert got.body == b"".join(STREAM) if stream else got.json == answer()
    check_log(log, "reporting counts")
    assert not handover


def test_watching_steps(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    """Where vLLM drafts."""
    monkeypatch.setattr(StepCounter, "watch", fail)
    for _ in range(2):
        got = Server(engine=engine_with(object())).post({"aux_info": True})
        assert got.status == 200
    check_log(log, "counting steps")
    assert not handover
