"""Calls of the kernels that draft and count, each with a batch of the given size, and texts that repeat."""

from collections.abc import Callable
from typing import Any

import torch

from vllm_specplus.kernels import arbiter, counts, drafts, ngram
from vllm_specplus.kernels.arbiter.state import NUM_KEYS, ONE
from vllm_specplus.sources import NGRAM, REFERENCE, SOURCES

_MAX_LEN, _NUM_TOKENS = 32_768, 4096
_NUM_STEPS = 2  # passes of the draft model
_FORECAST = 11
_DIFFERENT_TOKENS = 100


class DraftCall:
    """A call with arguments that are made beforehand. Its results are held to their specification by tests."""

    def __init__(self, function: Callable[..., Any], *args: Any, **named: Any) -> None:
        self.run = lambda: function(*args, **named)

    def check(self, output: Any) -> None:
        pass


class _Batch:
    """The tensors that the calls have in common, for the requests of a shape."""

    def __init__(self, shape: Any, device: str) -> None:
        self.device, self.num_reqs, self.width = device, shape.num_reqs, shape.num_rows - 1
        self.vocab_size = shape.vocab_size
        generator = None if device == "meta" else torch.Generator(device).manual_seed(0)
        size = (self.num_reqs, _MAX_LEN)
        self.token_ids = torch.randint(_DIFFERENT_TOKENS, size, dtype=torch.int32, device=device, generator=generator)
        self.num_tokens = self.full(_NUM_TOKENS)
        self.idx_mapping = torch.arange(self.num_reqs, dtype=torch.int32, device=device)
        self.limits = drafts.Limits(self.full(self.width), self.full(1))
        self.by_state = drafts.DraftCounts(self.full(0), self.full(0))
        self.num_model = min(_NUM_STEPS, self.width)
        self.drafts = torch.zeros((self.num_reqs, self.width), dtype=torch.int64, device=device)
        self.model_drafts = torch.zeros((self.num_reqs, self.num_model), dtype=torch.int64, device=device)
        self.one = torch.ones(1, dtype=torch.int64, device=device)

    def full(self, value: int) -> torch.Tensor:
        return torch.full((self.num_reqs,), value, dtype=torch.int32, device=self.device)

    @property
    def texts(self) -> dict[str, torch.Tensor]:
        return {"token_ids": self.token_ids, "num_tokens": self.num_tokens, "idx_mapping": self.idx_mapping}

    def counted(self) -> counts.Counted:
        """A step whose drafts are to be counted."""
        by_source = torch.zeros((2, len(SOURCES), self.width), dtype=torch.int64, device=self.device)
        of_requests = torch.zeros((self.num_reqs, 3), dtype=torch.int64, device=self.device)
        bounds = torch.arange(self.num_reqs + 1, dtype=torch.int32, device=self.device) * (self.width + 1)
        of_drafts = self.full(self.width), self.full(self.num_model), self.full(NGRAM)
        return counts.Counted(by_source, of_requests, self.full(2), bounds, *of_drafts)

    def state(self) -> arbiter.State:
        """An arbiter's, with an n-gram chain behind each number of the model's drafts, and a reference's."""
        starts = [*range(self.num_model + 1), 0]
        made = arbiter.make_state(
            self.num_reqs,
            num_model_steps=self.num_model,
            num_speculative_tokens=self.width,
            chain_sources=[NGRAM] * (self.num_model + 1) + [REFERENCE],
            starts=starts,
            prior=torch.full((NUM_KEYS.value,), ONE.value // 2, device=self.device),
        )
        made.offer_positions.fill_(_NUM_TOKENS - 2)
        return made


def _fill_drafts(b: _Batch) -> DraftCall:
    sizes = {"min_ngram_size": 2, "max_ngram_size": 5}
    return DraftCall(ngram.fill_drafts, *b.texts.values(), b.drafts, b.model_drafts, b.limits, b.by_state, **sizes)


def _continue_forecasts(b: _Batch) -> DraftCall:
    forecast = torch.zeros((b.num_reqs, _FORECAST), dtype=torch.int32, device=b.device)
    about = (b.full(_FORECAST), b.full(_NUM_TOKENS - 2), b.full(0))
    options = {"model_drafts": b.model_drafts, "limits": b.limits, "by_state": b.by_state}
    return DraftCall(drafts.continue_forecasts, *b.texts.values(), b.drafts, forecast, *about, **options)


def _write_one_hot_rows(b: _Batch) -> DraftCall:
    logits = torch.empty((b.num_reqs, b.width, b.vocab_size), dtype=torch.float32, device=b.device)
    return DraftCall(drafts.write_one_hot_rows, logits, b.idx_mapping, b.drafts, b.full(b.width), b.full(b.num_model))


def _count_drafts(b: _Batch) -> DraftCall:
    return DraftCall(counts.count_drafts, b.counted(), b.idx_mapping)


def _adapt(b: _Batch) -> DraftCall:
    """All that the arbiter does in a step, in its order."""
    state, counted = b.state(), b.counted()
    prices = torch.ones(2 + b.num_model, dtype=torch.int64, device=b.device)
    totals = torch.zeros(arbiter.NUM_TOTALS, dtype=torch.int64, device=b.device)
    tokens = torch.zeros((1, b.num_reqs, b.width), dtype=torch.int32, device=b.device)
    guess = tokens, b.full(b.width)[None], b.full(0)[None]
    report = torch.zeros(arbiter.NUM_TOTALS + 1 + b.num_reqs, dtype=torch.int64, device=b.device)
    outputs = b.drafts, b.by_state, b.full(NGRAM), totals, report
    sizes = {"min_ngram_size": 2, "max_ngram_size": 5, "match_len_cap": 24}
    ngrams = arbiter.NgramChains(state, b.texts["token_ids"], b.texts["num_tokens"], **sizes)

    def step() -> None:
        step = {"limits": b.limits, "model_drafts": b.model_drafts, "counted": counted}
        arbiter.judge_and_offer(state, **b.texts, num_new=b.one, **step)
        matches = ngrams.search(b.idx_mapping, b.limits)
        arbiter.offer_chains(state, b.idx_mapping, *guess, first_chain=b.num_model + 1)
        batch = b.num_tokens, b.idx_mapping, b.limits, prices
        arbiter.choose_and_settle(state, *batch, *outputs, matches=matches)

    return DraftCall(step)


_MADE = {
    "fill_drafts": _fill_drafts,
    "continue_forecasts": _continue_forecasts,
    "write_one_hot_rows": _write_one_hot_rows,
    "count_drafts": _count_drafts,
    "arbiter": _adapt,
}
CALLS: dict[str, Callable[[Any, str], DraftCall]] = {
    name: lambda shape, device, make=make: make(_Batch(shape, device)) for name, make in _MADE.items()
}
"""By name: makes the call for a shape on a device."""
