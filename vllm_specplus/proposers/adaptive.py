"""Drafts what earns most: the matchers, the references and the draft model offer, and the arbiter chooses."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from vllm_specplus.proposers.arbiter import Arbiter, Choice, Prices
from vllm_specplus.proposers.history import History, Match, Matcher
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.sources import REFERENCE


def arrange_chains(matching: Sequence[int], num_model_steps: int) -> tuple[list[int], list[int]]:
    """The source of each chain, and how many of the model's drafts it follows.

    The chains behind the same number of the model's drafts lie side by side. The reference's chain is the last.

    Args:
        matching: the sources that match the history.
        num_model_steps: S, the most passes of the draft model.
    """
    starts = [start for start in range(num_model_steps + 1) for _ in matching]
    return [*matching] * (num_model_steps + 1) + [REFERENCE], [*starts, 0]


class AdaptiveDrafter:
    """Drafts for a batch in each step: `plan`, then the draft model's passes, then `draft`.

    Args:
        matchers: by source.
        max_num_reqs: requests that have state at the same time.
        num_model_steps: S, the most passes of the draft model; 0 = there is none.
        num_speculative_tokens: K, the slots of a request.
        is_blind, stop_token_ids: as the arbiter's.
        makes_all_passes: whether each step has all passes, as data-parallel ranks must agree on their number.
    """

    def __init__(
        self,
        matchers: Mapping[int, Matcher],
        *,
        max_num_reqs: int,
        num_model_steps: int,
        num_speculative_tokens: int,
        is_blind: bool = False,
        makes_all_passes: bool = False,
        stop_token_ids: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self._matchers = matchers
        self._num_slots = num_speculative_tokens
        self._fixed_passes = num_model_steps if makes_all_passes else None
        self._prices: Prices | None = None
        sources, starts = arrange_chains(list(matchers), num_model_steps)
        self._reference_chain = len(sources) - 1
        self.arbiter = Arbiter(
            max_num_reqs,
            num_model_steps=num_model_steps,
            num_speculative_tokens=num_speculative_tokens,
            sources=sources,
            starts=starts,
            is_blind=is_blind,
            stop_token_ids=stop_token_ids,
        )

    def set_prices(self, prices: Prices) -> None:
        """Set what slots and passes cost from now on. Passes that are made anyway cost nothing."""
        if self._fixed_passes is None:
            self.arbiter.set_prices(prices)
        elif prices is not self._prices:
            self._prices = prices
            self.arbiter.set_prices(prices.without_passes())

    def is_asleep(self, req_ids: Sequence[str]) -> bool:
        """Whether no pass is going to be made for these requests: each has given the draft model up."""
        return self._fixed_passes is None and self.arbiter.is_asleep(req_ids)

    def plan(
        self,
        history: History,
        limits: np.ndarray,
        references: Sequence[ReferenceText | None],
        without_drafts: Iterable[str] = (),
    ) -> int:
        """Take in the new tokens, and say how many passes of the draft model to make.

        Args:
            history: the batch of B requests.
            limits: [B] int, the most drafts of each request; more than K count as K.
            references: [B], what each request brought.
            without_drafts: requests that never may have drafts.
        """
        self.arbiter.begin_step(history, without_drafts)
        self._offer_matches(history, None, limits)
        if references.count(None) < len(references):
            match = _cite(history, limits, references, self._num_slots)
            self.arbiter.offer(self._reference_chain, match.token_ids, match.num_tokens, match.match_len)
        return self.arbiter.plan_passes(limits) if self._fixed_passes is None else self._fixed_passes

    def draft(self, history: History, limits: np.ndarray, model_drafts: np.ndarray) -> Choice:
        """Choose the drafts of each request.

        Args:
            history, limits: as given to `plan`.
            model_drafts: [B, passes] int, the draft model's tokens; any number of passes.
        """
        num_passes = model_drafts.shape[1]
        if num_passes:
            self.arbiter.offer_model(model_drafts, limits)
        for start in range(1, num_passes + 1):
            self._offer_matches(history, model_drafts[:, :start], np.maximum(limits - start, 0))
        return self.arbiter.choose(limits)

    def withdraw(self, req_ids: Iterable[str]) -> None:
        """Forget what was offered to these requests: each begins anew under a name that may have been there before."""
        self.arbiter.withdraw(req_ids)

    def retain(self, req_ids: Collection[str]) -> None:
        """Drop the state of every request that is not named."""
        self.arbiter.retain(req_ids)
        for matcher in self._matchers.values():
            matcher.retain(req_ids)

    def _offer_matches(self, history: History, model_drafts: np.ndarray | None, limits: np.ndarray) -> None:
        start = 0 if model_drafts is None else model_drafts.shape[1]
        for i, matcher in enumerate(self._matchers.values()):
            match = matcher.match(history, model_drafts, limits)
            self.arbiter.offer(start * len(self._matchers) + i, match.token_ids, match.num_tokens, match.match_len)


def _cite(history: History, limits: np.ndarray, references: Sequence[ReferenceText | None], width: int) -> Match:
    """What the references draft, as a matcher would tell it."""
    num_reqs, limits = len(history.req_ids), np.minimum(limits, width)
    match = Match(np.zeros((num_reqs, width), np.int32), np.zeros(num_reqs, np.int32), np.zeros(num_reqs, np.int32))
    for i, reference in enumerate(references):
        if reference is not None and limits[i] > 0:
            drafts = reference.draft(history.tokens(i)[history.num_prompt_tokens[i] :], int(limits[i]))
            match.token_ids[i, : len(drafts)] = drafts
            match.num_tokens[i], match.match_len[i] = len(drafts), reference.agreed
    return match
