"""Suffix decoding on Model Runner V2, whose tokens are on the device and whose suffix trees are on the host.

With synchronous scheduling a step drafts from its own tokens. With asynchronous scheduling the host has those of the
step before, and predicts what comes after them, far enough to reach past this step's tokens; the device goes on from
where these end (`kernels.drafts.continue_predictions`), if they are what was predicted.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.kernels.drafts import continue_predictions
from vllm_specplus.proposers.history import History
from vllm_specplus.proposers.hybrid import HybridDrafter
from vllm_specplus.proposers.suffix import SuffixMatcher
from vllm_specplus.runners.v2.host_tokens import Arrival, TokenFeed

logger = init_logger("vllm.specplus")


@dataclass(frozen=True)
class _SlotHistory(History):
    """A history whose rows are picked from the mirror."""

    slots: np.ndarray  # [B] row of each request

    def tokens(self, i: int) -> np.ndarray:
        return self.token_ids[self.slots[i], : self.num_tokens[i]]


class SuffixFiller:
    """Fills the window from suffix trees on the host."""

    needs_every_step = True

    def __init__(self, options: SpecPlusOptions, req_states: Any, feed: TokenFeed):
        self._options = options
        self._req_states = req_states
        self._feed = feed
        self._matcher = SuffixMatcher(**options.suffix_matcher)
        logger.info(
            "suffix trees are on the host: each step waits for the tokens of %s",
            "the step before it" if feed.is_async else "its own",
        )

    def forget(self) -> None:
        """Begin with empty trees."""
        self._matcher = SuffixMatcher(**self._options.suffix_matcher)

    def fill(
        self,
        input_batch: Any,
        drafts: torch.Tensor,
        num_steps: int,
        max_drafts: torch.Tensor,
        arrival: Arrival | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `kernels.ngram.fill_drafts`: drafts are changed in place; returns how many, and how many the model's.

        `arrival`: what `feed.advance` has brought.
        """
        if arrival is not None:
            self._feed_ended(arrival)
        self._matcher.retain(self._req_states.req_id_to_index)
        if drafts.shape[1] == 0:
            return max_drafts, max_drafts
        if self._feed.is_async:
            return self._continue(input_batch, drafts, num_steps, max_drafts)
        assert arrival is not None
        return self._draft(input_batch, drafts, arrival.rows, num_steps)

    def _feed_ended(self, arrival: Arrival) -> None:
        """Give the matcher the last tokens of requests that have ended, which are part of their responses."""
        rows = arrival.rows
        for i, req_id in enumerate(arrival.req_ids):
            if req_id in self._req_states.req_id_to_index:
                continue
            found = self._feed.mirror.find(arrival.indices[i], arrival.generation[i])
            if found is None:
                continue
            token_ids, prompt_len = found
            text = np.concatenate((token_ids, rows[i, 2 : 2 + max(0, rows[i, 0] - len(token_ids))][::-1]))
            history = History([req_id], text[None], np.array([len(text)]), np.array([prompt_len]))
            self._matcher.match(history, None, np.zeros(1, np.int32))

    def _history(self, input_batch: Any) -> _SlotHistory:
        indices, mirror = input_batch.idx_mapping_np, self._feed.mirror
        return _SlotHistory(
            req_ids=input_batch.req_ids,
            token_ids=mirror.token_ids,
            num_tokens=mirror.num_tokens[indices],
            num_prompt_tokens=mirror.num_prompt_tokens[indices],
            slots=indices,
        )

    def _draft(
        self, input_batch: Any, drafts: torch.Tensor, rows: np.ndarray, num_steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft from tokens that are all there, the model's drafts among them."""
        history, limits = self._history(input_batch), rows[:, 1]
        if num_steps:
            drafter = HybridDrafter(
                self._matcher,
                num_model_steps=num_steps,
                num_speculative_tokens=drafts.shape[1],
                match_override_len=self._options.match_override_len,
            )
            made = drafter.draft(history, rows[:, rows.shape[1] - num_steps :], limits)
            lists, num_model = made.token_ids, made.num_model
        else:
            lists = self._matcher.match(history, None, limits).to_lists()
            num_model = np.zeros(len(lists), np.int32)
        window = np.full((len(lists), drafts.shape[1]), -1, np.int64)
        for i, row in enumerate(lists):
            window[i, : len(row)] = row
        drafts.copy_(self._feed.to_device(window))
        counts = np.array([len(row) for row in lists], np.int32)
        return self._feed.to_device(counts), self._feed.to_device(num_model)

    def _continue(
        self, input_batch: Any, drafts: torch.Tensor, num_steps: int, max_drafts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict from the tokens of the step before, and let the device go on from this one's."""
        history = self._history(input_batch)
        reach = np.full(len(history.req_ids), self._feed.reach, np.int32)
        match = self._matcher.match(history, None, reach)
        threshold = self._options.match_override_len
        replaces = (match.match_len >= threshold) & (threshold > 0)
        return continue_predictions(
            self._req_states.all_token_ids.gpu,
            self._req_states.total_len.gpu,
            input_batch.idx_mapping,
            drafts,
            self._feed.to_device(match.token_ids),
            self._feed.to_device(match.num_tokens),
            self._feed.to_device(history.num_tokens.astype(np.int32)),
            self._feed.to_device(replaces.astype(np.int32)),
            num_model_steps=num_steps,
            max_drafts=max_drafts,
        )
