"""The ledger: every name of vLLM that the plugin touches, and the check that they are all there.

The ledger is the gate, not a version number. It is read against the source files of the installed vLLM, so
that checking imports nothing of vLLM and costs a fraction of a second, and only when a plugin key is used.
"""

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

TESTED_VERSIONS = ("0.32", "0.33")


V2_REFUSAL = "vllm-specplus does not support Model Runner V2 yet: set VLLM_USE_V2_MODEL_RUNNER=0"


class SpecPlusCompatError(RuntimeError):
    """The installed vLLM lacks a name that the plugin needs; the message says which, and what for."""


@dataclass(frozen=True)
class Seam:
    """One name of vLLM that the plugin overrides, subclasses, calls or reads.

    Attributes:
        module: vLLM's module, as imported.
        name: a name of that module, or ``Class.member`` for a method or an annotated field of a class.
        why: what the plugin does with it.
        parameters: parameters of the function that the plugin passes or takes over by name.
    """

    module: str
    name: str
    why: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


_V1 = "vllm.v1.worker.gpu_model_runner"
_BASE = "vllm.v1.spec_decode.llm_base_proposer"
_REJECTION = "vllm.v1.sample.rejection_sampler"
_SAMPLER = "vllm.v1.sample.sampler"

CONFIG_SEAMS = (
    Seam(
        "vllm.engine.arg_utils",
        "EngineArgs.create_speculative_config",
        "the one permanent patch: builds the plugin's SpeculativeConfig and names its worker",
        ("target_model_config", "target_parallel_config"),
    ),
    Seam("vllm.engine.arg_utils", "EngineArgs.async_scheduling", "turned off for host-side drafting"),
    Seam("vllm.config.speculative", "SpeculativeConfig", "subclassed"),
    Seam("vllm.config.speculative", "SpeculativeConfig.__post_init__", "extended: model steps"),
    Seam("vllm.config.speculative", "SpeculativeConfig.num_speculative_tokens", "read and set"),
    Seam("vllm.config.speculative", "SpeculativeConfig.draft_model_config", "the MTP head's depth"),
    Seam("vllm.config.parallel", "ParallelConfig.worker_cls", "set to the plugin's worker"),
)

WORKER_SEAMS = (
    Seam("vllm.v1.worker.gpu_worker", "Worker.init_device", "extended: overrides while it runs"),
    Seam("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", "extended: overrides while it runs"),
)

V1_SEAMS = (
    *(
        Seam(_V1, name, "replaced by a hybrid subclass while the runner is built")
        for name in ("EagleProposer", "Gemma4Proposer", "Step3p5MTPProposer", "DraftModelProposer")
    ),
    Seam(_V1, "create_custom_proposer", "returns the plugin's own drafter", ("vllm_config",)),
    Seam(_V1, "Sampler", "replaced by the strategy's sampler while the runner is built"),
    Seam(_V1, "RejectionSampler", "replaced by the strategy's verifier while the runner is built"),
    Seam(_V1, "GPUModelRunner._get_positions", "positions that key the noise"),
    Seam(_BASE, "SpecDecodeBaseProposer.propose", "runs the model's steps", ("num_speculative_tokens",)),
    Seam(_BASE, "SpecDecodeBaseProposer.take_last_draft_probs", "extended by one-hot rows"),
    Seam(
        _BASE,
        "SpecDecodeBaseProposer.prepare_next_token_ids_padded",
        "this step's tokens, as a tensor",
        ("sampled_token_ids", "requests", "gpu_input_batch", "discard_request_mask"),
    ),
    Seam(
        _BASE,
        "SpecDecodeBaseProposer.prepare_next_token_ids_cpu",
        "this step's tokens, as lists",
        ("sampled_token_ids", "requests", "gpu_input_batch", "num_scheduled_tokens"),
    ),
    Seam(
        _REJECTION,
        "RejectionSampler.forward",
        "replaced",
        ("metadata", "draft_probs", "logits", "sampling_metadata"),
    ),
    Seam(
        _REJECTION,
        "RejectionSampler.apply_logits_processors",
        "called: penalties and masks of the draft rows",
        ("logits", "sampling_metadata", "metadata"),
    ),
    Seam(
        _REJECTION,
        "RejectionSampler._get_logprobs_tensors",
        "called: logprobs of the emitted tokens",
        (
            "max_num_logprobs",
            "metadata",
            "logits",
            "target_logits",
            "bonus_logits",
            "sampled_token_ids",
        ),
    ),
    Seam(
        "vllm.v1.sample.ops.topk_topp_sampler",
        "apply_top_k_top_p",
        "called: processed logprobs",
        ("logits", "k", "p"),
    ),
    Seam(
        _SAMPLER,
        "Sampler.apply_temperature",
        "called: processed logprobs",
        ("logits", "temp", "all_random"),
    ),
    Seam(
        _SAMPLER,
        "Sampler.sample",
        "replaced where a strategy is set",
        ("logits", "sampling_metadata", "logprobs_mode_override"),
    ),
    Seam(
        _SAMPLER,
        "Sampler.apply_logits_processors",
        "called: penalties and masks of the bonus rows",
        ("logits", "sampling_metadata", "predict_bonus_token"),
    ),
)

