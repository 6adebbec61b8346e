"""Tensor parallelism on the V1 model runner: two workers, each in a process of its own."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import PROMPTS, engine, speculative, target
from tests.e2e.parallel import (
    COMMON_PLACES,
    PROMPTS_OF_FAULTS,
    TWO,
    bind_a_core_each,
    check_all_workers_alike,
    check_faults_of_all_workers,
    check_own_drafts,
    measure_otherwise,
    of_workers,
    record_drafts,
)
from tests.e2e.parallel_servers import check_two_workers, plain_texts
from tests.e2e.references import ask, asking, config_of
from vllm_specplus.runners.v1 import requests as v1_requests


@pytest.fixture(autouse=True)
def a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    bind_a_core_each(monkeypatch)


# Without a draft model, since its passes would wait for the other worker's for ever.
@pytest.mark.parametrize(
    ("proposer", "shares_prices"), [("mtp_suffix", True), pytest.param("suffix", False, marks=pytest.mark.slow)]
)
def test_all_workers_draft_alike(proposer: str, shares_prices: bool, trained: Path, draft: Path) -> None:
    """Each worker chooses for itself, by the first one's clock. By their own clocks they would choose otherwise."""
    with engine(trained) as e:
        texts = e.tokens(PROMPTS[:4])
    config = config_of(proposer, draft, adaptive=True, verify_strategy="target_match")
    with engine(trained, config, **TWO) as e:
        e.llm.collective_rpc(measure_otherwise, args=(shares_prices,))
        e.llm.collective_rpc(record_drafts)
        assert ask(e, PROMPTS[:4] * 2, asking(texts), max_tokens=48) == texts * 2
        if shares_prices:
            check_own_drafts(e)
        first, last = e.llm.collective_rpc("specplus_stats")
        assert (first == last) == shares_prices
        assert sum(first["accepted"]["reference"]) > 0
        drafts, drafts_of_last = of_workers(e, "drafts")
        assert len(drafts) > 10
        assert (drafts == drafts_of_last) == shares_prices


@pytest.mark.parametrize(
    ("proposer", "more"),
    [
        ("mtp_ngram", {"verify_strategy": "topp"}),
        pytest.param("mtp_ngram", {}, marks=pytest.mark.slow),
        pytest.param("mtp_ngram", {"verify_strategy": "greedy"}, marks=pytest.mark.slow),
        pytest.param("suffix", {"verify_strategy": "target_match"}, marks=pytest.mark.slow),
        pytest.param(
            "mtp_ngram",
            {"verify_strategy": "rejection", "draft_sample_method": "probabilistic", "adaptive": True},
            marks=pytest.mark.slow,
        ),
        pytest.param("naive", {"verify_strategy": "topp"}, marks=pytest.mark.slow),
        pytest.param("eagle_ngram", {"verify_strategy": "target_match"}, marks=pytest.mark.slow),
        pytest.param("draft_model_ngram", {"verify_strategy": "rejection", "adaptive": True}, marks=pytest.mark.slow),
    ],
)
def test_all_workers_choose_alike(proposer: str, more: dict[str, Any], tiny: Path, trained: Path, draft: Path) -> None:
    """Each worker verifies for itself: with references and without, greedy, with a seed, and without one."""
    model = target(proposer, tiny, trained)
    with engine(model) as e:
        texts = e.tokens(PROMPTS[:4])
    with engine(model, config_of(proposer, draft, **more), **TWO) as e:
        check_all_workers_alike(e, texts, max_tokens=48)


def count_often(worker: Any) -> None:
    """Run in a worker: count drafts after every few, not after thousands."""
    v1_requests._MOST_UNCOUNTED = 3


def test_faults_of_all_workers_cost_no_text(trained: Path, draft: Path) -> None:
    arbiter = "vllm_specplus.proposers.arbiter.Arbiter"
    places = [
        *COMMON_PLACES,
        *(("drafting", f"{arbiter}.{name}") for name in ("begin_step", "plan_passes", "offer", "choose")),
        ("drafting", "vllm_specplus.runners.v1.drafter.kept_tokens"),
        ("counting", "vllm_specplus.runners.step_prices.StepPrices.add_passes"),
        ("counting", f"{v1_requests.__name__}.count_drafts"),
    ]
    with engine(trained) as e:
        texts = e.tokens(PROMPTS_OF_FAULTS)
    with engine(trained, config_of("mtp_suffix", draft, adaptive=True), **TWO) as e:
        e.llm.collective_rpc(count_often)
        check_faults_of_all_workers(e, places, texts, max_tokens=48)
        (first, _) = e.llm.collective_rpc("specplus_stats")
        assert sum(first["accepted"]["suffix"]) > 0


@pytest.mark.slow
def test_a_server(trained: Path, draft: Path, tmp_path: Path) -> None:
    config = speculative("mtp_ngram", draft, num_speculative_tokens=8, verify_strategy="target_match")
    check_two_workers(trained, config, plain_texts(trained), tmp_path)
