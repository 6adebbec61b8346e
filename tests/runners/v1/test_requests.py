"""References and counts on the V1 model runner, whose steps are played here."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.proposers.reference import make_history
from tests.runners.test_live_requests import model_config, new_request
from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.proposers.hybrid import Drafts
from vllm_specplus.runners import live_requests
from vllm_specplus.runners.v1 import requests as v1_requests
from vllm_specplus.runners.v1.requests import RequestTracker
from vllm_specplus.sources import SOURCES

MAX_LEN = 64
WIDTH = 4
TEXT = [5, 6, 7, 8, 9, 10, 11, 12]
GUESSED = ([1, 1, 1], 0)  # What stands for drafts of the history.


class Steps:
    """A runner's requests, prompt and output, and the steps that they take."""

    def __init__(self, rank: int = 0, **options: Any):
        options = {"method": "ngram", "num_speculative_tokens": WIDTH} | options
        config = SimpleNamespace(specplus=SpecPlusOptions(**options))
        runner = SimpleNamespace(speculative_config=config, model_config=model_config(MAX_LEN))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(v1_requests, "get_tp_group", lambda: SimpleNamespace(rank_in_group=rank))
            self.tracker = RequestTracker(runner)
        self.prompt: dict[str, list[int]] = {}
        self.output: dict[str, list[int]] = {}

    def add(self, req_id: str, reference: Iterable[int] | None = None, prompt: Iterable[int] = (3, 4), **asked: Any):
        """What the scheduler says of a request that begins."""
        self.prompt[req_id], self.output[req_id] = list(prompt), []
        return new_request(req_id, reference, **asked)

    def begin(
        self,
        *new: Any,
        ended: Iterable[str] = (),
        preempted: Iterable[str] = (),
        scheduled: dict[str, list[int]] | None = None,
        invalid: dict[str, int] | None = None,
    ) -> None:
        """A step begins in which these drafts are verified."""
        self.tracker.before_step(
            SimpleNamespace(
                scheduled_new_reqs=list(new),
                finished_req_ids=set(ended),
                preempted_req_ids=set(preempted) or None,
                scheduled_spec_decode_tokens=scheduled or {},
                num_invalid_spec_tokens=invalid,
            )
        )

    def draft(
        self,
        sampled: dict[str, list[int]],
        made: dict[str, tuple[list[int], int]] | None = None,
        room: dict[str, int] | None = None,
    ) -> dict[str, tuple[list[int], int]]:
        """Drafts of the requests that got these tokens, and how many of them are the model's; `made`: as before."""
        for req_id, tokens in sampled.items():
            self.output[req_id] += tokens
        texts = {req_id: self.prompt[req_id] + self.output[req_id] for req_id in sampled}
        history = make_history(texts, MAX_LEN)
        history.num_prompt_tokens[:] = [len(self.prompt[req_id]) for req_id in sampled]
        lists, num_model = zip(*((made or {}).get(req_id, ([], 0)) for req_id in sampled), strict=True)
        drafts = Drafts([list(tokens) for tokens in lists], np.array(num_model, np.int32))
        rooms = [(room or {}).get(req_id, WIDTH * bool(tokens)) for req_id, tokens in sampled.items()]
        self.tracker.put_references_first(history, np.array(rooms), drafts)
        return dict(zip(sampled, zip(drafts.token_ids, drafts.num_model.tolist(), strict=True), strict=True))

    def end(self, sampled: dict[str, list[int]]) -> None:
        """A step has given these tokens."""
        output = SimpleNamespace(req_ids=list(sampled), sampled_token_ids=list(sampled.values()))
        self.tracker.after_step(output)

    def drafted(self, what: str = "drafted") -> dict[str, list[int]]:
        """Tokens by position, of the sources that have any."""
        return {source: row for source, row in self.tracker.stats()[what].items() if any(row)}

    def accepted(self) -> dict[str, list[int]]:
        return self.drafted("accepted")


def test_a_reference_comes_before_history_and_model() -> None:
    steps = Steps()
    steps.begin(*(steps.add(name, TEXT) for name in "abc"), steps.add("d"))
    sampled = dict.fromkeys("abcd", TEXT[:2])
    drafts = steps.draft(sampled, {"a": GUESSED, "b": ([1, 1], 1), "d": ([1, 1], 1)})
    assert drafts == {"a": (TEXT[2:6], 0), "b": (TEXT[2:6], 0), "c": (TEXT[2:6], 0), "d": ([1, 1], 1)}


