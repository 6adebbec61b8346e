"""What the runs say: ratios, intervals, near-ties, and the recommendation."""

import math
from typing import Any

import pytest
from scipy import stats

from vllm_specplus.compare import speeds as module
from vllm_specplus.compare.configurations import Configuration
from vllm_specplus.compare.counts import Counts, of_plugin
from vllm_specplus.compare.measurements import Difference, Measurements, is_near_tie, recommendation
from vllm_specplus.compare.runs import Best, Run, sources_of_tokens
from vllm_specplus.compare.speeds import interval

NAMES = ("none", "mtp", "ngram")


def measured(speeds: dict[str, list[float]], levels: tuple[int, ...] = (1,), **traits: Any) -> Measurements:
    """Measurements in which each configuration has these tokens/s at every level; `traits` are of `mtp`."""
    configurations = [Configuration(name, None, **(traits if name == "mtp" else {})) for name in speeds]
    found = Measurements(configurations, [*levels])
    for name, values in speeds.items():
        for level in levels:
            for repeat, speed in enumerate(values):
                found.add(name, level, repeat, Run(1 / speed, [[1]], 0, 0, Counts()))
    return found


def test_quantiles_are_students() -> None:
    expected = stats.t.ppf(0.975, range(1, len(module._T) + 1))
    assert pytest.approx(expected, abs=6e-4) == module._T
    assert pytest.approx(stats.norm.ppf(0.975), abs=6e-4) == module._NORMAL


def test_the_interval_is_students_of_the_logarithms() -> None:
    logs = [0.1, 0.2, 0.15, 0.3]
    low, high = stats.t.interval(0.95, 3, loc=sum(logs) / 4, scale=stats.sem(logs))
    found = interval(logs)
    assert found == pytest.approx((math.exp(sum(logs) / 4), math.exp(low), math.exp(high)), rel=1e-4)
    assert interval([0.5])[1:] == (None, None)


def test_a_ratio_pairs_repeats() -> None:
    """A machine that slows down slows both, so the interval is narrow."""
    found = measured({"none": [100, 50, 25], "mtp": [200, 100, 50]}).speeds.ratio("mtp", "none", [1])
    assert found == pytest.approx((2, 2, 2))


def test_a_ratio_leaves_repeats_out_that_one_of_them_lacks() -> None:
    both = measured({"none": [100, 100], "mtp": [300]})
    assert both.speeds.ratio("mtp", "none", [1]) == (pytest.approx(3), None, None)
    assert measured({"none": [100], "mtp": []}).speeds.ratio("mtp", "none", [1]) is None


def test_the_best_is_recommended_and_how_sure_that_is() -> None:
    said = recommendation(
        measured({"none": [100, 101, 99], "mtp": [150, 152, 149], "ngram": [300, 303, 298]}), samples=False
    )
    assert said.startswith("Use ngram, 3.00 times as fast as none (95% interval 2.99 to 3.02): it is 2.00 times")
    assert said.endswith("as fast as mtp (95% interval 1.99 to 2.01), in 3 repeats.")


def test_two_that_cannot_be_told_apart_are_both_named() -> None:
    said = recommendation(
        measured({"none": [100, 100, 100], "mtp": [150, 170, 140], "ngram": [151, 150, 160]}), samples=False
    )
    assert said.startswith("Use ")
    assert "3 repeats cannot tell which is faster" in said
    assert {"mtp", "ngram"} <= set(said.replace(",", "").replace(":", "").split())


def test_one_repeat_is_never_sure() -> None:
    assert "one repeat cannot tell" in recommendation(measured({"none": [100], "mtp": [500]}), samples=False)


def test_no_speculation_may_be_the_best() -> None:
    said = recommendation(measured({"none": [100, 101, 99], "mtp": [50, 50, 51]}), samples=False)
    assert said.startswith("Use none: it is 1.")


def test_the_fastest_of_a_level_is_named_where_it_is_another() -> None:
    found = measured({"none": [100, 100], "mtp": [300, 301]}, (1, 32))
    for repeat in (0, 1):
        found.add("none", 32, repeat, Run(1 / 100, [[1]], 0, 0, Counts()))
        found.add("mtp", 32, repeat, Run(1 / 90, [[1]], 0, 0, Counts()))
    assert recommendation(found, samples=False).endswith("in 2 repeats; but none is fastest at concurrency 32.")


def test_two_that_cannot_be_told_apart_and_a_level_where_another_is_faster() -> None:
    found = measured({"none": [100, 100], "mtp": [300, 310], "ngram": [310, 300]}, (1, 32))
    for repeat in (0, 1):
        for name, speed in (("none", 100), ("mtp", 70), ("ngram", 70)):
            found.add(name, 32, repeat, Run(1 / speed, [[1]], 0, 0, Counts()))
    said = recommendation(found, samples=False)
    assert "2 repeats cannot tell which is faster" in said
    assert said.endswith("; but none is fastest at concurrency 32.")


