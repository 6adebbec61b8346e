"""Drafting on vLLM's V1 model runner.

A hybrid is vLLM's own proposer for its draft model, subclassed: it runs ``num_model_steps`` passes and then
asks the matcher for the remaining slots. The methods without a draft model (ngram, suffix, naive) run as
vLLM's custom class. Both return lists, so a slot that nothing fills is never scheduled.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.v1.worker import gpu_model_runner

from vllm_specplus import compat
from vllm_specplus.config import HISTORY_METHODS, SpecPlusOptions
from vllm_specplus.proposers.history import History, Matcher
from vllm_specplus.proposers.hybrid import Drafts, HybridDrafter
from vllm_specplus.proposers.ngram import NgramMatcher
from vllm_specplus.proposers.suffix import SuffixMatcher
from vllm_specplus.runners.v1.requests import RequestTracker
from vllm_specplus.runners.v1.samplers import StrategyRejectionSampler, StrategySampler

_MODEL_PROPOSERS = (
    "EagleProposer",
    "Gemma4Proposer",
    "Step3p5MTPProposer",
    "DraftModelProposer",
)


# State is kept for requests that wait their turn or were preempted, up to so many full batches of them.
_MAX_KEPT_BATCHES = 2


@contextmanager
def installed(options: SpecPlusOptions) -> Iterator[None]:
    """The plugin's classes stand in the runner's module while the block builds the runner."""
    names: dict[str, Any] = {}
    if options.is_hybrid:
        names |= {name: _hybrid(getattr(gpu_model_runner, name)) for name in _MODEL_PROPOSERS}
    if options.verify_strategy is not None:
        names |= {"Sampler": StrategySampler, "RejectionSampler": StrategyRejectionSampler}
    if options.method in HISTORY_METHODS:
        names["create_custom_proposer"] = HistoryDrafter
    with compat.override(gpu_model_runner, names):
        yield


def bind(runner: Any) -> RequestTracker | None:
    """Give the drafter and the samplers of a built runner what vLLM does not pass to them.

    Returns:
        What follows the runner's requests; None where the plugin does not draft.
    """
    _drop_fillers(runner)
    for name in ("sampler", "rejection_sampler"):
        part = getattr(runner, name, None)
        if isinstance(part, StrategySampler | StrategyRejectionSampler):
            part.bind(runner)
    drafter = getattr(runner, "drafter", None)
    if not isinstance(drafter, HistoryDrafter | _HybridMixin):
        return None
    requests = RequestTracker(runner)
    drafter.bind(runner, requests)
    return requests


def _drop_fillers(runner: Any) -> None:
    """Keep drafts that nobody drafted from being verified.

    Where one request comes near the model's length, vLLM drafts for none of the batch and puts zeros in their place.
    Its own sampling refuses them; a strategy that accepts any likely token would put them into the text.
    """
    copy_to_host = runner._copy_draft_token_ids_to_cpu
    runner.specplus_fillers = False

    def copy_draft_token_ids_to_cpu(scheduler_output: Any, zeros_only: bool = False) -> None:
        # Under async scheduling the slots are scheduled already: the verifier passes over them.
        runner.specplus_fillers = zeros_only
        if zeros_only and not runner.use_async_scheduling:
            req_ids = runner.input_batch.req_ids.copy()
            runner._draft_token_ids = [[] for _ in req_ids]
            runner._draft_token_req_ids = req_ids
        else:
            copy_to_host(scheduler_output, zeros_only)

    runner._copy_draft_token_ids_to_cpu = copy_draft_token_ids_to_cpu


def make_matcher(kind: str, vllm_config: Any) -> Matcher:
    """The matcher of a strategy or method: ``ngram`` or ``suffix``."""
    options: SpecPlusOptions = vllm_config.speculative_config.specplus
    if kind == "suffix":
        return SuffixMatcher(**options.suffix_matcher)
    return NgramMatcher(
        _MAX_KEPT_BATCHES * vllm_config.scheduler_config.max_num_seqs,
        vllm_config.model_config.max_model_len,
        min_ngram_size=options.min_ngram_size,
        max_ngram_size=options.max_ngram_size,
        match_len_cap=max(options.match_override_len, 1),
    )


class _HostHistory:
    """The batch's tokens on the host, and how many may be drafted for each request."""

    def __init__(self, runner: Any, requests: RequestTracker):
        self._runner = runner
        self._requests = requests
        self._max_kept = _MAX_KEPT_BATCHES * runner.scheduler_config.max_num_seqs

    def live(self) -> Collection[str]:
        """The requests whose state is worth keeping, those of this batch always among them."""
        unfinished = self._runner.requests
        return unfinished if len(unfinished) <= self._max_kept else self._runner.input_batch.req_ids

    def take(self, sampled: list[list[int]], width: int, *, on_host: bool = True) -> tuple[History, np.ndarray]:
        """The history of the batch, this step's tokens included.

        Args:
            sampled: [B] the tokens that each request got in this step; none for a partial prefill.
            width: the most drafts that a request may have.
            on_host: whether vLLM has written them into the host's sequences already. If not, they are
                written here, where vLLM's bookkeeping is about to write the same.

        Returns:
            The history, and [B] int64 drafts that each request may have: none for a partial prefill or
            where the model length leaves no room, and no more than the request allows.
        """
        batch = self._runner.input_batch
        num_reqs = len(sampled)
        num_tokens = batch.num_tokens_no_spec[:num_reqs].astype(np.int64)
        if not on_host:
            for i, tokens in enumerate(sampled):
                batch.token_ids_cpu[i, num_tokens[i] : num_tokens[i] + len(tokens)] = tokens
            num_tokens += [len(tokens) for tokens in sampled]
        # A prompt given as embeddings has no tokens; its row still holds those of an earlier request.
        num_prompt_tokens = batch.num_prompt_tokens[:num_reqs].copy()
        for i in batch.req_prompt_embeds:
            num_tokens[i] = num_prompt_tokens[i] = 0
        silent = np.array([not tokens for tokens in sampled]) | (num_tokens == 0)
        room = self._runner.max_model_len - num_tokens - 1
        history = History(
            req_ids=batch.req_ids[:num_reqs],
            token_ids=batch.token_ids_cpu,
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
        )
        allowed = self._requests.limits(history.req_ids, width)
        return history, np.where(silent, 0, np.clip(room, 0, allowed))