def test_what_nothing_speaks_for_is_better_than_nothing_only() -> None:
    steps = Steps()
    steps.begin(*(steps.add(name, TEXT, edit=True) for name in "ab"))
    # The output begins with another token, in the place of the text's first.
    assert steps.draft({"a": [30], "b": [30]}, {"a": GUESSED}) == {"a": GUESSED, "b": (TEXT[1:5], 0)}
    # Now it goes on as the text does.
    sampled = {"a": TEXT[1:3], "b": TEXT[1:3]}
    assert steps.draft(sampled, {"a": GUESSED}) == dict.fromkeys("ab", (TEXT[3:7], 0))


def test_a_reference_that_says_nothing_leaves_the_others_drafts() -> None:
    steps = Steps()
    steps.begin(steps.add("a", TEXT), steps.add("b", TEXT))
    assert steps.draft({"a": [30], "b": [*TEXT]}, dict.fromkeys("ab", GUESSED)) == dict.fromkeys("ab", GUESSED)


def test_no_more_is_drafted_than_there_is_room_for() -> None:
    steps = Steps()
    steps.begin(*(steps.add(name, TEXT) for name in "abc"))
    drafts = steps.draft(dict.fromkeys("abc", TEXT[:1]), {"c": GUESSED}, room={"a": 3, "b": 0, "c": 1})
    assert drafts == {"a": (TEXT[1:4], 0), "b": ([], 0), "c": (TEXT[1:2], 0)}


def test_the_prompt_is_no_output() -> None:
    steps = Steps()
    steps.begin(steps.add("a", TEXT, prompt=TEXT[:4]))
    assert steps.draft({"a": TEXT[:2]}) == {"a": (TEXT[2:6], 0)}
    assert steps.draft({"a": [30]}) == {"a": ([], 0)}


def test_no_request_drafts_from_anothers_reference() -> None:
    """Whatever their order in the batch; nor does one that has the id of a request that has ended."""
    steps = Steps()
    other = [5, 6, 20, 21, 22, 23]
    steps.begin(steps.add("a", TEXT), steps.add("b"), steps.add("c", other))
    expected = {"a": (TEXT[2:6], 0), "b": ([], 0), "c": (other[2:], 0)}
    assert steps.draft(dict.fromkeys("abc", TEXT[:2])) == expected
    assert steps.draft({name: [] for name in "cba"}, room=dict.fromkeys("abc", WIDTH)) == expected
    steps.begin(ended="a")
    steps.begin(steps.add("a"))
    assert steps.draft({"a": TEXT[:2], "c": []}, room={"c": 1}) == {"a": ([], 0), "c": (other[2:3], 0)}


@pytest.mark.parametrize(
    ("options", "source"),
    [
        ({}, "ngram"),
        ({"method": "suffix"}, "suffix"),
        ({"method": "mtp", "num_model_steps": 1, "mtp_strategy": "with_ngram"}, "ngram"),
        ({"method": "mtp", "num_model_steps": 1, "mtp_strategy": "with_suffix"}, "suffix"),
    ],
)
def test_drafts_are_counted_by_who_made_them(options: dict[str, Any], source: str) -> None:
    steps = Steps(**options)
    steps.begin(steps.add("a"), steps.add("b", TEXT))
    drafts = steps.draft({"a": [1], "b": TEXT[:1]}, {"a": ([2, 2, 3], 2)})
    steps.end({"a": [1], "b": TEXT[:1]})
    assert steps.drafted() == steps.accepted() == {}
    steps.begin(scheduled={name: tokens for name, (tokens, _) in drafts.items()})
    steps.draft({"a": [2, 2, 3, 4], "b": [6, 7, 30]})
    steps.end({"a": [2, 2, 3, 4], "b": [6, 7, 30]})
    assert steps.drafted() == {"model": [1, 1, 0, 0], source: [0, 0, 1, 0], "reference": [1, 1, 1, 1]}
    assert steps.accepted() == {"model": [1, 1, 0, 0], source: [0, 0, 1, 0], "reference": [1, 1, 0, 0]}
    # Neither is drafted by a reference now: "b" said what the text does not.
    steps.begin(scheduled={"a": [9], "b": [9, 9]})
    steps.end({"a": [1], "b": [9, 1]})
    assert steps.drafted() == {"model": [1, 1, 0, 0], source: [2, 1, 1, 0], "reference": [1, 1, 1, 1]}
    assert steps.accepted() == {"model": [1, 1, 0, 0], source: [1, 0, 1, 0], "reference": [1, 1, 0, 0]}


