"""Drafting on vLLM's Model Runner V2.

A hybrid is vLLM's own speculator for its draft model, subclassed: it runs ``num_model_steps`` passes, and a filler
puts drafts from history into the slots after them. The methods without a draft model are the filler alone.

Every slot that vLLM has scheduled must hold a token of the vocabulary, so a slot that nothing fills holds token 0, and
the device remembers how many drafts of a request are meant (`Drafting.num_drafts`). With synchronous scheduling the
scheduler is told, and does not schedule the rest; with asynchronous scheduling it has scheduled them before they were
made, and the verifier takes them for no drafts.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
from vllm.v1.worker.gpu.states import RequestState

from vllm_specplus import compat
from vllm_specplus.config import HISTORY_METHODS, SpecPlusOptions
from vllm_specplus.kernels.drafts import write_one_hot_rows
from vllm_specplus.kernels.ngram import fill_drafts
from vllm_specplus.runners.v2.host_tokens import TokenFeed
from vllm_specplus.runners.v2.requests import RequestTracker
from vllm_specplus.runners.v2.samplers import CountingRejectionSampler, StrategyRejectionSampler, StrategySampler
from vllm_specplus.runners.v2.suffix import SuffixFiller

_SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
MODEL_SPECULATORS = {
    f"{_SPECULATORS}.mtp.speculator": "MTPSpeculator",
    f"{_SPECULATORS}.multi_module_mtp.speculator": "MultiModuleMTPSpeculator",
    f"{_SPECULATORS}.eagle.speculator": "EagleSpeculator",
    f"{_SPECULATORS}.gemma4.speculator": "Gemma4Speculator",
    f"{_SPECULATORS}.standalone_ar.speculator": "StandaloneARSpeculator",
}


@contextmanager
def installed(options: SpecPlusOptions) -> Iterator[None]:
    """The plugin's classes stand in the runner's module while the block builds the runner or loads its model."""
    names: dict[str, Any] = {}
    if options.drafts_from_history:
        names["init_speculator"] = _init_speculator
        names["DraftTokensHandler"] = VariableLengthHandler
        names["RequestState"] = MatchedRequestState if options.matches_ngrams else FollowedRequestState
        names["RejectionSampler"] = CountingRejectionSampler
    if options.verify_strategy is not None:
        names |= {"Sampler": StrategySampler, "RejectionSampler": StrategyRejectionSampler}
    with compat.override(model_runner, names):
        yield


def bind(runner: Any) -> RequestTracker | None:
    """Give the parts of a built runner what vLLM does not pass to them.

    Returns:
        What follows the runner's requests; None where the plugin does not draft.

    Raises:
        SpecPlusCompatError: vLLM has put something else where the plugin's own part must stand.
    """
    options: SpecPlusOptions = runner.speculative_config.specplus
    drafting = getattr(runner.speculator, "drafting", None)
    if drafting is not None:
        runner.draft_tokens_handler.bind(drafting)
    sampler = runner.rejection_sampler
    if sampler is None:  # not the last stage of a pipeline
        return None
    strategy = options.verify_strategy
    if not isinstance(sampler, CountingRejectionSampler if strategy is None else StrategyRejectionSampler):
        raise compat.SpecPlusCompatError(
            f"the keys of vllm-specplus cannot hold: this model brings {type(sampler).__name__} to verify with"
        )
    sampler.bind(drafting)
    if runner.device.type != "cpu":
        warm_up(runner)
    return None if drafting is None else drafting.requests


def warm_up(runner: Any) -> None:
    """Compile, before a request waits for it, what may be launched and vLLM's own warm-up does not launch."""
    drafting = getattr(runner.speculator, "drafting", None)
    if drafting is not None:
        drafting.warm_up()
    if isinstance(runner.rejection_sampler, StrategyRejectionSampler):
        runner.rejection_sampler.warm_up(runner.model_config.head_dtype, runner.device, runner.speculator.draft_logits)