def test_a_wrong_text_is_not_recommended_but_a_near_tie_is() -> None:
    found = measured({"none": [100, 100], "mtp": [300, 301]})
    found.differences = [Difference("mtp", 1, "p", 0, "a", "b", [], is_near_tie=True)]
    assert recommendation(found, samples=False).startswith("Use mtp")
    found.differences = [Difference("mtp", 1, "p", 0, "a", "b", [], is_near_tie=False)]
    assert recommendation(found, samples=False) == "Use none: no other configuration is fit."
    found.failures["mtp"] = "no memory"
    assert recommendation(found, samples=False) == "Use none: no other configuration ran to its end."


def test_a_config_for_debugging_is_never_recommended() -> None:
    found = measured({"none": [100, 101], "mtp": [300, 301], "ngram": [200, 202]}, keeps_greedy_text=False)
    assert recommendation(found, samples=False).startswith("Use ngram: it is 2.00 times as fast as none")


def test_a_config_whose_sampled_answers_are_wrong_is_never_recommended() -> None:
    found = measured({"none": [100, 101], "mtp": [300, 301], "ngram": [200, 202]})
    found.sample_wrongly = {"mtp"}
    said = recommendation(found, samples=True)
    assert said.startswith("Use ngram: it is 2.00 times as fast as none")
    assert "; mtp is left out, as vLLM's own verification" in said


def test_a_baseline_that_failed_is_no_reason_to_recommend_nothing() -> None:
    found = measured({"none": [], "mtp": [300, 301], "ngram": [200, 202]})
    found.failures["none"] = "no memory"
    assert recommendation(found, samples=False).startswith("Use mtp: it is 1.")


def test_a_lossy_config_that_is_fastest_somewhere_is_said_to_be_that() -> None:
    found = measured({"none": [100, 100], "mtp": [99, 99], "ngram": [300, 301]}, (1, 32), loss="it is wild")
    for repeat in (0, 1):
        found.add("mtp", 32, repeat, Run(1 / 310, [[1]], 0, 0, Counts()))
    said = recommendation(found, samples=True)
    assert said.endswith("but mtp is fastest at concurrency 32; mtp is lossy: it is wild.")


def test_a_lossy_config_is_said_to_be_that_where_answers_are_sampled() -> None:
    speeds = {"none": [100.0, 101.0], "mtp": [300.0, 301.0]}
    said = [recommendation(measured(speeds, loss="it is wild"), samples=samples) for samples in (False, True)]
    assert said[0].endswith("in 2 repeats.")
    assert said[1].endswith("in 2 repeats; mtp is lossy: it is wild.")
    slower = {"none": [100.0, 101.0], "mtp": [50.0, 51.0]}
    assert "lossy" not in recommendation(measured(slower, loss="it is wild"), samples=True)


@pytest.mark.parametrize(
    ("gap", "dtype", "tokens", "near"),
    [
        (0.0, "float32", (7, 9), True),
        (0.1, "float32", (7, 9), False),
        (0.1, "bfloat16", (7, 9), True),
        (0.1, "bfloat16", (9, 7), True),
        (0.3, "bfloat16", (7, 9), False),
        (0.01, "float16", (7, 9), True),
        (0.1, "float16", (7, 9), False),
        (0.1, "bfloat16", (7, 8), False),  # a token that is not among the two best
        (0.1, "bfloat16", (7, None), False),  # an answer that ends early
        (0.1, "int4", (7, 9), False),
    ],
)
def test_near_ties(gap: float, dtype: str, tokens: tuple[int, int | None], near: bool) -> None:
    assert is_near_tie([Best(7, "a", 20.0), Best(9, "b", 20.0 - gap)], tokens, dtype) == near


def test_counts_leave_empty_slots_out() -> None:
    stats = {"drafted": {"model": [4, 2], "unfilled": [9, 9]}, "accepted": {"model": [3, 1], "unfilled": [0, 0]}}
    counts = of_plugin(4, stats)
    assert (counts.num_drafted, counts.num_accepted) == (6, 4)
    assert counts.wasted == pytest.approx(1 / 3)
    assert counts.accepted_by_position() == [0.75, 0.25]


def test_differences_of_counts_take_lists_of_any_length() -> None:
    before = Counts(1, {"model": 2}, {"model": [1]})
    after = Counts(3, {"model": 6, "ngram": 4}, {"model": [2, 1], "ngram": [0, 3]})
    assert after - before == Counts(2, {"model": 4, "ngram": 4}, {"model": [1, 1], "ngram": [0, 3]})
    assert before + (after - before) == after
    assert Counts().wasted is None
    assert Counts().accepted_by_position() == []


def test_sources_of_tokens() -> None:
    found = sources_of_tokens([1, 3, 1, 2], [{"ngram": 1, "model": 1}, {"reference": 1}])
    assert found == ["target", "model", "ngram", "target", "target", "reference", "target"]
    # More drafts were accepted than the answer has room for.
    assert sources_of_tokens([1, 3], [{"model": 5}]) == ["target", "model", "model", "target"]
    assert sources_of_tokens([1, 2, 1], [{"ngram": 1}, {"ngram": 1}]) == ["target", "ngram", "target", "target"]
    # A step without a count: nothing can be told.
    assert sources_of_tokens([2, 2], [{"model": 1}]) == ["unknown", "target", "unknown", "target"]
