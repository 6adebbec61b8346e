"""The demo's table, and its report of an engine that fails. No engine generates anything."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))
import demo  # noqa: E402

from vllm_specplus.config import resolve  # noqa: E402


def result(tokens: list[int], speed: float, steps: float) -> dict[str, Any]:
    """Return what a run reports of one prompt; half of the drafts at the first position were accepted."""
    return {
        "token_ids": tokens,
        "is_always_the_same": True,
        "tokens_per_second": [speed - 10, speed, speed + 10],
        "steps_per_100_tokens": steps,
        "tokens_per_verification": 1.5,
        "accepted_by_position": [0.5],
    }


def printed(results: dict[str, demo.Results]) -> tuple[bool, str]:
    out = io.StringIO()
    return demo.report(results, Console(width=120, file=out)), out.getvalue()


def test_the_table_marks_the_fastest_way_of_each_prompt() -> None:
    equal, text = printed(
        {
            demo.PLAIN: {"one": result([1, 2], 100, 100), "two": result([3], 300, 100)},
            "mtp": {"one": result([1, 2], 200, 61.2), "two": result([3], 250, 70)},
        }
    )
    assert equal
    rows = [line for line in text.splitlines() if "no speculation" in line or "mtp" in line]
    assert [line.count("*") for line in rows] == [0, 1, 1, 0]
    assert rows[1].split() == ["mtp", "*", "200", "(190", "to", "210)", "61", "1.50", "50", "yes"]
    assert "drafting saves steps" in text


def test_another_text_is_told() -> None:
    equal, text = printed({demo.PLAIN: {"one": result([1, 2], 100, 100)}, "mtp": {"one": result([1, 3], 200, 60)}})
    assert not equal
    assert "NO" in text


def test_a_text_that_another_round_does_not_repeat_is_told() -> None:
    answers = [([7, 8], 1.0, [1, 0, 0]), ([7, 8], 1.0, [1, 0, 0]), ([7, 9], 1.0, [1, 0, 0])]
    equal, text = printed({demo.PLAIN: {"one": result([7, 8], 100, 100)}, "mtp": {"one": demo.summary(answers)}})
    assert not equal
    assert "NO" in text


def test_a_summary_leaves_the_first_answer_out() -> None:
    # Steps, verifications, accepted drafts, and these by position.
    answers = [([7, 8], 9.0, [9, 9, 9, 9]), ([7, 8], 0.5, [1, 1, 1, 1]), ([7, 8], 1.0, [2, 1, 0, 0])]
    assert demo.summary(answers) == {
        "token_ids": [7, 8],
        "is_always_the_same": True,
        "tokens_per_second": [2.0, 4.0],
        "steps_per_100_tokens": 75.0,
        "tokens_per_verification": 1.5,
        "accepted_by_position": [0.5],
    }


def test_the_table_of_fast_engines_is_not_cut() -> None:
    long = "repeat, one name changed"
    fast = result([1, 2], 12345, 100) | {"accepted_by_position": [1.0] * 5}
    _, text = printed({demo.PLAIN: {long: fast}, "hybrid, adaptive": {long: fast}})
    assert "\u2026" not in text


def test_a_failing_engine_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("import os\nos.system('echo noise')\nraise RuntimeError('no such engine')\n")
    command = [sys.executable, str(EXAMPLES / "demo.py"), "MODEL", "--logs", str(tmp_path / "logs")]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    log = tmp_path / "logs" / "no-speculation.log"
    assert done.returncode == 1
    assert log.read_text().startswith("noise\n")
    assert "RuntimeError: no such engine" in done.stderr
    assert f"its whole output is in {log}" in done.stderr
    assert done.stdout == f"The engines' logs are in {tmp_path / 'logs'}\nstarts no speculation and mtp\n"


def adapts(config: dict[str, Any]) -> bool:
    options = resolve(config).options
    return options is not None and options.adaptive


def test_both_demos_begin_without_speculation() -> None:
    for compared in (demo.of_mtp(), demo.of_eagle("HEAD")):
        assert next(iter(compared.configs.items())) == (demo.PLAIN, None)
        configs = [config for config in compared.configs.values() if config is not None]
        assert len({resolve(config, strict=True).as_json() for config in configs}) == 5
        assert compared.units == demo.START_UNITS + (1 + demo.REPEATS) * len(compared.prompts)
        adaptive = [name for name, config in compared.configs.items() if config and adapts(config)]
        assert adaptive == ["hybrid, adaptive"]
    assert [bool(prompt.reference) for prompt in compared.prompts.values()] == [False, False, True, False]
    assert {config.get("model", "HEAD") for config in compared.configs.values() if config} == {"HEAD"}
