"""What a worker knows of requests that asked something."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.requests.options import CARRIED, CarriedOptions
from vllm_specplus.runners.live_requests import LiveRequest, LiveRequests, limits

OPTIONS = SpecPlusOptions(method="ngram", num_speculative_tokens=4, min_ngram_size=3, max_ngram_size=7)
NOTHING = {"requests": 0, "references": 0, "kept_counts": 0}


def new_request(req_id: str, reference: Iterable[int] | None = None, **asked: Any) -> SimpleNamespace:
    """What vLLM's scheduler says of a request that begins; one that asks nothing has no `asked` and no reference."""
    extra = None
    if reference is not None or asked:
        token_ids = None if reference is None else np.array(list(reference), np.int32)
        extra = {"my_key": 1, CARRIED: CarriedOptions(token_ids, **asked).encode()}
    return SimpleNamespace(req_id=req_id, sampling_params=SimpleNamespace(extra_args=extra))


def model_config(max_model_len: int = 64, vocab_size: int = 100_000) -> SimpleNamespace:
    """As much of vLLM's as is read."""
    return SimpleNamespace(max_model_len=max_model_len, get_vocab_size=lambda: vocab_size)


def new_live(warns: bool = True) -> LiveRequests:
    return LiveRequests(OPTIONS, model_config(), warns=warns)


def asked_by(live: LiveRequests, req_id: str) -> LiveRequest:
    asked = live.get(req_id)
    assert asked is not None
    return asked


def drafts(live: LiveRequests, req_id: str, width: int = 99) -> list[int]:
    """What is drafted at the beginning: the whole reference."""
    reference = asked_by(live, req_id).reference
    assert reference is not None
    return reference.draft(np.array([], np.int32), width).tolist()


def test_what_a_request_asked_is_known_until_it_ends() -> None:
    live = new_live()
    live.begin([new_request("a", [5, 6, 7], edit=True, max_drafts=3), new_request("b", max_drafts=2, key="key")])
    a, b = asked_by(live, "a"), asked_by(live, "b")
    assert a.reference is not None
    assert a.reference.edit
    assert (a.reference.min_ngram_size, a.reference.max_ngram_size) == (3, 7)
    assert (a.max_drafts, a.key) == (3, None)
    assert (b.reference, b.max_drafts, b.key) == (None, 2, "key")
    assert len(live) == 2
    assert drafts(live, "a") == [5, 6, 7]
    live.finish({"a"})
    assert live.get("a") is None
    assert live.get("b") is b


@pytest.mark.parametrize(
    "params", [None, SimpleNamespace(), SimpleNamespace(extra_args=None), SimpleNamespace(extra_args={"my_key": 1})]
)
def test_a_request_that_asks_nothing_leaves_no_trace(params: Any) -> None:
    live = new_live()
    live.begin([SimpleNamespace(req_id="a", sampling_params=params)])
    assert live.get("a") is None
    assert live.sizes() == NOTHING
    live.finish({"a"})


@pytest.mark.parametrize("edit", [True, False])
def test_the_mode_is_the_requests(edit: bool) -> None:
    live = new_live()
    live.begin([new_request("a", [5], edit=edit)])
    reference = asked_by(live, "a").reference
    assert reference is not None
    assert reference.edit is edit


def test_without_drafts_there_is_nothing_to_draft_from() -> None:
    live = new_live()
    live.begin([new_request("a", [5, 6], max_drafts=0), new_request("b", [5, 6], max_drafts=1)])
    assert asked_by(live, "a").reference is None
    assert asked_by(live, "a").max_drafts == 0
    assert drafts(live, "b") == [5, 6]
    assert live.sizes() == NOTHING | {"requests": 2, "references": 1}


def test_an_empty_reference_is_a_reference() -> None:
    live = new_live()
    live.begin([new_request("a", [])])
    assert drafts(live, "a") == []


