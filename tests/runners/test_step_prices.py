"""Prices from the times of steps that a test plays, with a clock of its own."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_specplus.proposers.arbiter import Prices
from vllm_specplus.runners import step_prices
from vllm_specplus.runners.faults import Faults
from vllm_specplus.runners.step_prices import StepPrices


class Group:
    """A tensor-parallel group; what the first worker broadcasts, all get."""

    def __init__(self, world_size: int = 1):
        self.world_size = world_size
        self.sent: list[Any] = []

    def broadcast_object(self, prices: Any) -> Any:
        self.sent.append(prices)
        return self.sent[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(time=0.0, group=Group())
    monkeypatch.setattr(step_prices, "time", SimpleNamespace(perf_counter=lambda: now.time))
    monkeypatch.setattr(step_prices, "get_tp_group", lambda: now.group)
    return now


def make_prices() -> StepPrices:
    return StepPrices(Faults(logs=False))


def step(num_drafts: int, *, new: bool = False, running: int = 1, tokens: int | None = None) -> Any:
    scheduled = 1 + num_drafts if tokens is None else tokens
    return SimpleNamespace(
        scheduled_new_reqs=["a"] if new else [],
        scheduled_cached_reqs=SimpleNamespace(num_reqs=running),
        scheduled_spec_decode_tokens={"a": [0] * num_drafts} if num_drafts else {},
        num_scheduled_tokens={"a": scheduled},
        total_num_scheduled_tokens=scheduled,
    )


def play(prices: StepPrices, clock: SimpleNamespace, num_steps: int, **more: Any) -> None:
    """Steps of 1 s and .1 s for each draft; each brings two tokens."""
    for i in range(num_steps):
        num_drafts = i % 9
        prices.begin_step(step(num_drafts, **more))
        prices.add_tokens(2)
        clock.time += 1 + 0.1 * num_drafts


def play_with_passes(prices: StepPrices, clock: SimpleNamespace, num_steps: int, *, num_drafts: int) -> None:
    """Steps of 1 s and two passes of .25 s each; each brings as many tokens as it has drafts, at least one."""
    for _ in range(num_steps):
        prices.begin_step(step(num_drafts))
        prices.add_passes(2, 0.5)
        prices.add_tokens(max(num_drafts, 1))
        clock.time += 1.5


def play_prompts(prices: StepPrices, num_steps: int, seconds: float) -> None:
    """Steps with prompts, in which two passes take some seconds."""
    for _ in range(num_steps):
        prices.begin_step(step(0, new=True))
        prices.add_passes(2, seconds)


def test_slots_cost_what_the_clock_tells(clock: SimpleNamespace) -> None:
    prices = make_prices()
    play(prices, clock, 300)
    # Two tokens in 1.4 s, and .1 s for a slot.
    assert prices.agree(1).slot == pytest.approx(0.1 * 2 / 1.4, rel=0.15)


def test_another_batch_has_prices_at_once(clock: SimpleNamespace) -> None:
    prices = make_prices()
    play(prices, clock, 300)
    alone = prices.agree(1)
    assert prices.agree(1) is alone
    beside_others = prices.agree(16)
    assert beside_others.slot > 2 * alone.slot
    assert prices.agree(17) is beside_others
    assert prices.agree(12).slot < beside_others.slot


def test_passes_are_told_from_the_target(clock: SimpleNamespace) -> None:
    prices = make_prices()
    play_with_passes(prices, clock, 600, num_drafts=3)
    found = prices.agree(1)
    assert found.first_pass == found.later_pass == pytest.approx(0.25 * 3 / 1.5)
    assert found.step == pytest.approx(1.0 * 3 / 1.5)


def test_passes_over_prompts_are_told_once(clock: SimpleNamespace) -> None:
    prices = make_prices()
    play(prices, clock, 8)
    play_prompts(prices, 1, 9.0)
    assert prices.agree(1).prompt_passes == 0
    play_prompts(prices, 1, 2.8)
    # The first may have compiled something.
    found = [prices.agree(1) for _ in range(8)][-1]
    assert found.prompt_passes == pytest.approx(2 * 2.8 / 1.35, rel=0.05)
    assert found.first_pass == pytest.approx(make_prices().agree(1).first_pass * found.step)
    assert [prices.agree(1).prompt_passes for _ in range(8)][-1] == 0


def test_all_requests_wait_for_passes_over_a_prompt(clock: SimpleNamespace) -> None:
    """What usual passes take is charged elsewhere."""
    prices = make_prices()
    play_with_passes(prices, clock, 20, num_drafts=0)
    play_prompts(prices, 2, 2.5)
    with_prompt = step(0, new=True)
    with_prompt.num_scheduled_tokens |= {"b": 1, "c": 50}
    prices.begin_step(with_prompt)
    prices.add_passes(2, 2.5)
    assert prices.agree(3).prompt_passes == pytest.approx((2.5 - 0.5) * (2 + 3))


def test_expected_passes_never_take_all_of_a_step(clock: SimpleNamespace) -> None:
    """Their usual time may be more than they took."""
    prices = make_prices()
    for _ in range(3):
        prices.add_past_passes(2, 5.0, 1, is_counted=True)
    for num_drafts in range(9):
        prices.begin_step(step(num_drafts))
        prices.expect_passes(2)
        prices.add_tokens(2)
        clock.time += 1 + 0.1 * num_drafts
    play_prompts(prices, 3, 9.0)
    found = prices.agree(1)
    assert 0 < found.step < 2
    assert found.slot >= 0
    assert found.prompt_passes > 0


def test_nothing_is_charged_before_a_step_is_known(clock: SimpleNamespace) -> None:
    prices = make_prices()
    play_prompts(prices, 3, 3.0)
    assert prices.agree(1).prompt_passes == 0
    clock.time += 3.0
    play(prices, clock, 2)
    prices.begin_step(step(0))
    assert [prices.agree(1).prompt_passes for _ in range(8)][-1] == pytest.approx(3 * 3.0 / 1.05, rel=0.05)


@pytest.mark.parametrize("what", [{"new": True}, {"tokens": 500}, {"running": 0}])
def test_steps_with_prompts_and_idle_times_are_not_counted(clock: SimpleNamespace, what: dict[str, Any]) -> None:
    prices, before = make_prices(), make_prices().agree(1)
    play(prices, clock, 50, **what)
    assert prices.agree(1) == before


def test_prices_stand_for_eight_steps_and_are_the_first_workers(clock: SimpleNamespace) -> None:
    clock.group = Group(world_size=2)
    prices = make_prices()
    for _ in range(16):
        play(prices, clock, 1)
        assert prices.agree(1) is clock.group.sent[0]
    assert len(clock.group.sent) == 2


def test_what_no_prices_are_asked_for_does_not_pile_up(clock: SimpleNamespace) -> None:
    """Steps are entered with the next prices, which nobody asks for while nothing drafts."""
    prices = make_prices()
    longest = 0
    for _ in range(100):
        play(prices, clock, 1)
        longest = max(longest, len(prices._postponed))
    assert 0 < longest < 50
    asked = make_prices()
    for _ in range(100):
        play(asked, clock, 1)
        asked.agree(1)
    # Those of the first count for eight steps.
    assert prices.agree(1) == [asked.agree(1) for _ in range(8)][-1]


def test_expected_times_are_kept_for_the_steps_of_one_price(clock: SimpleNamespace) -> None:
    """However many sizes of a batch there are."""
    prices, longest = make_prices(), 0
    for i in range(100):
        many = step(0)
        many.num_scheduled_tokens = {str(req_id): 1 for req_id in range(100 + i % 20)}
        prices.begin_step(many)
        prices.agree(100)
        prices.expect_passes(1 + i % 2)
        longest = max(longest, len(prices._usual_passes))
    assert longest == 8


def test_a_step_that_cannot_be_entered_is_not_entered_again(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices = make_prices()
    play(prices, clock, 3)
    with monkeypatch.context() as broken:
        broken.setattr(prices._meter, "add_step", None)
        assert prices.agree(1) == make_prices().agree(1)
    assert prices._faults.counts == {"counting": 1}
    assert [prices.agree(1) for _ in range(8)][-1] == make_prices().agree(1)
    assert prices._faults.counts == {"counting": 1}


def test_passes_over_prompts_are_not_charged_again_after_a_fault(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker would know its own prices again, and the others would take the copy for new ones."""
    prices = make_prices()
    prices._prices = charged = Prices(0.1, 1.0, prompt_passes=3.0)
    monkeypatch.setattr(prices, "_own_prices", None)
    told = prices.agree(1)
    assert told == replace(charged, prompt_passes=0.0)
    assert prices._faults.counts == {"counting": 1}


