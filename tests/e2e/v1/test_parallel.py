"""Tensor parallelism on the V1 model runner: two workers, each in a process of its own."""

import os
from pathlib import Path

import pytest

from tests.e2e.engines import PROMPTS, engine
from tests.e2e.parallel import drafts_of_workers, record_drafts
from tests.e2e.references import ask, asking, config_of


def test_all_workers_draft_alike(trained: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker chooses for itself, though each has a clock of its own."""
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    with engine(trained) as e:
        texts = e.tokens(PROMPTS[:4])
    config = config_of("mtp_suffix", draft, adaptive=True)
    with engine(trained, config, tensor_parallel_size=2, distributed_executor_backend="mp") as e:
        e.llm.collective_rpc(record_drafts)
        assert ask(e, PROMPTS[:4] * 2, asking(texts), max_tokens=48) == texts * 2
        first, last = e.llm.collective_rpc("specplus_stats")
        assert first == last
        assert sum(first["accepted"]["reference"]) > 0
        drafts, drafts_of_last = drafts_of_workers(e)
        assert len(drafts) > 10
        assert drafts == drafts_of_last
