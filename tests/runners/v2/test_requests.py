"""References and counts on Model Runner V2; the tests play its steps, and the kernels draft and count."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.test_drafts import Request, continued
from tests.runners.test_live_requests import model_config, new_request
from tests.runners.v2.suffix_engine import Event
from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.kernels.drafts import DraftCounts
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.runners import live_requests
from vllm_specplus.runners.v2 import requests as v2_requests
from vllm_specplus.runners.v2.host_tokens import TokenCopier
from vllm_specplus.runners.v2.requests import RequestTracker

pytestmark = pytest.mark.interpreter

MAX_LEN = 64
WIDTH = 4
TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
FROM_HISTORY = ([1, 1, 1], 0)  # drafts of the history, none of them the model's

Drafted = dict[str, tuple[list[int], int]]


@pytest.fixture(autouse=True)
def events(monkeypatch):
    Event.install(monkeypatch)


class Engine:
    """Requests in the places of a Model Runner V2, and their tracker, used as `runners.v2.drafting.Drafting` does.

    Memory that belongs to no request holds the text of the references.
    """

    def __init__(self, *, is_async: bool = False, width: int = WIDTH, method: str = "ngram", rank: int = 0):
        self.width, self.is_async = width, is_async
        options = SpecPlusOptions(method=method, num_speculative_tokens=width)
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(specplus=options, num_speculative_tokens=width),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            model_config=model_config(MAX_LEN),
        )
        self.token_ids = torch.tensor(TEXT * MAX_LEN, dtype=torch.int32)[: 4 * MAX_LEN].reshape(4, MAX_LEN)
        self.total_len = torch.full((4,), MAX_LEN, dtype=torch.int32)
        self.states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self.token_ids), total_len=SimpleNamespace(gpu=self.total_len)
        )
        cpu = torch.device("cpu")
        self.copier = TokenCopier(config, cpu, self.states, is_async=is_async, keeps_last=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(v2_requests, "get_tp_group", lambda: SimpleNamespace(rank_in_group=rank))
            self.by_state = DraftCounts(*torch.zeros(2, 4, dtype=torch.int32))
            self.tracker = RequestTracker(config, cpu, self.states, self.copier, self.by_state)
        self.places: dict[str, int] = {}
        self.prompt_len: dict[str, int] = {}

    def schedule(self, *new: Any, ended: Iterable[str] = ()) -> None:
        """Begin a step; requests take and leave their places later."""
        self.tracker.before_step(SimpleNamespace(scheduled_new_reqs=list(new), finished_req_ids=set(ended)))

    def add(
        self,
        req_id: str,
        index: int,
        reference: Iterable[int] | None = None,
        prompt: Iterable[int] = (3, 4),
        output: Iterable[int] = (),
        **options: Any,
    ) -> None:
        """Begin a request in place `index`, or continue it there with its output."""
        known = [*prompt, *output]
        self.schedule(new_request(req_id, reference, **options))
        self.places[req_id], self.prompt_len[req_id] = index, len(known) - len(list(output))
        self.token_ids[index, : len(known)] = torch.tensor(known, dtype=torch.int32)
        self.total_len[index] = len(known)
        self.tracker.begin(req_id, index)
        if self.tracker.has_reference(index):
            self.copier.mirror.add(index, self.prompt_len[req_id], known)
        else:
            self.copier.mirror.add_unfollowed(index)

    def end(self, req_id: str) -> None:
        self.schedule(ended=[req_id])
        self.preempt(req_id)

    def preempt(self, req_id: str) -> None:
        self.tracker.end(self.places.pop(req_id))

    def text(self, req_id: str) -> list[int]:
        """The tokens of a request on the device."""
        index = self.places[req_id]
        return self.token_ids[index, : self.total_len[index]].tolist()

    def batch(self, req_ids: Iterable[str], num_slots: Iterable[int] = ()) -> SimpleNamespace:
        indices = [self.places[req_id] for req_id in req_ids]
        ends = np.cumsum([0, *(count + 1 for count in num_slots)])
        return SimpleNamespace(
            req_ids=list(req_ids),
            idx_mapping=torch.tensor(indices, dtype=torch.int32),
            idx_mapping_np=np.array(indices, np.intp),
            cu_num_logits=torch.tensor(ends, dtype=torch.int32),
        )

    def step(
        self,
        sampled: dict[str, list[int]],
        others: Drafted | None = None,
        *,
        slots: dict[str, int] | None = None,
        invalid: list[bool] | None = None,
        width: int | None = None,
    ) -> Drafted:
        """Run a step.

        Args:
            sampled: the tokens that each request gets; none during its prefill.
            others: drafts of model and history, and how many are the model's.
            slots: how many slots of each request are verified, 0 by default.
            invalid: rows whose draft a grammar forbids.
            width: slots of a request in the next step.

        Returns:
            The drafts of each request, and how many are the model's.
        """
        tracker, width = self.tracker, self.width if width is None else width
        batch = self.batch(sampled, [(slots or {}).get(req_id, 0) for req_id in sampled])
        # vLLM's buffers hold more than the batch.
        counts = [*map(len, sampled.values()), 1, 1]
        num_sampled = torch.tensor(counts, dtype=torch.int32)
        mask = None if invalid is None else torch.tensor(invalid)
        tracker.count_drafts(batch, num_sampled, mask)

        for req_id, new in sampled.items():
            index = self.places[req_id]
            end = int(self.total_len[index])
            self.token_ids[index, end : end + len(new)] = torch.tensor(new, dtype=torch.int32)
            self.total_len[index] = end + len(new)
        lists = [(others or {}).get(req_id, ([], 0)) for req_id in sampled]
        drafts = torch.tensor([(tokens + [0] * width)[:width] for tokens, _ in lists]).reshape(len(lists), width)
        counts = DraftCounts(
            torch.tensor([min(len(tokens), width) for tokens, _ in lists], dtype=torch.int32),
            torch.tensor([num_model for _, num_model in lists], dtype=torch.int32),
        )
        for noted, count in zip(self.by_state, counts, strict=True):
            noted[batch.idx_mapping] = count
        tracker.count_steps(batch, num_sampled)
        limits = tracker.limits_of(batch, num_sampled, width)
        if tracker.requests_with_reference(batch):
            self.copier.advance(batch, drafts[:, :0], limits)
        num_drafts, num_model = tracker.put_references_first(batch, drafts, counts, limits)
        assert num_drafts.dtype == num_model.dtype == torch.int32
        for noted, count in zip(self.by_state, (num_drafts, num_model), strict=True):
            assert torch.equal(noted[batch.idx_mapping], count)
        rows = [row[:count] for row, count in zip(drafts.tolist(), num_drafts.tolist(), strict=True)]
        return dict(zip(sampled, zip(rows, num_model.tolist(), strict=True), strict=True))

    def collect(self, key: str) -> dict[str, int] | None:
        return self.tracker.collect_request_stats(key)

    def drafted(self, what: str = "drafted") -> dict[str, list[int]]:
        """Tokens by position, of the sources that have any."""
        return {source: row for source, row in self.tracker.stats()[what].items() if any(row)}

    def accepted(self) -> dict[str, list[int]]:
        return self.drafted("accepted")


def test_a_reference_comes_before_history_and_model():
    engine = Engine()
    for index, name in enumerate("abc"):
        engine.add(name, 3 - index, TEXT)
    engine.add("d", 0)
    drafts = engine.step(dict.fromkeys("dabc", TEXT[:2]), {"a": FROM_HISTORY, "b": ([1, 1], 1), "d": ([1, 1], 1)})
    assert drafts == {"d": ([1, 1], 1), "a": (TEXT[2:6], 0), "b": (TEXT[2:6], 0), "c": (TEXT[2:6], 0)}


def test_a_guess_is_used_only_if_there_are_no_other_drafts():
    engine = Engine()
    engine.add("a", 2, TEXT, edit=True)
    engine.add("b", 1, TEXT, edit=True)
    # The output begins with another token than the text.
    assert engine.step({"a": [30], "b": [30]}, {"a": FROM_HISTORY}) == {"a": FROM_HISTORY, "b": (TEXT[1:5], 0)}
    # The output goes on as the text does.
    sampled = {"a": TEXT[1:3], "b": TEXT[1:3]}
    assert engine.step(sampled, {"a": FROM_HISTORY}) == dict.fromkeys("ab", (TEXT[3:7], 0))


def test_a_reference_that_does_not_match_leaves_other_drafts():
    engine = Engine()
    engine.add("a", 0, TEXT)
    engine.add("b", 1, TEXT)
    others = {"a": ([1, 2], 2), "b": FROM_HISTORY}
    assert engine.step({"a": [30], "b": TEXT}, others) == others


def test_no_more_is_drafted_than_allowed():
    """The request sets a limit, vLLM sets one for the step, and a prefill drafts nothing."""
    engine = Engine()
    engine.add("a", 0, TEXT, max_drafts=2)
    engine.add("b", 1, TEXT)
    engine.add("c", 2, TEXT)
    drafts = engine.step({"a": TEXT[:1], "b": TEXT[:1], "c": []})
    assert drafts == {"a": (TEXT[1:3], 0), "b": (TEXT[1:5], 0), "c": ([], 0)}
    drafts = engine.step({"a": TEXT[1:2], "b": TEXT[1:2], "c": TEXT[:1]}, width=3)
    assert drafts == {"a": (TEXT[2:4], 0), "b": (TEXT[2:5], 0), "c": (TEXT[1:4], 0)}
    assert engine.step({"b": TEXT[2:3]}, width=0) == {"b": ([], 0)}


def test_the_prompt_does_not_count_as_output():
    engine = Engine()
    engine.add("a", 0, TEXT, prompt=TEXT[:4])
    assert engine.step({"a": TEXT[:2]}) == {"a": (TEXT[2:6], 0)}
    assert engine.step({"a": [30]}) == {"a": ([], 0)}


def test_one_step_later_a_text_that_agrees_is_drafted_as_well():
    """The host has the tokens of the step before; the device continues its forecast behind the newer tokens."""
    engine = Engine(is_async=True)
    engine.add("a", 1, TEXT)
    assert engine.step({"a": TEXT[:1]}, {"a": FROM_HISTORY}) == {"a": (TEXT[1:5], 0)}
    assert engine.step({"a": TEXT[1:4]}, {"a": FROM_HISTORY}) == {"a": (TEXT[4:8], 0)}
    assert engine.step({"a": TEXT[4:9]}, {"a": FROM_HISTORY}) == {"a": (TEXT[9:], 0)}
    assert engine.step({"a": TEXT[9:]}, {"a": FROM_HISTORY}) == {"a": FROM_HISTORY}
    assert Event.waited == [0, 1, 2]


@pytest.mark.parametrize("edit", [True, False])
def test_one_step_later_a_text_that_disagrees_is_noticed_at_once(edit):
    engine = Engine(is_async=True)
    engine.add("a", 1, TEXT, edit=edit)
    engine.step({"a": TEXT[:1]})
    assert engine.step({"a": [TEXT[1], 30]}, {"a": ([1, 2], 1)}) == {"a": ([1, 2], 1)}
    # With `edit` the host takes 30 for a replaced TEXT[2], else it forecasts nothing. The device compares what came.
    assert engine.step({"a": [TEXT[3]]}, {"a": FROM_HISTORY}) == {"a": (TEXT[4:8], 0) if edit else FROM_HISTORY}
    assert engine.step({"a": [40]}, {"a": FROM_HISTORY}) == {"a": FROM_HISTORY}


def test_one_step_later_a_request_that_begins_goes_on_from_its_prompt():
    engine = Engine(is_async=True)
    engine.add("a", 1, TEXT, prompt=TEXT[:3])
    assert engine.step({"a": []}, {"a": ([], 0)}) == {"a": ([], 0)}
    assert engine.step({"a": [30]}, {"a": FROM_HISTORY}) == {"a": FROM_HISTORY}
    engine.add("b", 2, TEXT)
    assert engine.step({"a": [31], "b": TEXT[:2]}) == {"a": ([], 0), "b": (TEXT[2:6], 0)}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_preempted_request_goes_on_at_another_place(is_async):
    engine = Engine(is_async=is_async)
    engine.add("a", 1, TEXT)
    engine.add("b", 2, [5, 6, 20, 21, 22, 23])
    engine.step(dict.fromkeys("ab", TEXT[:2]))
    engine.preempt("a")
    engine.end("b")
    engine.add("a", 2, TEXT, output=TEXT[:2])
    assert engine.step({"a": TEXT[2:3]}) == {"a": (TEXT[3:7], 0)}
    assert engine.step({"a": TEXT[3:5]}) == {"a": (TEXT[5:9], 0)}


@pytest.mark.parametrize("is_async", [False, True])
def test_no_request_drafts_from_anothers_reference(is_async):
    """This holds in any place, also in that of a request that has ended, and even under its id."""
    engine = Engine(is_async=is_async)
    other = [5, 6, 20, 21, 22, 23, 24, 25]
    engine.add("a", 2, TEXT)
    engine.add("b", 1)
    engine.add("c", 0, other)
    assert engine.step({"a": [5], "b": [5], "c": [5]}) == {"a": (TEXT[1:5], 0), "b": ([], 0), "c": (other[1:5], 0)}
    assert engine.step({"c": [6], "b": [6], "a": [6]}) == {"c": (other[2:6], 0), "b": ([], 0), "a": (TEXT[2:6], 0)}
    engine.end("a")
    engine.add("a", 2)
    assert not engine.tracker.has_reference(2)
    assert engine.step({"a": [5], "c": [20]}) == {"a": ([], 0), "c": (other[3:7], 0)}
    engine.end("c")
    engine.add("d", 0, TEXT)
    assert engine.step({"a": [6], "d": [5]}) == {"a": ([], 0), "d": (TEXT[1:5], 0)}
    engine.end("d")
    assert not engine.tracker.requests_with_reference(engine.batch("a"))
    assert engine.step({"a": [7]}, {"a": FROM_HISTORY}) == {"a": FROM_HISTORY}


def test_each_request_has_its_own_limit():
    engine = Engine()
    engine.add("a", 0, max_drafts=1)
    engine.add("b", 1)
    engine.add("c", 2, TEXT, max_drafts=0)
    engine.add("d", 3, TEXT, max_drafts=9)
    assert [engine.tracker.allows_drafts(index) for index in range(4)] == [True, True, False, True]
    num_sampled = torch.ones(4, dtype=torch.int32)

    def limits(req_ids: str, width: int) -> list[int]:
        limits = engine.tracker.limits_of(engine.batch(req_ids), num_sampled, width)
        assert limits.max_drafts_ptr.dtype == torch.int32
        assert limits.num_sampled_ptr is num_sampled
        return limits.max_drafts_ptr[: len(req_ids)].tolist()

    assert limits("dbca", 4) == [4, 4, 0, 1]
    assert limits("dbca", 3) == [3, 3, 0, 1]
    assert limits("ab", 0) == [0, 0]
    # Nothing is copied where no request of the batch has a limit of its own.
    engine.copier.to_device = None
    assert limits("bd", 3) == [3, 3]


@pytest.mark.parametrize(("method", "source"), [("ngram", "ngram"), ("suffix", "suffix"), ("naive", "ngram")])
def test_drafts_are_counted_by_who_made_them(method, source):
    engine = Engine(method=method)
    engine.add("a", 3, TEXT)
    engine.add("b", 0)
    engine.step({"a": TEXT[:1], "b": [1]}, {"b": ([2, 2, 3], 2)})
    assert engine.drafted() == engine.accepted() == {}
    engine.step({"a": [6, 7, 30], "b": [2, 2, 3, 4]}, {"a": ([9], 1)}, slots={"a": 4, "b": 4})
    expected = {"model": [1, 1, 0, 0], source: [0, 0, 1, 0], "reference": [1, 1, 1, 1], "unfilled": [0, 0, 0, 1]}
    assert engine.drafted() == expected
    assert engine.accepted() == {"model": [1, 1, 0, 0], source: [0, 0, 1, 0], "reference": [1, 1, 0, 0]}
    # Drafts before `num_model` count for the model. Drafts that were cut or forbidden do not count.
    engine.step({"a": [9, 1], "b": [1]}, {"a": ([9, 9], 0)}, slots={"a": 1})
    engine.step({"b": [1], "a": [9, 1]}, slots={"a": 2, "b": 1}, invalid=[False, False, False, False, True])
    assert engine.drafted() == {
        "model": [2, 1, 0, 0],
        source: [1, 0, 1, 0],
        "reference": [1, 1, 1, 1],
        "unfilled": [1, 0, 0, 1],
    }
    assert engine.accepted() == {"model": [2, 1, 0, 0], source: [1, 0, 1, 0], "reference": [1, 1, 0, 0]}


def test_a_requests_counts_go_on_over_preemption():
    engine = Engine()
    engine.add("a", 1, TEXT, counts_key="one")
    engine.add("b", 2, counts_key="two")
    engine.step({"a": TEXT[:1], "b": [5]}, {"b": FROM_HISTORY})
    engine.step({"a": [*TEXT[1:3], 30], "b": [1, 1]}, slots={"a": 4, "b": 3})  # "a": 2 of 4
    assert engine.collect("one") == {"num_requests": 1, "num_steps": 2, "accepted": 2, "rejected": 2}
    engine.preempt("a")
    # Its counts stay while it waits, and the request in its place does not add to them.
    engine.add("c", 1, TEXT)
    engine.step({"c": TEXT[:1], "b": [1]})
    engine.step({"c": TEXT[1:3], "b": [1]}, slots={"c": 4})
    assert engine.collect("one") == {"num_requests": 1, "num_steps": 2, "accepted": 2, "rejected": 2}
    engine.end("c")
    engine.add("a", 0, TEXT, output=TEXT[:3], counts_key="one")
    engine.step({"a": []})
    engine.step({"a": TEXT[3:4]})
    engine.step({"a": TEXT[4:7]}, slots={"a": 3})  # 2 of 3
    assert engine.collect("one") == {"num_requests": 1, "num_steps": 4, "accepted": 4, "rejected": 3}
    engine.end("a")
    assert engine.collect("one") is None
    # Drafts of the history do not count for a reference.
    assert engine.collect("two") == {"num_requests": 1, "num_steps": 4, "accepted": 0, "rejected": 0}
    assert engine.collect("three") is None


def test_a_place_counts_for_the_request_that_has_it():
    engine = Engine()
    for name in "ab":
        engine.add(name, 1, TEXT, counts_key=name)
        engine.step({name: TEXT[:1]})
        engine.step({name: TEXT[1:3]}, slots={name: 2})
        engine.end(name)
    engine.add("c", 1)
    engine.step({"c": TEXT[:1]}, {"c": FROM_HISTORY})
    engine.step({"c": [1, 30]}, slots={"c": 3})
    assert engine.drafted() == {"ngram": [1, 1, 1, 0], "reference": [2, 2, 0, 0]}
    expected = {"num_requests": 1, "num_steps": 2, "accepted": 1, "rejected": 1}
    assert [engine.collect(name) for name in "abc"] == [expected, expected, None]


def test_a_request_may_begin_in_the_step_in_which_its_id_ends():
    engine = Engine()
    engine.add("a", 1, TEXT, counts_key="one")
    engine.schedule(new_request("a", TEXT, counts_key="one"), ended=["a"])
    assert engine.tracker.stats()["entries"] == {"requests": 1, "references": 1, "request_counts": 1}


def test_requests_of_one_key_are_counted_together():
    engine = Engine()
    engine.add("a", 1, TEXT, counts_key="one")
    engine.add("b", 2, TEXT, counts_key="one")
    engine.step(dict.fromkeys("ab", TEXT[:1]))
    engine.step({"a": TEXT[1:3], "b": [30]}, slots={"a": 1, "b": 2})
    engine.end("a")
    expected = {"num_requests": 2, "num_steps": 4, "accepted": 1, "rejected": 2}
    assert engine.collect("one") == expected
    engine.end("b")
    assert engine.tracker.stats()["entries"] == {"requests": 0, "references": 0, "request_counts": 0}


def test_counts_are_kept_until_their_request_ends_and_they_are_collected():
    engine = Engine()
    nothing = {"requests": 0, "references": 0, "request_counts": 0}
    assert engine.tracker.stats()["entries"] == nothing
    engine.add("a", 0, TEXT, counts_key="one")
    engine.add("b", 1, max_drafts=1)
    assert engine.tracker.stats()["entries"] == {"requests": 2, "references": 1, "request_counts": 1}
    engine.end("b")
    engine.end("a")
    assert engine.tracker.stats()["entries"] == nothing | {"request_counts": 1}
    assert engine.collect("one") == {"num_requests": 1, "num_steps": 0, "accepted": 0, "rejected": 0}
    assert engine.tracker.stats()["entries"] == nothing


@pytest.mark.parametrize("rank", [0, 1])
def test_one_worker_logs_a_cut_reference(rank, monkeypatch):
    lines = []
    monkeypatch.setattr(live_requests.logger, "warning", lambda *args: lines.append(args))
    engine = Engine(rank=rank)
    engine.add("a", 0, range(9))
    assert not lines
    engine.add("b", 1, range(9), num_cut=1)
    assert len(lines) == (rank == 0)


class Expected:
    """The drafts of a reference that sees the text as it is, or as it was one step before."""

    def __init__(self, engine: Engine, req_id: str, reference: list[int], edit: bool):
        self.engine, self.req_id = engine, req_id
        sizes = SpecPlusOptions(method="ngram", num_speculative_tokens=1)
        self.reference = ReferenceText(
            np.array(reference, np.int32),
            edit=edit,
            min_ngram_size=sizes.min_ngram_size,
            max_ngram_size=sizes.max_ngram_size,
        )
        self.begin()

    def begin(self) -> None:
        self.last_text = self.engine.text(self.req_id)

    def drafts(self, others: tuple[list[int], int], limit: int) -> tuple[tuple[list[int], int], bool]:
        """The drafts, and whether they are the reference's."""
        engine, text = self.engine, self.engine.text(self.req_id)
        before, self.last_text = self.last_text, text
        known = before if engine.is_async else text
        output = np.array(known[engine.prompt_len[self.req_id] :], np.int32)
        forecast = self.reference.draft(output, (2 * engine.width + 1) if engine.is_async else engine.width)
        found, _ = continued(Request(text, len(known), forecast.tolist(), [], limit), engine.width)
        if found and not (self.reference.is_guess and known == text and others[0]):
            return (found, 0), True
        return others, False


