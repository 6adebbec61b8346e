"""A step's drafts on Model Runner V2: what fills the slots, and how many slots hold a draft.

vLLM feeds every slot that it has scheduled to the model, so every slot must hold a token of the vocabulary. A slot
without a draft holds token 0, which is padding, and `Drafting.num_drafts` tells on the device how many drafts a request
has. With synchronous scheduling the scheduler is told (`states.VariableLengthHandler`) and schedules no padding. With
asynchronous scheduling it has scheduled all slots before they are filled, and the verifier skips the padding
(`samplers.CountingRejectionSampler`).
"""

from typing import TYPE_CHECKING, Any

import torch

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.kernels.drafts import DraftCounts, write_one_hot_rows
from vllm_specplus.runners.v2.adaptive import AdaptiveFiller
from vllm_specplus.runners.v2.fillers import EmptyFiller, NgramFiller, ReferencesFirst, SlotFiller
from vllm_specplus.runners.v2.host_tokens import TokenCopier
from vllm_specplus.runners.v2.requests import RequestTracker
from vllm_specplus.runners.v2.suffix import SuffixFiller

if TYPE_CHECKING:
    from vllm_specplus.runners.v2.states import FollowedRequestState


class Drafting:
    """The drafts of a step's batch, and how many each request has.

    Attributes:
        draft_tokens: [max_num_reqs, K] int64, the drafts of this step's batch, padded with token 0.
        num_drafts: [max_num_reqs] int32 by request state: drafts of each request, in its first slots.
        num_model: [max_num_reqs] int32 by request state: how many of these are the draft model's.
        counts: both.
        latest: [B] int32 drafts of each request of the latest batch.
        confidences: [max_num_reqs, K] float32, the chance of each draft of this step's batch if those before it are
            right; 0 after the last draft. vLLM's adaptive verification reads it; None: that is off.
        width: K, the slots of a request.
        is_async: whether the scheduler schedules a step before the last step's drafts are made.
        requests: follows what single requests ask for.
    """

    def __init__(self, vllm_config: Any, device: torch.device, req_states: "FollowedRequestState"):
        options: SpecPlusOptions = vllm_config.speculative_config.specplus
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.width: int = vllm_config.speculative_config.num_speculative_tokens
        self.is_async = bool(vllm_config.scheduler_config.async_scheduling)
        self.draft_tokens = torch.zeros(max_num_reqs, self.width, dtype=torch.int64, device=device)
        self.num_drafts = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.num_model = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self.counts = DraftCounts(self.num_drafts, self.num_model)
        self.latest = self.num_drafts[:0]
        self.confidences: torch.Tensor | None = None
        if options.is_hybrid and vllm_config.speculative_config.enable_adaptive_verification:
            self.confidences = torch.zeros(max_num_reqs, self.width, dtype=torch.float32, device=device)
        self._copier = TokenCopier(
            vllm_config,
            device,
            req_states,
            is_async=self.is_async,
            keeps_last=self.is_async and options.matches_suffixes,
        )
        self.requests = RequestTracker(vllm_config, device, req_states, self._copier, self.counts)
        self._faults = self.requests.live_requests.faults
        model_config = vllm_config.model_config
        # A prompt may have placeholders of images or sound that the model cannot read as text.
        self._last_token = model_config.get_vocab_size() - 1 if model_config.is_multimodal_model else None
        self._slot_filler = self._make_slot_filler(vllm_config, device, req_states)
        req_states.drafting = self

    def begin(self, req_id: str, index: int, prompt_len: int, token_ids: list[int]) -> None:
        """Take note of a request that takes a place among the request states, perhaps with some of its output."""
        # vLLM pads the first step of a request that has one token left to compute.
        self.num_drafts[index].zero_()
        with self._faults.caught("drafting", [req_id]):
            self.requests.begin(req_id, index)
            if self._slot_filler.needs_every_step or self.requests.has_reference(index):
                self._copier.mirror.add(index, prompt_len, token_ids)
            else:
                self._copier.mirror.add_unfollowed(index)
            self._slot_filler.begin(req_id, index)
            return
        # Its tokens must not be taken for more of the request that had the place before.
        self._copier.mirror.add_unfollowed(index)

    def end(self, req_id: str, index: int) -> None:
        """Take note of a request that leaves its place, at its end or to come back later."""
        with self._faults.caught("requests"):
            # First, since the next request in this place must not have this one's reference.
            self.requests.end(index)
            self._slot_filler.end(req_id, index)

    def warm_up(self) -> None:
        """Compile the kernels that only some requests need."""
        self.requests.warm_up(self.draft_tokens[:1])
        self._slot_filler.warm_up()

    def reset(self) -> None:
        """Forget all requests; none runs."""
        self.requests.reset()
        self._copier.reset()
        self._slot_filler.reset()

    def begin_step(self, input_batch: Any) -> None:
        """Take note of a step that drafts, before its passes and before `fill`."""
        with self._faults.caught("drafting", input_batch.req_ids):
            self._slot_filler.begin_step(input_batch)

    def begin_passes(self, input_batch: Any, most: int) -> int | None:
        """See `SlotFiller.begin_passes`.

        After a fault the model makes all passes, so that its draft cache has no gaps.
        """
        with self._faults.caught("drafting", input_batch.req_ids):
            return self._slot_filler.begin_passes(input_batch, most)
        return most

    def end_passes(self, input_batch: Any, number: int | None) -> None:
        """See `SlotFiller.end_passes`."""
        with self._faults.caught("drafting", input_batch.req_ids):
            self._slot_filler.end_passes(number)

    def fill(
        self,
        input_batch: Any,
        model_drafts: torch.Tensor | None,
        num_sampled: torch.Tensor,
        width: int,
        draft_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Fill the slots of this step's batch.

        Args:
            input_batch: vLLM's.
            model_drafts: [num_reqs, num_steps] int64, or None.
            num_sampled: [num_reqs] int32 tokens that each request got in this step; 0: it is being prefilled.
            width: slots to fill, at most K; 0: vLLM wants no drafts in this step.
            draft_logits: [max_num_reqs, K, vocab], gets a one-hot row for each draft that is not the model's; or None.

        Returns:
            [num_reqs, K] int64 drafts, padded with token 0.
        """
        with self._faults.caught("drafting", input_batch.req_ids):
            drafts, num_drafts, num_model = self._fill(input_batch, model_drafts, num_sampled, width)
            if self._last_token is not None:
                drafts.clamp_(max=self._last_token)
            if draft_logits is not None:
                write_one_hot_rows(draft_logits, input_batch.idx_mapping, drafts, num_drafts, num_model)
            return drafts
        with self._faults.caught("counting"):
            self.requests.count_rest()
        draft_tokens, idx_mapping = self.draft_tokens[: input_batch.num_reqs], input_batch.idx_mapping
        draft_tokens.zero_()
        self.num_drafts[idx_mapping] = self.num_model[idx_mapping] = 0
        if self.confidences is not None:
            self.confidences[: input_batch.num_reqs].zero_()
        self.latest = self.num_drafts[idx_mapping]
        return draft_tokens

    def _fill(
        self, input_batch: Any, model_drafts: torch.Tensor | None, num_sampled: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The drafts as of `fill`, and both counts of the batch."""
        idx_mapping = input_batch.idx_mapping
        draft_tokens = self.draft_tokens[: input_batch.num_reqs]
        if model_drafts is None:
            model_drafts = draft_tokens[:, :0]
        with self._faults.caught("counting"):
            self.requests.count_steps(input_batch, num_sampled)
        # Kernels are compiled for all K slots, and the limits keep to the width of this step.
        limits = self.requests.limits_of(input_batch, num_sampled, width)
        arrival = None
        if self._slot_filler.needs_every_step or self.requests.requests_with_reference(input_batch):
            arrival = self._copier.advance(input_batch, model_drafts, limits)
        if width == 0:
            self._slot_filler.skip(input_batch, draft_tokens, model_drafts, limits, arrival)
            self.latest = self.num_drafts[idx_mapping]
            return draft_tokens, self.latest, self.num_model[idx_mapping]
        counts = self._slot_filler.fill(input_batch, draft_tokens, model_drafts, limits, arrival)
        self.latest = counts.num_drafts_ptr
        return draft_tokens, *counts

    def _make_slot_filler(
        self, vllm_config: Any, device: torch.device, req_states: "FollowedRequestState"
    ) -> SlotFiller:
        options: SpecPlusOptions = vllm_config.speculative_config.specplus
        if options.adaptive:
            return AdaptiveFiller(
                vllm_config, device, req_states, self._copier, self.requests, self.counts, self.confidences
            )
        filler: SlotFiller = EmptyFiller(self.counts)
        if options.matches_ngrams:
            filler = NgramFiller(options, req_states, self.counts, self.width)
        elif options.matches_suffixes:
            filler = SuffixFiller(options, req_states, self._copier, self.requests.scopes, self._faults, self.counts)
        return ReferencesFirst(filler, self.requests)