def forget(runner: Any) -> None:
    """Forget all requests that have been, of a runner on which the plugin drafts and none runs."""
    runner.speculator.drafting.forget()


class FollowedRequestState(RequestState):
    """Tells the drafting part of every request that takes a place or leaves it."""

    is_dense = False
    drafting: "Drafting | None" = None  # in a pipeline the last stage drafts

    def __init__(self, *args: Any, **kwargs: Any):
        dense = self.is_dense and get_pp_group().is_last_rank
        super().__init__(*args, **kwargs | {"use_dense_all_token_ids": dense})

    def add_request(self, req_id: str, prompt_len: int, all_token_ids: list[int], *args: Any, **kwargs: Any) -> None:
        """As vLLM's."""
        super().add_request(req_id, prompt_len, all_token_ids, *args, **kwargs)
        if self.drafting is not None:
            self.drafting.begin(req_id, self.req_id_to_index[req_id], prompt_len, all_token_ids)

    def remove_request(self, req_id: str) -> int | None:
        """As vLLM's."""
        index = super().remove_request(req_id)
        if index is not None and self.drafting is not None:
            self.drafting.requests.end(index)
        return index


class MatchedRequestState(FollowedRequestState):
    """Keeps all tokens in device memory, where the n-gram kernel reads them at every step."""

    is_dense = True


class VariableLengthHandler(DraftTokensHandler):
    """Tells the scheduler of as many drafts as are meant, where it asks."""

    def __init__(self, device: torch.device | None = None):
        super().__init__(device)
        self._drafting: Drafting | None = None
        self._num_drafts: Any = None

    def bind(self, drafting: "Drafting") -> None:
        self._drafting = drafting

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """Note this step's drafts, [num_reqs, K] int64, and start the copy of how many are meant."""
        super().set_draft_tokens(input_batch, draft_tokens)
        self._num_drafts = None
        drafting = self._drafting
        if drafting is None or (drafting.is_async and not input_batch.has_structured_output_reqs):
            return
        num_drafts = drafting.num_drafts[input_batch.idx_mapping]
        self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copy_stream):
            self._num_drafts = async_copy_to_np(num_drafts)
            num_drafts.record_stream(self.copy_stream)
            self.copy_event.record()

    def get_draft_tokens(self) -> DraftTokenIds | None:
        """The drafts of each request, without those that nobody made."""
        drafts = super().get_draft_tokens()
        if drafts is None or self._num_drafts is None:
            return drafts
        self.copy_event.synchronize()
        counts = self._num_drafts.tolist()
        return DraftTokenIds(
            drafts.req_ids, [row[:count] for row, count in zip(drafts.draft_token_ids, counts, strict=True)]
        )


class _StatelessFiller:
    """Knows nothing but what is on the device."""

    needs_every_step = False

    def forget(self) -> None:
        """There is nothing to forget."""


