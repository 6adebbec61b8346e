"""A config without a plugin key is vLLM's own, object for object."""

from pathlib import Path
from typing import Any

import pytest
from vllm.config.speculative import SpeculativeConfig
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.e2e.engines import engine, speculative
from vllm_specplus.engine.cpu_worker import SpecPlusCPUWorker
from vllm_specplus.engine.speculative_config import SpecPlusSpeculativeConfig
from vllm_specplus.runners.v1.samplers import StrategyRejectionSampler, StrategySampler


def parts(e: Any) -> dict[str, type]:
    executor = e.llm.llm_engine.engine_core.engine_core.model_executor
    runner = e.runner
    return {
        "config": type(runner.speculative_config),
        "worker": type(executor.driver_worker.worker),
        "drafter": type(runner.drafter),
        "rejection_sampler": type(runner.rejection_sampler),
        "sampler": type(runner.sampler),
    }


STOCK = {
    "config": SpeculativeConfig,
    "worker": CPUWorker,
    "drafter": EagleProposer,
    "rejection_sampler": RejectionSampler,
    "sampler": Sampler,
}


@pytest.mark.parametrize(
    "config",
    [
        {"method": "mtp", "num_speculative_tokens": 2},
        # A plugin key at its default asks for nothing.
        {"method": "mtp", "num_speculative_tokens": 2, "mtp_strategy": "default"},
        {"method": "mtp", "num_speculative_tokens": 2, "num_model_steps": 2},
        {"method": "mtp", "num_speculative_tokens": 2, "accept_policy": "normal"},
        # Another system's names for what vLLM has itself.
        {"speculate_method": "mtp", "speculate_max_draft_token_num": 2},
        {"sp_type": "mtp", "gen_num_per_cycle": 2},
    ],
    ids=lambda c: "+".join(c),
)
def test_stock_config_builds_stock_classes(config: dict[str, Any], tiny: Path) -> None:
    with engine(tiny, config) as e:
        assert parts(e) == STOCK


@pytest.mark.parametrize(
    ("config", "drafter"),
    [
        ({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}, "ngram_proposer.NgramProposer"),
        ({"method": "suffix", "num_speculative_tokens": 8}, "suffix_decoding.SuffixDecodingProposer"),
        ({"method": "draft_model", "model": "draft", "num_speculative_tokens": 2}, "draft_model.DraftModelProposer"),
    ],
    ids=["ngram", "suffix", "draft_model"],
)
def test_every_method_of_vllm_stays_its_own(config: dict[str, Any], drafter: str, tiny: Path, draft: Path) -> None:
    if "model" in config:
        config = config | {"model": str(draft)}
    with engine(tiny, config) as e:
        found = parts(e)
    assert f"{found['drafter'].__module__}.{found['drafter'].__name__}" == f"vllm.v1.spec_decode.{drafter}"
    assert {k: v for k, v in found.items() if k != "drafter"} == {k: v for k, v in STOCK.items() if k != "drafter"}


class OwnDrafter:
    """A user's own drafter, as vLLM's custom_class takes it."""

    def __init__(self, vllm_config: Any):
        pass

    def load_model(self, *args: Any) -> None:
        pass

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[tokens[-1]] if tokens else [] for tokens in sampled_token_ids]


def test_a_users_own_drafter_stays_with_a_strategy(tiny: Path) -> None:
    config = {
        "method": "custom_class",
        "model": f"{__name__}.OwnDrafter",
        "num_speculative_tokens": 1,
        "verify_strategy": "target_match",
    }
    with engine(tiny, config) as e:
        assert type(e.runner.drafter).__name__ == "OwnDrafter"
        e.tokens()
        assert e.counts().drafted > 0


def test_a_plugin_config_leaves_nothing_behind(tiny: Path, draft: Path) -> None:
    """The overrides last only while the runner is built; the next stock engine is stock again."""
    names = ("EagleProposer", "Sampler", "RejectionSampler", "create_custom_proposer")
    before = {name: getattr(gpu_model_runner, name) for name in names}
    with engine(tiny, speculative("mtp_ngram", draft, verify_strategy="topp")) as e:
        found = parts(e)
        assert {name: getattr(gpu_model_runner, name) for name in names} == before
    assert found["config"] is SpecPlusSpeculativeConfig
    assert found["worker"] is SpecPlusCPUWorker
    assert issubclass(found["drafter"], EagleProposer)
    assert found["drafter"] is not EagleProposer
    assert issubclass(found["rejection_sampler"], RejectionSampler)
    with engine(tiny, {"method": "mtp", "num_speculative_tokens": 2}) as e:
        assert parts(e) == STOCK


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a strategy vLLM verifies, as it does where its own verification is right."""
    monkeypatch.setattr("vllm_specplus.engine.setup.default_strategy", lambda engine: None)


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("proposer", ["mtp_ngram", "mtp_suffix", "ngram"])
def test_without_a_strategy_the_verifier_is_stock(proposer: str, trained: Path, draft: Path) -> None:
    """vLLM's own verifier takes the plugin's drafts. Every request here is greedy, which it gets right on a CPU too."""
    with engine(trained) as e:
        expected = e.tokens()
    with engine(trained, speculative(proposer, draft)) as e:
        found = parts(e)
        assert e.tokens() == expected
        assert 0 < e.counts().accepted < e.counts().drafted
    assert found["rejection_sampler"] is RejectionSampler
    assert found["sampler"] is Sampler


def test_on_a_cpu_without_a_strategy_the_verifier_is_the_plugins(tiny: Path, draft: Path) -> None:
    with engine(tiny, speculative("mtp_ngram", draft)) as e:
        found = parts(e)
    assert found["rejection_sampler"] is StrategyRejectionSampler
    assert found["sampler"] is StrategySampler


def test_no_speculation_at_all(tiny: Path) -> None:
    with engine(tiny) as e:
        assert e.runner.speculative_config is None
        assert type(e.runner.sampler) is Sampler
