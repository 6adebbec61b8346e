"""A model's own answers, from vLLM in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

_TEMPERATURE = 0.8
_MAX_NUM_SEQS = 64


def answers(
    model: Path, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int, dtype: torch.dtype
) -> list[list[int]]:
    """Let a model answer prompts: every second one greedily, the others at temperature 0.8.

    Args:
        model: the model's folder.
        prompts: token ids.
        max_tokens: most tokens of an answer; it may end sooner.
        seed: of the sampled answers.
        dtype: in which the model computes.

    Returns:
        the token ids of each answer.
    """
    # vLLM's workers cannot start where numba is loaded, and keep their memory as long as their process lives.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_answers, model, prompts, max_tokens, seed, dtype).result()


def _answers(
    model: Path, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int, dtype: torch.dtype
) -> list[list[int]]:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams

    longest = max(map(len, prompts)) + max_tokens
    llm = LLM(
        model=str(model),
        dtype=dtype,
        max_model_len=longest,
        max_num_seqs=_MAX_NUM_SEQS,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        seed=seed,
    )
    params = [
        SamplingParams(temperature=_TEMPERATURE if i % 2 else 0.0, max_tokens=max_tokens) for i in range(len(prompts))
    ]
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(result.outputs[0].token_ids) for result in results]
