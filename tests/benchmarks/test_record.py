"""What `benchmarks/record.py` refuses; tests/e2e/v1/test_record.py has its traces."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "record.py"
HYBRID = {"method": "mtp", "num_speculative_tokens": 4, "num_model_steps": 2, "mtp_strategy": "with_ngram"}


def last_line(*arguments: str) -> str:
    command = [sys.executable, str(SCRIPT), "MODEL", *arguments, "--out", "unused.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "Expecting property name"),
        ("5", "unsupported operand"),
        (json.dumps(HYBRID), f"{json.dumps(HYBRID)} is not allowed: what is recorded are the drafts of a model"),
        ('{"method": "ngram", "num_speculative_tokens": 4}', "is not allowed: what is recorded"),
        ('{"method": "mtp", "num_speculative_tokens": 0}', "num_speculative_tokens=0"),
    ],
)
def test_a_config_that_does_not_draft_with_a_model_alone(config: str, message: str) -> None:
    line = last_line("--workload", "edit", "--speculative-config", config)
    assert "argument --speculative-config: " in line
    assert message in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "the file: Invalid JSON"),
        ("{}", "the file: Input should be a valid array"),
        ('[{"kind": "code", "name": "one"}]', "0.prompt: Field required"),
        ('[{"kind": "code", "name": "one", "prompt": ""}]', "0.prompt: "),
    ],
)
def test_prompts_that_are_none(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    if text is not None:
        file.write_text(text)
    line = last_line(str(file))
    assert line.startswith(f"error: {file}: ")
    assert message in line
