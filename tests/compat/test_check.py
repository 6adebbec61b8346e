"""The ledger names what breaks, and only when a plugin key is used."""

import ast
import json
import os
import re
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
        # Not every version has each of them, such as Medusa's.
        if (root / file).exists():
            shutil.copy(root / file, tmp_path / file)
    return tmp_path


def doctor(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))


def test_installed_vllm_has_all() -> None:
    assert compat.missing_seams(compat.vllm_root()) == []
    assert compat.check_vllm() is None


def test_the_ledger_has_all_that_is_imported() -> None:
    """`compare` and `testing` run engines as a user does, and need no seam."""
    seams = {name for seam in compat.LEDGER for name in (seam.module, f"{seam.module}.{seam.name.split('.')[0]}")}
    package = Path(compat.__file__).parents[1]
    imported = {
        f"{node.module}.{alias.name}"
        for file in package.rglob("*.py")
        if file.relative_to(package).parts[0] not in ("compare", "testing")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for alias in node.names
    }
    assert len(imported) > 40
    assert imported - seams == set()


@pytest.mark.skipif("SPECPLUS_OTHER_VLLM" not in os.environ, reason="ci/test.sh unpacks another version and names it")
def test_the_other_vllm_has_all() -> None:
    folder = Path(os.environ["SPECPLUS_OTHER_VLLM"])
    version = folder.name.removeprefix("vllm-")
    metadata = next(folder.glob("vllm-*.dist-info/METADATA")).read_text()
    assert re.search(rf"^Version: {re.escape(version)}[.+]", metadata, re.MULTILINE)
    assert compat.missing_seams(folder / "vllm") == []


def test_a_renamed_method_is_named(copied_vllm: Path) -> None:
    file = "v1/sample/rejection_sampler.py"
    doctor(copied_vllm, file, "def _get_logprobs_tensors", "def _logprobs_tensors")
    (problem,) = compat.missing_seams(copied_vllm)
    assert "RejectionSampler._get_logprobs_tensors is gone" in problem


def test_a_lost_parameter_is_named(copied_vllm: Path) -> None:
    doctor(copied_vllm, "v1/spec_decode/llm_base_proposer.py", "discard_request_mask", "discard_mask")
    (problem,) = compat.missing_seams(copied_vllm)
    assert "prepare_next_token_ids_padded has no parameter discard_request_mask" in problem


def test_a_lost_parameter_of_a_coroutine_is_named(copied_vllm: Path) -> None:
    name = "call_utility_all_async"
    doctor(copied_vllm, "v1/engine/core_client.py", f"{name}(self, method:", f"{name}(self, function:")
    (problem,) = compat.missing_seams(copied_vllm)
    assert f"AsyncMPClient.{name} has no parameter method" in problem


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        (
            "v1/worker/gpu/spec_decode/rejection_sampler.py",
            "verify_draft_sampled: torch.Tensor,\n    )",
            "verify_draft_sampled: torch.Tensor,\n        bonus: bool = False,\n    )",
            "RejectionSampler._verify takes logits, .*, verify_draft_sampled, bonus, not just logits",
        ),
        (
            "v1/sample/rejection_sampler.py",
            "sampling_metadata: SamplingMetadata,\n    ) -> SamplerOutput",
            "sampling_metadata: SamplingMetadata,\n        **kwargs: object,\n    ) -> SamplerOutput",
            "RejectionSampler.forward takes metadata, .*, kwargs, not just metadata",
        ),
        (
            "v1/worker/gpu/sample/sampler.py",
            "expanded_local_pos: torch.Tensor,\n        seq_lens_upper_bound_np: np.ndarray,\n        return_logprobs",
            "seq_lens_upper_bound_np: np.ndarray,\n        expanded_local_pos: torch.Tensor,\n        return_logprobs",
            "Sampler.sample takes .* seq_lens_upper_bound_np, expanded_local_pos, return_logprobs, not just",
        ),
    ],
    ids=["added", "anything", "moved"],
)
def test_other_parameters_of_a_replaced_method_are_named(
    file: str, old: str, new: str, words: str, copied_vllm: Path
) -> None:
    """Where vLLM calls the plugin's in its place, with whatever its own takes."""
    doctor(copied_vllm, file, old, new)
    (problem,) = compat.missing_seams(copied_vllm)
    assert re.search(words, problem)


def test_a_function_that_became_something_else_is_named(copied_vllm: Path) -> None:
    file = "v1/spec_decode/custom_class_proposer.py"
    doctor(copied_vllm, file, "def create_custom_proposer", "create_custom_proposer = print\n\n\ndef make_proposer")
    (problem,) = compat.missing_seams(copied_vllm)
    assert "create_custom_proposer is not a function any more" in problem


def test_a_lost_module_is_named(copied_vllm: Path) -> None:
    (copied_vllm / "v1/spec_decode/custom_class_proposer.py").unlink()
    (problem,) = compat.missing_seams(copied_vllm)
    assert "module vllm.v1.spec_decode.custom_class_proposer is gone" in problem


def test_check_raises_one_error_that_names_the_seam(copied_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doctor(copied_vllm, "v1/worker/gpu_model_runner.py", "create_custom_proposer", "make_proposer")
    monkeypatch.setattr(compat.check, "vllm_root", lambda: copied_vllm)
    with pytest.raises(compat.SpecPlusCompatError, match="create_custom_proposer is gone"):
        compat.check_vllm.__wrapped__()


def test_an_untested_version_whose_seams_hold_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.check.importlib.metadata, "version", lambda name: "0.99.1")
    warning = compat.check_vllm.__wrapped__()
    assert warning is not None
    assert "0.99.1 is untested" in warning


def test_override_is_undone_when_the_block_fails() -> None:
    before = json.dumps
    with pytest.raises(TypeError), compat.override(json, {"dumps": len}):
        json.dumps(5)
    assert json.dumps is before
