"""A fault in drafting costs a request its drafts, never its text, and never the engine: Model Runner V2."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.engines import engine
from tests.e2e.faults import FAULTY, OTHERS, at_calls, check_alive, check_faults, fault, reads_the_faulty
from tests.e2e.references import ask, config_of, stats
from tests.e2e.v2.engines import async_engine
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.proposers.suffix import SuffixMatcher
from vllm_specplus.runners.v2 import adaptive, fillers
from vllm_specplus.runners.v2 import requests as v2_requests
from vllm_specplus.runners.v2.adaptive import AdaptiveFiller
from vllm_specplus.runners.v2.fillers import ReferencesFirst
from vllm_specplus.runners.v2.host_tokens import TokenCopier
from vllm_specplus.runners.v2.requests import RequestTracker

pytestmark = pytest.mark.interpreter

PROMPTS = [*OTHERS[:2], FAULTY]


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
        (True, True),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
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
    places: list[tuple[Any, str]] = [(RequestTracker, "count_steps"), (RequestTracker, "limits_of")]
    places += [(TokenCopier, "advance")]
    if is_adaptive:
        places += [
            (AdaptiveFiller, name) for name in ("_plan_passes", "_judge", "_choose", "_settle", "_read", "begin")
        ]
        places += [(adaptive.kernels, "offer_ngrams")]
    else:
        places += [(fillers, "fill_drafts"), (ReferencesFirst, "fill"), (RequestTracker, "put_references_first")]
    references = [{"sp_advice_prompt_token_ids": text} for text in expected[:3]]
    start = async_engine if is_async else engine
    with start(trained, config_of("mtp_ngram", draft, adaptive=is_adaptive)) as e:
        for i, (owner, name) in enumerate(places):
            with fault(owner, name, at_calls(2)) as hits:
                assert ask(e, PROMPTS, references, max_tokens=24) == expected[:3], name
            assert hits == [0], name
            assert stats(e)["faults"] == {"drafting": i + 1}
        with fault(v2_requests, "count_drafts", at_calls(2)) as hits:
            assert ask(e, PROMPTS, references, max_tokens=24) == expected[:3]
        assert hits == [0]
        check_faults(e, "drafting", log)
        check_faults(e, "counting", log)
        if is_adaptive:
            with fault(AdaptiveFiller, "end", lambda *args: True) as hits:
                assert ask(e, PROMPTS, references, max_tokens=24) == expected[:3]
            assert hits
            drafted = sum(stats(e)["drafted"]["reference"])
            assert ask(e, PROMPTS, [{}] * 3, max_tokens=24) == expected[:3]
            # No request has the reference of the one before it.
            assert sum(stats(e)["drafted"]["reference"]) == drafted
        check_alive(e, [*expected[:2], *expected[3:]], max_tokens=24)