class HistoryDrafter:
    """Drafts without a model: ngram, suffix, or (naive) from the requests' references alone."""

    def __init__(self, vllm_config: Any):
        options: SpecPlusOptions = vllm_config.speculative_config.specplus
        self._width = options.num_speculative_tokens
        self._matcher = None if options.method == "naive" else make_matcher(options.method, vllm_config)

    def bind(self, runner: Any, requests: RequestTracker) -> None:
        self._history = _HostHistory(runner, requests)
        self._requests = requests

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is no model; vLLM's CPU runner asks all the same."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """The drafts of each request; arguments and answer as vLLM's custom proposers have them."""
        history, room = self._history.take(sampled_token_ids, self._width)
        lists: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._matcher is not None:
            self._matcher.retain(self._history.live())
            lists = self._matcher.match(history, None, room).to_lists()
        drafts = Drafts(lists, np.zeros(len(lists), np.int32))
        self._requests.put_references_first(history, room, drafts)
        return drafts.token_ids


class _HybridMixin:
    """Adds the matcher's drafts to those of vLLM's proposer, which this is mixed into.

    vLLM calls ``prepare_next_token_ids_*`` with this step's tokens right before ``propose``; in the padded
    form that is before it has written them into the host's copy of the sequences.
    """

    vllm_config: Any
    num_speculative_tokens: int

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        options: SpecPlusOptions = self.vllm_config.speculative_config.specplus
        assert options.num_model_steps is not None
        self._steps = options.num_model_steps
        self._is_one_hot_to_the_verifier = options.verify_strategy not in (None, "rejection")
        self._drafter = HybridDrafter(
            make_matcher(options.mtp_strategy.removeprefix("with_"), self.vllm_config),
            num_model_steps=self._steps,
            num_speculative_tokens=options.num_speculative_tokens,
            match_override_len=options.match_override_len,
        )
        self._sampled: list[list[int]] = []
        self._sampled_on_host = False
        self._model_probs: torch.Tensor | None = None
        # What vLLM's dummy runs go by: an idle data-parallel rank must run as many passes as a busy one.
        self.num_speculative_tokens = self._steps

    def bind(self, runner: Any, requests: RequestTracker) -> None:
        self._history = _HostHistory(runner, requests)
        self._requests = requests

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: Any,
        gpu_input_batch: Any,
        discard_request_mask: torch.Tensor,
    ) -> Any:
        """Take note of this step's tokens: [B, width] with -1 after each request's last."""
        rows = sampled_token_ids.tolist()
        discarded = discard_request_mask[: len(rows)].tolist()
        vocab = gpu_input_batch.vocab_size
        self._sampled = [
            [] if gone else [token for token in row if 0 <= token < vocab]
            for row, gone in zip(rows, discarded, strict=True)
        ]
        self._sampled_on_host = False
        return super().prepare_next_token_ids_padded(  # type: ignore[misc]
            sampled_token_ids, requests, gpu_input_batch, discard_request_mask
        )

    def prepare_next_token_ids_cpu(
        self,
        sampled_token_ids: list[list[int]],
        requests: Any,
        gpu_input_batch: Any,
        num_scheduled_tokens: Any,
    ) -> Any:
        """Take note of this step's tokens, which vLLM has in the host's sequences already."""
        self._sampled = sampled_token_ids
        self._sampled_on_host = True
        return super().prepare_next_token_ids_cpu(  # type: ignore[misc]
            sampled_token_ids, requests, gpu_input_batch, num_scheduled_tokens
        )

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Run the model's steps, then fill the slots after them; one list of drafts per request."""
        model_drafts = super().propose(self._steps, *args, **kwargs)  # type: ignore[misc]
        history, room = self._history.take(self._sampled, num_speculative_tokens, on_host=self._sampled_on_host)
        self._drafter.matcher.retain(self._history.live())
        drafts = self._drafter.draft(history, model_drafts.cpu().numpy(), room)
        self._requests.put_references_first(history, room, drafts)
        self._model_probs = self._with_one_hot_rows(drafts, num_speculative_tokens)
        return drafts.token_ids

    def take_last_draft_probs(self) -> torch.Tensor | None:
        """[B, K, vocab] probabilities of all drafts: the model's own, then one-hot rows."""
        return self._model_probs

    def _with_one_hot_rows(self, drafts: Drafts, width: int) -> torch.Tensor | None:
        model_probs = super().take_last_draft_probs()  # type: ignore[misc]
        if model_probs is None or self._is_one_hot_to_the_verifier:
            return None
        return with_one_hot_rows(model_probs, drafts, width)


def with_one_hot_rows(model_probs: torch.Tensor, drafts: Drafts, width: int) -> torch.Tensor:
    """The distributions that drafts were drawn from: the model's, and one-hot rows for what was matched.

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


def _hybrid(proposer: type) -> type:
    return type(f"Hybrid{proposer.__name__}", (_HybridMixin, proposer), {})