def test_a_request_that_comes_back_goes_on_where_it_was() -> None:
    """Model Runner V2 begins a preempted request anew."""
    live = new_live()
    live.begin([new_request("a", [5, 6], key="key")])
    before = asked_by(live, "a")
    live.begin([new_request("a", [5, 6], key="key"), new_request("b")])
    assert asked_by(live, "a") is before
    live.finish({"a"})
    assert live.counts.collect("key") == {"num_requests": 1, "num_steps": 0, "accepted": 0, "rejected": 0}
    assert live.sizes() == NOTHING


def test_sizes_go_back_to_zeros() -> None:
    live = new_live()
    live.begin([new_request("a", [5], key="key"), new_request("b", max_drafts=1), new_request("c", key="key")])
    assert live.sizes() == {"requests": 3, "references": 1, "kept_counts": 1}
    live.finish({"a", "b", "unknown"})
    live.finish({"a"})
    assert live.sizes() == {"requests": 1, "references": 0, "kept_counts": 1}
    assert live.counts.collect("key") is not None
    assert live.sizes()["kept_counts"] == 1
    live.finish({"c"})
    assert live.sizes() == NOTHING


@pytest.mark.parametrize("warns", [True, False])
def test_what_was_cut_off_is_logged_once(warns: bool, log: pytest.LogCaptureFixture) -> None:
    live = new_live(warns=warns)
    for _ in range(2):
        live.begin([new_request("a", [70001], num_cut=3), new_request("b", [5])])
    said = "request a: its reference is longer than the model length: 3 tokens or more are cut off"
    assert [record.getMessage() for record in log.records] == [said] * warns


def test_a_request_that_begins_anew_asks_anew() -> None:
    """A session goes on with other parameters, or a client uses an id again; the old counts are let go."""
    live = new_live()
    live.begin([new_request("a", [5, 6], key="old")])
    live.begin([new_request("a", [7])])
    assert drafts(live, "a") == [7]
    assert live.counts.collect("old") is not None
    assert live.sizes() == {"requests": 1, "references": 1, "kept_counts": 0}
    live.begin([new_request("a")])
    assert live.sizes() == NOTHING


ENCODED = CarriedOptions(np.array([5, 6], np.int32), max_drafts=3, key="key").encode()


@pytest.mark.parametrize(
    "forged",
    [
        "x",
        1,
        [],
        {},
        {"token_ids": None},
        ENCODED | {"more": 1},
        ENCODED | {"token_ids": [5, 6]},
        ENCODED | {"token_ids": "abcd"},
        ENCODED | {"token_ids": b"abc"},
        ENCODED | {"token_ids": np.array([5, -1], np.int32).tobytes()},
        ENCODED | {"token_ids": np.array([5, 100_000], np.int32).tobytes()},
        ENCODED | {"token_ids": np.full(65, 5, np.int32).tobytes()},
        ENCODED | {"max_drafts": "3"},
        ENCODED | {"max_drafts": -1},
        ENCODED | {"edit": 2},
        ENCODED | {"key": ["key"]},
        ENCODED | {"num_cut": None},
    ],
)
def test_what_a_client_has_forged_is_not_read(forged: Any) -> None:
    """Not every way to vLLM's engine passes the check of requests; none of them may bring it down."""
    live = new_live()
    params = SimpleNamespace(extra_args={CARRIED: forged})
    live.begin([SimpleNamespace(req_id="a", sampling_params=params), new_request("b", [5])])
    assert live.get("a") is None
    assert drafts(live, "b") == [5]
    assert live.sizes() == NOTHING | {"requests": 1, "references": 1}


def test_limits_are_the_requests_within_the_window() -> None:
    live = new_live()
    live.begin([new_request("none", max_drafts=0), new_request("some", max_drafts=3), new_request("any", [5])])
    allowed = limits(live, ["some", "stranger", "none", "any"], 4)
    assert allowed.dtype == np.int64
    assert allowed.tolist() == [3, 4, 0, 4]
    assert limits(live, ["some", "any"], 2).tolist() == [2, 2]
    assert limits(live, [], 2).tolist() == []
