"""Tensor parallelism on the V1 model runner: two workers, each in a process of its own."""

import os
from pathlib import Path

import pytest

from tests.e2e.engines import PROMPTS, engine
from tests.e2e.faults import FAULTY, OTHERS, fail_in_worker
from tests.e2e.parallel import drafts_of_workers, measure_otherwise, record_drafts
from tests.e2e.references import ask, asking, config_of


# Without a draft model, since its passes would wait for the other worker's for ever.
@pytest.mark.parametrize(
    ("proposer", "shares_prices"), [("mtp_suffix", True), pytest.param("suffix", False, marks=pytest.mark.slow)]
)
def test_all_workers_draft_alike(
    proposer: str, shares_prices: bool, trained: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker chooses for itself, by the first one's clock. By their own clocks they would choose otherwise."""
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    with engine(trained) as e:
        texts = e.tokens(PROMPTS[:4])
    config = config_of(proposer, draft, adaptive=True)
    with engine(trained, config, tensor_parallel_size=2, distributed_executor_backend="mp") as e:
        e.llm.collective_rpc(measure_otherwise, args=(shares_prices,))
        e.llm.collective_rpc(record_drafts)
        assert ask(e, PROMPTS[:4] * 2, asking(texts), max_tokens=48) == texts * 2
        first, last = e.llm.collective_rpc("specplus_stats")
        assert (first == last) == shares_prices
        assert sum(first["accepted"]["reference"]) > 0
        drafts, drafts_of_last = drafts_of_workers(e)
        assert len(drafts) > 10
        assert (drafts == drafts_of_last) == shares_prices


def test_a_fault_of_all_workers_costs_no_text(trained: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    prompts = [*OTHERS, FAULTY]
    with engine(trained) as e:
        texts = ask(e, prompts, [{}] * 5, max_tokens=48)
    config = config_of("mtp_suffix", draft, adaptive=True)
    with engine(trained, config, tensor_parallel_size=2, distributed_executor_backend="mp") as e:
        e.llm.collective_rpc(fail_in_worker)
        for _ in range(2):
            assert ask(e, prompts, [{}] * 5, max_tokens=48) == texts
        first, last = e.llm.collective_rpc("specplus_stats")
        assert first == last
        assert first["faults"]["drafting"] >= 2
        assert sum(first["accepted"]["suffix"]) > 0
