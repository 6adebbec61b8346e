"""`PredictedOutputs` takes its fields out of a request's body; vLLM's server and engine are stand-ins."""

import asyncio
import gzip
import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.responses import JSONResponse

from tests.requests.stand_ins import (
    ALL_FIELDS,
    CHAT,
    DETAILS,
    PREDICTION,
    SECRET,
    TEXT,
    USAGE,
    Check,
    Engine,
    Server,
    answer,
    exchange,
    letters,
    middleware_on,
)
from vllm_specplus.requests.body import RequestBody
from vllm_specplus.requests.options import (
    HANDOVER_ENTRY,
    MAX_REFERENCE_FACTOR,
    RequestError,
    RequestOptions,
    parse_options,
)
from vllm_specplus.requests.refusal import RefusedRequestError


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"prediction"',
        b"null",
        b"\xff{}",
        b"[" * 100_000,
        gzip.compress(json.dumps(ALL_FIELDS).encode()),
        json.dumps(ALL_FIELDS | {"vllm_xargs": "text"}).encode(),
        json.dumps(ALL_FIELDS | {"vllm_xargs": [1]}).encode(),
    ],
)
def test_bodies_that_vllm_refuses(body: bytes) -> None:
    server = Server()
    assert server.post(body).body == JSONResponse(answer()).body
    assert server.bodies == [body]
    assert not server.engine.calls


@pytest.mark.parametrize(
    ("path", "root_path", "media_type"),
    [
        (CHAT, "", "application/json"),
        (TEXT, "", "Application/JSON; charset=utf-8"),
        (CHAT, "/a/prefix", "application/json ;x=y"),
    ],
)
def test_what_reaches_vllm(path: str, root_path: str, media_type: str) -> None:
    server = Server()
    body = {
        "model": "m",
        "messages": "ünï \ud83d",
        "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        "aux_info": True,
        "spaces_between_special_tokens": True,
        "vllm_xargs": {"sp_edit": 0, "spec_tokens": 3, "mine": [1, "x"]},
    }
    got = server.post(
        body, path=path, root_path=root_path, media_type=media_type, headers={"transfer-encoding": "chunked"}
    )
    key = server.body["vllm_xargs"][HANDOVER_ENTRY]
    assert server.body == {
        "model": "m",
        "messages": "ünï \ud83d",
        "spaces_between_special_tokens": True,
        "vllm_xargs": {"mine": [1, "x"], HANDOVER_ENTRY: key},
    }
    assert server.headers[0]["content-length"] == str(len(server.bodies[0]))
    assert "transfer-encoding" not in server.headers[0]
    assert server.resolved == [(letters("ab"), False, 3, True)]
    assert server.engine.calls == [("specplus_collect_request_stats", (key,))]
    assert got.json["usage"]["completion_tokens_details"] == DETAILS


def test_a_reference_in_tokens() -> None:
    server = Server()
    got = server.post({"vllm_xargs": {"sp_advice_prompt_token_ids": [4, 2], "sp_edit": 1}}, path=TEXT)
    assert server.resolved == [([4, 2], True, None, True)]
    assert set(server.body["vllm_xargs"]) == {HANDOVER_ENTRY}
    assert got.json == answer(usage=USAGE | {"completion_tokens_details": DETAILS})


@pytest.mark.parametrize("fields", [{}, {"prediction": None}])
def test_a_prediction_among_the_xargs(fields: dict[str, Any]) -> None:
    server = Server()
    server.post({**fields, "vllm_xargs": {"prediction": PREDICTION}})
    assert server.resolved == [(letters(SECRET), True, None, True)]
    assert set(server.body["vllm_xargs"]) == {HANDOVER_ENTRY}


def test_names_may_be_written_in_escapes() -> None:
    server = Server()
    server.post([rb'{"vllm_xargs": {"sp\u005fadvice_prompt": "a"}}'])
    assert server.resolved == [([97], False, None, True)]


