"""The arbiter on Model Runner V2: texts, offers and choice stay on the device.

The host decides one thing, how many passes of the draft model to launch. It goes by what the device has reported of an
earlier step: of the last one, whose end a synchronous step has waited for anyway, or with asynchronous scheduling of
the one before that. So it hardly ever waits. Every worker of a group reads the report of the same step, and so decides
alike.
"""

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.kernels import arbiter as kernels
from vllm_specplus.kernels.arbiter.state import MAX_STOPS, NO_OFFERS, NO_TOKEN, ONE
from vllm_specplus.kernels.drafts import DraftCounts, Limits
from vllm_specplus.proposers.adaptive import arrange_chains
from vllm_specplus.proposers.arbiter import ASLEEP, CommonAccount, Prices, ScaledPrices, prior_chances
from vllm_specplus.runners.arbiter_options import MATCH_LEN_CAP, arbiter_options, matching_sources
from vllm_specplus.runners.step_prices import StepPrices
from vllm_specplus.runners.v2.fillers import SlotFiller, longest_text
from vllm_specplus.runners.v2.host_tokens import Arrival, TokenCopier
from vllm_specplus.runners.v2.reports import Report, Reports
from vllm_specplus.runners.v2.requests import RequestTracker, SavedAccount
from vllm_specplus.runners.v2.suffix import SuffixFiller
from vllm_specplus.sources import NGRAM, SUFFIX

if TYPE_CHECKING:
    from vllm_specplus.runners.v2.states import FollowedRequestState


class Clock:
    """Reads the time at a place in the device's work."""

    def __init__(self, device: torch.device):
        self._on_host = time.perf_counter()
        self._event = None
        if device.type != "cpu":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def seconds_until(self, end: "Clock") -> float:
        """The time between two readings, both of which the device has passed."""
        if self._event is None or end._event is None:
            return end._on_host - self._on_host
        return self._event.elapsed_time(end._event) / 1000


class _Passes(NamedTuple):
    """The draft model's passes in a step: how many, and when they began and ended."""

    number: int
    began: Clock
    ended: Clock
    is_counted: bool


class _Report(NamedTuple):
    """What the device tells of one step, on its way to the host."""

    indices: np.ndarray  # [B] request states
    replaced: set[int]  # the states that their requests have left since
    sent: Report  # see `kernels.choose_and_settle`
    passes: _Passes | None


