"""A mixture of experts in two tensor-parallel workers, on the V1 model runner."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.drafters import ADAPTIVE, APPEND, MTP
from tests.e2e.engines import PROMPTS, engine, marked
from tests.e2e.families import make_family
from tests.e2e.parallel import of_workers, record_drafts
from tests.e2e.references import ask, asking

MAX_TOKENS = 16
CONFIGS: dict[str, dict[str, Any]] = {
    "adaptive": MTP | ADAPTIVE,
    "append": MTP | APPEND | {"verify_strategy": "topp"},
    "suffix": {
        "method": "suffix",
        "num_speculative_tokens": 6,
        "suffix_decoding_max_cached_requests": -1,
        "verify_strategy": "greedy",
    },
}
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("mixture"), "ernie")


@pytest.fixture(scope="module")
def plain(mixture: Path) -> list[list[int]]:
    """The texts of one process without speculation."""
    with engine(mixture) as e:
        return e.tokens(PROMPTS[:4], max_tokens=MAX_TOKENS)


@pytest.mark.parametrize("name", marked(CONFIGS, (), slow=CONFIGS))
def test_two_workers(name: str, mixture: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    with engine(mixture, CONFIGS[name], **TWO) as e:
        e.llm.collective_rpc(record_drafts)
        assert ask(e, PROMPTS[:4] * 2, asking(plain), max_tokens=MAX_TOKENS) == plain * 2
        first, last = e.llm.collective_rpc("specplus_stats")
        assert first == last
        assert sum(first["accepted"]["reference"]) > 0
        drafts, drafts_of_last = of_workers(e, "drafts")
        assert drafts == drafts_of_last
