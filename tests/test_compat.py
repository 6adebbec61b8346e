"""The ledger names what breaks, and only when a plugin key is used."""

import json
import os
import shutil
from pathlib import Path

import pytest

from vllm_specplus import compat


@pytest.fixture
def copied_vllm(tmp_path: Path) -> Path:
    """The files that the ledger reads, where a test may change them."""
    root = compat.vllm_root()
    for module in {seam.module for seam in compat.LEDGER}:
        name = Path(*module.split(".")[1:])
        file = name / "__init__.py" if (root / name).is_dir() else name.with_suffix(".py")
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / file, tmp_path / file)
    return tmp_path


def doctor(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))


def test_installed_vllm_has_all() -> None:
    assert compat.missing_seams(compat.vllm_root()) == []
    assert compat.check_vllm() is None


@pytest.mark.skipif("SPECPLUS_OTHER_VLLM" not in os.environ, reason="ci/test.sh unpacks another version and names it")
def test_the_other_vllm_has_all() -> None:
    root = Path(os.environ["SPECPLUS_OTHER_VLLM"]) / "vllm"
    assert "Version: 0.33.0" in next(root.parent.glob("vllm-*.dist-info/METADATA")).read_text()
    assert compat.missing_seams(root) == []


def test_a_renamed_method_is_named(copied_vllm: Path) -> None:
    file = "v1/sample/rejection_sampler.py"
    doctor(copied_vllm, file, "def _get_logprobs_tensors", "def _logprobs_tensors")
    (problem,) = compat.missing_seams(copied_vllm)
    assert "RejectionSampler._get_logprobs_tensors is gone" in problem


def test_a_lost_parameter_is_named(copied_vllm: Path) -> None:
    doctor(copied_vllm, "v1/spec_decode/llm_base_proposer.py", "discard_request_mask", "discard_mask")
    (problem,) = compat.missing_seams(copied_vllm)
    assert "prepare_next_token_ids_padded has no parameter discard_request_mask" in problem


def test_a_lost_module_is_named(copied_vllm: Path) -> None:
    (copied_vllm / "v1/worker/cpu_worker.py").unlink()
    (problem,) = compat.missing_seams(copied_vllm)
    assert "module vllm.v1.worker.cpu_worker is gone" in problem


def test_check_raises_one_error_that_names_the_seam(copied_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doctor(copied_vllm, "v1/worker/gpu_model_runner.py", "create_custom_proposer", "make_proposer")
    monkeypatch.setattr(compat, "vllm_root", lambda: copied_vllm)
    with pytest.raises(compat.SpecPlusCompatError, match="create_custom_proposer is gone"):
        compat.check_vllm.__wrapped__()


def test_an_untested_version_whose_seams_hold_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.importlib.metadata, "version", lambda name: "0.99.1")
    warning = compat.check_vllm.__wrapped__()
    assert warning is not None
    assert "0.99.1 is untested" in warning


def test_override_is_undone_when_the_block_fails() -> None:
    before = json.dumps
    with pytest.raises(TypeError), compat.override(json, {"dumps": len}):
        json.dumps(5)
    assert json.dumps is before
