"""vLLM's ``SpeculativeConfig`` with the plugin's options on it; pickled to the workers."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from pydantic import SkipValidation, ValidationError
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from vllm_specplus.config import HISTORY_METHODS, Resolved, SpecPlusOptions
from vllm_specplus.config.errors import SpecPlusConfigError, combined_error, config_error, not_allowed_error, setting
from vllm_specplus.config.keys import HYBRID_METHODS
from vllm_specplus.requests.shown_params import hide_references

# A method without a draft model runs under the name of one that the model runner knows. On V1 that is vLLM's custom
# class; on V2 it is vLLM's n-gram match on the device, which works with asynchronous scheduling.
_V1_CARRIER = {"method": "custom_class", "model": "vllm_specplus.runners.v1.drafter.HistoryDrafter"}
_V2_CARRIER = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1}
# vLLM's schedule of widths by batch size; with this one it never schedules a slot.
SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
_NO_DRAFTS = {SCHEDULE_KEY: [(1, 1, 0)]}
_LARGEST_BATCH = 1024  # vLLM's own default of max_num_seqs is no larger
# Of a head of these kinds, vLLM's models run the first layer alone, and end the engine where V2 asks for the second.
_RUN_ONE_LAYER = {"mimo_mtp", "ernie_mtp"}


def _schedule(widths: Sequence[int]) -> list[tuple[int, int, int]]:
    """A schedule that names each width, for the plugin's scheduler and for CUDA graphs.

    vLLM captures the graphs of a width up to the largest batch size that has it. So widths take turns.
    """
    return [(size, size, widths[(size - 1) % len(widths)]) for size in range(1, _LARGEST_BATCH + 1)]


def _vllm_error(item: Mapping[str, Any]) -> SpecPlusConfigError:
    """The error for `item` of pydantic's errors; the words are vLLM's, which names no key where a type is wrong."""
    says = item["msg"].removeprefix("Value error, ")
    if not item["loc"]:
        return config_error(says)
    *outer, name = map(str, item["loc"])
    return not_allowed_error(" in ".join([setting(name, item["input"]), *reversed(outer)]), says)


@contextmanager
def _without_custom_class_warning(model: str | None) -> Iterator[None]:
    """Drop vLLM's warning of an experimental custom class where that class is the plugin's own drafter."""

    def is_other_line(record: logging.LogRecord) -> bool:
        return "custom class" not in record.getMessage()

    if model != _V1_CARRIER["model"]:
        yield
        return
    vllm_logger = logging.getLogger(SpeculativeConfig.__module__)
    vllm_logger.addFilter(is_other_line)
    try:
        yield
    finally:
        vllm_logger.removeFilter(is_other_line)


@config
class SpecPlusSpeculativeConfig(SpeculativeConfig):
    """vLLM's config as it is built where plugin keys are used, with the plugin's options beside it."""

    if TYPE_CHECKING:
        num_speculative_tokens: int
        method: str
        parallel_drafting: bool

    # vLLM's fields before it have defaults, so it needs one; `create` always sets it.
    specplus: SkipValidation[SpecPlusOptions] = None  # type: ignore[assignment]
    """The plugin's options, resolved."""
    made_for_v2: bool = False
    """Whether it was made for Model Runner V2; the worker compares it with vLLM's choice."""

    @classmethod
    def create(
        cls, resolved: Resolved, model_config: Any, parallel_config: Any, *, on_v2: bool, widths: Sequence[int] = ()
    ) -> Self:
        """Build the config that vLLM runs with.

        Args:
            resolved: what the user's config means; its options are not None.
            model_config: vLLM's, of the target model.
            parallel_config: vLLM's, of the target model.
            on_v2: whether Model Runner V2 is going to read the config, or V1.
            widths: the numbers of slots that the plugin's scheduler chooses from; empty: it does not run.

        Raises:
            SpecPlusConfigError: vLLM refuses one of its own keys; the message is vLLM's.
        """
        options = resolved.options
        assert options is not None
        stock = dict(resolved.vllm)
        if options.method in HISTORY_METHODS:
            stock |= _V2_CARRIER if on_v2 else _V1_CARRIER
            # vLLM wants at least one.
            stock["num_speculative_tokens"] = max(options.num_speculative_tokens, 1)
            if on_v2 and not options.num_speculative_tokens:
                stock |= _NO_DRAFTS
        if widths:
            stock[SCHEDULE_KEY] = _schedule(widths)
        try:
            return cls(
                **stock,
                specplus=options,
                made_for_v2=on_v2,
                target_model_config=model_config,
                target_parallel_config=parallel_config,
            )
        except ValidationError as error:
            raise combined_error([_vllm_error(item) for item in error.errors()]) from None
        except NotImplementedError as error:
            # vLLM takes the checkpoint for another kind than the method.
            raise config_error(str(error)) from None

    def __post_init__(self) -> Any:
        """Let vLLM check its keys; in a hybrid it sees the model's drafts alone.

        Raises:
            ValueError: the draft checkpoint does not suit the plugin's options.
        """
        if self.specplus is None or not self.specplus.is_hybrid:
            with _without_custom_class_warning(self.model):
                return super().__post_init__()
        # vLLM wants a number of drafts that suits the head's layers. In a hybrid the head makes only num_model_steps.
        total, steps = self.num_speculative_tokens, self.specplus.num_model_steps
        assert steps is not None
        self.num_speculative_tokens = steps
        try:
            result = super().__post_init__()
        except ValueError as error:
            if "must be divisible by" not in str(error):
                raise
            layers = str(error).partition("n_predict=")[2]
            raise ValueError(
                f"num_model_steps={steps} is not allowed: the MTP head of {self.model!r} has {layers} "
                f"layers, so it must be at most {layers} or a multiple of it"
            ) from None
        if self.made_for_v2 and self.use_multi_module_mtp():
            self._check_modules(steps, total)
        self.num_speculative_tokens = total
        if self.method not in HYBRID_METHODS or self.parallel_drafting:
            raise ValueError(
                f"mtp_strategy={self.specplus.mtp_strategy!r} is not allowed: {self.model!r} is no checkpoint for "
                f"method {self.specplus.method!r}; vLLM takes it for {self.method!r}, which drafts in parallel or alone"
            )
        return result

    def _check_modules(self, steps: int, total: int) -> None:
        """Check that vLLM's speculator for heads of several layers can make `steps` of `total` drafts.

        Raises:
            ValueError: it cannot.
        """
        model_type = self.draft_model_config.hf_config.model_type
        allowed = "1"
        if model_type not in _RUN_ONE_LAYER:
            # It goes back over as many rejected drafts as it has modules, and no more.
            if steps == total:
                return
            allowed = f"1 or num_speculative_tokens={total}"
        raise ValueError(
            f"num_model_steps={steps} is not allowed on Model Runner V2: the MTP head of {self.model!r} ({model_type}) "
            f"has several layers, so it must be {allowed}; VLLM_USE_V2_MODEL_RUNNER=0 takes others"
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a process of the engine, where vLLM may log what requests ask, also where nothing checks them."""
        hide_references()
        self.__dict__.update(state)

    def __repr__(self) -> str:
        options = self.specplus
        shown = {"method": options.method, "num_spec_tokens": options.num_speculative_tokens}
        if options.is_hybrid:
            shown |= {"strategy": options.mtp_strategy, "num_model_steps": options.num_model_steps}
        if options.verify_strategy:
            shown |= {"verify": options.verify_strategy, "policy": options.accept_policy}
        return f"SpecPlusSpeculativeConfig({', '.join(f'{k}={v!r}' for k, v in shown.items())})"
