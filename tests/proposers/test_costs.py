"""Costs from the times of steps, and prices from the pace."""

from collections.abc import Sequence

import numpy as np
import pytest

from vllm_specplus.proposers.costs import CostMeter, Costs, Pace, StepTimes


def test_the_slope_is_found_in_spite_of_noise_and_pauses() -> None:
    rng = np.random.default_rng(0)
    meter = CostMeter()
    for i in range(400):
        tokens = int(rng.integers(1, 60))
        pause = 5.0 if i % 50 == 49 else 0.0
        meter.add_step(tokens, 1, 0.010 + 0.0002 * tokens + rng.normal(0, 0.0003) + pause)
    costs = meter.costs(1)
    assert costs.slot == pytest.approx(0.0002, rel=0.25)
    assert costs.step == pytest.approx(0.016, rel=0.1)


def test_a_request_is_not_taken_for_a_slot() -> None:
    """Requests and their drafts become fewer together, as at the end of a batch."""
    rng = np.random.default_rng(0)
    meter = CostMeter()
    for i in range(400):
        num_reqs = 16 - i % 16
        num_drafts = int(rng.integers(2 * num_reqs, 8 * num_reqs + 1))
        meter.add_step(num_drafts, num_reqs, 2.0 + 0.5 * num_reqs + 0.03 * num_drafts)
    for num_reqs in (1, 8, 16):
        costs = meter.costs(num_reqs)
        assert costs.slot == pytest.approx(0.03, rel=0.1)
        assert costs.step == pytest.approx(2.0 + 0.5 * num_reqs + 0.03 * 5 * num_reqs, rel=0.1)


def test_verifying_at_all_is_not_taken_for_slots() -> None:
    rng = np.random.default_rng(0)
    meter = CostMeter()
    for i in range(400):
        num_drafts = 0 if i % 20 else int(rng.integers(1, 9))
        meter.add_step(num_drafts, 1, 1.0 + 0.05 * num_drafts + (0.6 if num_drafts else 0.0))
    costs = meter.costs(1)
    assert costs.verification == pytest.approx(0.6, abs=0.1)
    assert costs.slot == pytest.approx(0.05, abs=0.02)


def test_where_all_steps_have_drafts_nothing_is_known_of_verifying_at_all() -> None:
    meter = CostMeter()
    for num_drafts in (2, 8) * 100:
        meter.add_step(num_drafts, 1, 1.6 + 0.05 * num_drafts)
    assert meter.costs(1).verification == pytest.approx(0.0, abs=0.05)


def test_verifying_never_costs_less_than_nothing() -> None:
    meter = CostMeter()
    for num_drafts in (0, 8) * 100:
        meter.add_step(num_drafts, 1, 1.0 if num_drafts else 1.5)
    assert meter.costs(1).verification == 0
    assert meter.costs(1).slot == 0


def test_a_pass_is_expected_to_cost_as_much_of_a_step_for_another_batch() -> None:
    meter = CostMeter()
    for num_reqs in (2, 16) * 50:
        meter.add_step(0, num_reqs, 2.0 + 0.5 * num_reqs)
    for _ in range(100):
        meter.add_passes(1, 16, 4.0)
    assert meter.passes_time(1, 16) == pytest.approx(4.0, rel=0.01)
    assert meter.costs(2).first_pass == pytest.approx(4.0 * 3 / 10, rel=0.05)


def test_of_a_batch_never_seen_a_step_is_bounded() -> None:
    """It takes no less than that of a smaller batch, and for each request no more."""
    meter = CostMeter()
    for num_reqs in (8, 9) * 50:
        meter.add_step(0, num_reqs, 10.0 * num_reqs - 70.0)
    usual = meter.costs(9).step
    assert meter.costs(90).step / 90 <= 1.001 * usual / 9
    assert 0 < meter.costs(1).step <= usual


def test_batches_of_another_size_are_measured_apart() -> None:
    """A step of one request may take longer than one of four, and its slots may be free."""
    rng = np.random.default_rng(0)
    meter = CostMeter()
    for _ in range(300):
        meter.add_step(int(rng.integers(0, 9)), 1, 57.0)
    for _ in range(40):
        num_drafts = int(rng.integers(0, 17))
        meter.add_step(num_drafts, 4, 47.0 + 3.0 * num_drafts)
    assert meter.costs(4).slot == pytest.approx(3.0, rel=0.1)
    assert meter.costs(4).step == pytest.approx(47.0 + 3.0 * 8, rel=0.1)
    assert meter.costs(1).slot == pytest.approx(0.0, abs=0.1)
    assert meter.costs(1).step == meter.step_time(1) == pytest.approx(57.0)


