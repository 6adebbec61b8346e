"""A fault in drafting costs a request its drafts, never its text, and never the engine: V1."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.engines import engine
from tests.e2e.families import make_medusa
from tests.e2e.faults import (
    FAULTY,
    OTHERS,
    at_calls,
    check_alive,
    check_faults,
    check_faults_in_accepting_all,
    fault,
    let_drafts_pay,
    reads_the_faulty,
)
from tests.e2e.references import ask, config_of, stats
from vllm_specplus.proposers.adaptive import AdaptiveDrafter
from vllm_specplus.proposers.arbiter import Arbiter
from vllm_specplus.proposers.ngram import NgramMatcher
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.proposers.suffix import SuffixMatcher
from vllm_specplus.runners.live_requests import LiveRequest, LiveRequests
from vllm_specplus.runners.step_prices import StepPrices
from vllm_specplus.runners.v1 import drafter
from vllm_specplus.runners.v1 import requests as v1_requests
from vllm_specplus.runners.v1.history import HostHistory

PROMPTS = [*OTHERS, FAULTY]


@pytest.fixture(autouse=True)
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    let_drafts_pay(monkeypatch)


@pytest.fixture(scope="module")
def expected(trained: Path) -> list[list[int]]:
    with engine(trained) as e:
        return ask(e, PROMPTS, [{}] * 5, max_tokens=48)


@pytest.mark.parametrize(
    ("proposer", "adaptive"),
    [
        ("ngram", False),
        ("mtp_ngram", True),
        ("suffix", False),
        *(
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in [("ngram", True), ("mtp_ngram", False), ("suffix", True)]
        ),
    ],
)
def test_a_fault_in_matching_is_of_its_request_alone(
    proposer: str, adaptive: bool, trained: Path, draft: Path, expected: list[list[int]], log: pytest.LogCaptureFixture
) -> None:
    matcher = SuffixMatcher if proposer == "suffix" else NgramMatcher
    with engine(trained, config_of(proposer, draft, adaptive=adaptive)) as e:
        with fault(matcher, "match", reads_the_faulty) as hits:
            assert ask(e, PROMPTS, [{}] * 5, max_tokens=48) == expected
        # The fault itself and the search for its request, for each match of one step: behind 0, 1 and 2 of the drafts.
        assert len(hits) == (6 if proposer == "mtp_ngram" and adaptive else 2)
        assert sum(stats(e)["accepted"]["suffix" if proposer == "suffix" else "ngram"]) > 0
        check_faults(e, "drafting", log)
        check_alive(e, expected)


@pytest.mark.parametrize(("proposer", "adaptive"), [("naive", True), ("mtp_ngram", False), ("mtp_ngram", True)])
def test_a_fault_in_a_reference_is_of_its_request_alone(
    proposer: str, adaptive: bool, trained: Path, draft: Path, expected: list[list[int]], log: pytest.LogCaptureFixture
) -> None:
    references = [{"sp_advice_prompt_token_ids": text} for text in expected]
    faulty = expected[1]

    def is_faulty(reference: ReferenceText, *args: Any) -> bool:
        return np.array_equal(reference._text, faulty)

    config = config_of(proposer, draft) | {"adaptive": adaptive}
    with engine(trained, config) as e:
        with fault(ReferenceText, "draft", is_faulty) as hits:
            assert ask(e, PROMPTS, references, max_tokens=48) == expected
        assert hits
        assert sum(stats(e)["accepted"]["reference"]) > 0
        check_faults(e, "drafting", log)
        assert ask(e, PROMPTS, references, max_tokens=48) == expected


def test_a_fault_in_the_arbiter_costs_the_batch_its_drafts(
    trained: Path, draft: Path, expected: list[list[int]], log: pytest.LogCaptureFixture
) -> None:
    places = [
        *((Arbiter, name) for name in ("begin_step", "plan_passes", "offer", "offer_model", "choose")),
        (AdaptiveDrafter, "is_asleep"),
        (AdaptiveDrafter, "set_prices"),
        (StepPrices, "agree"),
        (drafter, "kept_tokens"),
    ]
    with engine(trained, config_of("mtp_ngram", draft, adaptive=True)) as e:
        for i, (owner, name) in enumerate(places):
            with fault(owner, name, at_calls(3)) as hits:
                assert ask(e, PROMPTS, [{}] * 5, max_tokens=48) == expected
            assert hits == [0], name
            assert stats(e)["faults"]["drafting"] == i + 1
        check_faults(e, "drafting", log)
        check_alive(e, expected)


@pytest.mark.parametrize("adaptive", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_fault_in_reading_the_tokens_for_medusa_costs_the_batch_its_drafts(
    adaptive: bool, trained: Path, tmp_path: Path, expected: list[list[int]], log: pytest.LogCaptureFixture
) -> None:
    heads = {"method": "medusa", "model": str(make_medusa(tmp_path / "heads", trained))}
    config = config_of("mtp_ngram", tmp_path, adaptive=adaptive) | heads
    with engine(trained, config) as e:
        with fault(HostHistory, "newest_tokens", at_calls(3)) as hits:
            assert ask(e, PROMPTS, [{}] * 5, max_tokens=48) == expected
        assert hits == [0]
        check_faults(e, "drafting", log)
        assert stats(e)["faults"] == {"drafting": 1}
        check_alive(e, expected)


def test_a_fault_in_counting_or_following_costs_no_text(
    trained: Path,
    draft: Path,
    expected: list[list[int]],
    log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(v1_requests, "_MOST_UNCOUNTED", 3)
    references = [{"sp_advice_prompt_token_ids": text} for text in expected]
    places = [
        (StepPrices, "add_passes"),
        (StepPrices, "begin_step"),
        (LiveRequest, "__init__"),
        (LiveRequests, "accept_all_mask"),
        (StepPrices, "add_tokens"),
        (v1_requests, "count_drafts"),
    ]
    with engine(trained, config_of("mtp_ngram", draft, adaptive=True, allow_force_accept=True)) as e:
        for owner, name in places:
            with fault(owner, name, at_calls(2)) as hits:
                assert ask(e, PROMPTS, references, max_tokens=48) == expected
            assert hits == [0], name
        assert stats(e)["faults"] == {"requests": 3, "counting": 3}
        check_faults_in_accepting_all(e, PROMPTS, expected, max_tokens=48)
        check_faults(e, "requests", log)
        check_faults(e, "counting", log)
        check_alive(e, expected)


def test_a_seeded_request_whose_prompt_comes_in_chunks_where_nothing_is_verified(trained: Path) -> None:
    """vLLM alone ends at one on a CPU."""
    texts = []
    for chunk in (32, 512):
        with engine(trained, {"method": "naive"}, max_num_batched_tokens=chunk) as e:
            texts.append(e.tokens(OTHERS[:2], n=5, temperature=0.9, seed=11))
    assert texts[0] == texts[1]
    assert len(set(map(tuple, texts[0]))) == 10
