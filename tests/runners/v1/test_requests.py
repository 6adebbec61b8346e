"""References and counts on the V1 model runner; the tests play its steps."""

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
from vllm_specplus.runners.v1.history import HostHistory
from vllm_specplus.runners.v1.requests import RequestTracker
from vllm_specplus.sources import SOURCES

MAX_LEN = 64
WIDTH = 4
TEXT = [5, 6, 7, 8, 9, 10, 11, 12]
FROM_HISTORY = ([1, 1, 1], 0)  # drafts of the history, none of them the model's


class Steps:
    """The prompts and outputs of a runner's requests, and their steps."""

    def __init__(self, rank: int = 0, **options: Any):
        options = {"method": "ngram", "num_speculative_tokens": WIDTH} | options
        config = SimpleNamespace(specplus=SpecPlusOptions(**options))
        runner = SimpleNamespace(speculative_config=config, model_config=model_config(MAX_LEN))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(v1_requests, "get_tp_group", lambda: SimpleNamespace(rank_in_group=rank))
            self.tracker = RequestTracker(runner)
        self.prompt: dict[str, list[int]] = {}
        self.output: dict[str, list[int]] = {}

    def add(self, req_id: str, reference: Iterable[int] | None = None, prompt: Iterable[int] = (3, 4), **options: Any):
        """Add a request; returns what the scheduler tells the worker when it begins."""
        self.prompt[req_id], self.output[req_id] = list(prompt), []
        return new_request(req_id, reference, **options)

    def begin(
        self,
        *new: Any,
        ended: Iterable[str] = (),
        preempted: Iterable[str] = (),
        scheduled: dict[str, list[int]] | None = None,
        invalid: dict[str, int] | None = None,
    ) -> None:
        """Begin a step in which the drafts of `scheduled` are verified."""
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
        others: dict[str, tuple[list[int], int]] | None = None,
        max_drafts: dict[str, int] | None = None,
    ) -> dict[str, tuple[list[int], int]]:
        """Draft for the requests that got these tokens.

        Args:
            sampled: the tokens of each request.
            others: drafts of model and history, and how many are the model's.
            max_drafts: the most drafts of each request.

        Returns:
            The drafts of each request, and how many are the model's.
        """
        for req_id, tokens in sampled.items():
            self.output[req_id] += tokens
        texts = {req_id: self.prompt[req_id] + self.output[req_id] for req_id in sampled}
        history = make_history(texts, MAX_LEN)
        history.num_prompt_tokens[:] = [len(self.prompt[req_id]) for req_id in sampled]
        lists, num_model = zip(*((others or {}).get(req_id, ([], 0)) for req_id in sampled), strict=True)
        drafts = Drafts([list(tokens) for tokens in lists], np.array(num_model, np.int32))
        most = [(max_drafts or {}).get(req_id, WIDTH * bool(tokens)) for req_id, tokens in sampled.items()]
        self.tracker.put_references_first(history, np.array(most), drafts)
        return dict(zip(sampled, zip(drafts.token_ids, drafts.num_model.tolist(), strict=True), strict=True))

    def end(self, sampled: dict[str, list[int]]) -> None:
        """End a step that has given these tokens."""
        output = SimpleNamespace(req_ids=list(sampled), sampled_token_ids=list(sampled.values()))
        self.tracker.after_step(output)

    def collect(self, key: str) -> dict[str, int] | None:
        return self.tracker.collect_request_stats(key)

    def drafted(self, what: str = "drafted") -> dict[str, list[int]]:
        """Tokens by position, of the sources that have any."""
        return {source: row for source, row in self.tracker.stats()[what].items() if any(row)}

    def accepted(self) -> dict[str, list[int]]:
        return self.drafted("accepted")


def test_a_reference_comes_before_history_and_model() -> None:
    steps = Steps()
    steps.begin(*(steps.add(name, TEXT) for name in "abc"), steps.add("d"))
    sampled = dict.fromkeys("abcd", TEXT[:2])
    drafts = steps.draft(sampled, {"a": FROM_HISTORY, "b": ([1, 1], 1), "d": ([1, 1], 1)})
    assert drafts == {"a": (TEXT[2:6], 0), "b": (TEXT[2:6], 0), "c": (TEXT[2:6], 0), "d": ([1, 1], 1)}


