"""What `benchmarks/record.py` refuses; tests/e2e/v1/test_record.py has its traces."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "record.py"
HYBRID = {"method": "mtp", "num_speculative_tokens": 4, "num_model_steps": 2, "mtp_strategy": "with_ngram"}


def refusal(*arguments: str) -> str:
    command = [sys.executable, str(SCRIPT), "MODEL", *arguments, "--out", "unused.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "malformed JSON at line 1 column 2"),
        ("5", "expected a JSON object, got 5"),
        (json.dumps(HYBRID), 'mtp_strategy="with_ngram" is not allowed: only the drafts of a model are recorded'),
        ('{"method": "ngram", "num_speculative_tokens": 4}', 'method="ngram" is not allowed'),
        ('{"method": "ngram_gpu", "num_speculative_tokens": 4}', 'method="ngram_gpu" is not allowed'),
        ('{"method": "mtp", "num_speculative_tokens": 0}', "num_speculative_tokens=0"),
    ],
)
def test_a_config_that_does_not_draft_with_a_model_alone(config: str, message: str) -> None:
    line = refusal("--workload", "edit", "--speculative-config", config)
    assert "argument --speculative-config: " in line
    assert message in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "the file: Invalid JSON"),
        ("{}", "the file: Input should be a valid array"),
        ("[]", "it is empty"),
        ('[{"kind": "code", "name": "one"}]', "0.prompt: Field required"),
        ('[{"kind": "code", "name": "one", "prompt": ""}]', 'must be text or a list of token ids, got ""'),
        ('[{"kind": "code", "name": "one", "prompt": [-1]}]', "must be text or a list of token ids, got [-1]"),
        ('[{"kind": "code", "name": "one", "prompt": "a", "refrence": "b"}]', "0.refrence: Extra inputs"),
    ],
)
def test_a_bad_file_gets_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    if text is not None:
        file.write_text(text)
    line = refusal(str(file))
    assert line.startswith(f"error: {file}: ")
    assert message in line


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "MODEL", "--workload", "edit", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: --out {tmp_path}: cannot be written: ")
