"""What a worker knows about requests that ask something of the plugin."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.requests.options import RESOLVED_ENTRY, ResolvedOptions
from vllm_specplus.runners.live_requests import LiveRequest, LiveRequests

OPTIONS = SpecPlusOptions(method="ngram", num_speculative_tokens=4, min_ngram_size=3, max_ngram_size=7)
NOTHING = {"requests": 0, "references": 0, "request_counts": 0}


def new_request(req_id: str, reference: Iterable[int] | None = None, **options: Any) -> SimpleNamespace:
    """vLLM's message about a request that begins; without a reference and `options` it asks nothing."""
    extra = None
    if reference is not None or options:
        token_ids = None if reference is None else np.array(list(reference), np.int32)
        extra = {"my_key": 1, RESOLVED_ENTRY: ResolvedOptions(token_ids=token_ids, **options).to_wire()}
    return SimpleNamespace(req_id=req_id, sampling_params=SimpleNamespace(extra_args=extra))


def model_config(max_model_len: int = 64, vocab_size: int = 100_000, is_multimodal: bool = False) -> SimpleNamespace:
    """The part of vLLM's that is read."""
    return SimpleNamespace(
        max_model_len=max_model_len, get_vocab_size=lambda: vocab_size, is_multimodal_model=is_multimodal
    )


def new_requests(warns: bool = True) -> LiveRequests:
    return LiveRequests(OPTIONS, model_config(), warns=warns)


def request_of(requests: LiveRequests, req_id: str) -> LiveRequest:
    request = requests.get(req_id)
    assert request is not None
    return request


def drafts(requests: LiveRequests, req_id: str, width: int = 99) -> list[int]:
    """The drafts at the beginning: the whole reference."""
    reference = request_of(requests, req_id).reference
    assert reference is not None
    return reference.draft(np.array([], np.int32), width).tolist()


def test_a_request_is_known_until_it_ends() -> None:
    requests = new_requests()
    requests.begin(
        [new_request("a", [5, 6, 7], edit=True, max_drafts=3), new_request("b", max_drafts=2, counts_key="key")]
    )
    a, b = request_of(requests, "a"), request_of(requests, "b")
    assert a.reference is not None
    assert a.reference.edit
    assert (a.reference.min_ngram_size, a.reference.max_ngram_size) == (3, 7)
    assert (a.max_drafts, a.counts_key) == (3, None)
    assert (b.reference, b.max_drafts, b.counts_key) == (None, 2, "key")
    assert len(requests) == 2
    assert drafts(requests, "a") == [5, 6, 7]
    requests.finish({"a"})
    assert requests.get("a") is None
    assert requests.get("b") is b


@pytest.mark.parametrize(
    "params", [None, SimpleNamespace(), SimpleNamespace(extra_args=None), SimpleNamespace(extra_args={"my_key": 1})]
)
def test_a_request_that_asks_nothing_leaves_no_trace(params: Any) -> None:
    requests = new_requests()
    requests.begin([SimpleNamespace(req_id="a", sampling_params=params)])
    assert requests.get("a") is None
    assert requests.sizes() == NOTHING
    requests.finish({"a"})


def ending(ignore_eos: bool = False, end_of_sequence: int = 5) -> SimpleNamespace:
    """A request whose text ends with the end of a sequence, by 9, and by numbers that are no tokens."""
    params = SamplingParams(stop_token_ids=[9, 4, 100_000, -1, 2**40], ignore_eos=ignore_eos)
    params.update_from_generation_config({"eos_token_id": [end_of_sequence, 8]}, end_of_sequence)
    return SimpleNamespace(req_id="a", sampling_params=params)


def test_what_ends_a_text_is_known_while_it_runs() -> None:
    adaptive = SpecPlusOptions(method="ngram", num_speculative_tokens=4, adaptive=True)
    requests = LiveRequests(adaptive, model_config(), warns=True)
    for new, expected in ((ending(), [5, 4, 8, 9]), (ending(end_of_sequence=7), [7, 4, 8, 9])):
        requests.begin([new])
        assert requests.stop_token_ids == {"a": expected}
    requests.begin([ending(ignore_eos=True)])
    assert requests.stop_token_ids["a"] == [4, 9]
    requests.finish({"a"})
    assert requests.stop_token_ids == {}
    fixed = new_requests()
    fixed.begin([ending()])
    assert fixed.stop_token_ids == {}


@pytest.mark.parametrize("edit", [True, False])
def test_the_mode_is_the_requests(edit: bool) -> None:
    requests = new_requests()
    requests.begin([new_request("a", [5], edit=edit)])
    reference = request_of(requests, "a").reference
    assert reference is not None
    assert reference.edit is edit


def test_without_drafts_there_is_nothing_to_draft_from() -> None:
    requests = new_requests()
    requests.begin([new_request("a", [5, 6], max_drafts=0), new_request("b", [5, 6], max_drafts=1)])
    assert request_of(requests, "a").reference is None
    assert request_of(requests, "a").max_drafts == 0
    assert drafts(requests, "b") == [5, 6]
    assert requests.sizes() == NOTHING | {"requests": 2, "references": 1}


