"""A mixture of experts in two tensor-parallel workers, on the V1 model runner; what vLLM does not run on a CPU."""

import signal
from pathlib import Path

import openai
import pytest

from tests.e2e.engines import PROMPTS, engine
from tests.e2e.families import make_family
from tests.e2e.faults import let_drafts_pay_in_worker
from tests.e2e.parallel import MIXTURE_CONFIGS, TWO, bind_a_core_each, check_all_workers_alike
from tests.e2e.serving import serve

MAX_TOKENS = 16


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("mixture"), "ernie")


@pytest.fixture(scope="module")
def plain(mixture: Path) -> list[list[int]]:
    """The texts of one process without speculation."""
    with engine(mixture) as e:
        return e.tokens(PROMPTS[:4], max_tokens=MAX_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURE_CONFIGS)
def test_two_workers(name: str, mixture: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    bind_a_core_each(monkeypatch)
    with engine(mixture, MIXTURE_CONFIGS[name], **TWO) as e:
        e.llm.collective_rpc(let_drafts_pay_in_worker)
        check_all_workers_alike(e, plain, MAX_TOKENS)


@pytest.mark.slow
def test_vllm_itself_has_no_expert_parallelism_on_a_cpu(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keys of the plugin too, its workers die in the kernel for experts: docs/deployment.md says so."""
    bind_a_core_each(monkeypatch)
    with engine(mixture, None, enable_expert_parallel=True, **TWO) as e:
        executor = e.llm.llm_engine.engine_core.engine_core.model_executor
        processes = [worker.proc for worker in executor.workers]
        with pytest.raises(RuntimeError, match="cancelled"):
            e.tokens(PROMPTS[:1], max_tokens=2)
        assert -signal.SIGSEGV in [process.exitcode for process in processes]


@pytest.mark.slow
def test_vllm_itself_has_no_data_parallel_experts_on_a_cpu(mixture: Path, tmp_path: Path) -> None:
    """Without keys of the plugin too, its engines die at the first request: docs/deployment.md says so."""
    environment = {"VLLM_PLUGINS": "", "VLLM_CPU_SIM_MULTI_NUMA": "1"}
    with serve(mixture, tmp_path, "--data-parallel-size", "2", **environment) as server:
        with pytest.raises(openai.APIError):
            server.client().completions.create(model="tiny", prompt="aaaa", max_tokens=2)
        assert "in all_gatherv" in server.log()
