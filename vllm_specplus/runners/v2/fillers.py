"""Ways to fill the slots of a step from history, by fixed rules."""

from typing import TYPE_CHECKING, Any, Protocol

import torch

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.kernels.drafts import DraftCounts, Limits, place_drafts
from vllm_specplus.kernels.ngram import NgramSearch
from vllm_specplus.runners.v2.host_tokens import Arrival
from vllm_specplus.runners.v2.requests import RequestTracker

if TYPE_CHECKING:
    from vllm_specplus.runners.v2.states import FollowedRequestState


_FEW = 48  # requests, of which a list takes less time than numpy


class SlotFiller(Protocol):
    """Fills slots from history."""

    needs_every_step: bool = False
    """Whether it has to see the tokens of every step on the host."""

    def fill(
        self,
        input_batch: Any,
        drafts: torch.Tensor,
        model_drafts: torch.Tensor,
        limits: Limits,
        arrival: Arrival | None,
    ) -> DraftCounts:
        """Draft for a batch of B requests.

        Args:
            input_batch: vLLM's.
            drafts: [B, K] int64, takes the drafts, padded with token 0.
            model_drafts: [B, num_steps] int64, apart from `drafts`.
            limits: of each request's drafts.
            arrival: the tokens that `TokenCopier.advance` has brought to the host, if any.

        Returns:
            The counts of the batch. They have been noted by request state as well.
        """

    def skip(
        self,
        input_batch: Any,
        drafts: torch.Tensor,
        model_drafts: torch.Tensor,
        limits: Limits,
        arrival: Arrival | None,
    ) -> None:
        """Follow a step in which vLLM wants no drafts; nothing to do by default.

        Args:
            input_batch, model_drafts, arrival: as for `fill`.
            drafts: [B, K] int64, may be changed.
            limits: no request may draft.
        """
        return

    def begin(self, req_id: str, index: int) -> None:
        """Take note of a request that takes a place among the request states; nothing to do by default."""
        return

    def end(self, req_id: str, index: int) -> None:
        """Take note of a request that leaves its place, at its end or to come back later; nothing by default."""
        return

    def begin_step(self, input_batch: Any) -> None:
        """Take note of a step that drafts, before its passes and all else; nothing to do by default.

        Args:
            input_batch: vLLM's.
        """
        return

    def begin_passes(self, input_batch: Any, most: int) -> int | None:
        """How many passes the draft model is to make now; None: it is not to run.

        Args:
            input_batch: vLLM's.
            most: the most passes, and how many there are by default. With 0 the draft model still takes in the text.
        """
        return most

    def end_passes(self, number: int | None) -> None:
        """Take note that the draft model has made its passes, if any; nothing to do by default."""
        return

    def warm_up(self) -> None:
        """Launch once the kernels that only some requests need; nothing to do by default. No request runs."""
        return

    def reset(self) -> None:
        """Forget all requests; nothing to do for a filler that keeps no state."""
        return


def longest_text(input_batch: Any) -> int:
    """The most tokens that a request may have with those of this step: a bound that vLLM keeps on the host."""
    bounds = input_batch.seq_lens_cpu_upper_bound
    return (max(bounds.tolist()) if len(bounds) <= _FEW else int(bounds.numpy().max())) + 1


class NgramFiller(SlotFiller):
    """Matches n-grams of a request's own text on the device."""

    def __init__(self, options: SpecPlusOptions, req_states: "FollowedRequestState", by_state: DraftCounts, width: int):
        self._search = NgramSearch(
            req_states.all_token_ids.gpu,
            req_states.total_len.gpu,
            by_state,
            width=width,
            ngram_sizes=(options.min_ngram_size, options.max_ngram_size),
            match_override_len=options.match_override_len,
            takes_first=options.ngram_match_order == "first",
        )

    def fill(
        self,
        input_batch: Any,
        drafts: torch.Tensor,
        model_drafts: torch.Tensor,
        limits: Limits,
        arrival: Arrival | None,
    ) -> DraftCounts:
        """See `SlotFiller.fill`."""
        longest = longest_text(input_batch) + model_drafts.shape[1]
        return self._search.fill(input_batch.idx_mapping, drafts, model_drafts, limits, longest)


class EmptyFiller(SlotFiller):
    """Leaves all slots empty, for method `naive`: only references draft."""

    def __init__(self, by_state: DraftCounts):
        self._by_state = by_state
        self._none = torch.zeros_like(by_state.num_drafts_ptr)

    def fill(
        self,
        input_batch: Any,
        drafts: torch.Tensor,
        model_drafts: torch.Tensor,
        limits: Limits,
        arrival: Arrival | None,
    ) -> DraftCounts:
        """See `SlotFiller.fill`."""
        none = self._none[: len(drafts)]
        place_drafts(drafts, drafts, none, none, input_batch.idx_mapping, self._by_state)
        return DraftCounts(none, none)


class ReferencesFirst(SlotFiller):
    """Puts the drafts of a request's reference in the place of another filler's, where it has some to say."""

    def __init__(self, filler: SlotFiller, requests: RequestTracker):
        self._filler = filler
        self._requests = requests
        self.needs_every_step = filler.needs_every_step

    def reset(self) -> None:
        """Forget all requests."""
        self._filler.reset()

    def fill(
        self,
        input_batch: Any,
        drafts: torch.Tensor,
        model_drafts: torch.Tensor,
        limits: Limits,
        arrival: Arrival | None,
    ) -> DraftCounts:
        """See `SlotFiller.fill`."""
        counts = self._filler.fill(input_batch, drafts, model_drafts, limits, arrival)
        return self._requests.put_references_first(input_batch, drafts, counts, limits)

    def skip(
        self,
        input_batch: Any,
        drafts: torch.Tensor,
        model_drafts: torch.Tensor,
        limits: Limits,
        arrival: Arrival | None,
    ) -> None:
        """See `SlotFiller.skip`."""
        self._filler.skip(input_batch, drafts, model_drafts, limits, arrival)
