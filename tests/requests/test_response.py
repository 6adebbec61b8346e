"""`PredictedOutputs` adds a report to a response that is no stream; vLLM's server and engine are stand-ins."""

import gzip
import json
import time
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.requests.stand_ins import (
    ALL_FIELDS,
    COUNTS,
    DETAILS,
    PREDICTION,
    STREAM,
    USAGE,
    Engine,
    Server,
    answer,
    each,
    pieces_of,
)


def test_usage_of_a_reference() -> None:
    """The other details of the usage stay, and so does every other field."""
    whole = answer(usage=USAGE | {"completion_tokens_details": {"reasoning_tokens": 3}}, extra=[1.5, None])
    got = Server(lambda: JSONResponse(whole)).post({"prediction": PREDICTION})
    whole["usage"]["completion_tokens_details"] |= DETAILS
    assert got.json == whole
    assert "ünï \u4f60".encode() in got.body
    parsed = ChatCompletion.model_validate(got.json, strict=True)
    assert parsed.usage.completion_tokens_details.accepted_prediction_tokens == 7


@pytest.mark.parametrize(
    ("num_tokens", "counts", "accepted"),
    [
        # The prompt's step, and one of eight drafts that is cut after the first.
        (2, {"num_steps": 2, "accepted": 8}, 1),
        (1, {"num_steps": 1, "accepted": 0}, 0),
        (10, {"num_steps": 2, "accepted": 8}, 8),
        # Two choices: if only one of them is cut, this is one too many.
        (12, {"num_requests": 2, "num_steps": 4, "accepted": 16}, 10),
        (None, {}, 0),
    ],
)
def test_no_more_is_accepted_than_the_text_can_hold(num_tokens: Any, counts: dict[str, int], accepted: int) -> None:
    whole = answer(usage=USAGE | {"completion_tokens": num_tokens})
    got = Server(lambda: JSONResponse(whole), Engine([COUNTS | counts])).post({"prediction": PREDICTION})
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": 2}
    assert got.json["usage"]["completion_tokens_details"] == details


def test_choices_of_several_engines() -> None:
    """Each engine counts the choices that it has made; most of a data-parallel server's know nothing of a request."""
    engine = Engine([None, None], [[None, COUNTS], [None], [COUNTS | {"num_steps": 5, "accepted": 4, "rejected": 1}]])
    whole = answer(usage=USAGE | {"completion_tokens": 20})
    got = Server(lambda: JSONResponse(whole), engine).post(ALL_FIELDS).json
    details = {"accepted_prediction_tokens": 11, "rejected_prediction_tokens": 3}
    assert got["usage"]["completion_tokens_details"] == details
    assert got["aux_info"]["iter_count"] == 9


@pytest.mark.parametrize("details", [None, {}])
def test_usage_without_details(details: Any) -> None:
    whole = answer(usage=USAGE | {"completion_tokens_details": details})
    got = Server(lambda: JSONResponse(whole)).post({"prediction": {"type": "content", "content": ""}})
    assert got.json["usage"]["completion_tokens_details"] == DETAILS


@pytest.mark.parametrize(("num_steps", "tokens", "average"), [(4, 10, 2.5), (0, 10, 0.0), (4, None, 0.0)])
def test_aux_info(num_steps: int, tokens: int | None, average: float, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    whole = answer(usage=USAGE | {"completion_tokens": tokens})
    server = Server(lambda: JSONResponse(whole), Engine([COUNTS | {"num_requests": 1, "num_steps": num_steps}]))
    got = server.post({"aux_info": True, "stream": False})
    assert "stream_options" not in server.body
    assert got.json == whole | {
        "aux_info": {
            "iter_count": num_steps,
            "output_len": tokens or 0,
            "avg_tokens_per_iter": average,
            "cost_time": 250.0,
        }
    }


def test_both_fields() -> None:
    got = Server().post(ALL_FIELDS).json
    assert got["usage"]["completion_tokens_details"] == DETAILS
    assert got["aux_info"]["iter_count"] == 4


@pytest.mark.parametrize("answers", [[], [None, None]])
def test_no_worker_knows_anything(answers: list[None]) -> None:
    """The response then says nothing of counts."""
    got = Server(engine=Engine(answers)).post(ALL_FIELDS).json
    assert "completion_tokens_details" not in got["usage"]
    assert "aux_info" not in got


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_alone(stream: bool) -> None:
    """The response says nothing about it, so nothing is counted."""
    pieces = pieces_of(STREAM, 50) if stream else [json.dumps(answer(), indent=1).encode()]
    media_type = "text/event-stream" if stream else "application/json"
    server = Server(lambda: StreamingResponse(each(pieces), media_type=media_type))
    got = server.post({"stream": stream, "vllm_xargs": {"spec_tokens": 0}})
    assert [message["body"] for message in got.sent[1:]] == [*pieces, b""]
    assert "stream_options" not in server.body
    assert server.resolved == [(None, False, 0, False)]
    assert not server.engine.calls


@pytest.mark.parametrize(
    "response",
    [
        JSONResponse({"error": {"message": "no", "code": 404}, "usage": USAGE}, 404),
        JSONResponse(answer(), 500),
        Response(JSONResponse(answer()).body, media_type="text/plain"),
        Response(gzip.compress(JSONResponse(answer()).body), headers={"content-encoding": "gzip"}),
        JSONResponse(None),
        JSONResponse([answer()]),
        JSONResponse(answer(usage=None)),
        Response(b'{"usage":{}', media_type="application/json"),
        StreamingResponse(each([b'{ "usage"', b":1}"]), media_type="application/json"),
        StreamingResponse(each(STREAM), 400, media_type="text/event-stream"),
    ],
)
def test_responses_that_stay(response: Response) -> None:
    server = Server(lambda: response)
    got = server.post(ALL_FIELDS)
    assert got.status == response.status_code
    assert list(got.sent[0]["headers"]) == response.raw_headers
    body = getattr(response, "body", None)
    assert got.body == body if body is not None else got.body in (b"".join(STREAM), b'{ "usage":1}')
    assert len(server.engine.calls) == 1


def test_a_json_response_in_pieces() -> None:
    """Its length is known once it has been changed."""
    body = JSONResponse(answer()).body
    pieces = [body[:100], b"", body[100:]]
    got = Server(lambda: StreamingResponse(each(pieces), media_type="application/json; charset=utf-8")).post(ALL_FIELDS)
    assert b"content-length" in got.headers
    assert len(got.sent) == 2
    assert got.json["usage"]["completion_tokens_details"] == DETAILS
