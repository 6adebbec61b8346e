"""Drafting on vLLM's V1 model runner.

A hybrid is a subclass of vLLM's own proposer for its draft model. It runs up to ``num_model_steps`` passes, and joins
their drafts with those of the history. The methods without a draft model (ngram, suffix, naive) run as vLLM's custom
class. Both return lists, so vLLM never schedules a slot that holds no draft.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.config.keys import NAIVE
from vllm_specplus.proposers.adaptive import AdaptiveDrafter
from vllm_specplus.proposers.arbiter import Choice
from vllm_specplus.proposers.history import History, Matcher
from vllm_specplus.proposers.hybrid import Drafts, HybridDrafter
from vllm_specplus.proposers.ngram import NgramMatcher
from vllm_specplus.proposers.suffix import SuffixMatcher
from vllm_specplus.runners.arbiter_options import MATCH_LEN_CAP, arbiter_options, matching_sources
from vllm_specplus.runners.faults import Faults, GuardedMatcher
from vllm_specplus.runners.live_requests import LiveRequests
from vllm_specplus.runners.v1.history import MAX_BATCHES_WITH_STATE, HostHistory
from vllm_specplus.runners.v1.requests import RequestTracker
from vllm_specplus.sources import SOURCES
from vllm_specplus.strategies import uses_draft_distribution

if TYPE_CHECKING:

    class _Proposer:
        """What the hybrid reads and extends of vLLM's proposers."""

        vllm_config: Any
        num_speculative_tokens: int

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def prepare_next_token_ids_padded(self, *args: Any) -> Any: ...
        def prepare_next_token_ids_cpu(self, *args: Any) -> Any: ...
        def prepare_inputs_padded(self, *args: Any) -> Any: ...
        def propose(self, *args: Any, **kwargs: Any) -> Any: ...
        def take_last_draft_probs(self) -> torch.Tensor | None: ...

else:
    _Proposer = object


def make_matcher(kind: str, vllm_config: Any, faults: Faults) -> Matcher:
    """Make the matcher of a strategy or method: ``ngram`` or ``suffix``."""
    options: SpecPlusOptions = vllm_config.speculative_config.specplus
    model_config = vllm_config.model_config
    vocab_size = model_config.get_vocab_size() if model_config.is_multimodal_model else None
    if kind == "suffix":
        return GuardedMatcher(SuffixMatcher(**options.suffix_matcher), faults, vocab_size)
    ngram = NgramMatcher(
        MAX_BATCHES_WITH_STATE * vllm_config.scheduler_config.max_num_seqs,
        model_config.max_model_len,
        min_ngram_size=options.min_ngram_size,
        max_ngram_size=options.max_ngram_size,
        match_order=options.ngram_match_order,
        match_len_cap=MATCH_LEN_CAP if options.adaptive else max(options.match_override_len, 1),
    )
    return GuardedMatcher(ngram, faults, vocab_size)


def make_adaptive_drafter(vllm_config: Any, live_requests: LiveRequests) -> AdaptiveDrafter:
    """Make the drafter of a config with `adaptive`."""
    sources = matching_sources(vllm_config.speculative_config.specplus)
    return AdaptiveDrafter(
        {source: make_matcher(SOURCES[source], vllm_config, live_requests.faults) for source in sources},
        max_num_reqs=MAX_BATCHES_WITH_STATE * vllm_config.scheduler_config.max_num_seqs,
        stop_token_ids=live_requests.stop_token_ids,
        **arbiter_options(vllm_config),
    )


