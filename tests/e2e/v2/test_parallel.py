"""Tensor and pipeline parallelism on Model Runner V2: two workers, each in a process of its own."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import engine
from tests.e2e.parallel import drafts_of_workers, record_drafts
from tests.e2e.references import ask, asking, config_of
from tests.e2e.v2.engines import FEW, async_engine, tokens

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize(
    ("proposer", "more", "start", "parallel"),
    [
        ("mtp_suffix", {}, engine, "tensor_parallel_size"),
        ("mtp_suffix", {"adaptive": True}, engine, "tensor_parallel_size"),
        ("mtp_ngram", {"adaptive": True}, async_engine, "tensor_parallel_size"),
        # With synchronous scheduling vLLM cannot draft in a pipeline.
        ("mtp_ngram", {}, async_engine, "pipeline_parallel_size"),
    ],
)
def test_two_workers(
    proposer: str,
    more: dict[str, Any],
    start: Any,
    parallel: str,
    trained: Path,
    draft: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    with engine(trained) as e:
        texts = tokens(e)
    two = {parallel: 2, "distributed_executor_backend": "mp"}
    with start(trained, config_of(proposer, draft, **more), **two) as e:
        if parallel == "tensor_parallel_size":
            e.llm.collective_rpc(record_drafts)
        assert ask(e, FEW * 2, asking(texts), max_tokens=20) == texts * 2
        first, last = e.llm.collective_rpc("specplus_stats")
        assert sum(last["accepted"]["reference"]) > 0
        if parallel == "tensor_parallel_size":
            # Each worker drafts for itself, and all must draft the same.
            assert first == last
            drafts, drafts_of_last = drafts_of_workers(e)
            assert len(drafts) > 5
            assert drafts == drafts_of_last
            # With asynchronous scheduling vLLM leaves out the steps that it throws away.
            if start is engine:
                assert sum(map(sum, first["accepted"].values())) == e.counts().accepted
        else:
            # The last stage drafts.
            assert first is None
