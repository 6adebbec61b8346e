"""Speculators of Model Runner V2 that draft from history.

A hybrid is a subclass of vLLM's own speculator for its draft model. It runs up to ``num_model_steps`` passes, and
`Drafting` decides what fills the slots. The methods without a draft model have `Drafting` alone.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_specplus import compat
from vllm_specplus.config import HISTORY_METHODS, SpecPlusOptions
from vllm_specplus.runners.v2.drafting import Drafting

if TYPE_CHECKING:
    from vllm_specplus.runners.v2.states import FollowedRequestState

    class _Speculator:
        """What the hybrid reads and extends of vLLM's speculators."""

        draft_logits: torch.Tensor | None
        draft_token_confidence_probs: torch.Tensor
        use_acceptance_estimator: bool
        num_speculative_steps: int
        vllm_config: Any

        def init_cudagraph_manager(self, cudagraph_mode: Any) -> None: ...
        def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor: ...

else:
    _Speculator = object

_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
MODEL_SPECULATORS = {
    f"{_SPECULATORS}.mtp.speculator": "MTPSpeculator",
    f"{_SPECULATORS}.multi_module_mtp.speculator": "MultiModuleMTPSpeculator",
    f"{_SPECULATORS}.eagle.speculator": "EagleSpeculator",
    f"{_SPECULATORS}.gemma4.speculator": "Gemma4Speculator",
    f"{_SPECULATORS}.standalone_ar.speculator": "StandaloneARSpeculator",
}
_RUNS_ALL_MODULES = "MultiModuleMTPSpeculator"
"""Its passes are layers of one run."""
_IGNORES_NUMBER = "StandaloneARSpeculator"
"""It makes `num_speculative_steps` passes, whatever `propose` is told."""


class HistorySpeculator(BaseSpeculator):
    """Drafts without a model: ngram, suffix, or (naive) from the requests' references alone."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: "FollowedRequestState"):
        self.drafting = Drafting(vllm_config, device, req_states)
        self.num_speculative_steps = self.drafting.width

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: no part of it runs in a graph."""

    def capture(self) -> None:
        """Do nothing: no part of it runs in a graph."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft from history; arguments are those of vLLM's speculators.

        Returns:
            [num_reqs, K] int64 drafts, padded with token 0.
        """
        width = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        if dummy_run:
            return self.drafting.draft_tokens[: input_batch.num_reqs]
        self.drafting.begin_step(input_batch)
        return self.drafting.fill(input_batch, None, num_sampled, width)