def test_a_guess_is_used_only_if_there_are_no_other_drafts() -> None:
    steps = Steps()
    steps.begin(*(steps.add(name, TEXT, edit=True) for name in "ab"))
    # The output begins with another token than the text.
    assert steps.draft({"a": [30], "b": [30]}, {"a": FROM_HISTORY}) == {"a": FROM_HISTORY, "b": (TEXT[1:5], 0)}
    # The output goes on as the text does.
    sampled = {"a": TEXT[1:3], "b": TEXT[1:3]}
    assert steps.draft(sampled, {"a": FROM_HISTORY}) == dict.fromkeys("ab", (TEXT[3:7], 0))


def test_a_reference_that_does_not_match_leaves_other_drafts() -> None:
    steps = Steps()
    steps.begin(steps.add("a", TEXT), steps.add("b", TEXT))
    others = dict.fromkeys("ab", FROM_HISTORY)
    assert steps.draft({"a": [30], "b": [*TEXT]}, others) == others


def test_no_more_is_drafted_than_there_is_room_for() -> None:
    steps = Steps()
    steps.begin(*(steps.add(name, TEXT) for name in "abc"))
    drafts = steps.draft(dict.fromkeys("abc", TEXT[:1]), {"c": FROM_HISTORY}, max_drafts={"a": 3, "b": 0, "c": 1})
    assert drafts == {"a": (TEXT[1:4], 0), "b": ([], 0), "c": (TEXT[1:2], 0)}


def test_the_prompt_does_not_count_as_output() -> None:
    steps = Steps()
    steps.begin(steps.add("a", TEXT, prompt=TEXT[:4]))
    assert steps.draft({"a": TEXT[:2]}) == {"a": (TEXT[2:6], 0)}
    assert steps.draft({"a": [30]}) == {"a": ([], 0)}


def test_no_request_drafts_from_anothers_reference() -> None:
    """This holds in any order of the batch, and for a request with the id of one that has ended."""
    steps = Steps()
    other = [5, 6, 20, 21, 22, 23]
    steps.begin(steps.add("a", TEXT), steps.add("b"), steps.add("c", other))
    expected = {"a": (TEXT[2:6], 0), "b": ([], 0), "c": (other[2:], 0)}
    assert steps.draft(dict.fromkeys("abc", TEXT[:2])) == expected
    assert steps.draft({name: [] for name in "cba"}, max_drafts=dict.fromkeys("abc", WIDTH)) == expected
    steps.begin(ended="a")
    steps.begin(steps.add("a"))
    assert steps.draft({"a": TEXT[:2], "c": []}, max_drafts={"c": 1}) == {"a": ([], 0), "c": (other[2:3], 0)}


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
    # No reference drafts now: "b" has left its text.
    steps.begin(scheduled={"a": [9], "b": [9, 9]})
    steps.end({"a": [1], "b": [9, 1]})
    assert steps.drafted() == {"model": [1, 1, 0, 0], source: [2, 1, 1, 0], "reference": [1, 1, 1, 1]}
    assert steps.accepted() == {"model": [1, 1, 0, 0], source: [1, 0, 1, 0], "reference": [1, 1, 0, 0]}


def test_only_what_is_verified_counts() -> None:
    """The scheduler cuts drafts, a grammar forbids some, and a preempted request loses its own."""
    steps = Steps()
    steps.begin(*(steps.add(name, TEXT, counts_key=name) for name in "abcd"))
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
    assert [steps.collect(name) for name in "abcd"] == [
        {"num_requests": 1, "num_steps": 2, "accepted": 2, "rejected": 0},
        {"num_requests": 1, "num_steps": 2, "accepted": 1, "rejected": 2},
        {"num_requests": 1, "num_steps": 2, "accepted": 0, "rejected": 0},
        {"num_requests": 1, "num_steps": 1, "accepted": 0, "rejected": 0},
    ]