class _NgramFiller(_StatelessFiller):
    """The n-gram match, on the device."""

    def __init__(self, options: SpecPlusOptions, req_states: Any):
        self._options = options
        self._req_states = req_states

    def fill(
        self, input_batch: Any, drafts: torch.Tensor, num_steps: int, max_drafts: torch.Tensor, arrival: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return fill_drafts(
            self._req_states.all_token_ids.gpu,
            self._req_states.total_len.gpu,
            input_batch.idx_mapping,
            drafts,
            num_model_steps=num_steps,
            min_ngram_size=self._options.min_ngram_size,
            max_ngram_size=self._options.max_ngram_size,
            match_override_len=self._options.match_override_len,
            max_drafts=max_drafts,
        )


class _NoFiller(_StatelessFiller):
    """`naive`: nothing is drafted but from references."""

    def fill(
        self, input_batch: Any, drafts: torch.Tensor, num_steps: int, max_drafts: torch.Tensor, arrival: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        drafts.fill_(-1)
        none = torch.zeros_like(max_drafts)
        return none, none


class Drafting:
    """A step's window of drafts, and which of them are meant.

    Attributes:
        window: [max_num_reqs, K] int64, the drafts of this step's batch.
        num_drafts: [max_num_reqs] int32 by request state: drafts that are meant, from the first slot on.
        num_model: [max_num_reqs] int32 by request state: how many of those are the draft model's.
        is_async: whether the scheduler schedules a step before the drafts of the last are made.
        requests: follows what single requests ask for.
    """

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        options: SpecPlusOptions = vllm_config.speculative_config.specplus
        scheduler_config = vllm_config.scheduler_config
        max_num_reqs, width = scheduler_config.max_num_seqs, vllm_config.speculative_config.num_speculative_tokens
        self.is_async = bool(scheduler_config.async_scheduling)
        self.window = torch.zeros(max_num_reqs, width, dtype=torch.int64, device=device)
        self.num_drafts = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.num_model = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._feed = TokenFeed(
            vllm_config,
            device,
            req_states,
            is_async=self.is_async,
            keeps_last=self.is_async and options.matches_suffixes,
        )
        self.requests = RequestTracker(vllm_config, device, req_states, self._feed)
        self._filler: Any = _NoFiller()
        if options.matches_ngrams:
            self._filler = _NgramFiller(options, req_states)
        elif options.matches_suffixes:
            self._filler = SuffixFiller(options, req_states, self._feed)
        req_states.drafting = self

    def begin(self, req_id: str, index: int, prompt_len: int, token_ids: list[int]) -> None:
        """A request takes its place among the request states, perhaps with some of its output."""
        self.requests.begin(req_id, index)
        # vLLM pads the first step of a request that has one token left to compute.
        self.num_drafts[index].zero_()
        if self._filler.needs_every_step or self.requests.has_reference(index):
            self._feed.mirror.add(index, prompt_len, token_ids)
        else:
            self._feed.mirror.leave(index)

    def warm_up(self) -> None:
        """Compile what only some requests need."""
        self.requests.warm_up(self.window[:1], self.num_drafts, self.num_model)

    def forget(self) -> None:
        """Forget all requests that have been; none runs."""
        self.requests.forget()
        self._feed.forget()
        self._filler.forget()

    def fill(
        self, input_batch: Any, model_drafts: torch.Tensor | None, num_sampled: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fill the window of this step's batch.

        Args:
            input_batch: vLLM's.
            model_drafts: [num_reqs, num_steps] int64, or None.
            num_sampled: [num_reqs] int32 tokens that each request got in this step; 0: it is being prefilled.
            width: slots to fill; 0: vLLM wants no drafts in this step.

        Returns:
            [num_reqs, K] int64 drafts, each a token, [num_reqs] int32 how many are meant, and how many the model's.
        """
        num_reqs, idx_mapping = input_batch.num_reqs, input_batch.idx_mapping
        window = self.window[:num_reqs]
        num_steps = 0 if model_drafts is None else model_drafts.shape[1]
        if model_drafts is not None:
            window[:, :num_steps] = model_drafts
        self.requests.count_steps(input_batch, num_sampled)
        needs_every_step = self._filler.needs_every_step
        # All of it or nothing: kernels are compiled for one width, and `max_drafts` keeps to what is wanted.
        drafts = window if width else window[:, :0]
        max_drafts = self.requests.limit(input_batch, (num_sampled[:num_reqs] > 0).to(torch.int32) * width)
        arrival = None
        if needs_every_step or self.requests.references(input_batch):
            arrival = self._feed.advance(input_batch, drafts, num_steps, max_drafts)
        if width == 0 and not needs_every_step:
            return window, self.num_drafts[idx_mapping], self.num_model[idx_mapping]
        num_drafts, num_model = self._filler.fill(input_batch, drafts, num_steps, max_drafts, arrival)
        num_drafts, num_model = self.requests.put_references_first(
            input_batch, drafts, num_drafts, num_model, max_drafts
        )
        window.clamp_(min=0)
        self.num_drafts[idx_mapping] = num_drafts
        self.num_model[idx_mapping] = num_model
        return window, num_drafts, num_model


class HistorySpeculator(BaseSpeculator):
    """Drafts without a model: ngram, suffix, or (naive) from the requests' references alone."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any):
        self.drafting = Drafting(vllm_config, device, req_states)
        self.num_speculative_steps = vllm_config.speculative_config.num_speculative_tokens

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing here runs in a graph."""

    def capture(self) -> None:
        """Nothing here runs in a graph."""

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
        """[num_reqs, K] int64 drafts; arguments as vLLM's speculators have them."""
        width = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        if dummy_run:
            return self.drafting.window[: input_batch.num_reqs]
        return self.drafting.fill(input_batch, None, num_sampled, width)[0]


class _HybridMixin:
    """Adds the filler's drafts to those of vLLM's speculator, which this is mixed into.

    The speculator was built for ``num_model_steps`` drafts, its buffers and graphs of decode steps too.
    """

    drafting: Drafting
    draft_logits: torch.Tensor | None
    num_speculative_steps: int

    def bind(self, drafting: Drafting, writes_one_hot: bool) -> None:
        self.drafting = drafting
        self._writes_one_hot = writes_one_hot
        if self.draft_logits is not None and writes_one_hot:
            # vLLM's verifier looks at every slot's, and never at those past the drafts that are meant.
            max_num_reqs, width = drafting.window.shape
            shape = max_num_reqs, width, self.draft_logits.shape[2]
            self.draft_logits = self.draft_logits.new_zeros(shape)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """The first draft's graph runs over the target's batch, which has all slots."""
        steps, self.num_speculative_steps = self.num_speculative_steps, self.drafting.window.shape[1]
        try:
            super().init_cudagraph_manager(cudagraph_mode)  # type: ignore[misc]
        finally:
            self.num_speculative_steps = steps

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
        """Run the model's steps, then fill the slots after them; arguments and answer as vLLM's."""
        width = self.drafting.window.shape[1] if num_speculative_tokens is None else num_speculative_tokens
        steps = min(self.num_speculative_steps, width)
        model_drafts = super().propose(  # type: ignore[misc]
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            *args,
            dummy_run=dummy_run,
            num_speculative_tokens=steps,
            **kwargs,
        )
        if dummy_run:
            return self.drafting.window[: input_batch.num_reqs]
        window, num_drafts, num_model = self.drafting.fill(input_batch, model_drafts[:, :steps], num_sampled, width)
        if self.draft_logits is not None and self._writes_one_hot:
            write_one_hot_rows(self.draft_logits, input_batch.idx_mapping, window, num_drafts, num_model)
        return window


def _init_speculator(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
    """Stands in for vLLM's function of that name: the speculator of a config with plugin keys."""
    from vllm.v1.worker.gpu.spec_decode import init_speculator

    options: SpecPlusOptions = vllm_config.speculative_config.specplus
    if options.method in HISTORY_METHODS:
        return HistorySpeculator(vllm_config, device, req_states)
    # vLLM makes one draft for every slot; its speculator is shown as many slots as the model is to fill.
    shown = copy.copy(vllm_config)
    shown.speculative_config = copy.copy(vllm_config.speculative_config)
    shown.speculative_config.num_speculative_tokens = options.num_model_steps
    with ExitStack() as stack:
        for module_name, name in MODEL_SPECULATORS.items():
            module = import_module(module_name)
            stack.enter_context(compat.override(module, {name: _hybrid(getattr(module, name))}))
        speculator = init_speculator(shown, device, req_states)
    speculator.bind(Drafting(vllm_config, device, req_states), writes_one_hot=options.verify_strategy is None)
    return speculator


def _hybrid(speculator: type) -> type:
    return type(f"Hybrid{speculator.__name__}", (_HybridMixin, speculator), {})
