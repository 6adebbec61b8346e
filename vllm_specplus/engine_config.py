"""vLLM's ``SpeculativeConfig`` with the plugin's options on it; pickled to the workers."""

from typing import TYPE_CHECKING, Any, Self

from pydantic import SkipValidation, ValidationError
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from vllm_specplus.config import HISTORY_METHODS, Resolved, SpecPlusConfigError, SpecPlusOptions
from vllm_specplus.config_keys import HYBRID_METHODS

# Methods that need no draft model run on V1 as vLLM's custom class; this names what builds the drafter.
_HISTORY_DRAFTER = "vllm_specplus.runners.v1.HistoryDrafter"


@config
class SpecPlusSpeculativeConfig(SpeculativeConfig):
    """What vLLM sees of a config with plugin keys."""

    if TYPE_CHECKING:
        num_speculative_tokens: int
        method: str
        parallel_drafting: bool

    specplus: SkipValidation[SpecPlusOptions] = None  # type: ignore[assignment]
    """The plugin's own keys, resolved."""

    @classmethod
    def create(cls, resolved: Resolved, model_config: Any, parallel_config: Any) -> Self:
        """Build the config that vLLM runs with.

        Raises:
            SpecPlusConfigError: vLLM refuses what is left for it; the message is vLLM's.
        """
        options = resolved.options
        assert options is not None
        stock = dict(resolved.vllm)
        if options.method in HISTORY_METHODS:
            stock |= {
                "method": "custom_class",
                "model": _HISTORY_DRAFTER,
                # vLLM wants at least one; naive proposes none of it.
                "num_speculative_tokens": max(options.num_speculative_tokens, 1),
            }
        try:
            return cls(
                **stock,
                specplus=options,
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
        self.num_speculative_tokens = total
        if self.method not in HYBRID_METHODS or self.parallel_drafting:
            raise ValueError(
                f"mtp_strategy={self.specplus.mtp_strategy!r} is not allowed: {self.model!r} is no checkpoint for "
                f"method {self.specplus.method!r}: vLLM takes it for {self.method!r}, which drafts in parallel or alone"
            )
        return result

    @property
    def drafts_on_host(self) -> bool:
        """Whether drafting reads the requests' tokens on the host."""
        return self.specplus.is_hybrid or self.specplus.method in HISTORY_METHODS

    def __repr__(self) -> str:
        options = self.specplus
        shown = {"method": options.method, "num_spec_tokens": options.num_speculative_tokens}
        if options.is_hybrid:
            shown |= {"strategy": options.mtp_strategy, "num_model_steps": options.num_model_steps}
        if options.verify_strategy:
            shown |= {"verify": options.verify_strategy, "policy": options.accept_policy}
        return f"SpecPlusSpeculativeConfig({', '.join(f'{k}={v!r}' for k, v in shown.items())})"
