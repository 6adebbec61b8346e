"""Verification on a CPU in compiled code: the specification of `reference.py`, one row after the other.

A step of few rows takes torch some hundred operations, most of which are shorter than their launches. Here it is one
call. Rows behind the end of a request's run are not read. One thread works on all rows.
"""

import numpy as np
import torch

from vllm_specplus.verify.noise import token_keys
from vllm_specplus.verify.types import VerifyInputs, VerifyOutput

_NO_FLOATS, _NO_INTEGERS = np.empty(0, np.float32), np.empty(0, np.int64)


def takes(inputs: VerifyInputs) -> bool:
    """Whether this backend verifies some inputs: on a CPU, policy `normal`, drafts that were not sampled."""
    return inputs.logits.device.type == "cpu" and inputs.policy == "normal" and inputs.draft_logits is None


def prepare() -> None:
    """Load the compiled code, or compile it where nothing is cached: some seconds, once."""
    one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    verify(
        VerifyInputs(
            logits=one[:, None],
            cu_num_rows=torch.arange(2),
            draft_token_ids=zero,
            temperature=one,
            top_p=None,
            top_k=None,
            min_p=None,
            seeds=zero,
            positions=zero,
            strategy="greedy",
            policy="normal",
            verify_window=0,
            max_candidate_len=None,
            max_rows=1,
        )
    )


def verify(inputs: VerifyInputs) -> VerifyOutput:
    """Verify the drafts of every request; see ``vllm_specplus.verify.verify_draft_tokens``.

    Raises:
        ValueError: `takes` is false.
    """
    if not takes(inputs):
        drafts = "one-hot" if inputs.draft_logits is None else "sampled"
        raise ValueError(
            f"backend is 'numba', policy {inputs.policy!r}, the device {inputs.logits.device}, and drafts are "
            f"{drafts}; allowed with 'numba': policy 'normal', the cpu and no draft_logits"
        )
    # numba, imported before a vLLM CPU worker has started, breaks that worker.
    from vllm_specplus.verify import _rows

    vocab_size = inputs.vocab_size
    num_blocks = -(-vocab_size // _rows.BLOCK)
    padded_size = num_blocks * _rows.BLOCK
    token_ids = torch.empty((inputs.num_reqs, inputs.max_rows), dtype=torch.int64)
    num_tokens = torch.empty(inputs.num_reqs, dtype=torch.int32)
    logits = inputs.logits.to(torch.float32)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    stride = logits.stride(0)
    size = (inputs.num_rows - 1) * stride + vocab_size if inputs.num_rows else 0
    batch = _rows.Batch(
        logits=_array(logits.as_strided((size,), (1,))),
        stride=stride,
        vocab_size=vocab_size,
        cu_num_rows=_array(inputs.cu_num_rows),
        draft_token_ids=_array(inputs.draft_token_ids),
        temperature=_array(inputs.temperature),
        top_p=_NO_FLOATS if inputs.top_p is None else _array(inputs.top_p),
        top_k=_NO_INTEGERS if inputs.top_k is None else _array(inputs.top_k),
        min_p=_NO_FLOATS if inputs.min_p is None else _array(inputs.min_p),
        seeds=_array(inputs.seeds),
        positions=_array(inputs.positions),
        token_keys=token_keys(padded_size, logits.device).numpy().view(np.uint32),
    )
    row = _rows.Row(
        keys=_scratch(padded_size, torch.int32),
        maxima=_scratch(num_blocks, torch.int32),
        weights=_scratch(padded_size, torch.float32),
        found=_scratch(padded_size, torch.int32),
        counts=_scratch(_rows.NUM_BINS, torch.int64),
        masses=_scratch(_rows.NUM_BINS, torch.float64),
    )
    max_candidates = vocab_size if inputs.max_candidate_len is None else min(inputs.max_candidate_len, vocab_size)
    options = (_rows.CODES[inputs.strategy], inputs.verify_window, max_candidates)
    _rows.verify(batch, options, row, token_ids.numpy(), num_tokens.numpy())
    return VerifyOutput(token_ids, num_tokens)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy()


def _scratch(size: int, dtype: torch.dtype) -> np.ndarray:
    # By torch, whose unwritten memory tests fill.
    return torch.empty(size, dtype=dtype).numpy()
