"""The one permanent patch: where the plugin's config enters vLLM."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_specplus.compat import SpecPlusCompatError, check_vllm
from vllm_specplus.config import Resolved, SpecPlusConfigError, resolve
from vllm_specplus.config.keys import NAIVE

# A name below "vllm", so that vLLM's own logging setup prints it.
logger = init_logger("vllm.specplus")

_PATCHED = "specplus_original"
# On EngineArgs that are used again, perhaps for a config without plugin keys.
_ASYNC_TURNED_OFF = "specplus_turned_async_scheduling_off"
# What vLLM itself writes into the dict when it builds its config.
_ENGINE_KEYS = ("target_model_config", "target_parallel_config")
_FLAGS = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}
_WORKERS = {
    "cpu": "vllm_specplus.engine.cpu_worker.SpecPlusCPUWorker",
    "cuda": "vllm_specplus.engine.worker.SpecPlusWorker",
}


def install() -> None:
    """Wrap ``EngineArgs.create_speculative_config``; a second call changes nothing."""
    original = EngineArgs.create_speculative_config
    if hasattr(original, _PATCHED):
        return

    @functools.wraps(original)
    def create_speculative_config(self: EngineArgs, target_model_config: Any, target_parallel_config: Any) -> Any:
        try:
            return _create(self, original, target_model_config, target_parallel_config)
        except (SpecPlusConfigError, SpecPlusCompatError) as error:
            if _started_by_vllm_command():
                _exit(error)
            raise

    setattr(create_speculative_config, _PATCHED, original)
    EngineArgs.create_speculative_config = create_speculative_config


def _create(args: EngineArgs, original: Callable[..., Any], model_config: Any, parallel_config: Any) -> Any:
    """vLLM's own SpeculativeConfig where no plugin key is used, else the plugin's subclass of it."""
    if vars(args).pop(_ASYNC_TURNED_OFF, False):
        args.async_scheduling = None
    given = _given_config(args)
    if given is None:
        return original(args, model_config, parallel_config)
    resolved = resolve(given)
    for line in resolved.notes:
        logger.info("%s", line)
    for line in resolved.warnings:
        logger.warning("%s", line)
    if resolved.options is None:
        if resolved.vllm != given:
            logger.info("resolved speculative config: %s", resolved.as_json())
            args.speculative_config = dict(resolved.vllm)
            for flag in _FLAGS.values():
                setattr(args, flag, None)
        return original(args, model_config, parallel_config)

    if warning := check_vllm():
        logger.warning("%s", warning)
    parallel_config.worker_cls = _worker_cls(parallel_config.worker_cls)
    _check_watermark(args)
    on_v2 = _runs_on_v2(args, resolved)
    if on_v2:
        _check_v2(resolved, model_config, parallel_config)
    config = _build(resolved, model_config, parallel_config, on_v2)
    if resolved.options.drafts_from_history and parallel_config.pipeline_parallel_size > 1:
        _check_pipeline(args, on_v2)
    elif resolved.options.drafts_from_history and not on_v2:
        _refuse_async_scheduling(args)
    elif args.async_scheduling is None and resolved.options.matches_suffixes:
        _leave_async_scheduling_off(args, "suffix trees are on the host and draft more with every token there")
    elif args.async_scheduling is None and resolved.options.method == NAIVE and resolved.options.num_speculative_tokens:
        _leave_async_scheduling_off(args, "requests without a reference draft nothing, and their slots would be run")
    _check_requests(model_config, resolved)
    logger.info("resolved speculative config: %s", resolved.as_json())
    return config


def _given_config(args: EngineArgs) -> dict[str, Any] | None:
    """The speculative config as the user gave it: ``--speculative-config`` and the ``--spec-*`` flags."""
    # A vLLM that lacks a flag must still start; what a plugin config needs is checked once there is one.
    flags = {key: getattr(args, flag, None) for key, flag in _FLAGS.items()}
    flags = {key: value for key, value in flags.items() if value is not None}
    given = args.speculative_config
    if given is None:
        return flags or None
    if not isinstance(given, dict):
        raise SpecPlusConfigError(f"speculative_config: {given!r} is not allowed: it must be a JSON object")
    given = {key: value for key, value in given.items() if key not in _ENGINE_KEYS}
    if twice := sorted(flags.keys() & given.keys()):
        raise SpecPlusConfigError(f"speculative_config: {', '.join(twice)} is given twice: here and by a --spec-* flag")
    return flags | given


def _build(resolved: Resolved, model_config: Any, parallel_config: Any, on_v2: bool) -> Any:
    from vllm_specplus.engine.speculative_config import SpecPlusSpeculativeConfig

    return SpecPlusSpeculativeConfig.create(resolved, model_config, parallel_config, on_v2)


def _runs_on_v2(args: EngineArgs, resolved: Resolved) -> bool:
    """Whether vLLM is going to choose Model Runner V2; the worker sees to it that this was right.

    vLLM decides when its whole config is there, and goes by the speculative config, which depends on the runner.
    """
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    chosen = envs.VLLM_USE_V2_MODEL_RUNNER
    if chosen is not None:
        return chosen
    lacks = (
        resolved.vllm.get("parallel_drafting"),
        resolved.vllm.get("use_heterogeneous_vocab"),
        args.distributed_executor_backend == "external_launcher" and args.pipeline_parallel_size > 1,
        args.enable_dbo,
    )
    return HAS_TRITON and not any(lacks)


def _check_watermark(args: EngineArgs) -> None:
    if args.watermark_config is not None:
        raise SpecPlusConfigError(
            "speculative_config: keys of vllm-specplus are not allowed with a watermark, which vLLM's own drafting and "
            "verification put in: leave one of them out"
        )


def _check_v2(resolved: Resolved, model_config: Any, parallel_config: Any) -> None:
    """Refuse what the plugin's parts of Model Runner V2 cannot do."""
    assert resolved.options is not None
    strategy = resolved.options.verify_strategy
    if resolved.vllm.get("enable_adaptive_verification"):
        raise SpecPlusConfigError(
            "speculative_config: enable_adaptive_verification=True is not allowed with keys of vllm-specplus: it "
            "trims the drafts that these make"
        )
    if resolved.options.drafts_from_history and parallel_config.enable_batch_sharded_sampling:
        raise SpecPlusConfigError(
            "speculative_config: enable_batch_sharded_sampling=True is not allowed where vllm-specplus drafts: each "
            "worker would know what became of its own requests' drafts only"
        )
    if strategy and model_config.use_fp64_gumbel:
        raise SpecPlusConfigError(
            f"speculative_config: verify_strategy={strategy!r} is not allowed with use_fp64_gumbel=True: its noise "
            "is float32"
        )


