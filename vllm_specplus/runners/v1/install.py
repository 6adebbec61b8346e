"""Puts the plugin's drafter and samplers into vLLM's V1 model runner."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.worker import gpu_model_runner

from vllm_specplus import compat
from vllm_specplus.config import HISTORY_METHODS, SpecPlusOptions
from vllm_specplus.runners import BuildStep
from vllm_specplus.runners.live_requests import OptionsTracker
from vllm_specplus.runners.v1.drafter import HistoryDrafter, HybridMixin, hybrid_class
from vllm_specplus.runners.v1.requests import RequestTracker
from vllm_specplus.runners.v1.samplers import RewindingSampler, StrategyRejectionSampler, StrategySampler

BUILD_STEPS: tuple[BuildStep, ...] = ("init_device",)

_MODEL_PROPOSERS = (
    "EagleProposer",
    "Gemma4Proposer",
    "Step3p5MTPProposer",
    "DraftModelProposer",
    "MedusaProposer",  # not in vLLM 0.33
)


@contextmanager
def plugin_classes_installed(options: SpecPlusOptions) -> Iterator[None]:
    """Rebind names in vLLM's runner module to the plugin's classes while the block builds the runner."""
    names: dict[str, Any] = {}
    if options.is_hybrid:
        proposers = {name: getattr(gpu_model_runner, name, None) for name in _MODEL_PROPOSERS}
        names |= {name: hybrid_class(proposer) for name, proposer in proposers.items() if proposer is not None}
    if options.verify_strategy is not None:
        names |= {"Sampler": StrategySampler, "RejectionSampler": StrategyRejectionSampler}
    elif not options.num_speculative_tokens:
        # On a CPU any other config without a strategy has been given one.
        names["Sampler"] = RewindingSampler
    if options.method in HISTORY_METHODS:
        names["create_custom_proposer"] = HistoryDrafter
    with compat.override(gpu_model_runner, names):
        yield


def connect(runner: Any) -> RequestTracker | OptionsTracker | None:
    """Give the drafter and the samplers of a built runner what vLLM does not pass to them.

    Returns:
        The tracker of the runner's requests; None where the plugin has nothing to follow.
    """
    _wrap_draft_copy(runner)
    for name in ("sampler", "rejection_sampler"):
        part = getattr(runner, name, None)
        if isinstance(part, StrategySampler | StrategyRejectionSampler):
            part.set_runner(runner)
    drafter = getattr(runner, "drafter", None)
    allows_force_accept = runner.speculative_config.specplus.allow_force_accept
    tracker: RequestTracker | OptionsTracker
    if isinstance(drafter, HistoryDrafter | HybridMixin):
        tracker = RequestTracker(runner)
        drafter.set_runner(runner, tracker)
    elif allows_force_accept:
        tracker = OptionsTracker(runner.vllm_config)
    else:
        return None
    if allows_force_accept and isinstance(runner.rejection_sampler, StrategyRejectionSampler):
        runner.rejection_sampler.set_live_requests(tracker.live_requests)
    return tracker


def forget_warm_up(runner: Any) -> None:
    """Do nothing: vLLM's warm-up on V1 runs no requests, so nothing is left of it."""


def _wrap_draft_copy(runner: Any) -> None:
    """Wrap the runner's method that hands drafts over, so that padding is not verified as drafts.

    When one request comes near the model's length, vLLM drafts for no request of the batch and schedules zeros as
    padding. vLLM's own sampling rejects them. A strategy that accepts any likely token would emit them.
    """
    copy_to_host = runner._copy_draft_token_ids_to_cpu
    runner.specplus_is_padding = False

    def copy_draft_token_ids_to_cpu(scheduler_output: Any, zeros_only: bool = False) -> None:
        # Under asynchronous scheduling the slots are scheduled already, and the verifier skips them by this flag.
        runner.specplus_is_padding = zeros_only
        if zeros_only and not runner.use_async_scheduling:
            req_ids = runner.input_batch.req_ids.copy()
            runner._draft_token_ids = [[] for _ in req_ids]
            runner._draft_token_req_ids = req_ids
        else:
            copy_to_host(scheduler_output, zeros_only)

    runner._copy_draft_token_ids_to_cpu = copy_draft_token_ids_to_cpu
