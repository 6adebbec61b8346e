"""Builds the config that vLLM runs with, and puts the plugin's worker, scheduler and request check into the engine."""

from vllm import envs
from vllm.logger import init_logger

from vllm_specplus.engine.command import is_vllm_command
from vllm_specplus.engine.setup import WORKERS, EngineSetup
from vllm_specplus.engine.speculative_config import SpecPlusSpeculativeConfig
from vllm_specplus.engine.widths import SCHEDULER
from vllm_specplus.requests import check as request_check
from vllm_specplus.requests.shown_params import hide_references

logger = init_logger("vllm.specplus")

SALTING_SCHEDULER = "vllm_specplus.engine.scheduler.make_salting_scheduler"


def speculative_config(setup: EngineSetup) -> SpecPlusSpeculativeConfig:
    """vLLM's config with the plugin's options on it.

    Raises:
        SpecPlusConfigError: vLLM refuses one of its own keys.
    """
    return SpecPlusSpeculativeConfig.create(
        setup.resolved, setup.model_config, setup.parallel_config, on_v2=setup.on_v2, widths=setup.widths
    )


def set_worker(setup: EngineSetup) -> None:
    """Have vLLM start the plugin's worker."""
    setup.parallel_config.worker_cls = WORKERS[setup.device_type]


def set_scheduler(setup: EngineSetup) -> None:
    """Have vLLM start the plugin's scheduler where that chooses widths, or tells the workers the requests' salts."""
    if setup.widths:
        setup.args.scheduler_cls = SCHEDULER
    elif setup.options.needs_salts and setup.args.scheduler_cls is None:
        setup.args.scheduler_cls = SALTING_SCHEDULER
    elif setup.options.needs_salts:
        logger.warning(
            "suffix trees are not shared between requests: scheduler_cls=%r does not tell the workers their cache_salt",
            setup.args.scheduler_cls,
        )


def set_request_check(setup: EngineSetup) -> None:
    """Have vLLM check what requests ask of the plugin, where it can, and log no reference in any case."""
    hide_references()
    if setup.model_config.return_sampling_mask:
        logger.info("what requests ask of vllm-specplus is ignored with return_sampling_mask=True")
        return
    if envs.VLLM_USE_RUST_FRONTEND:
        logger.info("what requests ask of vllm-specplus is ignored by vLLM's Rust front end")
    request_check.install(
        setup.model_config,
        drafts=setup.options.drafts_from_history,
        allows_force_accept=setup.options.allow_force_accept,
        is_server=is_vllm_command(),
    )
