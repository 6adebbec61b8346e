"""What the scheduler learns from vLLM's steps."""

from collections.abc import Set
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.engine import scheduler as module
from vllm_specplus.engine.scheduler import WidthChooser, WidthScheduler, make_scheduler
from vllm_specplus.proposers.draft_widths import Plan
from vllm_specplus.runners.faults import Faults

WIDTHS = [0, 1, 2, 4]


class Engine:
    """A chooser and the steps that it is told of, with a clock of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        self.chooser = WidthChooser(WIDTHS)
        self.results: list[tuple[str, int, int]] = []
        self.plans: list[Plan] = []
        self.steps: list[tuple[int, int, float]] = []
        draft_widths = self.chooser.draft_widths
        monkeypatch.setattr(draft_widths, "add_step", lambda *step: self.steps.append(step))
        monkeypatch.setattr(draft_widths, "add_result", self._add_result)

    def _add_result(self, req_id: str, num_slots: int, num_accepted: int, plan: Plan) -> None:
        self.results.append((req_id, num_slots, num_accepted))
        self.plans.append(plan)

    def schedule(self, slots: dict[str, int], finished: Set[str] = frozenset(), **changes: Any) -> Any:
        """Schedule a step; `slots`: the number of each request."""
        counts = {req_id: 1 + count for req_id, count in slots.items()}
        output = SimpleNamespace(
            **{
                "finished_req_ids": finished,
                "scheduled_new_reqs": [],
                "scheduled_spec_decode_tokens": {r: [-1] * count for r, count in slots.items() if count},
                "num_scheduled_tokens": counts,
                "total_num_scheduled_tokens": sum(counts.values()),
            }
            | changes
        )
        self.chooser.choose([SimpleNamespace(request_id=r, is_prefill_chunk=False) for r in slots])
        self.chooser.note_step(output)
        return output

    def end(self, output: Any, tokens: dict[str, int], gone: Set[str] = frozenset()) -> None:
        """End a step; `tokens`: the number that each request got. Those in `gone` were aborted meanwhile."""
        result = SimpleNamespace(
            sampled_token_ids=[[7] * count for count in tokens.values()],
            req_id_to_index={req_id: i for i, req_id in enumerate(tokens)},
        )
        requests = {r: SimpleNamespace(is_finished=lambda: False) for r in tokens if r not in gone}
        self.chooser.note_output(output, result, requests)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_each_request_is_counted_with_its_slots(engine: Engine) -> None:
    step = engine.schedule({"a": 4, "b": 4, "c": 0, "d": 2})
    engine.end(step, {"a": 5, "b": 1, "c": 1, "d": 2})
    assert engine.results == [("a", 4, 4), ("b", 4, 0), ("d", 2, 1)]


def test_the_plan_of_a_steps_slots_is_the_one_made_a_step_before(engine: Engine) -> None:
    first = engine.schedule({"a": 0})
    plan = engine.chooser._next_plan
    second = engine.schedule({"a": 1})
    # Nothing was scheduled, so the slots wait for the next step. vLLM reports such a step all the same.
    engine.end(engine.schedule({}), {})
    third = engine.schedule({"a": 1})
    for step in (first, second, third):
        engine.end(step, {"a": 1})
    assert engine.plans[0] is plan
    assert len(engine.plans) == 2


def test_ended_aborted_and_discarded_requests_are_left_out(engine: Engine) -> None:
    step = engine.schedule({"a": 2, "b": 2, "c": 2})
    engine.end(step, {"a": 3, "b": 0, "c": 2}, gone={"a"})
    assert engine.results == [("c", 2, 1)]
    # A step that vLLM reports nothing of.
    step = engine.schedule({"a": 2})
    engine.chooser.note_output(step, SimpleNamespace(sampled_token_ids=None), {})
    assert engine.results == [("c", 2, 1)]


def test_state_goes_with_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = WidthChooser(WIDTHS)
    chooser.draft_widths.add_result("a", 2, 1, Plan(2))
    chooser.draft_widths.add_result("b", 2, 1, Plan(2))
    chooser.note_step(SimpleNamespace(finished_req_ids={"a", "never seen"}, total_num_scheduled_tokens=0))
    assert chooser.draft_widths.num_requests == 1


def test_a_step_is_timed_from_the_end_of_the_one_before(engine: Engine) -> None:
    """Two steps are under way; while they overlap, only the first runs."""
    first = engine.schedule({"a": 0})
    engine.now = 1.0
    second = engine.schedule({"a": 1})
    engine.now = 3.0
    engine.end(first, {"a": 1})
    engine.now = 7.0
    engine.end(second, {"a": 1})
    # No step was under way when this one was scheduled.
    engine.now = 50.0
    third = engine.schedule({"a": 2})
    engine.now = 52.0
    engine.end(third, {"a": 1})
    assert engine.steps == [(1, 1, 3.0), (2, 1, 4.0), (3, 1, 2.0)]


@pytest.mark.parametrize("changes", [{"scheduled_new_reqs": ["b"]}, {"num_scheduled_tokens": {"a": 30}}])
def test_steps_with_prompts_have_no_time(changes: dict[str, Any], engine: Engine) -> None:
    step = engine.schedule({"a": 1}, **changes)
    engine.end(step, {"a": 2})
    assert engine.steps == []
    assert engine.results == [("a", 1, 1)]


def test_outputs_that_were_never_noted_are_ignored(engine: Engine) -> None:
    engine.schedule({"a": 1})
    engine.end(SimpleNamespace(total_num_scheduled_tokens=2), {"a": 2})
    assert engine.results == []


def test_requests_in_their_prompt_do_not_count() -> None:
    chooser = WidthChooser(WIDTHS)
    running = [SimpleNamespace(request_id=r, is_prefill_chunk=r == "a") for r in "ab"]
    assert chooser.choose(running) in WIDTHS
    assert set(chooser._next_plan.classes) == {"b"}
    assert chooser.choose([]) in WIDTHS


class Stock:
    """In the place of vLLM's scheduler."""

    def __init__(self, vllm_config: Any, lookup: list[int] | None = None) -> None:
        self.dynamic_sd_lookup = lookup
        self.running: list[Any] = []
        self.requests: dict[str, Any] = {}