def test_padding_counts_as_unfilled() -> None:
    """vLLM pads the first step of a request that has one token left to compute."""
    steps = Steps()
    steps.begin(steps.add("a"), scheduled={"a": [-1] * WIDTH})
    steps.end({"a": [1]})
    assert steps.drafted() == {"unfilled": [1] * WIDTH}
    steps.draft({"a": [1]}, {"a": FROM_HISTORY})
    steps.begin(preempted="a")
    steps.begin(scheduled={"a": [-1, -1]})
    steps.end({"a": [1]})
    # A session goes on as a new request with the same id.
    steps.draft({"a": [1]}, {"a": FROM_HISTORY})
    steps.begin(steps.add("a"), scheduled={"a": [-1]})
    steps.end({"a": [1]})
    assert steps.drafted() == {"unfilled": [3, 2, 1, 1]}
    assert steps.accepted() == {}


def test_a_requests_counts_are_only_of_its_reference() -> None:
    steps = Steps()
    steps.begin(
        steps.add("a", TEXT, edit=True, counts_key="one"), steps.add("b", counts_key="two"), steps.add("c", TEXT)
    )
    # "a" does not begin like its reference, so it keeps the history's drafts.
    first = {"a": [30], "b": TEXT[:1], "c": TEXT[:1]}
    drafts = steps.draft(first, {"a": FROM_HISTORY, "b": FROM_HISTORY})
    steps.end(first)
    steps.begin(scheduled={name: tokens for name, (tokens, _) in drafts.items()})
    second = {"a": [1, 1, 6], "b": [1, 1, 1, 2], "c": [*TEXT[1:4], 30]}
    steps.end(second)
    assert steps.collect("one") == {"num_requests": 1, "num_steps": 2, "accepted": 0, "rejected": 0}
    assert steps.collect("two") == {"num_requests": 1, "num_steps": 2, "accepted": 0, "rejected": 0}
    assert steps.collect("three") is None
    assert steps.accepted() == {"ngram": [2, 2, 1, 0], "reference": [1, 1, 1, 0]}


def test_counts_are_kept_until_their_request_ends_and_they_are_collected() -> None:
    steps = Steps()
    nothing = {"requests": 0, "references": 0, "request_counts": 0}
    assert steps.tracker.stats()["entries"] == nothing
    steps.begin(steps.add("a", TEXT, counts_key="one"), steps.add("b", counts_key="two"))
    steps.end({"a": [5], "b": [5]})
    assert steps.tracker.stats()["entries"] == {"requests": 2, "references": 1, "request_counts": 2}
    assert steps.collect("two") == {"num_requests": 1, "num_steps": 1, "accepted": 0, "rejected": 0}
    steps.begin(ended=["a", "b", "stranger"])
    assert steps.tracker.stats()["entries"] == nothing | {"request_counts": 1}
    assert steps.collect("one") == {"num_requests": 1, "num_steps": 1, "accepted": 0, "rejected": 0}
    assert steps.tracker.stats()["entries"] == nothing


def test_drafts_of_a_request_that_has_ended_do_not_count_for_the_next() -> None:
    steps = Steps()
    steps.begin(steps.add("a", TEXT))
    steps.draft({"a": TEXT[:1]})
    steps.begin(ended="a")
    steps.begin(steps.add("a"), scheduled={"a": [-1]})
    steps.end({"a": [1]})
    assert steps.drafted() == {"unfilled": [1, 0, 0, 0]}


def test_a_request_may_begin_in_the_step_in_which_its_id_ends() -> None:
    steps = Steps()
    steps.begin(steps.add("a", TEXT, counts_key="one"))
    steps.begin(steps.add("a", TEXT, counts_key="one"), ended="a")
    assert steps.tracker.stats()["entries"] == {"requests": 1, "references": 1, "request_counts": 1}
    assert steps.draft({"a": TEXT[:1]}) == {"a": (TEXT[1:5], 0)}


