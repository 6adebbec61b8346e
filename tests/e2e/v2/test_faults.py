"""A fault in drafting costs a request its drafts, never its text, and never the engine: Model Runner V2."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.engines import engine
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
from tests.e2e.v2.engines import async_engine
from vllm_specplus.kernels.ngram import NgramSearch
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.proposers.suffix import SuffixMatcher
from vllm_specplus.runners.live_requests import LiveRequest, LiveRequests
from vllm_specplus.runners.step_prices import StepPrices
from vllm_specplus.runners.v2 import adaptive
from vllm_specplus.runners.v2.adaptive import AdaptiveFiller
from vllm_specplus.runners.v2.fillers import ReferencesFirst
from vllm_specplus.runners.v2.host_tokens import TokenCopier
from vllm_specplus.runners.v2.requests import RequestTracker

pytestmark = pytest.mark.interpreter

PROMPTS = [*OTHERS[:2], FAULTY]
NUM_DRAFTS = 5  # of `mtp_ngram` in a step


@pytest.fixture(autouse=True)
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    let_drafts_pay(monkeypatch)


@pytest.fixture(scope="module")
def expected(trained: Path) -> list[list[int]]:
    with engine(trained) as e:
        return ask(e, [*PROMPTS, *OTHERS[2:]], [{}] * 5, max_tokens=24)


@pytest.mark.parametrize(
    ("is_async", "is_adaptive"),
    [
        (True, False),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
def test_a_fault_in_suffix_trees_or_a_reference_is_of_its_request_alone(
    is_async: bool,
    is_adaptive: bool,
    trained: Path,
    draft: Path,
    expected: list[list[int]],
    log: pytest.LogCaptureFixture,
) -> None:
    faulty = expected[1]

    def is_faulty(reference: ReferenceText, *args: Any) -> bool:
        return np.array_equal(reference._text, faulty)

    references = [{"sp_advice_prompt_token_ids": text} for text in expected[:3]]
    start = async_engine if is_async else engine
    with start(trained, config_of("mtp_suffix", draft, adaptive=is_adaptive)) as e:
        with fault(SuffixMatcher, "match", reads_the_faulty) as hits:
            assert ask(e, PROMPTS, [{}] * 3, max_tokens=24) == expected[:3]
        assert hits
        check_faults(e, "drafting", log)
        with fault(ReferenceText, "draft", is_faulty) as hits:
            assert ask(e, PROMPTS, references, max_tokens=24) == expected[:3]
        assert len(hits) == 1
        assert sum(stats(e)["accepted"]["reference"]) > 0
        check_alive(e, [*expected[:2], *expected[3:]], max_tokens=24)


@pytest.mark.parametrize(
    ("is_async", "is_adaptive"),
    [
        (True, False),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_any_other_fault_costs_the_batch_its_drafts_or_its_counts(
    is_async: bool,
    is_adaptive: bool,
    trained: Path,
    draft: Path,
    expected: list[list[int]],
    log: pytest.LogCaptureFixture,
) -> None:
    places: dict[str, list[tuple[Any, str]]] = {
        "drafting": [(RequestTracker, "limits_of"), (TokenCopier, "advance")],
        "counting": [(RequestTracker, "count_steps"), (RequestTracker, "_counted")],
        "requests": [(LiveRequest, "__init__"), (LiveRequests, "accept_all_mask")],
    }
    if is_adaptive:
        places["drafting"] += [
            (AdaptiveFiller, name) for name in ("_plan_passes", "_judge", "_choose", "_read", "begin")
        ]
        places["drafting"] += [(adaptive.kernels.NgramChains, "search")]
        places["counting"] += [(StepPrices, name) for name in ("add_tokens", "expect_passes", "add_past_passes")]
        places["requests"] += [(StepPrices, "begin_step")]
    else:
        places["drafting"] += [
            (NgramSearch, "fill"),
            (ReferencesFirst, "fill"),
            (RequestTracker, "put_references_first"),
        ]
    references = [{"sp_advice_prompt_token_ids": text} for text in expected[:3]]
    start = async_engine if is_async else engine
    with start(trained, config_of("mtp_ngram", draft, adaptive=is_adaptive, allow_force_accept=True)) as e:
        for part, of_part in places.items():
            for i, (owner, name) in enumerate(of_part):
                before = stats(e)
                with fault(owner, name, at_calls(2)) as hits:
                    assert ask(e, PROMPTS, references, max_tokens=24) == expected[:3], name
                assert hits == [0], name
                after = stats(e)
                assert after["faults"] == before["faults"] | {part: i + 1}, name
                if part == "counting":
                    # Drafts go on: in the steps before the fault fewer than these can be accepted.
                    accepted, accepted_before = (sum(map(sum, found["accepted"].values())) for found in (after, before))
                    assert accepted - accepted_before > 2 * NUM_DRAFTS * len(PROMPTS), name
            check_faults(e, part, log)
        check_faults_in_accepting_all(e, PROMPTS, expected[:3], max_tokens=24)
        if is_adaptive:
            with fault(AdaptiveFiller, "end", lambda *args: True) as hits:
                assert ask(e, PROMPTS, references, max_tokens=24) == expected[:3]
            assert hits
            drafted = sum(stats(e)["drafted"]["reference"])
            assert ask(e, PROMPTS, [{}] * 3, max_tokens=24) == expected[:3]
            # No request has the reference of the one before it.
            assert sum(stats(e)["drafted"]["reference"]) == drafted
        check_alive(e, [*expected[:2], *expected[3:]], max_tokens=24)
