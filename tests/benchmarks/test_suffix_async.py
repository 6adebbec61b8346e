"""The benchmark of suffix drafting one step late, tiny; and what it calls wrong."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.test_drafts import Request
from tests.kernels.test_drafts import continued as continued_by_definition

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import suffix_async as benchmark  # noqa: E402


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Report of a quick run, and what it printed."""
    path = tmp_path_factory.mktemp("suffix_async") / "new folder" / "report.json"
    command = [sys.executable, str(BENCHMARKS / "suffix_async.py"), "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


def test_every_setting_is_measured(quick):
    report, printed = quick
    steps = {(r["model_steps"], r["drafts"], r["texts"], r["mode"]): r["steps_per_1000"] for r in report["results"]}
    assert len(steps) == len(report["results"]) == 2 * 2 * 2 * 3
    for result in report["results"]:
        has_suffixes = result["mode"] != "none"
        assert (result["host_us"] > 0) == has_suffixes
        assert result["host_us_min"] <= result["host_us"] <= result["host_us_max"]
        assert f"{result['steps_per_1000']:.1f}" in printed
        # Accepted drafts are the tokens that needed no step of their own; a text's end may cut one off.
        accepted = result["accepted_per_draft"] * result["drafts_per_step"]
        assert 1000 / result["steps_per_1000"] == pytest.approx(1 + accepted, rel=0.02)
    for model_steps, drafts, texts, mode in steps:
        assert 1000 / (drafts + 1) <= steps[model_steps, drafts, texts, mode] <= 1000
        assert steps[0, drafts, texts, "none"] == 1000
        assert max(steps[0, drafts, texts, mode] for mode in ("sync", "async")) < 1000
        assert 500 < steps[1, drafts, texts, "none"] < 680
    for drafts in {drafts for _, drafts, _, _ in steps}:
        # Edited text follows what was there before, and what came last matters little.
        assert steps[0, drafts, "files", "sync"] < steps[0, drafts, "files", "async"]
    assert report["environment"]["packages"]["arctic-inference"]


def test_texts_are_the_same_in_every_run_and_edited_ones_are_not_the_files():
    texts, again = benchmark.make_texts(3, 2048), benchmark.make_texts(3, 2048)
    for name, rows in texts.items():
        assert len(rows) == 3
        for one, other in zip(rows, again[name], strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
            assert np.array_equal(one.model, other.model)
            assert (one.model == one.token_ids).mean() == pytest.approx(0.7, abs=0.05)
    for file, edited in zip(texts["files"], texts["edited"], strict=True):
        assert not np.array_equal(file.token_ids, edited.token_ids)


def test_it_goes_on_from_forecasts_as_the_kernel_is_said_to():
    rng, longer = random.Random(0), 0
    for _ in range(3000):
        new, model, forecast = ([rng.randrange(2) for _ in range(rng.randrange(n))] for n in (5, 3, 9))
        limit = rng.randint(len(model), 6)
        expected, _ = continued_by_definition(Request([7, *new], 1, forecast, model, limit), 6)
        assert benchmark.continued(new, forecast, model, limit) == expected
        longer += len(expected) > len(model)
    assert longer > 100


class Accepted:
    """Equals each token that it is compared with once, and none after that."""

    def __init__(self):
        self.compared = 0

    def __eq__(self, other):
        self.compared += 1
        return self.compared == 1

    def __hash__(self):
        return 0


@pytest.mark.parametrize(
    ("continued", "message"),
    [
        (lambda new, forecast, model, limit: [0] * (limit + 1), "async: 5 drafts, allowed are 4"),
        (lambda new, forecast, model, limit: [Accepted()], "async: the replay of file-0 is not its text"),
    ],
)
def test_a_wrong_replay_gets_no_number(monkeypatch, capsys, continued, message):
    monkeypatch.setattr(benchmark, "continued", continued)
    assert benchmark.main(["--quick", "--drafts", "4"]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
