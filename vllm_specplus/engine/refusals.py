"""Refusals of engines that the plugin cannot serve: a function for each reason returns the error or None."""

from collections.abc import Callable
from importlib.metadata import version

from vllm_specplus.config import SpecPlusConfigError
from vllm_specplus.config.errors import config_error
from vllm_specplus.engine.setup import WORKERS, EngineSetup


def refuse(setup: EngineSetup) -> None:
    """Raise SpecPlusConfigError for the first reason why this engine cannot run."""
    for find_error in _REASONS:
        if error := find_error(setup):
            raise error


def _platform_error(setup: EngineSetup) -> SpecPlusConfigError | None:
    if setup.device_type in WORKERS:
        return None
    return config_error(
        f"platform {setup.device_type!r} is not supported by vllm-specplus: it runs on {', '.join(WORKERS)}"
    )


def _worker_error(setup: EngineSetup) -> SpecPlusConfigError | None:
    current = setup.parallel_config.worker_cls
    if current in ("auto", WORKERS[setup.device_type]):
        return None
    return SpecPlusConfigError(
        f"worker_cls={current!r} is not allowed with keys of vllm-specplus, which has a worker of its own: "
        "leave it unset"
    )


def _watermark_error(setup: EngineSetup) -> SpecPlusConfigError | None:
    if setup.args.watermark_config is None:
        return None
    return config_error(
        "keys of vllm-specplus are not allowed with a watermark: vLLM's own drafting and verification put it in; "
        "leave one of them out"
    )


def _sharded_sampling_error(setup: EngineSetup) -> SpecPlusConfigError | None:
    is_sharded = setup.on_v2 and setup.parallel_config.enable_batch_sharded_sampling
    if not is_sharded or not setup.options.drafts_from_history:
        return None
    return config_error(
        "enable_batch_sharded_sampling=True is not allowed where vllm-specplus drafts: "
        "each worker would know the accepted drafts of its own requests only"
    )


def _noise_error(setup: EngineSetup) -> SpecPlusConfigError | None:
    strategy = setup.options.verify_strategy
    if not setup.on_v2 or strategy is None or not setup.model_config.use_fp64_gumbel:
        return None
    return config_error(
        f"verify_strategy={strategy!r} is not allowed with use_fp64_gumbel=True: the strategy's noise is float32"
    )


def _synthetic_error(setup: EngineSetup) -> SpecPlusConfigError | None:
    is_synthetic = setup.resolved.vllm.get("rejection_sample_method") == "synthetic"
    if setup.device_type != "cpu" or setup.on_v2 or not is_synthetic:
        return None
    return config_error(
        'rejection_sample_method="synthetic" is not allowed on a CPU on Model Runner V1: vLLM lacks it there, and the '
        "engine dies at the first draft; leave it out"
    )


def _pipeline_error(setup: EngineSetup) -> SpecPlusConfigError | None:
    size = setup.parallel_config.pipeline_parallel_size
    if size == 1 or not setup.options.drafts_from_history:
        return None
    if not setup.on_v2:
        return SpecPlusConfigError(
            f"pipeline_parallel_size={size} is not allowed on Model Runner V1 where vllm-specplus drafts: leave it at 1"
        )
    if setup.options.method == "draft_model":
        return config_error(
            f'method="draft_model" is not allowed with pipeline_parallel_size={size}: vLLM gives each stage a part of '
            "the draft model, and the engine dies at the first draft"
        )
    if setup.args.async_scheduling is False:
        return SpecPlusConfigError(
            f"async_scheduling=False is not allowed with pipeline_parallel_size={size} where vllm-specplus drafts: "
            "vLLM would schedule drafts before it has the token that they follow; leave it unset"
        )
    return None


def _async_scheduling_error(setup: EngineSetup) -> SpecPlusConfigError | None:
    if not setup.args.async_scheduling or setup.on_v2 or not setup.options.drafts_from_history:
        return None
    return SpecPlusConfigError(
        "async_scheduling=True is not allowed: vllm-specplus drafts on the host, which needs every token there first; "
        "leave it unset"
    )


def _linear_attention_error(setup: EngineSetup) -> SpecPlusConfigError | None:
    layers = getattr(setup.model_config.hf_text_config, "layer_types", None) or ()
    if setup.device_type != "cpu" or not setup.options.drafts_from_history or "linear_attention" not in layers:
        return None
    if not version("vllm").startswith("0.32."):
        return None
    return config_error(
        "a model with linear attention is not allowed on a CPU where vllm-specplus drafts: there vLLM 0.32 has "
        "a wrong state of such layers after a step with fewer drafts than num_speculative_tokens; install vLLM 0.33"
    )


def _expert_parallel_error(setup: EngineSetup) -> SpecPlusConfigError | None:
    parallel = setup.parallel_config
    num_workers = parallel.tensor_parallel_size * parallel.data_parallel_size
    if setup.device_type != "cpu" or not parallel.enable_expert_parallel or num_workers == 1:
        return None
    return SpecPlusConfigError(
        "enable_expert_parallel=True is not allowed on a CPU with keys of vllm-specplus: vLLM's kernel for experts is "
        "not told which of them a worker holds, and the worker dies; leave it out"
    )


def _shared_experts_error(setup: EngineSetup) -> SpecPlusConfigError | None:
    size = setup.parallel_config.data_parallel_size
    if setup.device_type != "cpu" or size == 1 or not setup.model_config.is_moe:
        return None
    return SpecPlusConfigError(
        f"data_parallel_size={size} is not allowed for a mixture of experts on a CPU with keys of vllm-specplus: "
        "vLLM's engines cannot gather tokens for their experts there, and die at the first request; leave it at 1"
    )


_REASONS: tuple[Callable[[EngineSetup], SpecPlusConfigError | None], ...] = (
    _platform_error,
    _worker_error,
    _watermark_error,
    _sharded_sampling_error,
    _noise_error,
    _synthetic_error,
    _pipeline_error,
    _async_scheduling_error,
    _linear_attention_error,
    _expert_parallel_error,
    _shared_experts_error,
)
