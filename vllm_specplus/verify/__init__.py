"""Verification of draft tokens: functions of tensors, without vLLM."""

from typing import TYPE_CHECKING

import torch

from vllm_specplus.strategies import POLICIES, STRATEGIES
from vllm_specplus.verify import numba_backend, torch_backend
from vllm_specplus.verify.checks import check_choice, make_inputs
from vllm_specplus.verify.types import VerifyOutput

if TYPE_CHECKING:
    from vllm_specplus.kernels.verify import Workspace

__all__ = ["BACKENDS", "POLICIES", "STRATEGIES", "VerifyOutput", "verify_draft_tokens"]

BACKENDS = ("auto", "numba", "torch", "triton")


@torch.no_grad()
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
    """Accept the first drafts of each request, up to the first that fails, and add one token of the target's own.

    Without drafts (one row per request) this is plain sampling. ``verify/reference.py`` defines the result. It also
    says which strategy keeps the target's distribution, and names the papers.

    Args:
        logits: ``[num_rows, vocab]`` float32, bfloat16 or float16, any strides, not changed:
            target logits after penalties, bias and grammar, before temperature. Arguments may require gradients, but
            none flow.
        cu_num_rows: ``[num_reqs + 1]`` int32 or int64: request r has the rows ``cu[r]`` to
            ``cu[r + 1] - 1``. The last of them is its bonus row. A request without rows gets no token.
        draft_token_ids: ``[num_rows]`` int64 or int32: the draft tested at each row; -1 where
            there is none. The value on a bonus row is ignored.
        temperature: ``[num_reqs]`` float; 0 is greedy under every strategy.
        top_p, min_p: ``[num_reqs]`` float in 0..1, or None: off, as 1 and 0 are.
        top_k: ``[num_reqs]`` int, or None: off, as 0 and -1 are.
        seeds: ``[num_reqs]`` int. None: drawn from torch's default generator at each call.
        positions: ``[num_rows]`` int, required with `seeds`: position of the token that was fed
            in to get the row; the token emitted there comes one later. It keys the noise.
        strategy: ``"greedy"``, ``"target_match"``, ``"topp"`` or ``"rejection"``.
        policy: ``"normal"``, ``"accept_all"`` (every valid draft) or ``"reject_all"``.
        verify_window: `topp`: accept a draft that is only the second choice if the next `verify_window` drafts are
            all first choices; 0 is off.
        max_candidate_len: `topp`: at most this many candidates; None is no limit.
        backend: ``"numba"``, for tensors on the CPU, policy ``"normal"`` and no `draft_logits`; ``"torch"``;
            ``"triton"``, which needs CUDA, or Triton's interpreter (``TRITON_INTERPRET=1`` in the environment);
            ``"auto"``: Triton on CUDA, numba where it can, else torch.
        max_rows: columns of the output, at least the rows of the longest request. Rows past it are left out. None:
            the longest request's number, which the host waits for on an accelerator.
        draft_logits: `rejection`: ``[num_rows, vocab]`` float32, bfloat16 or float16. Each draft was sampled from its
            row, at the request's temperature and without top-p, top-k or min-p. The logits stand here before
            temperature. None: the drafts were not sampled (n-grams, a greedy draft model).
        draft_rows: ``[num_rows]`` int32 or int64: the row of `draft_logits` that the draft at each row was sampled
            from; negative: it was not sampled. `draft_logits` may then have any number of rows. None: each row's own.
        workspace: `triton`: outputs and scratch memory made before (``kernels.verify.Workspace``). Nothing is
            allocated then if `max_rows`, `seeds` and `positions` are given, indices are int64, parameters are
            float32, and all are contiguous. The result stands in it until the next call.

    Raises:
        TypeError, ValueError: with the argument's name, its value and the allowed ones. Ranges of values in tensors
            are checked on the CPU only.
    """
    check_choice("backend", backend, BACKENDS)
    # Here alone: the estimate of a step's cost records its launches on tensors without values.
    if isinstance(logits, torch.Tensor) and logits.is_meta:
        raise ValueError("logits is on meta; allowed: a device that holds values")
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
    takes_triton = backend == "triton" or (backend == "auto" and logits.is_cuda)
    if not takes_triton:
        if workspace is not None:
            raise ValueError(f"workspace is given with backend {backend!r}; allowed: 'triton', which alone uses it")
        if backend == "numba" or (backend == "auto" and numba_backend.takes(inputs)):
            return numba_backend.verify(inputs)
        return torch_backend.verify(inputs)
    # Triton is slow to import, and some platforms of vLLM have none.
    from vllm_specplus.kernels import verify as triton_backend

    return triton_backend.verify(inputs, workspace)
