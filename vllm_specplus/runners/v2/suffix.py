"""Suffix decoding on Model Runner V2: tokens are on the device, suffix trees on the host.

With synchronous scheduling a step drafts from its own tokens. With asynchronous scheduling the host has the tokens of
the step before. It forecasts what comes after them, far enough to reach past this step's tokens. If the forecast
agrees with them, the device continues it behind them (`kernels.drafts.continue_forecasts`).
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.kernels.drafts import DraftCounts, Limits, continue_forecasts, place_drafts
from vllm_specplus.proposers.history import History
from vllm_specplus.proposers.hybrid import HybridDrafter
from vllm_specplus.proposers.suffix import SuffixMatcher
from vllm_specplus.runners.faults import Faults, GuardedMatcher
from vllm_specplus.runners.suffix_scopes import SuffixScopes
from vllm_specplus.runners.v2.fillers import SlotFiller
from vllm_specplus.runners.v2.host_tokens import Arrival, TokenCopier

if TYPE_CHECKING:
    from vllm_specplus.runners.v2.states import FollowedRequestState


logger = init_logger("vllm.specplus")


@dataclass(frozen=True, kw_only=True)
class _MirrorHistory(History):
    """A history whose rows are picked from the mirror."""

    indices: np.ndarray  # [B] the mirror's row of each request

    def tokens(self, i: int) -> np.ndarray:
        return self.token_ids[self.indices[i], : self.num_tokens[i]]

    def only(self, i: int) -> Self:
        chosen = slice(i, i + 1)
        return replace(super().only(i), token_ids=self.token_ids, indices=self.indices[chosen])


class SuffixFiller(SlotFiller):
    """Fills slots from suffix trees on the host."""

    needs_every_step = True

    def __init__(
        self,
        options: SpecPlusOptions,
        req_states: "FollowedRequestState",
        copier: TokenCopier,
        scopes: SuffixScopes,
        faults: Faults,
        by_state: DraftCounts,
    ):
        self._options = options
        self._scopes = scopes
        self._faults = faults
        self._by_state = by_state
        self._req_states = req_states
        self._copier = copier
        self.reset()
        logger.info(
            "suffix trees are on the host: each step waits for the tokens of %s",
            "the step before it" if copier.is_async else "its own",
        )

    def reset(self) -> None:
        """Begin with empty trees."""
        self._matcher = GuardedMatcher(SuffixMatcher(**self._options.suffix_matcher), self._faults)

    def fill(
        self,
        input_batch: Any,
        drafts: torch.Tensor,
        model_drafts: torch.Tensor,
        limits: Limits,
        arrival: Arrival | None,
    ) -> DraftCounts:
        """See `SlotFiller.fill`."""
        self._take_in(arrival)
        if self._copier.is_async:
            return self._continue(input_batch, drafts, model_drafts, limits)
        assert arrival is not None
        return self._draft(input_batch, drafts, arrival.rows, model_drafts.shape[1])

    def skip(
        self,
        input_batch: Any,
        drafts: torch.Tensor,
        model_drafts: torch.Tensor,
        limits: Limits,
        arrival: Arrival | None,
    ) -> None:
        """See `SlotFiller.skip`."""
        self._take_in(arrival)

    def chains(
        self, input_batch: Any, num_passes: int, limits: Limits, arrival: Arrival | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the trees say behind each number of the model's drafts: 0, 1, ..., `num_passes`.

        With asynchronous scheduling only what they say behind none of them: the others have not come to the host.

        Args:
            input_batch, limits, arrival: as for `fill`.
            num_passes: drafts that the model made for each request.

        Returns:
            [N, B, K] tokens, [N, B] int32 their number, [N, B] int32 how many tokens before them agree.
        """
        self._take_in(arrival)
        history = self._history(input_batch)
        if self._copier.is_async:
            match = self._matcher.match(history, None, np.full(len(history.req_ids), self._copier.reach, np.int32))
            found = self._copier.continue_chains(
                input_batch, match.token_ids, match.num_tokens, match.match_len, limits
            )
            return found[0][None], found[1][None], found[2][None]
        assert arrival is not None
        max_drafts = arrival.rows[:, 1]
        model_drafts = arrival.rows[:, arrival.rows.shape[1] - num_passes :]
        token_ids = np.zeros((num_passes + 1, len(max_drafts), max(max_drafts.max(), 1)), np.int32)
        num_tokens, agreed = np.zeros((2, *token_ids.shape[:2]), np.int32)
        for start in range(num_passes + 1):
            drafts_before = model_drafts[:, :start] if start else None
            match = self._matcher.match(history, drafts_before, np.maximum(max_drafts - start, 0))
            token_ids[start, :, : match.token_ids.shape[1]] = match.token_ids
            num_tokens[start], agreed[start] = match.num_tokens, match.match_len
        tokens, *counts = self._copier.pack_to_device(token_ids, num_tokens, agreed)
        return tokens, counts[0], counts[1]

    def _take_in(self, arrival: Arrival | None) -> None:
        """Add the last tokens of requests that have finished, and drop the state of those that have gone."""
        if arrival is not None:
            self._add_finished(arrival)
        self._matcher.retain(self._req_states.req_id_to_index)

    def _add_finished(self, arrival: Arrival) -> None:
        """Add to the trees the last tokens of requests that have finished, which are part of their responses."""
        rows = arrival.rows
        for i, req_id in enumerate(arrival.req_ids):
            if req_id in self._req_states.req_id_to_index or self._faults.rows_without_drafts([req_id]):
                continue
            found = self._copier.mirror.find(arrival.indices[i], arrival.generation[i])
            if found is None:
                continue
            token_ids, prompt_len = found
            text = np.concatenate((token_ids, rows[i, 2 : 2 + max(0, rows[i, 0] - len(token_ids))][::-1]))
            lengths = np.array([len(text)]), np.array([prompt_len])
            history = History([req_id], text[None], *lengths, self._scopes.of([req_id]))
            self._matcher.match(history, None, np.zeros(1, np.int32))
            # After a fault nobody else would forget a request that has ended.
            self._faults.finish([req_id])

    def _history(self, input_batch: Any) -> _MirrorHistory:
        indices, mirror = input_batch.idx_mapping_np, self._copier.mirror
        num_tokens, num_prompt_tokens = mirror.num_tokens[indices], mirror.num_prompt_tokens[indices]
        faulty = self._faults.rows_without_drafts(input_batch.req_ids)
        num_tokens[faulty] = num_prompt_tokens[faulty] = 0
        return _MirrorHistory(
            req_ids=input_batch.req_ids,
            token_ids=mirror.token_ids,
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
            scopes=self._scopes.of(input_batch.req_ids),
            indices=indices,
        )

    def _draft(self, input_batch: Any, drafts: torch.Tensor, rows: np.ndarray, num_steps: int) -> DraftCounts:
        """Draft from this step's tokens and the model's drafts, which have all come to the host."""
        history, limits = self._history(input_batch), rows[:, 1]
        if num_steps:
            drafter = HybridDrafter(
                self._matcher,
                num_model_steps=num_steps,
                num_speculative_tokens=drafts.shape[1],
                match_override_len=self._options.match_override_len,
            )
            hybrid = drafter.draft(history, rows[:, rows.shape[1] - num_steps :], limits)
            lists, num_model = hybrid.token_ids, hybrid.num_model
        else:
            lists = self._matcher.match(history, None, limits).to_lists()
            num_model = np.zeros(len(lists), np.int32)
        padded = np.zeros((len(lists), drafts.shape[1]), np.int32)
        for i, row in enumerate(lists):
            padded[i, : len(row)] = row
        counts = np.array([len(row) for row in lists])
        tokens, num_drafts, num_from_model = self._copier.pack_to_device(padded, counts, num_model)
        place_drafts(drafts, tokens, num_drafts, num_from_model, input_batch.idx_mapping, self._by_state)
        return DraftCounts(num_drafts, num_from_model)

    def _continue(
        self, input_batch: Any, drafts: torch.Tensor, model_drafts: torch.Tensor, limits: Limits
    ) -> DraftCounts:
        """Forecast from the tokens of the step before, and let the device continue behind this step's tokens."""
        history = self._history(input_batch)
        reach = np.full(len(history.req_ids), self._copier.reach, np.int32)
        match = self._matcher.match(history, None, reach)
        threshold = self._options.match_override_len
        replaces = (match.match_len >= threshold) & (threshold > 0)
        return continue_forecasts(
            self._req_states.all_token_ids.gpu,
            self._req_states.total_len.gpu,
            input_batch.idx_mapping,
            drafts,
            *self._copier.pack_to_device(match.token_ids, match.num_tokens, history.num_tokens, replaces),
            model_drafts=model_drafts if model_drafts.shape[1] else None,
            limits=limits,
            by_state=self._by_state,
        )
