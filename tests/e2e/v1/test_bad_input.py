"""A wrong setting is reported once, clearly, before weights load."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from tests.e2e.engines import engine, speculative
from vllm_specplus.config import SpecPlusConfigError

HYBRID = {"method": "mtp", "num_speculative_tokens": 3, "mtp_strategy": "with_ngram"}


def create(model: Path, config: Any, **args: Any) -> Any:
    args = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 256} | args
    return EngineArgs(model=str(model), speculative_config=config, **args).create_engine_config()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([1], "JSON object"),
        (HYBRID | {"mtp_stategy": "with_ngram"}, "mtp_stategy.*mtp_strategy"),
        (HYBRID | {"num_model_steps": "2"}, "num_model_steps"),
        (HYBRID | {"num_model_steps": 4}, "num_model_steps=4.*num_speculative_tokens"),
        (HYBRID | {"method": "ngram"}, "mtp_strategy.*ngram"),
        (HYBRID | {"max_ngram_size": 3, "prompt_lookup_max": 4}, "max_ngram_size.*prompt_lookup_max"),
        (HYBRID | {"verify_strategy": "top_p"}, "verify_strategy.*topp"),
        (HYBRID | {"tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
    ],
    ids=["no_object", "key", "type", "range", "no_model", "aliases", "choice", "vllm's"],
)
def test_engine_refuses(config: Any, said: str, tiny: Path) -> None:
    with pytest.raises(SpecPlusConfigError, match=said) as error:
        create(tiny, config)
    assert "\n" not in str(error.value)


def copy_with(model: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a checkpoint in `folder`, with changes to its config."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_head_of_several_layers_forbids_some_steps(tiny: Path, tmp_path: Path) -> None:
    two = copy_with(tiny, tmp_path, num_nextn_predict_layers=2)
    with pytest.raises(SpecPlusConfigError, match=r"num_model_steps=3.*2 layers"):
        create(two, HYBRID | {"num_speculative_tokens": 5, "num_model_steps": 3})
    # Five drafts of a two-layer head are none of vLLM's business here: the head makes two of them.
    config = create(two, HYBRID | {"num_speculative_tokens": 5, "num_model_steps": 2})
    assert config.speculative_config.num_speculative_tokens == 5


def test_vocabulary_of_the_draft_model_must_fit(tiny: Path, draft: Path, tmp_path: Path) -> None:
    other = copy_with(draft, tmp_path, vocab_size=384)
    with pytest.raises(SpecPlusConfigError, match=r"vocab_size=320.*vocab_size=384"):
        create(tiny, speculative("draft_model_ngram", other))


def test_a_checkpoint_of_another_method(tiny: Path, draft: Path, tmp_path: Path) -> None:
    """vLLM goes by the checkpoint in choosing the method, by its name too; a hybrid does not vanish with it."""
    folder = shutil.copytree(draft, tmp_path / "dspark-head")
    with pytest.raises(SpecPlusConfigError, match=r"mtp_strategy='with_ngram'.*'draft_model'.*'dspark'"):
        create(tiny, speculative("draft_model_ngram", folder))


def test_async_scheduling_cannot_be_asked_for(tiny: Path) -> None:
    with pytest.raises(SpecPlusConfigError, match="async_scheduling"):
        create(tiny, HYBRID, async_scheduling=True)


def test_another_worker_cannot_be_asked_for(tiny: Path) -> None:
    with pytest.raises(SpecPlusConfigError, match=r"worker_cls='my\.Worker'"):
        create(tiny, HYBRID, worker_cls="my.Worker")


def test_flag_and_key(tiny: Path) -> None:
    with pytest.raises(SpecPlusConfigError, match="num_speculative_tokens is given twice"):
        create(tiny, HYBRID, spec_tokens=3)
    flagged = {key: HYBRID[key] for key in ("method", "mtp_strategy")}
    assert create(tiny, flagged, spec_tokens=3).speculative_config.num_speculative_tokens == 3


def test_config_may_be_made_twice(tiny: Path) -> None:
    args = EngineArgs(model=str(tiny), speculative_config=dict(HYBRID), max_model_len=256)
    first, second = args.create_engine_config(), args.create_engine_config()
    assert first.speculative_config.specplus == second.speculative_config.specplus


@pytest.mark.parametrize("length", [255, 256])
def test_prompt_at_the_models_length(length: int, tiny: Path) -> None:
    with engine(tiny, HYBRID, max_model_len=256) as e:
        prompt = [i % 9 + 40 for i in range(length)]
        if length == 256:
            with pytest.raises(VLLMValidationError, match="maximum model length of 256"):
                e.tokens([prompt], max_tokens=1)
        else:
            assert len(e.tokens([prompt], max_tokens=4)[0]) == 1
        assert len(e.tokens([[1, 2, 3]])[0]) == 48


@pytest.mark.parametrize(
    "config",
    [
        json.dumps(HYBRID | {"num_model_steps": 9}),
        *(pytest.param(text, marks=pytest.mark.slow) for text in ("{'method': 'mtp'}", "[1, 2]")),
    ],
)
def test_command_line(config: str, tiny: Path) -> None:
    """One message, exit code 2, no traceback, and no weights loaded."""
    vllm = Path(sys.executable).with_name("vllm")
    done = subprocess.run(
        [vllm, "serve", tiny, "--speculative-config", config, "--max-model-len", "256"],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "INFO"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert "speculative" in last
    assert "Traceback" not in done.stderr + done.stdout
    assert "Starting to load model" not in done.stderr + done.stdout
