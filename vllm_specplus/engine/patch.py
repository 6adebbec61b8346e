"""The one permanent patch: where the plugin's config enters vLLM."""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_specplus.compat import SpecPlusCompatError, check_vllm
from vllm_specplus.config import Resolved, SpecPlusConfigError, resolve
from vllm_specplus.config.errors import config_error, show
from vllm_specplus.config.summary import summary
from vllm_specplus.engine.command import is_vllm_command

# A name below "vllm", so that vLLM's own logging setup prints it.
logger = init_logger("vllm.specplus")

_ORIGINAL = "specplus_original"
# Marks EngineArgs that vLLM may use again, perhaps for a config without plugin keys.
_ASYNC_TURNED_OFF = "specplus_turned_async_scheduling_off"
_SCHEDULER_LOGGER = "vllm.config.scheduler"
_OWN_SCHEDULER = "vllm_specplus.engine.scheduler"
# vLLM writes these into the user's dict when it builds its config.
_ENGINE_KEYS = ("target_model_config", "target_parallel_config")
_FLAGS = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}


def install() -> None:
    """Wrap ``EngineArgs.create_speculative_config``; a second call changes nothing."""
    original = EngineArgs.create_speculative_config
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def create_speculative_config(self: EngineArgs, target_model_config: Any, target_parallel_config: Any) -> Any:
        try:
            return _create(self, original, target_model_config, target_parallel_config)
        except (SpecPlusConfigError, SpecPlusCompatError) as error:
            if is_vllm_command():
                _exit(error)
            raise

    # vLLM warns of a custom scheduler; who turned plugin keys on has not chosen one.
    logging.getLogger(_SCHEDULER_LOGGER).addFilter(lambda record: _OWN_SCHEDULER not in record.getMessage())
    setattr(create_speculative_config, _ORIGINAL, original)
    EngineArgs.create_speculative_config = create_speculative_config


def _create(args: EngineArgs, original: Callable[..., Any], model_config: Any, parallel_config: Any) -> Any:
    """vLLM's own SpeculativeConfig where no plugin key is used, else the plugin's subclass of it."""
    # Read what the user wrote.
    _reset_async_scheduling(args)
    _reset_scheduler(args)
    config = _user_config(args)
    if config is None:
        return original(args, model_config, parallel_config)
    resolved = resolve(config)
    _log(resolved)
    if resolved.options is None:
        if resolved.vllm != config:
            # A plugin key, or another system's name.
            _hand_to_vllm(args, resolved)
            _expect_requests(model_config)
        return original(args, model_config, parallel_config)

    # Refuse what cannot work.
    if warning := check_vllm():
        logger.warning("%s", warning)
    # These modules import names of vLLM that the check has just found.
    from vllm_specplus.engine import build, refusals, setup, widths

    engine = setup.EngineSetup.read(args, resolved, model_config, parallel_config)
    refusals.refuse(engine)

    # Build the config, and set the engine up for it.
    engine = widths.with_possible_adaptive_verification(setup.with_default_strategy(engine))
    engine = setup.with_cached_token_limit(widths.with_chosen_widths(engine))
    speculative_config = build.speculative_config(engine)
    build.set_worker(engine)
    build.set_scheduler(engine)
    build.set_request_check(engine)
    _set_async_scheduling(args, setup.reason_for_synchronous_scheduling(engine))
    logger.info("resolved speculative config: %s", engine.resolved.as_json())
    logger.info("%s", summary(engine.resolved))
    return speculative_config


def _user_config(args: EngineArgs) -> dict[str, Any] | None:
    """The speculative config as the user wrote it: ``--speculative-config`` and the ``--spec-*`` flags."""
    # A vLLM that lacks a flag must still start without plugin keys.
    flags = {key: getattr(args, flag, None) for key, flag in _FLAGS.items()}
    flags = {key: value for key, value in flags.items() if value is not None}
    config = args.speculative_config
    if config is None:
        return flags or None
    if not isinstance(config, dict):
        raise config_error(f"expected a JSON object, got {show(config)}")
    config = {key: value for key, value in config.items() if key not in _ENGINE_KEYS}
    if repeats := sorted(flags.keys() & config.keys()):
        raise config_error(f"{', '.join(repeats)} is given twice: here and by a --spec-* flag")
    return flags | config


def _hand_to_vllm(args: EngineArgs, resolved: Resolved) -> None:
    """Put vLLM's own keys in place of another engine's, and of plugin keys that ask for nothing."""
    logger.info("resolved speculative config: %s", resolved.as_json())
    # No keys: the config asks for no speculation.
    args.speculative_config = dict(resolved.vllm) or None
    for flag in _FLAGS.values():
        setattr(args, flag, None)


def _reset_async_scheduling(args: EngineArgs) -> None:
    if vars(args).pop(_ASYNC_TURNED_OFF, False):
        args.async_scheduling = None


def _reset_scheduler(args: EngineArgs) -> None:
    """Take the plugin's scheduler out of arguments that vLLM uses again."""
    if str(getattr(args, "scheduler_cls", None)).startswith(_OWN_SCHEDULER):
        args.scheduler_cls = None


def _set_async_scheduling(args: EngineArgs, reason: str | None) -> None:
    """Turn asynchronous scheduling off for `reason`, where the user leaves it open."""
    if args.async_scheduling is None and reason:
        logger.info("async scheduling is off: %s", reason)
        args.async_scheduling = False
        setattr(args, _ASYNC_TURNED_OFF, True)


def _expect_requests(model_config: Any) -> None:
    """Prepare for the plugin's requests in an engine in which vLLM drafts alone: they may ask for `aux_info`."""
    if is_vllm_command():
        # The middleware answers them. Without it they are refused.
        from vllm_specplus.requests.unread_fields import refuse_unread_fields

        refuse_unread_fields(model_config.max_model_len, reads_xargs=False)
    else:
        # In a user's own program nothing else is asked before its requests.
        from vllm_specplus.requests.steps import step_counter

        step_counter.install()


def _log(resolved: Resolved) -> None:
    for line in resolved.notes:
        logger.info("%s", line)
    for line in resolved.warnings:
        logger.warning("%s", line)


def _exit(error: Exception) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)