@pytest.mark.parametrize("edit", [True, False])
@pytest.mark.parametrize("is_async", [False, True])
def test_any_steps_draft_and_add_up(is_async, edit):
    """Requests with and without a reference begin, end, are preempted and limited; their drafts are cut."""
    rng = np.random.default_rng(is_async)
    engine = Engine(is_async=is_async)
    expected: dict[str, Expected] = {}
    options: dict[str, dict[str, Any]] = {}
    last: dict[str, tuple[list[int], bool]] = {}  # by running request: its drafts, and whether they are its reference's
    verified = np.zeros((2, WIDTH), np.int64)
    expected_counts: dict[str, np.ndarray] = {}
    free, started, num_first = [0, 1, 2, 3], 0, 0

    def tokens(count):
        return rng.integers(1, 4, count).tolist()

    for _ in range(70):
        for req_id in list(engine.places):
            text, prompt_len = engine.text(req_id), engine.prompt_len[req_id]
            if len(text) > MAX_LEN - 10 or rng.random() < 0.05:
                free.append(engine.places[req_id])
                del last[req_id]
                if rng.random() < 0.5 and len(text) < MAX_LEN - 10:
                    engine.preempt(req_id)
                    place = free.pop(0)
                    engine.add(req_id, place, prompt=text[:prompt_len], output=text[prompt_len:], **options[req_id])
                    last[req_id] = [], False
                    if req_id in expected:
                        expected[req_id].begin()
                else:
                    engine.end(req_id)
        while len(free) > 1:
            req_id = f"request-{started}"
            options[req_id] = {"counts_key": req_id, "max_drafts": [None, None, 2][started % 3], "edit": edit}
            if started % 4:
                options[req_id]["reference"] = tokens(30)
            engine.add(req_id, free.pop(), prompt=tokens(3), **options[req_id])
            last[req_id], expected_counts[req_id] = ([], False), np.zeros(3, np.int64)
            if started % 4:
                expected[req_id] = Expected(engine, req_id, options[req_id]["reference"], edit)
            started += 1
        chosen = rng.permutation(list(engine.places))[: rng.integers(1, len(engine.places) + 1)].tolist()
        sampled, slots, limits, others = {}, {}, {}, {}
        for req_id in chosen:
            drafts, is_reference = last[req_id]
            num_drafts = min(len(drafts), int(rng.integers(0, 2 * WIDTH)))
            slots[req_id] = WIDTH if is_async and drafts else num_drafts
            num_drafts = min(len(drafts), slots[req_id])
            num_accepted = int(rng.integers(0, num_drafts + 1))
            sampled[req_id] = []
            if rng.random() < 0.9:
                # Most outputs go on like their reference.
                at = len(engine.text(req_id)) - engine.prompt_len[req_id] + num_accepted
                agreeing = options[req_id].get("reference", [])[at : at + 1] if rng.random() < 0.7 else []
                sampled[req_id] = drafts[:num_accepted] + (agreeing or tokens(1))
            if sampled[req_id]:
                verified[0, : slots[req_id]] += 1
                verified[1, :num_accepted] += 1
                expected_counts[req_id] += [1, num_accepted * is_reference, (num_drafts - num_accepted) * is_reference]
            limits[req_id] = (options[req_id]["max_drafts"] or WIDTH) * bool(sampled[req_id])
            others[req_id] = tokens(rng.integers(0, limits[req_id] + 1)), 0
        drafted = engine.step(sampled, others, slots=slots)
        for req_id in chosen:
            wanted, is_reference = others[req_id], False
            if req_id in expected:
                wanted, is_reference = expected[req_id].drafts(others[req_id], limits[req_id])
            assert drafted[req_id] == wanted
            last[req_id] = wanted[0], is_reference
            num_first += is_reference
    assert num_first > 30
    stats = engine.tracker.stats()
    for what, positions in zip(("drafted", "accepted"), verified, strict=True):
        assert np.sum(list(stats[what].values()), axis=0).tolist() == positions.tolist()
    for req_id, (num_steps, accepted, rejected) in expected_counts.items():
        counted = {"num_requests": 1, "num_steps": num_steps, "accepted": accepted, "rejected": rejected}
        assert engine.collect(req_id) == counted


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_the_arbiter_has_not_counted_is_counted_later(goes_on: bool) -> None:
    """After a fault before its judgement, or where none has followed; with the batch that it was of."""
    engine, at_once = Engine(), Engine()
    engine.tracker._counts_later = True
    for each in (engine, at_once):
        each.add("a", 1)
        each.add("b", 3)
        each.step(dict.fromkeys("ab", TEXT[:1]), {"a": ([1, 1], 1), "b": FROM_HISTORY})
    batch, sampled = engine.batch("ba", [3, 2]), torch.tensor([2, 3], dtype=torch.int32)
    for each in (engine, at_once):
        each.tracker.count_drafts(batch, sampled, None)
    assert engine.drafted() == {}
    assert engine.tracker.uncounted(engine.batch("ba")) is None  # of another batch
    counted = engine.tracker.uncounted(batch)
    assert counted is not None
    assert counted.num_sampled is sampled
    if goes_on:
        engine.tracker.count_drafts(engine.batch("a", [0]), torch.zeros(1, dtype=torch.int32), None)
    else:
        engine.tracker.count_rest()
    assert engine.drafted() == at_once.drafted() != {}
    assert engine.accepted() == at_once.accepted() != {}
