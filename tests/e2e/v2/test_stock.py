"""A config without a plugin key builds vLLM's own objects on Model Runner V2 too."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config.speculative import SpeculativeConfig
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
from vllm.v1.worker.gpu.states import RequestState

from tests.e2e.engines import engine, speculative
from vllm_specplus.engine.cpu_worker import SpecPlusCPUWorker
from vllm_specplus.engine.speculative_config import SpecPlusSpeculativeConfig

pytestmark = pytest.mark.interpreter

STOCK = {
    "config": SpeculativeConfig,
    "worker": CPUWorker,
    "speculator": MTPSpeculator,
    "rejection_sampler": RejectionSampler,
    "sampler": Sampler,
    "draft_tokens_handler": DraftTokensHandler,
    "req_states": RequestState,
}
NAMES = ("init_speculator", "DraftTokensHandler", "RequestState", "RejectionSampler", "Sampler")


def parts(e: Any) -> dict[str, type]:
    executor = e.llm.llm_engine.engine_core.engine_core.model_executor
    runner = e.runner
    found = {name: type(getattr(runner, name)) for name in list(STOCK)[2:]}
    return {"config": type(runner.speculative_config), "worker": type(executor.driver_worker.worker)} | found


@pytest.mark.parametrize(
    "config",
    [
        {"method": "mtp", "num_speculative_tokens": 2},
        {"method": "mtp", "num_speculative_tokens": 2, "num_model_steps": 2, "accept_policy": "normal"},
        {"speculate_method": "mtp", "speculate_max_draft_token_num": 2},
    ],
    ids=["stock", "neutral", "translated"],
)
def test_stock_config_builds_stock_classes(config: dict[str, Any], tiny: Path) -> None:
    with engine(tiny, config) as e:
        assert parts(e) == STOCK
        assert not e.llm.llm_engine.model_config.logits_processors


def test_a_plugin_config_leaves_nothing_behind(tiny: Path, draft: Path) -> None:
    """The overrides last only while the runner is built; the next stock engine is stock again."""
    before = {name: getattr(model_runner, name) for name in NAMES}
    with engine(tiny, speculative("mtp_ngram", draft, verify_strategy="topp")) as e:
        found = parts(e)
        assert {name: getattr(model_runner, name) for name in NAMES} == before
    assert found.pop("config") is SpecPlusSpeculativeConfig
    assert found.pop("worker") is SpecPlusCPUWorker
    for name, part in found.items():
        assert issubclass(part, STOCK[name])
        assert part is not STOCK[name]
    with engine(tiny, {"method": "mtp", "num_speculative_tokens": 2}) as e:
        assert parts(e) == STOCK
