"""Puts the plugin's speculators, request states and samplers into vLLM's Model Runner V2."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.worker.gpu import model_runner

from vllm_specplus import compat
from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.runners import BuildStep
from vllm_specplus.runners.arbiter_options import matching_sources
from vllm_specplus.runners.live_requests import OptionsTracker
from vllm_specplus.runners.v2.adaptive_verification import turn_off_where_impossible
from vllm_specplus.runners.v2.drafting import Drafting
from vllm_specplus.runners.v2.requests import RequestTracker
from vllm_specplus.runners.v2.samplers import CountingRejectionSampler, StrategyRejectionSampler, StrategySampler
from vllm_specplus.runners.v2.speculator import init_speculator
from vllm_specplus.runners.v2.states import DenseRequestState, FollowedRequestState, VariableLengthHandler
from vllm_specplus.sources import NGRAM

# vLLM builds its samplers while it loads the model.
BUILD_STEPS: tuple[BuildStep, ...] = ("init_device", "load_model")


@contextmanager
def plugin_classes_installed(options: SpecPlusOptions) -> Iterator[None]:
    """Rebind names in vLLM's runner module while the block builds the runner or loads its model."""
    names: dict[str, Any] = {}
    if options.drafts_from_history:
        # The device matches n-grams beside suffix trees where the arbiter chooses.
        sources = matching_sources(options) if options.adaptive else [NGRAM] * options.matches_ngrams
        names["init_speculator"] = init_speculator
        names["DraftTokensHandler"] = VariableLengthHandler
        names["RequestState"] = DenseRequestState if NGRAM in sources else FollowedRequestState
        names["RejectionSampler"] = CountingRejectionSampler
    if options.verify_strategy is not None:
        names |= {"Sampler": StrategySampler, "RejectionSampler": StrategyRejectionSampler}
    with compat.override(model_runner, names):
        yield


def connect(runner: Any) -> RequestTracker | OptionsTracker | None:
    """Give the parts of a built runner what vLLM does not pass to them.

    Returns:
        The tracker of the runner's requests; None where the plugin has nothing to follow.

    Raises:
        SpecPlusCompatError: vLLM has put another class in the place of one of the plugin's.
    """
    options: SpecPlusOptions = runner.speculative_config.specplus
    drafting = _drafting(runner)
    turn_off_where_impossible(runner)
    if drafting is not None:
        runner.draft_tokens_handler.set_drafting(drafting)
    sampler = runner.rejection_sampler
    if sampler is None:  # not the last stage of a pipeline
        return None
    strategy = options.verify_strategy
    if not isinstance(sampler, CountingRejectionSampler if strategy is None else StrategyRejectionSampler):
        raise compat.SpecPlusCompatError(
            f"the keys of vllm-specplus cannot take effect: this model brings {type(sampler).__name__} to verify with"
        )
    sampler.set_drafting(drafting)
    if runner.device.type != "cpu":
        warm_up(runner)
    tracker: RequestTracker | OptionsTracker | None = None if drafting is None else drafting.requests
    if options.allow_force_accept and isinstance(sampler, StrategyRejectionSampler):
        tracker = tracker or OptionsTracker(runner.vllm_config)
        sampler.set_live_requests(tracker.live_requests)
    return tracker


def warm_up(runner: Any) -> None:
    """Compile, before a request waits for them, the kernels that vLLM's own warm-up does not launch."""
    drafting = _drafting(runner)
    if drafting is not None:
        drafting.warm_up()
    if isinstance(runner.rejection_sampler, StrategyRejectionSampler):
        runner.rejection_sampler.warm_up(runner.model_config.head_dtype, runner.device, runner.speculator.draft_logits)


def forget_warm_up(runner: Any) -> None:
    """Clear what the requests of vLLM's warm-up have left in counts, suffix trees and tokens; no request runs."""
    drafting = _drafting(runner)
    if drafting is not None:
        drafting.reset()


def _drafting(runner: Any) -> Drafting | None:
    return getattr(runner.speculator, "drafting", None)