class HybridMixin(_Speculator):
    """Adds drafts from history to those of vLLM's speculator, into which this class is mixed.

    The speculator was built for ``num_model_steps`` drafts, and so were its buffers and its graphs of decode steps.
    """

    drafting: Drafting

    def set_drafting(self, drafting: Drafting, vllm_config: Any, writes_one_hot: bool) -> None:
        """Set what fills the slots that the model's drafts leave.

        Args:
            drafting: of this runner.
            vllm_config: vLLM's, of all K slots.
            writes_one_hot: whether vLLM's own verifier runs, which reads a row of draft logits for every draft.
        """
        self.drafting = drafting
        self._config_of_slots = vllm_config
        self._writes_one_hot = writes_one_hot
        if drafting.confidences is not None:
            # vLLM's estimate of the chances covers the model's own drafts alone.
            self.use_acceptance_estimator = False
            self.draft_token_confidence_probs = drafting.confidences
        if self.draft_logits is not None and writes_one_hot:
            # Rows of padding are never read.
            shape = len(drafting.draft_tokens), drafting.width, self.draft_logits.shape[2]
            dtype, device = self.draft_logits.dtype, self.draft_logits.device
            self.draft_logits = None  # or there would be room for both
            self.draft_logits = torch.zeros(shape, dtype=dtype, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Make vLLM's graphs; those of the first draft are for all K slots, as it runs over the target's batch."""
        steps, shown = self.num_speculative_steps, self.vllm_config
        self.num_speculative_steps, self.vllm_config = self.drafting.width, self._config_of_slots
        try:
            super().init_cudagraph_manager(cudagraph_mode)
        finally:
            self.num_speculative_steps, self.vllm_config = steps, shown
        later_passes = getattr(self, "decode_cudagraph_manager", None)
        if later_passes is not None:
            # It captures a graph for each number of passes that this config names.
            later_passes.vllm_config = shown

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Make the model's passes, then fill the slots; arguments are those of vLLM's speculators.

        Returns:
            [num_reqs, K] int64 drafts, padded with token 0.
        """
        width = self.drafting.width if num_speculative_tokens is None else num_speculative_tokens
        steps = min(self.num_speculative_steps, width)
        propose = partial(
            super().propose,
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            *args,
            dummy_run=dummy_run,
            **kwargs,
        )
        if dummy_run:
            propose(num_speculative_tokens=steps)
            return self.drafting.draft_tokens[: input_batch.num_reqs]
        model_drafts = None
        self.drafting.begin_step(input_batch)
        num_passes = self.drafting.begin_passes(input_batch, steps)
        if num_passes is not None:
            model_drafts = self._make_passes(propose, num_passes)
        self.drafting.end_passes(input_batch, num_passes)
        draft_logits = self.draft_logits if self._writes_one_hot else None
        return self.drafting.fill(input_batch, model_drafts, num_sampled, width, draft_logits)

    def _make_passes(self, propose: Callable[..., torch.Tensor], num_passes: int) -> torch.Tensor:
        """[num_reqs, passes] int64 drafts; a model whose passes go together makes all of them."""
        steps = self.num_speculative_steps
        if _RUNS_ALL_MODULES in type(self).__name__ and num_passes:
            num_passes = steps
        if _IGNORES_NUMBER in type(self).__name__:
            self.num_speculative_steps = num_passes
        try:
            return propose(num_speculative_tokens=num_passes)[:, :num_passes]
        finally:
            self.num_speculative_steps = steps


def init_speculator(
    vllm_config: Any, device: torch.device, req_states: "FollowedRequestState"
) -> HistorySpeculator | HybridMixin:
    """Build the speculator of a config with plugin keys; stands in for vLLM's function of this name."""
    from vllm.v1.worker.gpu.spec_decode import init_speculator as vllm_init_speculator

    options: SpecPlusOptions = vllm_config.speculative_config.specplus
    if options.method in HISTORY_METHODS:
        return HistorySpeculator(vllm_config, device, req_states)
    assert options.num_model_steps is not None
    # vLLM's speculator makes one draft for every slot, so it is shown only as many slots as the model fills.
    shown = copy.copy(vllm_config)
    shown.speculative_config = copy.copy(vllm_config.speculative_config)
    steps = options.num_model_steps
    shown.speculative_config.num_speculative_tokens = steps
    # The numbers of passes that vLLM has to capture graphs for, besides one. It reads as many entries as a batch may
    # have requests, so the largest number comes first.
    passes = [(i, i, number) for i, number in enumerate(range(steps, 1, -1), 1)] if options.adaptive else []
    shown.speculative_config.num_speculative_tokens_per_batch_size = passes or None
    with ExitStack() as stack:
        for module_name, name in MODEL_SPECULATORS.items():
            module = import_module(module_name)
            stack.enter_context(compat.override(module, {name: _hybrid_class(getattr(module, name))}))
        speculator: HybridMixin = vllm_init_speculator(shown, device, req_states)
    drafting = Drafting(vllm_config, device, req_states)
    speculator.set_drafting(drafting, vllm_config, writes_one_hot=options.verify_strategy is None)
    return speculator


def _hybrid_class(speculator: type) -> type:
    return type(f"Hybrid{speculator.__name__}", (HybridMixin, speculator), {})