def test_a_size_of_few_steps_goes_by_its_neighbours() -> None:
    meter = CostMeter()
    for num_drafts in (0, 8) * 50:
        meter.add_step(num_drafts, 2, 2.0 + 0.1 * num_drafts)
    neighbours = meter.costs(16)
    meter.add_step(0, 16, 10.0)
    assert meter.costs(16) == neighbours
    for _ in range(3):
        meter.add_step(0, 16, 10.0)
    assert meter.costs(16).step == pytest.approx(10.0, rel=0.1)
    # Its steps say nothing of a slot.
    assert meter.costs(16).slot == pytest.approx(meter.costs(2).slot, rel=0.1)


def test_sizes_without_drafts_do_not_lend_each_other_a_slow_first_step() -> None:
    meter = CostMeter()
    meter.add_step(0, 1, 5000.0)
    for num_reqs in (1, 1, *(1, 16) * 300):
        meter.add_step(0, num_reqs, 50.0)
    for num_reqs in (1, 16):
        costs = meter.costs(num_reqs)
        assert costs.slot * num_reqs < 0.1 * costs.step


def test_a_slot_is_lent_by_a_size_that_knows_it() -> None:
    """Between them lies a size all of whose steps are alike."""
    rng = np.random.default_rng(0)
    meter = CostMeter()
    for num_drafts in rng.integers(0, 17, 100).tolist():
        meter.add_step(num_drafts, 4, 47.0 + 3.0 * num_drafts)
    for num_reqs in (8, 16):
        for _ in range(8):
            meter.add_step(0, num_reqs, 60.0)
    assert meter.costs(16).slot == pytest.approx(3.0, rel=0.1)


def test_passes_of_batches_of_another_size_are_measured_apart() -> None:
    meter = CostMeter()
    for num_reqs, step, time in ((1, 57.0, 6.0), (16, 150.0, 16.0)):
        for _ in range(40):
            meter.add_step(0, num_reqs, step)
            meter.add_passes(1, num_reqs, time)
            meter.add_passes(2, num_reqs, 1.5 * time)
    for num_reqs, time in ((1, 6.0), (16, 16.0)):
        assert meter.costs(num_reqs).first_pass == meter.passes_time(1, num_reqs) == pytest.approx(time)
        assert meter.costs(num_reqs).later_pass == pytest.approx(time / 2)


def test_a_pause_counts_as_three_usual_steps() -> None:
    meter = CostMeter()
    for _ in range(9):
        assert meter.add_step(3, 1, 1.0) == 1.0
    assert meter.add_step(3, 1, 100.0) == 3.0


def test_a_step_with_many_more_drafts_is_no_pause() -> None:
    """Sixteen requests, where now and then all of them draft: on a CPU that takes eight times as long."""
    meter = CostMeter()
    for i in range(400):
        num_drafts = 128 if i % 10 == 9 else 0
        meter.add_step(num_drafts, 16, 1.0 + 7.0 * num_drafts / 128)
    costs = meter.costs(16)
    assert costs.slot + costs.verification / 128 == pytest.approx(7.0 / 128, rel=0.1)


def test_steps_alike_say_nothing_of_a_slot() -> None:
    """Then it stays what is usual."""
    meter = CostMeter()
    for _ in range(50):
        meter.add_step(7, 1, 2.0)
    costs = meter.costs(1)
    found = costs.step, costs.slot, costs.first_pass, costs.later_pass
    assert found == pytest.approx((2.0, 0.04, 0.2, 0.2))
    assert costs.more == pytest.approx((0.0,) * 7)


def test_a_slot_never_costs_less_than_nothing() -> None:
    meter = CostMeter()
    for tokens in (1, 50) * 50:
        meter.add_step(tokens - 1, 1, 1.0 / tokens)
    assert meter.costs(1).slot == 0


def test_the_first_pass_and_the_later_ones() -> None:
    meter = CostMeter()
    meter.add_step(0, 1, 1.0)
    add_passes(meter, 3, [0.6] * 3)
    assert (meter.costs(1).first_pass, meter.costs(1).later_pass) == pytest.approx((0.2, 0.2))
    add_passes(meter, 1, [0.4] * 3)
    assert meter.costs(1).first_pass == pytest.approx(0.4)
    assert meter.costs(1).later_pass == pytest.approx(0.1)


