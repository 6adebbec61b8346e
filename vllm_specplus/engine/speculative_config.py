"""vLLM's ``SpeculativeConfig`` with the plugin's options on it; pickled to the workers."""

from typing import TYPE_CHECKING, Any, Self

from pydantic import SkipValidation, ValidationError
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from vllm_specplus.config import HISTORY_METHODS, Resolved, SpecPlusConfigError, SpecPlusOptions
from vllm_specplus.config.keys import HYBRID_METHODS

# Methods that need no draft model run as one that the model runner knows: on V1 vLLM's custom class, with what builds
# the drafter; on V2 its n-gram match on the device, which asynchronous scheduling goes with.
_V1_CARRIER = {"method": "custom_class", "model": "vllm_specplus.runners.v1.drafter.HistoryDrafter"}
_V2_CARRIER = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1}
# No slot is ever scheduled.
_NO_DRAFTS = {"num_speculative_tokens_per_batch_size": [(1, 1, 0)]}


@config
class SpecPlusSpeculativeConfig(SpeculativeConfig):
    """What vLLM sees of a config with plugin keys."""

    if TYPE_CHECKING:
        num_speculative_tokens: int
        method: str
        parallel_drafting: bool

    specplus: SkipValidation[SpecPlusOptions] = None  # type: ignore[assignment]
    """The plugin's own keys, resolved."""
    made_for_v2: bool = False
    """The model runner that it was made for."""

    @classmethod
    def create(cls, resolved: Resolved, model_config: Any, parallel_config: Any, on_v2: bool) -> Self:
        """Build the config that vLLM runs with, on Model Runner V2 or V1.

        Raises:
            SpecPlusConfigError: vLLM refuses what is left for it; the message is vLLM's.
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
        try:
            return cls(
                **stock,
                specplus=options,
                made_for_v2=on_v2,
                target_model_config=model_config,
                target_parallel_config=parallel_config,
            )
        except ValidationError as error:
            reasons = "; ".join(e["msg"].removeprefix("Value error, ") for e in error.errors())
            raise SpecPlusConfigError(f"speculative_config: {reasons}") from None

    def __post_init__(self) -> Any:
        if self.specplus is None or not self.specplus.is_hybrid:
            return super().__post_init__()
        # vLLM ties the draft model's depth to the number of draft tokens; in a hybrid the model makes only
        # the first num_model_steps of them.
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
        if self.made_for_v2 and steps < total and self.use_multi_module_mtp():
            # vLLM's speculator for it goes back over as many refused drafts as its modules make, and no more.
            raise ValueError(
                f"num_model_steps={steps} is not allowed on Model Runner V2: the MTP head of {self.model!r} has "
                f"several layers, so it must be 1 or num_speculative_tokens={total}; VLLM_USE_V2_MODEL_RUNNER=0 "
                "takes others"
            )
        self.num_speculative_tokens = total
        if self.method not in HYBRID_METHODS or self.parallel_drafting:
            raise ValueError(
                f"mtp_strategy={self.specplus.mtp_strategy!r} is not allowed: {self.model!r} is no checkpoint for "
                f"method {self.specplus.method!r}: vLLM takes it for {self.method!r}, which drafts in parallel or alone"
            )
        return result

    def __repr__(self) -> str:
        options = self.specplus
        shown = {"method": options.method, "num_spec_tokens": options.num_speculative_tokens}
        if options.is_hybrid:
            shown |= {"strategy": options.mtp_strategy, "num_model_steps": options.num_model_steps}
        if options.verify_strategy:
            shown |= {"verify": options.verify_strategy, "policy": options.accept_policy}
        return f"SpecPlusSpeculativeConfig({', '.join(f'{k}={v!r}' for k, v in shown.items())})"