class AdaptiveFiller(SlotFiller):
    """Fills slots with what earns most, of all sources; references are among them.

    Args:
        by_state: see `Drafting.counts`.
        confidences: see `Drafting.confidences`.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        req_states: "FollowedRequestState",
        copier: TokenCopier,
        requests: RequestTracker,
        by_state: DraftCounts,
        confidences: torch.Tensor | None = None,
    ):
        self._by_state = by_state
        self._confidences = confidences
        self._options: SpecPlusOptions = vllm_config.speculative_config.specplus
        self._arguments = arbiter_options(vllm_config)
        self._device = device
        self._req_states = req_states
        self._copier = copier
        self._requests = requests
        self._max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self._matching = matching_sources(self._options)
        self._suffix: SuffixFiller | None = None
        if SUFFIX in self._matching:
            faults = requests.live_requests.faults
            self._suffix = SuffixFiller(self._options, req_states, copier, requests.scopes, faults, by_state)
        self.needs_every_step = self._suffix is not None
        # With asynchronous scheduling the host has launched a step before the device is at the end of the one before.
        self._lag = 2 if copier.is_async else 1
        self._reports: deque[_Report] = deque()
        size = kernels.NUM_TOTALS + 1 + self._max_num_reqs
        self._memory = Reports(size, torch.int64, device, number=self._lag, sleeps=copier.is_async)
        self.reset()

    def reset(self) -> None:
        """Forget what was learned; no request runs."""
        steps = self._arguments["num_model_steps"]
        sources, starts = arrange_chains(self._matching, steps)
        self._reference_chain = len(sources) - 1
        self._state = kernels.make_state(
            self._max_num_reqs,
            num_model_steps=steps,
            num_speculative_tokens=self._arguments["num_speculative_tokens"],
            chain_sources=sources,
            starts=starts,
            prior=torch.from_numpy(prior_chances()).to(self._device),
            is_blind=self._arguments["is_blind"],
        )
        self._stops = np.full((self._max_num_reqs, MAX_STOPS.value), NO_TOKEN.value, np.int32)  # as in the offers
        self._totals = torch.zeros(kernels.NUM_TOTALS, dtype=torch.int64, device=self._device)
        self._num_new = self._totals[:1]
        self._totals_before = (0, 0)
        self._texts = self._req_states.all_token_ids.gpu, self._req_states.total_len.gpu
        kernels.check_lasting(self._state, *self._texts, self._by_state, self._requests.fill_source, self._totals)
        self._ngrams = self._ngram_chains() if NGRAM in self._matching else None
        self._account = CommonAccount()
        self._prices: Prices | None = None
        self._reports.clear()
        # By request state, and whether one of them may be asleep.
        self._is_awake, self._may_sleep = np.ones(self._max_num_reqs, bool), False
        self._planned = steps
        self._passes_began: Clock | None = None
        self._passes: _Passes | None = None
        if self._suffix is not None:
            self._suffix.reset()

    def warm_up(self) -> None:
        """Launch what offers a reference's chain, and what chooses in a step without drafts, for no request."""
        nobody = torch.full((1,), -1, dtype=torch.int64, device=self._device)
        none = torch.zeros(1, dtype=torch.int32, device=self._device)
        drafts = nobody.new_zeros(1, self._arguments["num_speculative_tokens"])
        self._offer_reference(nobody, drafts, none, none)
        limits = Limits(none, none)
        nothing = [self._requests.nothing_counted(is_masked) for is_masked in (False, True)]
        for uncounted in (None, *nothing):
            kernels.judge_and_offer(self._state, *self._texts, nobody, self._num_new, limits, drafts[:, :0], uncounted)
        kernels.choose_and_settle(
            self._state,
            self._texts[1],
            nobody,
            limits,
            torch.ones(2 + self._arguments["num_model_steps"], dtype=torch.int64, device=self._device),
            drafts,
            self._by_state,
            self._requests.fill_source,
            self._totals,
            self._memory.take().tensor,
        )

    def _ngram_chains(self) -> kernels.NgramChains:
        options = self._options
        return kernels.NgramChains(
            self._state,
            *self._texts,
            min_ngram_size=options.min_ngram_size,
            max_ngram_size=options.max_ngram_size,
            match_len_cap=MATCH_LEN_CAP,
            takes_first=options.ngram_match_order == "first",
            first_chain=self._matching.index(NGRAM),
            chains_per_start=len(self._matching),
        )

    def begin(self, req_id: str, index: int) -> None:
        """Make room for a request that takes a place among the request states; one that comes back has its credit."""
        self._state.offer_positions[index].fill_(NO_OFFERS.value)
        for numbers in self._state.record:
            numbers[index].fill_(0)
        self._set_stops(index, self._requests.live_requests.stop_token_ids.get(req_id, []))
        account = self._requests.take_back(req_id)
        if account is not None:
            self._take_place(index, account.is_awake)
            self._state.credits[index : index + 1].copy_(account.credits)
            return
        # As many as the step has: those that begin with it come one by one.
        num_reqs = self._prices_of_steps.num_reqs
        credit = self._account.allowance(num_reqs) if self._requests.allows_drafts(index) else ASLEEP
        self._take_place(index, credit != ASLEEP)
        self._state.credits[index].fill_(credit)

    def _set_stops(self, index: int, token_ids: list[int]) -> None:
        """Set the tokens that end a request's text; mostly those of the last one in its place."""
        stops = np.full(MAX_STOPS.value, NO_TOKEN.value, np.int32)
        stops[: len(token_ids)] = token_ids
        if not np.array_equal(stops, self._stops[index]):
            self._state.offers.stops[index].copy_(self._copier.to_device(stops))
            self._stops[index] = stops

    def _take_place(self, index: int, is_awake: bool) -> None:
        """Another request, or none, has a request state now: reports under way do not tell of it."""
        for report in self._reports:
            report.replaced.add(index)
        self._is_awake[index] = is_awake
        self._may_sleep = self._may_sleep or not is_awake

    def end(self, req_id: str, index: int) -> None:
        """Keep the credit of a request that may come back: once it sleeps, its draft cache has gaps."""
        if not self._requests.has_ended(req_id):
            credits = self._state.credits[index : index + 1].clone()
            self._requests.keep(req_id, SavedAccount(bool(self._is_awake[index]), credits))
        self._take_place(index, is_awake=True)

    @property
    def _prices_of_steps(self) -> StepPrices:
        assert self._requests.prices is not None
        return self._requests.prices

    def begin_passes(self, input_batch: Any, most: int) -> int | None:
        """See `SlotFiller.begin_passes`; the draft model does not run where all requests have given it up."""
        # Even where vLLM wants no drafts, the draft model has to keep up with the text.
        number = self._plan_passes(input_batch, max(most, 1))
        self._passes_began = Clock(self._device) if number else None
        return number or None

    def end_passes(self, number: int | None) -> None:
        """See `SlotFiller.end_passes`."""
        # None after a fault too: then nobody knows when the passes began.
        began, self._passes_began = self._passes_began, None
        if number and began is not None:
            ended, prices = Clock(self._device), self._prices_of_steps
            with self._requests.live_requests.faults.caught("counting"):
                prices.expect_passes(number)
            self._passes = _Passes(number, began, ended, prices.is_counted)

    def begin_step(self, input_batch: Any) -> None:
        """Take over what has been told of an earlier step, and the prices for this one.

        No fault must keep a worker from the exchange of prices with the others.
        """
        with self._requests.live_requests.faults.caught("drafting", input_batch.req_ids):
            while len(self._reports) >= self._lag:
                self._read(self._reports.popleft())
        prices = self._prices_of_steps.agree(input_batch.num_reqs)
        if prices is not self._prices:
            self._set_prices(prices)

    def _plan_passes(self, input_batch: Any, most: int) -> int:
        if self._arguments["makes_all_passes"]:
            return most
        if self._may_sleep and not self._is_awake[input_batch.idx_mapping_np].any():
            return 0
        return min(max(self._planned, 1), most)

    def fill(
        self,
        input_batch: Any,
        drafts: torch.Tensor,
        model_drafts: torch.Tensor,
        limits: Limits,
        arrival: Arrival | None,
    ) -> DraftCounts:
        """See `SlotFiller.fill`."""
        self._judge(input_batch, model_drafts, limits)
        idx_mapping, matches = input_batch.idx_mapping, None
        if self._ngrams is not None:
            matches = self._ngrams.search(idx_mapping, limits, longest_text(input_batch) + model_drafts.shape[1])
        if self._suffix is not None:
            chains = self._suffix.chains(input_batch, model_drafts.shape[1], limits, arrival)
            where = {"first_chain": self._matching.index(SUFFIX), "chains_per_start": len(self._matching)}
            kernels.offer_chains(self._state, idx_mapping, *chains, **where)
        reference = self._requests.continue_references(input_batch, limits)
        if reference is not None:
            self._offer_reference(idx_mapping, *reference)

        chosen = self._choose(input_batch, drafts, limits, limits, matches)
        if self._confidences is not None:
            torch.div(chosen.chances[: len(drafts)], ONE.value, out=self._confidences[: len(drafts)])
        return chosen.counts

    def skip(
        self,
        input_batch: Any,
        drafts: torch.Tensor,
        model_drafts: torch.Tensor,
        limits: Limits,
        arrival: Arrival | None,
    ) -> None:
        """See `SlotFiller.skip`; the model's passes earn nothing in such a step, but are paid for."""
        # Requests that have left their prompts could draft.
        decoding = limits._replace(max_drafts_ptr=torch.ones_like(limits.max_drafts_ptr))
        self._judge(input_batch, model_drafts, decoding)
        if self._suffix is not None:
            self._suffix.skip(input_batch, drafts, model_drafts, limits, arrival)
        self._choose(input_batch, drafts, limits, decoding)

    def _judge(self, input_batch: Any, model_drafts: torch.Tensor, limits: Limits) -> None:
        """Judge the offers of the last step by the tokens that have come, and offer the model's drafts."""
        batch = input_batch.idx_mapping, self._num_new, limits, model_drafts
        kernels.judge_and_offer(self._state, *self._texts, *batch, self._requests.uncounted(input_batch))
        self._requests.forget_uncounted()

    def _offer_reference(
        self, idx_mapping: torch.Tensor, token_ids: torch.Tensor, lengths: torch.Tensor, agreed: torch.Tensor
    ) -> None:
        """Offer one chain to each request: see `RequestTracker.continue_references`."""
        chains = token_ids[None], lengths[None], agreed[None]
        kernels.offer_chains(self._state, idx_mapping, *chains, first_chain=self._reference_chain)

    def _choose(
        self,
        input_batch: Any,
        drafts: torch.Tensor,
        limits: Limits,
        planning: Limits,
        matches: kernels.NgramMatches | None = None,
    ) -> kernels.Chosen:
        """Choose, enter what the passes have earned, and send the host a report."""
        report = self._memory.take()
        chosen = kernels.choose_and_settle(
            self._state,
            self._texts[1],
            input_batch.idx_mapping,
            limits,
            self._prices_on_device,
            drafts,
            self._by_state,
            self._requests.fill_source,
            self._totals,
            report.tensor,
            planning=planning,
            matches=matches,
        )
        num_reqs = len(drafts)
        if num_reqs:
            report.send(kernels.NUM_TOTALS + 1 + num_reqs)
            self._reports.append(_Report(input_batch.idx_mapping_np, set(), report, self._passes))
        self._passes = None
        return chosen

    def _set_prices(self, prices: Prices) -> None:
        self._prices = prices
        if self._arguments["makes_all_passes"]:
            prices = prices.without_passes()
        self._account.charge(prices)
        scaled = ScaledPrices.of(prices, self._arguments["num_model_steps"])
        self._step_price = scaled.step
        # With asynchronous scheduling a slot is paid for before it is filled.
        slot = 0 if self._copier.is_async else scaled.slot
        self._prices_on_device = self._copier.to_device(np.array([slot, scaled.step, *scaled.passes], np.int64))

    def _read(self, report: _Report) -> None:
        """Take over what an earlier step has told."""
        indices = report.indices
        values = report.sent.read(kernels.NUM_TOTALS + 1 + len(indices))
        tokens, profit, self._planned = values[: kernels.NUM_TOTALS + 1].tolist()
        num_new, new_profit = tokens - self._totals_before[0], profit - self._totals_before[1]
        self._totals_before = tokens, profit
        self._account.add_tokens(num_new, len(indices), self._step_price)
        self._account.add(new_profit)
        is_awake = values[kernels.NUM_TOTALS + 1 :] != ASLEEP
        if self._may_sleep or not is_awake.all():
            if report.replaced:
                is_awake = np.where(np.isin(indices, [*report.replaced]), self._is_awake[indices], is_awake)
            self._is_awake[indices] = is_awake
            self._may_sleep = not self._is_awake.all()
        with self._requests.live_requests.faults.caught("counting"):
            self._prices_of_steps.add_tokens(num_new)
            if report.passes is not None:
                number, began, ended, is_counted = report.passes
                seconds = began.seconds_until(ended)
                self._prices_of_steps.add_past_passes(number, seconds, len(indices), is_counted=is_counted)