def test_text_is_tokenised_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    server, threads = Server(), []

    def encode(text: str) -> np.ndarray:
        threads.append(threading.get_ident())
        return np.array([len(text)], np.int32)

    monkeypatch.setattr(Check, "tokenizer", SimpleNamespace(encode=encode))
    server.post({"prediction": PREDICTION})
    assert server.resolved == [([len(SECRET)], True, None, True)]
    assert threading.get_ident() not in threads


def test_a_long_reference_is_cut_once_for_all_prompts() -> None:
    server = Server()
    server.post({"prompt": ["a", "b"], "prediction": {"type": "content", "content": "x" * 250}}, path=TEXT)
    assert server.resolved == [(letters("x" * 100), True, None, True)]


def test_every_request_has_its_own_key() -> None:
    server = Server()
    for _ in range(2):
        server.post({"aux_info": True})
    assert server.resolved == [(None, False, None, True)] * 2
    keys = {json.loads(body)["vllm_xargs"][HANDOVER_ENTRY] for body in server.bodies}
    assert keys == {args[0] for _, args in server.engine.calls}
    assert len(keys) == 2


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_every_encoding_that_vllm_reads(encoding: str) -> None:
    server = Server()
    assert server.post([json.dumps(ALL_FIELDS).encode(encoding)]).status == 200
    assert server.resolved == [(letters(SECRET), True, None, True)]
    assert Server().post([json.dumps({"sp_advise_prompt": SECRET}).encode(encoding)]).status == 400


@pytest.mark.parametrize("num_spaces", [0, 1 << 20])
def test_a_deep_body_that_can_be_read_can_be_written(num_spaces: int) -> None:
    """A large one is read in a thread, which has more room on its stack than the event loop. vLLM may refuse it."""
    app = middleware_on(JSONResponse(answer()), Engine())
    for depth in range(940, 1000):
        body = b'{"aux_info": true, "x": ' + b"[" * depth + b"]" * depth + b"}" + b" " * num_spaces
        start, *_ = asyncio.run(exchange(app, [body]))
        assert start["status"] == 200


def test_a_body_that_cannot_be_written_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        RequestBody({"x": deep, "vllm_xargs": {}}, RequestOptions()).encode("entry", "key")


class Unseen(list):
    """A list whose elements nobody may look at."""

    def __iter__(self) -> Any:
        raise AssertionError

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("sp_advice_prompt_token_ids", lambda values: values),
        ("prediction", lambda values: {"type": "content", "content": values}),
    ],
)
def test_a_list_is_bounded_before_its_elements_are_looked_at(name: str, wrap: Any) -> None:
    most = MAX_REFERENCE_FACTOR * 100  # the stand-in's length is 100
    part: Any = 3 if name == "sp_advice_prompt_token_ids" else {"type": "text", "text": "a"}
    with pytest.raises(RequestError, match=f"{most + 1} elements, and at most {most}") as caught:
        parse_options({name: wrap(Unseen([object()] * (most + 1)))}, 100)
    assert caught.value.field == name
    got = Server().post({name: wrap([part] * (most + 1))})
    assert (got.status, got.json["error"]["param"]) == (400, name)
    assert Server().post({name: wrap([part] * most)}).status == 200
    with pytest.raises(RefusedRequestError, match="at most"):
        Check.validate_params(SimpleNamespace(extra_args={name: wrap([part] * (most + 1))}))


@pytest.mark.parametrize(
    "wrong",
    [
        *(0, "", [], False, 3, "x"),
        *({"include_usage": value} for value in ("", [], {}, 3, "zzz")),
        *({"continuous_usage_stats": value} for value in ("", [], {}, 3, "zzz")),
    ],
)
def test_wrong_stream_options_are_left_for_vllm_to_refuse(wrong: Any) -> None:
    server = Server()
    server.post({"aux_info": True, "stream": True, "stream_options": wrong})
    assert server.body["stream_options"] == wrong
    assert type(server.body["stream_options"]) is type(wrong)
