"""Verification of draft tokens: functions of tensors that know nothing of vLLM."""

from typing import TYPE_CHECKING

import torch

from vllm_specplus.verify import torch_backend
from vllm_specplus.verify.checks import check_choice, make_inputs
from vllm_specplus.verify.types import POLICIES, STRATEGIES, VerifyOutput

if TYPE_CHECKING:
    from vllm_specplus.kernels.verify.launch import Workspace

__all__ = ["BACKENDS", "POLICIES", "STRATEGIES", "VerifyOutput", "verify_draft_tokens"]

BACKENDS = ("auto", "torch", "triton")


def verify_draft_tokens(
    logits: torch.Tensor,
    cu_num_rows: torch.Tensor,
    draft_token_ids: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    strategy: str = "greedy",
    policy: str = "normal",
    verify_window: int = 0,
    max_candidate_len: int | None = None,
    backend: str = "auto",
    *,
    max_rows: int | None = None,
    draft_logits: torch.Tensor | None = None,
    draft_rows: torch.Tensor | None = None,
    workspace: "Workspace | None" = None,
) -> VerifyOutput:
    """Accept the first few drafts of each request and add one token of the target's own.

    Without drafts (one row per request) this is plain sampling. ``verify/reference.py`` defines
    the result, says which strategy keeps the target's distribution, and names the papers.

    Args:
        logits: ``[num_rows, vocab]`` float32, bfloat16 or float16, any strides, not changed:
            target logits after penalties, bias and grammar, before temperature.
        cu_num_rows: ``[num_reqs + 1]`` int32 or int64: request r has the rows ``cu[r]`` to
            ``cu[r + 1] - 1``, the last of them its bonus row. A request of no rows gains nothing.
        draft_token_ids: ``[num_rows]`` int64 or int32: the draft tested at each row; -1 where
            there is none. What stands on a bonus row is not looked at.
        temperature: ``[num_reqs]`` float; 0 is greedy under every strategy.
        top_p, min_p: ``[num_reqs]`` float in 0..1, or None: off, as 1 and 0 are.
        top_k: ``[num_reqs]`` int, or None: off, as 0 and -1 are.
        seeds: ``[num_reqs]`` int. None: drawn from torch's default generator at each call.
        positions: ``[num_rows]`` int, required with `seeds`: position of the token that was fed
            in to get the row; the token emitted there comes one later. Keys the noise.
        strategy: ``"greedy"``, ``"target_match"``, ``"topp"`` or ``"rejection"``.
        policy: ``"normal"``, ``"accept_all"`` (every valid draft) or ``"reject_all"``.
        verify_window: `topp`: rows that must agree before a second choice passes; 0 is off.
        max_candidate_len: `topp`: at most this many candidates; None is no limit.
        backend: ``"torch"``; ``"triton"``, on CUDA, or anywhere under Triton's interpreter (with
            ``TRITON_INTERPRET=1`` in the environment); ``"auto"``: Triton on CUDA, else torch.
        max_rows: width of the output, at least the rows of the longest request (rows past it are
            left out). None: found out, which waits for an accelerator.
        draft_logits: `rejection`: ``[num_rows, vocab]`` float32, bfloat16 or float16, what the drafts
            were sampled from at the request's temperature (before it is applied, without top-p,
            top-k or min-p). None: the drafts were not sampled (n-grams, a greedy draft model).
        draft_rows: ``[num_rows]`` int32 or int64: the row of `draft_logits`, which may then have any
            number of them, that the draft at each row was sampled from; negative: it was not
            sampled. None: each row's own.
        workspace: `triton`: outputs and scratch made before (``kernels.verify.Workspace``), so that
            with `max_rows`, `seeds` and `positions` given, contiguous int64 tensors and float32
            parameters, nothing is allocated. The result stands in it until the next call.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed. Ranges of values
            in tensors are checked on the CPU only.
    """
    check_choice("backend", backend, BACKENDS)
    inputs = make_inputs(
        logits=logits,
        cu_num_rows=cu_num_rows,
        draft_token_ids=draft_token_ids,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seeds=seeds,
        positions=positions,
        strategy=strategy,
        policy=policy,
        verify_window=verify_window,
        max_candidate_len=max_candidate_len,
        max_rows=max_rows,
        draft_logits=draft_logits,
        draft_rows=draft_rows,
    )
    if backend == "auto":
        backend = "triton" if logits.is_cuda else "torch"
    if backend == "torch":
        if workspace is not None:
            raise ValueError("workspace is given with backend 'torch'; allowed: 'triton', which alone uses it")
        return torch_backend.verify(inputs)
    # Triton is slow to import, and not there on every platform that vLLM runs on.
    from vllm_specplus.kernels.verify import launch as triton_backend

    return triton_backend.verify(inputs, workspace)