@pytest.mark.parametrize("faulty", ["first", "last"])
@pytest.mark.parametrize(("part", "name"), [("_meter", "costs"), ("_pace", "prices"), ("_meter", "add_step")])
@pytest.mark.parametrize("begin", [0, 16])
def test_a_fault_of_one_worker_leaves_none_waiting(
    begin: int, part: str, name: str, faulty: str, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    clock.group = SimpleNamespace(world_size=2, broadcast_object=lambda prices: sent.append(prices) or prices)
    workers = {"first": make_prices()}
    # It would wait for ever where nothing has been sent.
    clock.group = SimpleNamespace(world_size=2, broadcast_object=lambda prices: sent.pop(0))
    workers["last"] = make_prices()
    found = []
    with monkeypatch.context() as broken:
        for i in range(48):
            if i == begin:
                broken.setattr(getattr(workers[faulty], part), name, None)
            if i == begin + 16:
                broken.undo()
            for prices in workers.values():
                prices.begin_step(step(i % 9))
                prices.add_tokens(2)
            clock.time += 1 + 0.1 * (i % 9)
            found.append(workers["first"].agree(1))
            assert workers["last"].agree(1) is found[-1]
            assert sent == []
    other = {"first": "last", "last": "first"}[faulty]
    assert workers[faulty]._faults.counts["counting"] >= 1
    assert workers[other]._faults.counts == {}
    if faulty == "first":
        # The prices of before stand until the fault is over.
        assert found[begin] == found[begin + 15] != found[-1]
        assert found[begin] == found[max(begin - 1, 0)]