def add_passes(meter: CostMeter, num_passes: int, times: Sequence[float]) -> None:
    for time in times:
        meter.add_passes(num_passes, 1, time)


@pytest.mark.parametrize("times", [[4.0, 0.2, 0.2], [0.2, 4.0, 0.2], [0.2, 0.2, 0.2, 4.0]])
def test_a_pause_within_the_first_passes_is_no_cost(times: list[float]) -> None:
    """Until three have been measured they cost what is usual."""
    meter = CostMeter()
    meter.add_step(0, 1, 1.0)
    add_passes(meter, 1, times[:2])
    assert meter.costs(1).first_pass == pytest.approx(0.1)
    assert meter.passes_time(1, 1) == 0
    add_passes(meter, 1, times[2:])
    assert meter.costs(1).first_pass == meter.passes_time(1, 1) == pytest.approx(0.2, rel=0.1)


def test_passes_over_prompts_count_from_the_second_on_and_pauses_as_three_usual_ones() -> None:
    meter = CostMeter()
    times = (9.0, 0.5, 0.5, 0.5, 20.0, 0.5)
    assert [meter.add_prompt_passes(1, 1, time) for time in times] == [0, 2 * 0.5, 0.5, 0.5, 1.5, 0.5]


def test_the_usual_time_of_passes_over_prompts_does_not_count() -> None:
    meter = CostMeter()
    meter.add_step(0, 1, 1.0)
    add_passes(meter, 1, (0.2, 0.2, 0.2))
    times = (0.5, 0.7, 0.6, 0.1)
    assert [meter.add_prompt_passes(1, 1, time) for time in times] == pytest.approx([0, 2 * 0.3, 0.4, 0])


def test_before_anything_is_known_a_step_is_the_unit() -> None:
    assert CostMeter().costs(1) == Costs(1.0, 0.02, 0.1, 0.1)


def test_prices_are_what_the_time_would_bring() -> None:
    pace = Pace()
    costs = Costs(1.0, 0.1, 0.3, 0.2)
    assert pace.prices(costs, 4).slot == pytest.approx(0.4)
    for _ in range(600):
        pace.add(3, 2.0)
    prices = pace.prices(costs, 2)
    assert (prices.slot, prices.first_pass, prices.later_pass) == pytest.approx((0.3, 0.9, 0.6))
    assert prices.step == pytest.approx(1.5)


def test_a_lucky_first_step_does_not_make_the_drafts_of_later_requests_dear() -> None:
    pace, costs = Pace(), Costs(1.0, 0.2)
    pace.add(24, 5.8)
    for _ in range(20):
        pace.add(1, 1.0)
    pace.begin_request(1)
    assert 0.2 < pace.prices(costs, 1).slot < 0.2 * 1.75


def test_the_pace_follows_sooner_after_a_request_has_begun() -> None:
    def after(num_steps: int, begins: bool) -> float:
        pace = Pace()
        for _ in range(200):
            pace.add(6, 1.0)
        if begins:
            pace.begin_request(1)
        for _ in range(num_steps):
            pace.add(1, 1.0)
        return pace.prices(Costs(1.0, 1.0), 1).slot

    assert after(12, begins=True) < 3 < after(12, begins=False)


def line_through(steps: list[tuple[int, int, float]]) -> StepTimes:
    times = StepTimes()
    for step in steps:
        times.add(*step)
    return times


def test_the_time_of_a_step_lies_on_a_line() -> None:
    rng = np.random.default_rng(0)
    steps = [(int(n), 4, 2.0 + 0.05 * n + rng.normal(0, 0.05)) for n in rng.integers(4, 40, 200)]
    assert line_through(steps).times([4, 40], 4) == pytest.approx([2.2, 4.0], rel=0.05)


def test_the_line_stays_known_while_steps_are_alike() -> None:
    steps = [(n, 4, 2.0 + 0.05 * n) for n in (4, 8, 20) * 8] + [(8, 4, 2.4)] * 2000
    times = line_through(steps)
    assert times.is_sloped(4)
    assert times.times([8, 20], 4) == pytest.approx([2.4, 3.0], rel=0.1)


def test_a_larger_batch_has_to_be_measured_again() -> None:
    times = line_through([(n, 1, 2.0 + 0.05 * n) for n in (1, 2, 5) * 8])
    assert times.is_sloped(1)
    assert not times.is_sloped(64)


