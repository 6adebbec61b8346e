"""The comparison of adaptive drafting with its parts: its requests and its goals; the engines are not run."""

import itertools
import json
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import adaptive

from vllm_specplus.config import resolve
from vllm_specplus.testing.real_prompts import openings, passages


def result(way: str, *speeds: float, kind: str = "a JSON list") -> adaptive.Result:
    return adaptive.Result(way, kind, 1, 0.0, list(speeds))


def test_each_kind_has_prompts_of_its_own() -> None:
    prompts = adaptive.prompts()
    assert len({(prompt.name, prompt.text) for prompt in prompts}) == len(prompts)
    for kind, number in Counter(prompt.name for prompt in prompts).items():
        assert number == adaptive.NUM_PROMPTS
        references = {prompt.reference for prompt in prompts if prompt.name == kind}
        assert references == {""} if kind != adaptive.WRONG else all(references)


def test_the_real_models_head_has_not_read_the_files() -> None:
    read = [*passages(0), *itertools.islice(openings(0), 1024)]
    for prompt in adaptive.prompts():
        assert not any(prompt.text[300:600] in text for text in read), prompt.name


@pytest.mark.parametrize(("concurrency", "number"), [(1, 4), (2, 4), (3, 6), (16, 32)])
def test_places_stay_taken_for_most_of_a_run(concurrency: int, number: int) -> None:
    prompts = adaptive.prompts()
    for kind in {prompt.name for prompt in prompts}:
        numbers = adaptive.numbers_of(kind, concurrency)
        assert len(numbers) == number
        assert len(set(numbers)) == min(number, adaptive.NUM_PROMPTS)
        assert {prompts[i].name for i in numbers} == {kind}


@pytest.mark.parametrize("head", [None, "an/eagle-head"])
def test_configs_are_what_they_are_called(head: str | None) -> None:
    configs = adaptive.configs(head)
    options = {way: resolve(config).options for way, config in configs.items() if config is not None}
    assert {way for way, found in options.items() if found is not None and found.adaptive} == {
        adaptive.ADAPTIVE,
        *adaptive.PREDICTED,
    }
    override = options["override"]
    assert override is not None
    assert override.match_override_len == 4


def test_predictions_are_measured_with_the_config_of_the_docs() -> None:
    root = Path(__file__).parents[2]
    about, in_readme = (root / "README.md").read_text().partition("// any model: ")[2].splitlines()[:2]
    assert "predicted outputs" in about
    command = (root / "docs" / "requests.md").read_text().partition("--speculative-config")[2]
    _, in_requests, _ = command.split("'", 2)
    for config in (in_readme, in_requests):
        assert json.loads(config) == adaptive.configs(None)[adaptive.PREDICTED[0]]


@pytest.mark.parametrize(("speed", "met"), [(97.5, True), (96.0, False)])
def test_the_goal_is_a_share_of_the_best_other_way(speed: float, met: bool) -> None:
    (row,) = adaptive.goals(
        [result("none", 50, 50), result("ngram", 100, 100), result(adaptive.ADAPTIVE, speed, speed)]
    )
    assert (row["best_other"], row["met"]) == ("ngram", met)
    assert row["ratio"] == pytest.approx(speed / 100)


def test_the_best_other_way_is_not_the_luckiest_one() -> None:
    """Each of three equal ways is lucky once. Adaptive is as fast as they are, and misses nothing."""
    lucky = [[110 if way == repeat else 100 for repeat in range(3)] for way in range(3)]
    group = [result(way, *speeds) for way, speeds in zip(("none", "ngram", "append"), lucky, strict=True)]
    (row,) = adaptive.goals([*group, result(adaptive.ADAPTIVE, 100, 100, 100)])
    assert row["ratio"] == 1
    assert row["met"]


@pytest.mark.parametrize(("speeds", "surely_missed"), [((90, 95, 96), True), ((90, 95, 99), False)])
def test_a_miss_is_within_the_noise_or_beyond(speeds: tuple[float, ...], surely_missed: bool) -> None:
    (row,) = adaptive.goals([result("none", 100, 100, 100), result(adaptive.ADAPTIVE, *speeds)])
    assert not row["met"]
    assert row["surely_missed"] == surely_missed


def test_a_wrong_prediction_is_compared_with_no_speculation() -> None:
    """Neither way of predictions counts as the other's best other way."""
    speeds = dict(zip(adaptive.PREDICTED, (120, 94), strict=True))
    group = [result("none", 100, kind=adaptive.WRONG)]
    group += [result(way, speed, kind=adaptive.WRONG) for way, speed in speeds.items()]
    rows = adaptive.goals(group)
    assert [row["way"] for row in rows] == [*adaptive.PREDICTED]
    assert [(row["best_other"], row["limit"], row["met"]) for row in rows] == [
        ("none", 0.95, True),
        ("none", 0.95, False),
    ]


def test_an_interrupted_run_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(*args):
        yield [result("none", 50), result(adaptive.ADAPTIVE, 60)], []
        assert json.loads(out.read_text())["results"]
        raise KeyboardInterrupt

    out = tmp_path / "folder" / "out.json"
    monkeypatch.setattr(adaptive, "engines", lambda *args: nullcontext({}))
    monkeypatch.setattr(adaptive, "measure", measure)
    assert adaptive.main(["model", "--json", str(out)]) == 1
    report = json.loads(out.read_text())
    assert report["wrong"] == ["interrupted"]
    assert [row["ratio"] for row in report["goals"]] == [1.2]
    assert "FAILED: interrupted" in capsys.readouterr().out