class HistoryDrafter:
    """Drafts without a model: ngram, suffix, or (naive) from the requests' references alone."""

    def __init__(self, vllm_config: Any):
        self._vllm_config = vllm_config
        options: SpecPlusOptions = vllm_config.speculative_config.specplus
        self._width = options.num_speculative_tokens
        self._adaptive: AdaptiveDrafter | None = None
        self._matcher: Matcher | None = None

    def set_runner(self, runner: Any, tracker: RequestTracker) -> None:
        """Set the runner whose batches are drafted for, and what follows its requests."""
        self._history = HostHistory(runner, tracker)
        self._tracker = tracker
        self._faults = tracker.live_requests.faults
        options: SpecPlusOptions = self._vllm_config.speculative_config.specplus
        if options.adaptive:
            tracker.drafter = self._adaptive = make_adaptive_drafter(self._vllm_config, tracker.live_requests)
        elif options.method != NAIVE:
            self._matcher = make_matcher(options.method, self._vllm_config, self._faults)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model, but vLLM's CPU runner calls this."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for each request; arguments and result are those of vLLM's custom proposers."""
        req_ids = self._history.req_ids(len(sampled_token_ids))
        with self._faults.caught("drafting", req_ids):
            if self._adaptive is not None:
                _set_prices(self._adaptive, self._tracker, len(req_ids))
            return self._draft(*self._history.read(sampled_token_ids, self._width))
        return [[] for _ in req_ids]

    def _draft(self, history: History, max_drafts: np.ndarray) -> list[list[int]]:
        if self._adaptive is not None:
            self._history.drop_idle_state(self._adaptive.retain)
            _plan_passes(self._adaptive, self._tracker, history, max_drafts)
            return _choose(self._adaptive, self._tracker, history, max_drafts, None).to_lists()
        lists: list[list[int]] = [[] for _ in history.req_ids]
        if self._matcher is not None:
            self._history.drop_idle_state(self._matcher.retain)
            lists = self._matcher.match(history, None, max_drafts).to_lists()
        drafts = Drafts(lists, np.zeros(len(lists), np.int32))
        self._tracker.put_references_first(history, max_drafts, drafts)
        return drafts.token_ids


class HybridMixin(_Proposer):
    """Joins drafts from history with those of vLLM's proposer, into which this class is mixed.

    vLLM calls ``prepare_next_token_ids_*`` with this step's tokens right before ``propose``. In the padded form it has
    not yet written them into the host's copy of the sequences.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        options: SpecPlusOptions = self.vllm_config.speculative_config.specplus
        assert options.num_model_steps is not None
        self._steps = options.num_model_steps
        self._is_one_hot_to_the_verifier = not uses_draft_distribution(options.verify_strategy)
        self._sampled_tokens: list[list[int]] = []
        self._tokens_on_host = False
        self._draft_probs: torch.Tensor | None = None
        # Of this step: whether the draft model sleeps, and the time that its inputs took.
        self._is_asleep, self._inputs_time = False, 0.0
        # vLLM's dummy runs go by this number: an idle data-parallel rank must run as many passes as a busy one.
        self.num_speculative_tokens = self._steps

    def set_runner(self, runner: Any, tracker: RequestTracker) -> None:
        """Set the runner whose batches are drafted for, and what follows its requests."""
        self._history = HostHistory(runner, tracker)
        self._tracker = tracker
        self._faults = tracker.live_requests.faults
        options: SpecPlusOptions = self.vllm_config.speculative_config.specplus
        self._drafter: HybridDrafter | AdaptiveDrafter
        if options.adaptive:
            self._drafter = tracker.drafter = make_adaptive_drafter(self.vllm_config, tracker.live_requests)
        else:
            self._drafter = HybridDrafter(
                make_matcher(options.mtp_strategy.removeprefix("with_"), self.vllm_config, self._faults),
                num_model_steps=self._steps,
                num_speculative_tokens=options.num_speculative_tokens,
                match_override_len=options.match_override_len,
            )

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: Any,
        gpu_input_batch: Any,
        discard_request_mask: torch.Tensor,
    ) -> Any:
        """Note this step's tokens, [B, width] with -1 after each request's last; then go on as vLLM does.

        While the draft model sleeps the result is twice None.
        """
        req_ids = gpu_input_batch.req_ids[: len(sampled_token_ids)]
        self._sampled_tokens, self._tokens_on_host = [[] for _ in req_ids], False
        self._is_asleep, self._inputs_time = False, 0.0
        with self._faults.caught("drafting", req_ids):
            discards = self._history.discards(len(req_ids))
            self._sampled_tokens = kept_tokens(sampled_token_ids, discards, gpu_input_batch.vocab_size)
            self._is_asleep = isinstance(self._drafter, AdaptiveDrafter) and self._drafter.is_asleep(req_ids)
        if self._is_asleep:
            # With synchronous scheduling nobody but the draft model reads them.
            return None, None
        with self._timed_inputs():
            return super().prepare_next_token_ids_padded(
                sampled_token_ids, requests, gpu_input_batch, discard_request_mask
            )

    def prepare_inputs_padded(
        self, common_attn_metadata: Any, spec_decode_metadata: Any, valid_sampled_tokens_count: torch.Tensor
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
        """Prepare the draft model's inputs as vLLM does, unless it sleeps; arguments and result are those of vLLM."""
        if self._is_asleep:
            return common_attn_metadata, None, None
        with self._timed_inputs():
            return super().prepare_inputs_padded(common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count)

    @contextmanager
    def _timed_inputs(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._inputs_time += time.perf_counter() - began

    def prepare_next_token_ids_cpu(
        self,
        sampled_token_ids: list[list[int]],
        requests: Any,
        gpu_input_batch: Any,
        num_scheduled_tokens: Any,
    ) -> Any:
        """Note this step's tokens, which vLLM has written into the host's sequences; then go on as vLLM does."""
        self._sampled_tokens = sampled_token_ids
        self._tokens_on_host = True
        self._is_asleep, self._inputs_time = False, 0.0
        return super().prepare_next_token_ids_cpu(sampled_token_ids, requests, gpu_input_batch, num_scheduled_tokens)

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Make the model's passes and join their drafts with others; return one list of drafts for each request."""
        if isinstance(self._drafter, AdaptiveDrafter):
            return self._propose_what_pays(self._drafter, num_speculative_tokens, *args, **kwargs)
        model_drafts = super().propose(self._steps, *args, **kwargs)
        drafts, self._draft_probs = self._no_drafts(), None
        with self._faults.caught("drafting", self._req_ids()):
            history, max_drafts = self._read_history(num_speculative_tokens)
            self._history.drop_idle_state(self._drafter.matcher.retain)
            joined = self._drafter.draft(history, model_drafts.cpu().numpy(), max_drafts)
            self._tracker.put_references_first(history, max_drafts, joined)
            self._draft_probs = self._with_one_hot_rows(joined, num_speculative_tokens)
            drafts = joined
        return drafts.token_ids

    def _req_ids(self) -> list[str]:
        return self._history.req_ids(len(self._sampled_tokens))

    def _no_drafts(self) -> Drafts:
        num_reqs = len(self._sampled_tokens)
        return Drafts([[] for _ in range(num_reqs)], np.zeros(num_reqs, np.int32))

    def _propose_what_pays(
        self, drafter: AdaptiveDrafter, num_speculative_tokens: int, *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        # After a fault the model makes all passes. So its draft cache has no gaps, and all ranks agree on the number.
        plan, num_passes = None, 0 if self._is_asleep else self._steps
        with self._faults.caught("drafting", self._req_ids()):
            _set_prices(drafter, self._tracker, len(self._sampled_tokens))
            history, max_drafts = self._read_history(num_speculative_tokens)
            self._history.drop_idle_state(drafter.retain)
            num_passes = _plan_passes(drafter, self._tracker, history, max_drafts)
            plan = history, max_drafts
        began = time.perf_counter()
        model_drafts = super().propose(num_passes, *args, **kwargs).cpu().numpy() if num_passes else None
        drafts, self._draft_probs = self._no_drafts().token_ids, None
        if plan is not None:
            with self._faults.caught("drafting", self._req_ids()):
                choice = _choose(drafter, self._tracker, *plan, model_drafts)
                chosen = choice.to_lists()
                # Without drafts of the model no draft has a distribution.
                if num_passes:
                    rows = self._with_one_hot_rows(Drafts(chosen, choice.num_model), num_speculative_tokens)
                    self._draft_probs = rows
                drafts = chosen
        if num_passes:
            assert self._tracker.prices is not None
            # The choice takes longer with the model's drafts, which is their cost too.
            seconds = self._inputs_time + time.perf_counter() - began
            with self._faults.caught("counting"):
                self._tracker.prices.add_passes(num_passes, seconds)
        return drafts

    def _read_history(self, width: int) -> tuple[History, np.ndarray]:
        """See `HostHistory.read`."""
        read = self._history.read if self._tokens_on_host else self._history.write_and_read
        return read(self._sampled_tokens, width)

    def take_last_draft_probs(self) -> torch.Tensor | None:
        """[B, K, vocab] float32 probabilities of all drafts: the model's own, then one-hot rows."""
        return self._draft_probs

    def _with_one_hot_rows(self, drafts: Drafts, width: int) -> torch.Tensor | None:
        model_probs = super().take_last_draft_probs()
        if model_probs is None or self._is_one_hot_to_the_verifier:
            return None
        return with_one_hot_rows(model_probs, drafts, width)


def _set_prices(drafter: AdaptiveDrafter, tracker: RequestTracker, num_reqs: int) -> None:
    """Set the prices of a step, first of all: no fault must keep a worker from the exchange with the others."""
    assert tracker.prices is not None
    drafter.set_prices(tracker.prices.agree(num_reqs))


def _plan_passes(drafter: AdaptiveDrafter, tracker: RequestTracker, history: History, max_drafts: np.ndarray) -> int:
    # Their text has gone from the history.
    drafter.withdraw(tracker.live_requests.faults.without_drafts)
    return drafter.plan(
        history, max_drafts, tracker.references(history.req_ids), without_drafts=tracker.live_requests.without_drafts()
    )


def _choose(
    drafter: AdaptiveDrafter,
    tracker: RequestTracker,
    history: History,
    max_drafts: np.ndarray,
    model_drafts: np.ndarray | None,
) -> Choice:
    if model_drafts is None:
        model_drafts = np.empty((len(max_drafts), 0), np.int32)
    choice = drafter.draft(history, max_drafts, model_drafts)
    tracker.take_note(history.req_ids, choice)
    return choice


class MedusaMixin(HybridMixin):
    """Reads this step's tokens itself: vLLM hands them to every proposer but Medusa's, after it has written them."""

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Draft as a hybrid does; see `HybridMixin.propose`."""
        req_ids = self._history.req_ids()
        self._sampled_tokens, self._tokens_on_host = [[] for _ in req_ids], True
        with self._faults.caught("drafting", req_ids):
            self._sampled_tokens = self._history.newest_tokens()
        return super().propose(num_speculative_tokens, *args, **kwargs)


class _MedusaHeads(_Proposer):
    """Gives vLLM's Medusa proposer what `HybridMixin` asks of one."""

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[B, passes] drafts; all heads run together."""
        return super().propose(self.num_speculative_tokens, *args, **kwargs)[:, :num_speculative_tokens]

    def take_last_draft_probs(self) -> None:
        """Return None: the heads' drafts are not sampled."""


def hybrid_class(proposer: type) -> type:
    """Make the hybrid subclass of one of vLLM's proposers."""
    bases = (MedusaMixin, _MedusaHeads) if proposer.__name__ == "MedusaProposer" else (HybridMixin,)
    return type(f"Hybrid{proposer.__name__}", (*bases, proposer), {})


def kept_tokens(sampled: torch.Tensor, discards: Sequence[bool], vocab_size: int) -> list[list[int]]:
    """[B] lists of the tokens that requests got; none of those whose step is discarded.

    Args:
        sampled: [B, width] int, -1 after each request's last.
        discards: [B], whose step is discarded.
        vocab_size: tokens from here on are none.
    """
    return [
        [] if is_discarded else [token for token in row if 0 <= token < vocab_size]
        for row, is_discarded in zip(sampled.tolist(), discards, strict=True)
    ]


def with_one_hot_rows(model_probs: torch.Tensor, drafts: Drafts, width: int) -> torch.Tensor:
    """Make the distributions that drafts were drawn from: the model's own, and one-hot rows for the matcher's drafts.

    Args:
        model_probs: [B, S, vocab] float32, of the model's S drafts.
        drafts: the drafts of the B requests.
        width: K, slots of a request.

    Returns:
        [B, K, vocab] float32; zeros where a slot holds no draft.
    """
    batch, steps, vocab = model_probs.shape
    matched = np.full((batch, width), -1, np.int64)
    for i, row in enumerate(drafts.token_ids):
        first = int(drafts.num_model[i])
        matched[i, first : len(row)] = row[first:]
    token_ids = torch.from_numpy(matched).to(model_probs.device)
    num_model = torch.from_numpy(drafts.num_model).to(model_probs.device)
    slots = torch.arange(width, device=model_probs.device)

    probs = model_probs.new_zeros(batch, width, vocab)
    probs.scatter_(2, token_ids.clamp(min=0)[:, :, None], (token_ids >= 0).to(probs.dtype)[:, :, None])
    of_model = (slots[:steps] < num_model[:, None])[:, :, None]
    probs[:, :steps] = torch.where(of_model, model_probs, probs[:, :steps])
    return probs