def test_before_steps_are_measured_a_slot_of_all_requests_costs_what_is_usual() -> None:
    times = StepTimes()
    assert times.times([16, 32], 16) == pytest.approx([1.0, 1.02])
    assert not times.is_sloped(16)


def test_no_step_takes_less_than_no_time() -> None:
    times = line_through([(n, 1, n * n / 10) for n in (4, 8, 16) * 20])
    assert times.times([1], 1)[0] > 0


def beyond_none(meter: CostMeter, num_drafts: int) -> float:
    costs = meter.costs(1)
    more = costs.more[min(num_drafts, len(costs.more)) - 1] if costs.more else 0.0
    return costs.verification + num_drafts * costs.slot + more


def test_of_a_single_request_each_number_of_drafts_has_a_time() -> None:
    """As on a processor that takes longer for two tokens than for three."""
    times = {0: 57.0, 1: 66.0, 2: 49.0, 8: 58.0}
    rng = np.random.default_rng(0)
    meter = CostMeter()
    for _ in range(400):
        num_drafts = int(rng.choice([*times]))
        meter.add_step(num_drafts, 1, times[num_drafts] + rng.normal(0, 1.0))
    for num_drafts in (1, 2, 8):
        assert beyond_none(meter, num_drafts) == pytest.approx(times[num_drafts] - times[0], abs=3.0)
    assert beyond_none(meter, 2) < beyond_none(meter, 5) < beyond_none(meter, 8)
    assert beyond_none(meter, 20) - beyond_none(meter, 8) == pytest.approx(12 * meter.costs(1).slot)
    assert meter.costs(2).more == ()


def test_on_a_line_no_number_of_drafts_has_a_time_of_its_own() -> None:
    meter = CostMeter()
    for num_drafts in (0, 2, 4, 8) * 100:
        meter.add_step(num_drafts, 1, 50.0 + (10.0 if num_drafts else 0.0) + num_drafts)
    costs = meter.costs(1)
    assert costs.verification == pytest.approx(10.0, abs=1.0)
    assert costs.more == pytest.approx([0.0] * 8, abs=0.7)


def test_a_number_of_drafts_that_once_took_long_is_forgotten() -> None:
    """Otherwise it would never be tried again."""
    meter = CostMeter()
    for i in range(200):
        meter.add_step(i % 3, 1, 150.0 if i % 3 == 1 else 50.0)
    assert beyond_none(meter, 1) > 50.0
    for i in range(400):
        meter.add_step(2 * (i % 2), 1, 50.0)
    assert beyond_none(meter, 1) < 10.0


def test_a_number_of_drafts_is_no_dearer_than_the_line_after_a_slow_time() -> None:
    """The whole machine was slow, and then does without drafts for a while."""
    meter = CostMeter()
    for i in range(600):
        meter.add_step(1 + i % 2, 1, 130.0)
    for _ in range(600):
        meter.add_step(0, 1, 50.0)
    assert meter.costs(1).more == ()


def test_a_pause_does_not_make_a_number_of_drafts_dearer_than_the_line() -> None:
    meter = CostMeter()
    for _ in range(100):
        meter.add_step(0, 1, 50.0)
    meter.add_step(8, 1, 5000.0)
    for _ in range(16):
        meter.add_step(0, 1, 50.0)
    assert max(meter.costs(1).more) <= 0.0


def test_what_the_line_has_learned_is_not_counted_twice() -> None:
    meter = CostMeter()
    for _ in range(96):
        meter.add_step(0, 1, 50.0)
    for _ in range(32):
        meter.add_step(8, 1, 90.0)
        meter.add_step(0, 1, 50.0)
        if meter.costs(1).more:
            assert beyond_none(meter, 8) < 44.0
    assert beyond_none(meter, 8) == pytest.approx(40.0, abs=2.0)


def test_prices_have_each_number_of_drafts() -> None:
    pace = Pace()
    for _ in range(1000):
        pace.add(2.0, 1.0)
    prices = pace.prices(Costs(50.0, 1.0, verification=5.0, more=(10.0, -15.0)), 1)
    assert prices.more == pytest.approx((0.4, -0.6), rel=0.01)


def test_each_request_waits_for_the_passes_over_the_prompts_of_its_step() -> None:
    meter = CostMeter()
    batches = (1, 16, 4)
    assert [meter.add_prompt_passes(1, num_reqs, 0.5) for num_reqs in batches] == [0, (1 + 16) * 0.5, 4 * 0.5]