LEDGER = CONFIG_SEAMS + WORKER_SEAMS + V1_SEAMS


def vllm_root() -> Path:
    """The folder of the installed ``vllm`` package, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SpecPlusCompatError("vllm is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def missing_seams(root: Path) -> list[str]:
    """What of the ledger the vLLM under ``root`` lacks, a line each; empty when all hold."""
    return [problem for seam in LEDGER if (problem := _problem(root, seam))]


@cache
def check_vllm() -> str | None:
    """Check the whole ledger against the installed vLLM, once per process.

    Returns:
        A warning for a version that was not tested, else None.

    Raises:
        SpecPlusCompatError: a seam is gone; the message names each.
    """
    version = importlib.metadata.version("vllm")
    if problems := missing_seams(vllm_root()):
        raise SpecPlusCompatError(f"vllm-specplus cannot run on vLLM {version}: " + "; ".join(problems))
    if not version.startswith(tuple(f"{v}." for v in TESTED_VERSIONS)):
        tested = " and ".join(TESTED_VERSIONS)
        return f"vLLM {version} is untested (tested: {tested}), but has every name that is needed"
    return None


@contextmanager
def override(module: ModuleType, names: dict[str, Any]) -> Iterator[None]:
    """Rebind ``names`` in ``module`` while the block runs, and put the old objects back after it."""
    saved = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)


def _problem(root: Path, seam: Seam) -> str | None:
    tree = _parse(root.joinpath(*seam.module.split(".")[1:]).with_suffix(".py"))
    if tree is None:
        return f"module {seam.module} is gone (needed for {seam.name}: {seam.why})"
    scope: ast.AST = tree
    for part in seam.name.split("."):
        found = _bindings(scope).get(part)
        if found is None:
            return f"{seam} is gone ({seam.why})"
        scope = found
    if seam.parameters and isinstance(scope, ast.FunctionDef):
        arguments = scope.args
        given = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        if lost := [p for p in seam.parameters if p not in given]:
            return f"{seam} has no parameter {', '.join(lost)} ({seam.why})"
    return None


@cache
def _parse(path: Path) -> ast.Module | None:
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None


def _bindings(scope: ast.AST) -> dict[str, ast.AST]:
    """Names bound in the body of a module or class, to the node that binds them."""
    names: dict[str, ast.AST] = {}
    for node in getattr(scope, "body", []):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update({alias.asname or alias.name: alias for alias in node.names})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
        elif isinstance(node, ast.Assign):
            names.update({t.id: node for t in node.targets if isinstance(t, ast.Name)})
    return names
