"""Limits of drafts, as the kernels take them."""

from collections.abc import Iterable

import torch

from vllm_specplus.kernels.drafts import Limits


def limits_of(numbers: Iterable[int]) -> Limits:
    """`Limits` that come to these numbers. A 0 is in turn a limit, and that of a request that got no tokens."""
    max_drafts = torch.tensor(list(numbers), dtype=torch.int32)
    num_sampled = torch.ones_like(max_drafts)
    no_tokens = (max_drafts == 0) & (torch.arange(len(max_drafts)) % 2 == 0)
    return Limits(max_drafts.masked_fill(no_tokens, 9), num_sampled.masked_fill(no_tokens, 0))