def test_an_empty_reference_is_a_reference() -> None:
    requests = new_requests()
    requests.begin([new_request("a", [])])
    assert drafts(requests, "a") == []


def test_a_request_that_comes_back_goes_on_where_it_was() -> None:
    """Model Runner V2 begins a preempted request anew."""
    requests = new_requests()
    requests.begin([new_request("a", [5, 6], counts_key="key")])
    before = request_of(requests, "a")
    requests.begin([new_request("a", [5, 6], counts_key="key"), new_request("b")])
    assert request_of(requests, "a") is before
    requests.finish({"a"})
    assert requests.counts.collect("key") == {"num_requests": 1, "num_steps": 0, "accepted": 0, "rejected": 0}
    assert requests.sizes() == NOTHING


def test_sizes_go_back_to_zeros() -> None:
    requests = new_requests()
    requests.begin(
        [new_request("a", [5], counts_key="key"), new_request("b", max_drafts=1), new_request("c", counts_key="key")]
    )
    assert requests.sizes() == {"requests": 3, "references": 1, "request_counts": 1}
    requests.finish({"a", "b", "unknown"})
    requests.finish({"a"})
    assert requests.sizes() == {"requests": 1, "references": 0, "request_counts": 1}
    assert requests.counts.collect("key") is not None
    assert requests.sizes()["request_counts"] == 1
    requests.finish({"c"})
    assert requests.sizes() == NOTHING


@pytest.mark.parametrize("warns", [True, False])
def test_what_was_cut_off_is_logged_once(warns: bool, log: pytest.LogCaptureFixture) -> None:
    requests = new_requests(warns=warns)
    for name in ("a", "a", "b", "c"):
        requests.begin([new_request(name, [70001], num_cut=3), new_request("d", [5])])
    said = (
        "request 'a': its reference is longer than the model length: 3 tokens or more are cut off; no other such "
        "request is logged"
    )
    assert [record.getMessage() for record in log.records] == [said] * warns


def test_a_request_id_of_several_lines_is_logged_in_one(log: pytest.LogCaptureFixture) -> None:
    new_requests(warns=True).begin([new_request("a\nERROR " + "b" * 1000, [70001], num_cut=3)])
    (record,) = log.records
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 200


def test_a_request_that_begins_anew_asks_anew() -> None:
    """A session goes on with other parameters, or a client uses an id again; the old counts end."""
    requests = new_requests()
    requests.begin([new_request("a", [5, 6], counts_key="old")])
    requests.begin([new_request("a", [7])])
    assert drafts(requests, "a") == [7]
    assert requests.counts.collect("old") is not None
    assert requests.sizes() == {"requests": 1, "references": 1, "request_counts": 0}
    requests.begin([new_request("a")])
    assert requests.sizes() == NOTHING


WIRE = ResolvedOptions(token_ids=np.array([5, 6], np.int32), max_drafts=3, counts_key="key").to_wire()


@pytest.mark.parametrize(
    "forged",
    [
        "x",
        1,
        [],
        {},
        {"token_ids": None},
        {name: value for name, value in WIRE.items() if name != "num_cut"},
        WIRE | {"more": 1},
        WIRE | {"token_ids": [5, 6]},
        WIRE | {"token_ids": "abcd"},
        WIRE | {"token_ids": b"abc"},
        WIRE | {"token_ids": np.array([5, 6], np.int32)},
        WIRE | {"token_ids": np.array([[5.0, 6.0]])},
        ResolvedOptions(),
        WIRE | {1: 2},
        WIRE | {"token_ids": np.array([5, -1], np.int32).tobytes()},
        WIRE | {"token_ids": np.array([5, 100_000], np.int32).tobytes()},
        WIRE | {"token_ids": np.full(65, 5, np.int32).tobytes()},
        WIRE | {"max_drafts": "3"},
        WIRE | {"max_drafts": -1},
        WIRE | {"edit": 2},
        WIRE | {"counts_key": ["key"]},
        WIRE | {"num_cut": None},
    ],
)
def test_what_a_client_has_forged_is_not_read(forged: Any) -> None:
    """Some ways to vLLM's engine bypass the check; no client may bring the engine down."""
    requests = new_requests()
    params = SimpleNamespace(extra_args={RESOLVED_ENTRY: forged})
    requests.begin([SimpleNamespace(req_id="a", sampling_params=params), new_request("b", [5])])
    assert requests.get("a") is None
    assert drafts(requests, "b") == [5]
    assert requests.sizes() == NOTHING | {"requests": 1, "references": 1}


def test_the_most_drafts_are_the_requests_within_the_width() -> None:
    requests = new_requests()
    requests.begin([new_request("none", max_drafts=0), new_request("some", max_drafts=3), new_request("any", [5])])
    assert requests.max_drafts(["some", "stranger", "none", "any"], 4) == [3, 4, 0, 4]
    assert requests.max_drafts(["some", "any"], 2) == [2, 2]
    assert requests.max_drafts([], 2) == []
    assert requests.without_drafts() == ["none"]