def test_the_drafter_is_told_of_requests_that_begin() -> None:
    """A session goes on under its id without having ended."""
    steps, withdrawn = Steps(), []
    steps.tracker.drafter = SimpleNamespace(withdraw=withdrawn.append)
    steps.begin(steps.add("a"))
    steps.begin(steps.add("a"), steps.add("b"), preempted=["c"])
    steps.begin(ended=["b"])
    assert withdrawn == [{"a"}, {"a", "b"}, set()]


def test_a_fault_in_prices_hides_no_request() -> None:
    steps = Steps()
    steps.tracker.prices = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="begin_step"):
        steps.begin(steps.add("a", TEXT))
    assert steps.tracker.live_requests.sizes()["references"] == 1
    with pytest.raises(AttributeError, match="begin_step"):
        steps.begin(ended="a")
    assert steps.tracker.live_requests.sizes()["requests"] == 0


def test_what_cannot_be_counted_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    steps.begin(steps.add("a", TEXT))
    steps.draft({"a": TEXT[:1]})
    steps.begin(scheduled={"a": TEXT[1:5]})
    steps.end({"a": TEXT[1:3]})
    with monkeypatch.context() as patch:
        patch.setattr(v1_requests, "count_drafts", None)
        with pytest.raises(TypeError):
            steps.tracker.stats()
    assert not steps.drafted()


def test_each_request_has_its_own_limit() -> None:
    steps = Steps()
    steps.begin(steps.add("a", max_drafts=1), steps.add("b"), steps.add("c", TEXT, max_drafts=0))
    assert steps.tracker.live_requests.max_drafts(["b", "c", "a"], 3) == [3, 0, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_worker_logs_a_cut_reference(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = []
    monkeypatch.setattr(live_requests.logger, "warning", lambda *args: lines.append(args))
    steps = Steps(rank)
    steps.begin(steps.add("a", range(9)))
    assert not lines
    steps.begin(steps.add("b", range(9), num_cut=1))
    assert len(lines) == (rank == 0)


def test_any_steps_add_up() -> None:
    """Requests with and without a reference begin and end, and their drafts are cut or forbidden."""
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
            new.append(steps.add(f"request-{started}", reference, edit=True, counts_key="all"))
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
        others = {req_id: (tokens(rng.integers(2, WIDTH + 1)), 2) for req_id in chosen if sampled[req_id]}
        pending |= {req_id: drafts for req_id, (drafts, _) in steps.draft(sampled, others).items()}
        steps.end(sampled)
    stats = steps.tracker.stats()
    for what, expected in zip(("drafted", "accepted"), verified, strict=True):
        assert list(stats[what]) == list(SOURCES)
        assert np.sum(list(stats[what].values()), axis=0).tolist() == expected.tolist()
        assert set(steps.drafted(what)) == {"model", "ngram", "reference"}
    counts = steps.collect("all")
    assert counts is not None
    assert counts["accepted"] == sum(stats["accepted"]["reference"])
    assert counts["rejected"] == sum(stats["drafted"]["reference"]) - counts["accepted"]


def test_state_of_requests_that_have_ended_is_dropped_once() -> None:
    steps, kept = Steps(), []
    steps.begin(steps.add("a"), steps.add("b"))
    batch = SimpleNamespace(req_ids=["b"])
    runner = SimpleNamespace(
        requests={"a": 1, "b": 2}, input_batch=batch, scheduler_config=SimpleNamespace(max_num_seqs=1)
    )
    history = HostHistory(runner, steps.tracker)
    history.drop_idle_state(lambda req_ids: kept.append(list(req_ids)))
    assert kept == []
    del runner.requests["a"]
    steps.begin(ended="a")
    steps.begin()
    for _ in range(2):
        history.drop_idle_state(lambda req_ids: kept.append(list(req_ids)))
    assert kept == [["b"]]
    # Of too many requests only those of the batch keep theirs.
    runner.requests |= {"c": 3, "d": 4}
    history.drop_idle_state(lambda req_ids: kept.append(list(req_ids)))
    assert kept == [["b"], ["b"]]
