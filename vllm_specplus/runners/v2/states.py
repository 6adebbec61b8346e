"""vLLM's request states and its reports to the scheduler on Model Runner V2, with what drafting adds to them."""

from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
from vllm.v1.worker.gpu.states import RequestState

from vllm_specplus.runners.v2.drafting import Drafting


class FollowedRequestState(RequestState):
    """Tells `Drafting` of every request that takes a place or leaves it."""

    is_dense = False
    drafting: Drafting | None = None  # in a pipeline only the last stage drafts

    def __init__(self, *args: Any, **kwargs: Any):
        dense = self.is_dense and get_pp_group().is_last_rank
        super().__init__(*args, **kwargs | {"use_dense_all_token_ids": dense})

    def add_request(self, req_id: str, prompt_len: int, all_token_ids: list[int], *args: Any, **kwargs: Any) -> None:
        """Add a request as vLLM does, then tell `Drafting` of its place and tokens."""
        super().add_request(req_id, prompt_len, all_token_ids, *args, **kwargs)
        if self.drafting is not None:
            self.drafting.begin(req_id, self.req_id_to_index[req_id], prompt_len, all_token_ids)

    def remove_request(self, req_id: str) -> int | None:
        """Remove a request as vLLM does, then tell `Drafting`; return the place that it had."""
        index = super().remove_request(req_id)
        if index is not None and self.drafting is not None:
            self.drafting.end(req_id, index)
        return index


class DenseRequestState(FollowedRequestState):
    """Keeps all tokens in device memory, where the n-gram kernel reads them in every step."""

    is_dense = True


class VariableLengthHandler(DraftTokensHandler):
    """Reports to the scheduler, where it asks, only the slots that hold a draft."""

    def __init__(self, device: torch.device | None = None):
        super().__init__(device)
        self._drafting: Drafting | None = None
        self._num_drafts: np.ndarray | None = None
        self._counts_copied: torch.cuda.Event | None = None

    def set_drafting(self, drafting: Drafting) -> None:
        """Set what knows how many drafts each request has."""
        self._drafting = drafting
        # vLLM's own event sleeps while it waits, and wakes up late. A synchronous step cannot go on meanwhile.
        self._counts_copied = torch.cuda.Event(blocking=drafting.is_async)

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """Note this step's drafts, [num_reqs, K] int64, and start to copy their numbers to the host."""
        super().set_draft_tokens(input_batch, draft_tokens)
        self._num_drafts = None
        drafting = self._drafting
        if drafting is None or (drafting.is_async and not input_batch.has_structured_output_reqs):
            return
        num_drafts = drafting.latest
        self.copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copy_stream):
            self._num_drafts = async_copy_to_np(num_drafts)
            num_drafts.record_stream(self.copy_stream)
            assert self._counts_copied is not None
            self._counts_copied.record()

    def get_draft_tokens(self) -> DraftTokenIds | None:
        """Return the drafts of each request, without padding; waits for the copy of their numbers."""
        drafts = super().get_draft_tokens()
        if drafts is None or self._num_drafts is None:
            return drafts
        assert self._counts_copied is not None
        self._counts_copied.synchronize()
        counts = self._num_drafts.tolist()
        return DraftTokenIds(
            drafts.req_ids, [row[:count] for row, count in zip(drafts.draft_token_ids, counts, strict=True)]
        )