def _check_requests(model_config: Any, resolved: Resolved) -> None:
    from vllm import envs

    from vllm_specplus.requests import check as request_check

    assert resolved.options is not None
    if model_config.return_sampling_mask:
        logger.info("what requests ask of vllm-specplus is ignored with return_sampling_mask=True")
        return
    if envs.VLLM_USE_RUST_FRONTEND:
        logger.info("what requests ask of vllm-specplus is ignored by vLLM's Rust front end")
    request_check.install(model_config, drafts=resolved.options.drafts_from_history)


def _worker_cls(current: str) -> str:
    from vllm.platforms import current_platform

    worker = _WORKERS.get(current_platform.device_type)
    if worker is None:
        raise SpecPlusConfigError(
            f"speculative_config: platform {current_platform.device_type!r} is not supported by "
            f"vllm-specplus: it runs on {', '.join(_WORKERS)}"
        )
    if current not in ("auto", worker):
        raise SpecPlusConfigError(
            f"worker_cls={current!r} cannot be combined with vllm-specplus's own worker: leave it unset"
        )
    return worker


def _check_pipeline(args: EngineArgs, on_v2: bool) -> None:
    """Refuse synchronous scheduling, which schedules drafts while the token before them is still in the pipeline."""
    if not on_v2:
        raise SpecPlusConfigError(
            f"pipeline_parallel_size={args.pipeline_parallel_size} is not allowed on Model Runner V1 where "
            "vllm-specplus drafts: leave it at 1"
        )
    if args.async_scheduling is False:
        raise SpecPlusConfigError(
            f"async_scheduling=False is not allowed with pipeline_parallel_size={args.pipeline_parallel_size} where "
            "vllm-specplus drafts: vLLM would schedule drafts before it has the token that they follow; leave it unset"
        )


def _refuse_async_scheduling(args: EngineArgs) -> None:
    if args.async_scheduling:
        raise SpecPlusConfigError(
            "async_scheduling=True is not allowed: drafts from the request's history are made on the "
            "host and need every token there first; leave it unset"
        )
    if args.async_scheduling is None:
        _leave_async_scheduling_off(args, "drafting needs the complete history on the host")


def _leave_async_scheduling_off(args: EngineArgs, reason: str) -> None:
    logger.info("async scheduling is off: %s", reason)
    args.async_scheduling = False
    setattr(args, _ASYNC_TURNED_OFF, True)


def _started_by_vllm_command() -> bool:
    """Whether this process is ``vllm ...`` or ``python -m vllm...``, not somebody's own program."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return Path((sys.argv or [""])[0]).name == "vllm" or (spec is not None and spec.name.partition(".")[0] == "vllm")


def _exit(error: Exception) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)