def vllm_config(is_async: bool, **options: Any) -> Any:
    """The part of vLLM's config that decides which scheduler runs."""
    options = {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_scope": "shared"} | options
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        speculative_config=SimpleNamespace(specplus=SpecPlusOptions(**options)),
    )


@pytest.mark.parametrize("lookup", [[0, 0, 4], None])
def test_synchronous_scheduling_has_vllms_scheduler(
    lookup: list[int], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "Scheduler", Stock)
    config = vllm_config(is_async=False)
    scheduler = make_scheduler(config, lookup=lookup)
    assert type(scheduler) is Stock
    assert scheduler.dynamic_sd_lookup is None
    (line,) = log.messages
    assert line.endswith("one for each draft that is worth it, since scheduling is synchronous")


def test_where_vllm_dropped_the_schedule_nothing_is_chosen(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module.AsyncScheduler, "__init__", Stock.__init__)
    scheduler = WidthScheduler(SimpleNamespace())
    assert scheduler._chooser is None
    assert log.messages == ["slots for drafts in a step: always all, since vLLM has dropped the other widths"]
    scheduler._ask(lambda chooser: pytest.fail("nobody to ask"))


def test_a_fault_ends_the_choice_is_logged_once_and_goes_to_the_workers(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module.AsyncScheduler, "__init__", Stock.__init__)
    monkeypatch.setattr(module.AsyncScheduler, "schedule", lambda self: SimpleNamespace())
    scheduler = WidthScheduler(SimpleNamespace(), [0, 0, 1, 4, 4])
    assert "slots for drafts in a step: 0, 1, 4, whichever the accepted drafts pay for" in log.messages
    text = "what a client " + "wrote"
    for _ in range(2):
        scheduler._ask(lambda chooser: {}[text])
    assert scheduler.dynamic_sd_lookup == [4] * 5
    (said,) = [line for line in log.messages if "cannot choose" in line]
    assert "KeyError" in said
    assert "in _ask" in said
    assert text not in log.text
    workers = Faults(logs=False)
    for _ in range(2):
        workers.take_over(scheduler.schedule())
    assert workers.counts == {"scheduling": 1}