def test_only_what_is_verified_counts() -> None:
    """The scheduler cuts drafts, a grammar forbids some, and a preempted request's are lost."""
    steps = Steps()
    steps.begin(*(steps.add(name, TEXT, key=name) for name in "abcd"))
    first = dict.fromkeys("abcd", TEXT[:1])
    drafts = {name: tokens for name, (tokens, _) in steps.draft(first).items()}
    steps.end(first)
    assert list(drafts.values()) == [TEXT[1:5]] * 4
    scheduled = {"a": drafts["a"][:2], "b": [*drafts["b"][:3], -1], "d": drafts["d"]}
    steps.begin(scheduled=scheduled, invalid={"b": 1})
    # "c" is prefilled again, "d" gets nothing.
    steps.end({"a": [6, 7, 8], "b": [6, 30], "c": [6], "d": []})
    assert steps.drafted() == {"reference": [2, 2, 1, 0]}
    assert steps.accepted() == {"reference": [2, 1, 0, 0]}
    assert [steps.tracker.request_stats(name) for name in "abcd"] == [
        {"num_requests": 1, "num_steps": 2, "accepted": 2, "rejected": 0},
        {"num_requests": 1, "num_steps": 2, "accepted": 1, "rejected": 2},
        {"num_requests": 1, "num_steps": 2, "accepted": 0, "rejected": 0},
        {"num_requests": 1, "num_steps": 1, "accepted": 0, "rejected": 0},
    ]


def test_padding_is_nobodys() -> None:
    """vLLM gives a request with one token left to compute a step of full width, before anything is drafted."""
    steps = Steps()
    steps.begin(steps.add("a"), scheduled={"a": [-1] * WIDTH})
    steps.end({"a": [1]})
    assert steps.drafted() == {"unfilled": [1] * WIDTH}
    steps.draft({"a": [1]}, {"a": GUESSED})
    steps.begin(preempted="a")
    steps.begin(scheduled={"a": [-1, -1]})
    steps.end({"a": [1]})
    # A session goes on, which is a new request of the same id.
    steps.draft({"a": [1]}, {"a": GUESSED})
    steps.begin(steps.add("a"), scheduled={"a": [-1]})
    steps.end({"a": [1]})
    assert steps.drafted() == {"unfilled": [3, 2, 1, 1]}
    assert steps.accepted() == {}


def test_a_requests_counts_are_of_its_reference_alone() -> None:
    steps = Steps()
    steps.begin(steps.add("a", TEXT, edit=True, key="one"), steps.add("b", key="two"), steps.add("c", TEXT))
    # "a" begins otherwise than its reference, so that the history's drafts stand.
    first = {"a": [30], "b": TEXT[:1], "c": TEXT[:1]}
    drafts = steps.draft(first, {"a": GUESSED, "b": GUESSED})
    steps.end(first)
    steps.begin(scheduled={name: tokens for name, (tokens, _) in drafts.items()})
    second = {"a": [1, 1, 6], "b": [1, 1, 1, 2], "c": [*TEXT[1:4], 30]}
    steps.end(second)
    assert steps.tracker.request_stats("one") == {"num_requests": 1, "num_steps": 2, "accepted": 0, "rejected": 0}
    assert steps.tracker.request_stats("two") == {"num_requests": 1, "num_steps": 2, "accepted": 0, "rejected": 0}
    assert steps.tracker.request_stats("three") is None
    assert steps.accepted() == {"ngram": [2, 2, 1, 0], "reference": [1, 1, 1, 0]}


def test_counts_wait_for_their_request_to_end_and_to_be_asked_for() -> None:
    steps = Steps()
    nothing = {"requests": 0, "references": 0, "kept_counts": 0}
    assert steps.tracker.stats()["entries"] == nothing
    steps.begin(steps.add("a", TEXT, key="one"), steps.add("b", key="two"))
    steps.end({"a": [5], "b": [5]})
    assert steps.tracker.stats()["entries"] == {"requests": 2, "references": 1, "kept_counts": 2}
    assert steps.tracker.request_stats("two") == {"num_requests": 1, "num_steps": 1, "accepted": 0, "rejected": 0}
    steps.begin(ended=["a", "b", "stranger"])
    assert steps.tracker.stats()["entries"] == nothing | {"kept_counts": 1}
    assert steps.tracker.request_stats("one") == {"num_requests": 1, "num_steps": 1, "accepted": 0, "rejected": 0}
    assert steps.tracker.stats()["entries"] == nothing


