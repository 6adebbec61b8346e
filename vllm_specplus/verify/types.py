"""Arguments and result of a verification backend."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class VerifyOutput:
    """Tokens of one verification step.

    Attributes:
        token_ids: ``[num_reqs, max_rows]`` int64, accepted drafts, then one token of the target's
            own, then -1.
        num_tokens: ``[num_reqs]`` int32, accepted drafts + 1 (0 for a request without rows).
    """

    token_ids: torch.Tensor
    num_tokens: torch.Tensor


@dataclass(frozen=True)
class VerifyInputs:
    """Checked and completed arguments of ``verify_draft_tokens``, whose names they keep.

    ``seeds`` and ``positions`` are always there. ``top_p``, ``top_k`` and ``min_p`` are None when no request uses them.
    ``max_rows`` is the number of the output's columns.
    """

    logits: torch.Tensor  # [num_rows, vocab] float
    cu_num_rows: torch.Tensor  # [num_reqs + 1] int64
    draft_token_ids: torch.Tensor  # [num_rows] int64
    temperature: torch.Tensor  # [num_reqs] float32
    top_p: torch.Tensor | None  # [num_reqs] float32
    top_k: torch.Tensor | None  # [num_reqs] int64
    min_p: torch.Tensor | None  # [num_reqs] float32
    seeds: torch.Tensor  # [num_reqs] int64
    positions: torch.Tensor  # [num_rows] int64
    strategy: str
    policy: str
    verify_window: int
    max_candidate_len: int | None
    max_rows: int
    draft_logits: torch.Tensor | None = None  # [num_rows, or any with draft_rows, vocab] float
    draft_rows: torch.Tensor | None = None  # [num_rows] int64

    @property
    def num_reqs(self) -> int:
        return self.temperature.shape[0]

    @property
    def num_rows(self) -> int:
        return self.logits.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]
