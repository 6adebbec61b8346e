"""`benchmarks/record.py`: the traces are the engine's own, so what is replayed on them is what an engine does."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import PROMPTS, engine
from vllm_specplus.testing.tiny_tokenizer import SPECIAL_TOKENS

_ROOT = Path(__file__).parents[3]
MAX_TOKENS = 40
STEPS = 2


@pytest.fixture(scope="module", params=["mtp", "eagle", "draft_model"])
def drafter(request: pytest.FixtureRequest, trained: Path, tiny: Path, draft: Path) -> tuple[Path, dict[str, Any]]:
    """A model, and the config of what drafts for it."""
    config = {"method": request.param, "num_speculative_tokens": STEPS}
    if request.param == "mtp":
        return trained, config
    return tiny, config | {"model": str(draft / "eagle" if request.param == "eagle" else draft)}


@pytest.fixture(scope="module")
def traces(drafter: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    model, config = drafter
    folder = tmp_path_factory.mktemp("record")
    rows = [{"kind": "code", "name": str(i), "prompt": prompt} for i, prompt in enumerate(PROMPTS[:3])]
    rows.append({"kind": "text", "name": "text", "prompt": "import os\n", "reference": "import os\n"})
    (folder / "prompts.json").write_text(json.dumps(rows))
    arguments = (str(folder / "prompts.json"), "--speculative-config", json.dumps(config), "--max-model-len", "512")
    return recorded(folder, model, MAX_TOKENS, *arguments)


def recorded(folder: Path, model: Path, max_tokens: int, *arguments: str) -> list[dict]:
    out = folder / "traces.json"
    command = [sys.executable, "benchmarks/record.py", str(model), *arguments, "--ignore-eos"]
    command += ["--out", str(out), "--max-tokens", str(max_tokens)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    traces = json.loads(out.read_text())
    assert f"{len(traces)} traces, {len(traces) * max_tokens} output tokens" in done.stdout
    return traces


def test_traces_are_complete(traces: list[dict]) -> None:
    assert len(traces) == 4
    assert [trace["prompt"] for trace in traces[:3]] == PROMPTS[:3]
    assert traces[3]["prompt"] == traces[3]["reference"] == list(b"import os\n")
    for trace in traces:
        assert len(trace["output"]) == len(trace["drafts"]) == MAX_TOKENS
        assert {len(drafts) for drafts in trace["drafts"][:-2]} == {STEPS}


def test_an_engine_takes_the_steps_that_a_replay_takes(
    traces: list[dict], drafter: tuple[Path, dict[str, Any]]
) -> None:
    with engine(*drafter) as e:
        assert e.tokens([trace["prompt"] for trace in traces], max_tokens=MAX_TOKENS) == [t["output"] for t in traces]
        steps = e.counts().drafts
    assert sum(_num_steps(trace) for trace in traces) == steps


def test_the_prompts_of_workloads(trained: Path, tmp_path: Path) -> None:
    traces = recorded(tmp_path, trained, 4, "--workload", "edit", "prose")
    assert [trace["kind"] for trace in traces] == ["edit"] * 8 + ["prose"] * 8
    edit, prose = traces[0], traces[8]
    question = [SPECIAL_TOKENS["<|im_start|>"], *b"user\nRename `filename` to `path` in this function"]
    assert edit["prompt"][: len(question)] == question
    assert bytes(edit["reference"]) in bytes(token for token in edit["prompt"] if token < 256)
    assert bytes(prose["prompt"]).startswith(b"The harbour had been quiet")
    assert "reference" not in prose


def _num_steps(trace: dict) -> int:
    """The steps with drafts that follow the first token."""
    output, position, steps = trace["output"], 1, 0
    while position < len(output):
        drafts, follows = trace["drafts"][position - 1], output[position:]
        accepted = 0
        while drafts[: accepted + 1] == follows[: accepted + 1] and accepted < len(drafts):
            accepted += 1
        steps += 1
        position += accepted + 1
    return steps
