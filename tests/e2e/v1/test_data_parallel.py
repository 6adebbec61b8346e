"""Data parallelism on the V1 model runner: two engines behind one address, and a server each."""

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from tests.e2e.engines import speculative
from tests.e2e.parallel_servers import check_two_engines, check_two_servers, plain_texts

CONFIG = {"method": "mtp", "num_speculative_tokens": 8, "num_model_steps": 2, "mtp_strategy": "with_ngram"}


@pytest.fixture(scope="module")
def texts(trained: Path) -> list[str]:
    return plain_texts(trained)


@pytest.mark.slow
def test_two_engines_of_one_address(texts: list[str], trained: Path, tmp_path: Path) -> None:
    """vLLM starts as many API server processes as engines; each asks all engines."""
    check_two_engines(trained, CONFIG, texts, tmp_path)


def test_one_api_server(texts: list[str], trained: Path, tmp_path: Path) -> None:
    """A hybrid that is not adaptive drafts without predictions too."""
    check_two_engines(trained, CONFIG | {"adaptive": False}, texts, tmp_path, "--api-server-count", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proposer", "strategy"),
    [("mtp_ngram", "topp"), ("mtp_suffix", "greedy"), ("suffix", "target_match"), ("ngram", "rejection")],
)
def test_each_verifier(
    proposer: str, strategy: str, texts: list[str], trained: Path, draft: Path, tmp_path: Path
) -> None:
    slots = {"num_speculative_tokens": 8}
    config: dict[str, Any] = speculative(proposer, draft, **slots, verify_strategy=strategy)
    check_two_engines(trained, config, texts, tmp_path)


@pytest.mark.slow
def test_a_server_each(texts: list[str], trained: Path, tmp_path: Path) -> None:
    """As vLLM tells users of a dense model to do it, behind a balancer."""
    check_two_servers(trained, CONFIG, texts, tmp_path)


def test_a_dense_model_has_no_rank(trained: Path) -> None:
    """vLLM says that its servers are to be started by themselves."""
    args = AsyncEngineArgs(model=str(trained), speculative_config=CONFIG, data_parallel_size=2, data_parallel_rank=0)
    with pytest.raises(ValueError, match="Non-MoE models do not support external data parallel mode"):
        args.create_engine_config()
