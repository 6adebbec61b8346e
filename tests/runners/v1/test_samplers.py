"""What vLLM's samplers are asked on Model Runner V1."""

from types import SimpleNamespace
from typing import Any

import torch

from vllm_specplus.runners.v1.samplers import StrategyRejectionSampler


def test_rows_without_drafts_are_bonus_rows() -> None:
    """Otherwise vLLM applies a thinking budget to the rows of other requests."""
    asked: list[tuple[Any, dict[str, Any]]] = []
    sampler = StrategyRejectionSampler.__new__(StrategyRejectionSampler)
    torch.nn.Module.__init__(sampler)
    sampler.sampler = lambda *args, **kwargs: asked.append((args, kwargs))
    logits, metadata = torch.zeros(2, 8), object()
    sampler.forward(SimpleNamespace(num_draft_tokens=[0, 0]), None, logits, metadata)
    assert asked == [((logits, metadata), {"predict_bonus_token": True})]