def test_drafts_of_a_request_that_has_ended_are_not_the_next_ones() -> None:
    steps = Steps()
    steps.begin(steps.add("a", TEXT))
    steps.draft({"a": TEXT[:1]})
    steps.begin(ended="a")
    steps.begin(steps.add("a"), scheduled={"a": [-1]})
    steps.end({"a": [1]})
    assert steps.drafted() == {"unfilled": [1, 0, 0, 0]}


def test_a_request_that_begins_as_it_ends_runs() -> None:
    steps = Steps()
    steps.begin(steps.add("a", TEXT, key="one"))
    steps.begin(steps.add("a", TEXT, key="one"), ended="a")
    assert steps.tracker.stats()["entries"] == {"requests": 1, "references": 1, "kept_counts": 1}
    assert steps.draft({"a": TEXT[:1]}) == {"a": (TEXT[1:5], 0)}


def test_limits_are_the_requests() -> None:
    steps = Steps()
    steps.begin(steps.add("a", max_drafts=1), steps.add("b"), steps.add("c", TEXT, max_drafts=0))
    assert steps.tracker.limits(["b", "c", "a"], 3).tolist() == [3, 0, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_worker_says_what_is_cut(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(live_requests.logger, "warning", lambda *args: said.append(args))
    steps = Steps(rank)
    steps.begin(steps.add("a", range(9)))
    assert not said
    steps.begin(steps.add("b", range(9), num_cut=1))
    assert len(said) == (rank == 0)


def test_any_steps_add_up() -> None:
    """Requests with and without a reference come, go, are preempted, and have their drafts cut or forbidden."""
    rng = np.random.default_rng(0)
    steps = Steps(method="mtp", num_model_steps=2, mtp_strategy="with_ngram")
    verified = np.zeros((2, WIDTH), np.int64)
    pending: dict[str, list[int]] = {}
    started = 0

    def tokens(count: int) -> list[int]:
        return rng.integers(1, 4, count).tolist()

    for _ in range(300):
        ended = [req_id for req_id in steps.output if rng.random() < 0.05 or len(steps.output[req_id]) > 40]
        for req_id in ended:
            del steps.output[req_id]
            pending.pop(req_id, None)
        new = []
        while len(steps.output) < 4:
            reference = [None, tokens(20)][started % 2]
            new.append(steps.add(f"request-{started}", reference, edit=True, key="all"))
            started += 1
        chosen = [req_id for req_id in steps.output if rng.random() < 0.8] or list(steps.output)
        scheduled = {}
        for req_id in chosen:
            if (drafts := pending.get(req_id, [])[: rng.integers(0, WIDTH + 1)]) and rng.random() < 0.9:
                scheduled[req_id] = drafts
        invalid = {req_id: 1 for req_id in scheduled if rng.random() < 0.1}
        steps.begin(*new, ended=ended, scheduled=scheduled, invalid=invalid or None)
        sampled = {}
        for req_id in chosen:
            num_drafts = len(scheduled.get(req_id, ())) - invalid.get(req_id, 0)
            num_accepted = rng.integers(0, num_drafts + 1)
            sampled[req_id] = scheduled.get(req_id, [])[:num_accepted] + tokens(1) if rng.random() < 0.9 else []
            if sampled[req_id]:
                verified[0, :num_drafts] += 1
                verified[1, :num_accepted] += 1
        made = {req_id: (tokens(rng.integers(2, WIDTH + 1)), 2) for req_id in chosen if sampled[req_id]}
        pending |= {req_id: drafts for req_id, (drafts, _) in steps.draft(sampled, made).items()}
        steps.end(sampled)
    stats = steps.tracker.stats()
    for what, expected in zip(("drafted", "accepted"), verified, strict=True):
        assert list(stats[what]) == list(SOURCES)
        assert np.sum(list(stats[what].values()), axis=0).tolist() == expected.tolist()
        assert set(steps.drafted(what)) == {"model", "ngram", "reference"}
    counts = steps.tracker.request_stats("all")
    assert counts is not None
    assert counts["accepted"] == sum(stats["accepted"]["reference"])
    assert counts["rejected"] == sum(stats["drafted"]["reference"]) - counts["accepted"]
