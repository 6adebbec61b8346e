"""With asynchronous scheduling the scheduler chooses how many slots a step has."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import engine
from tests.e2e.faults import InjectedError
from tests.e2e.v2.engines import FEW, async_engine, tokens
from vllm_specplus.engine.scheduler import WidthScheduler
from vllm_specplus.proposers.costs import StepTimes
from vllm_specplus.proposers.draft_widths import DraftWidths

pytestmark = pytest.mark.interpreter

CONFIGS: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "max_ngram_size": 4,
        "min_ngram_size": 1,
        "adaptive": True,
    },
    "hybrid": {"method": "mtp", "num_speculative_tokens": 6, "num_model_steps": 2, "mtp_strategy": "with_ngram"},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8, "adaptive": True},
}


@pytest.fixture(autouse=True)
def steps_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter a slot takes as long as a step."""
    add = StepTimes.add
    monkeypatch.setattr(StepTimes, "add", lambda self, tokens, reqs, time: add(self, tokens, reqs, 1 + 0.02 * tokens))


def scheduler_of(e: Any) -> WidthScheduler:
    scheduler = e.llm.llm_engine.engine_core.engine_core.scheduler
    assert isinstance(scheduler, WidthScheduler)
    return scheduler


def note_widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    chosen: list[int] = []
    choose = DraftWidths.choose

    def note(self: DraftWidths, req_ids: Any) -> Any:
        plan = choose(self, req_ids)
        chosen.append(plan.width)
        return plan

    monkeypatch.setattr(DraftWidths, "choose", note)
    return chosen


@pytest.mark.parametrize("name", CONFIGS)
def test_widths_vary_and_the_text_does_not(name: str, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(trained) as e:
        expected = tokens(e), tokens(e, FEW[:1], max_tokens=40)
    chosen = note_widths(monkeypatch)
    with async_engine(trained, CONFIGS[name], chooses_widths=True) as e:
        scheduler = scheduler_of(e)
        assert (tokens(e), tokens(e, FEW[:1], max_tokens=40)) == expected
        counts = e.counts()
        assert len(set(chosen)) >= 3
        assert 0 < counts.accepted < counts.drafted < counts.drafts * CONFIGS[name]["num_speculative_tokens"]
        chooser = scheduler._chooser
        assert chooser is not None
        assert chooser.draft_widths.num_requests <= 1  # the last, which vLLM reports with the next step


def test_an_error_of_the_choice_costs_the_choice_alone(
    trained: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(trained) as e:
        expected = tokens(e)

    def fail(self: DraftWidths, *args: Any) -> None:
        raise InjectedError

    monkeypatch.setattr(DraftWidths, "add_result", fail)
    with async_engine(trained, CONFIGS["ngram"], chooses_widths=True) as e:
        scheduler = scheduler_of(e)
        assert tokens(e) == expected
        assert scheduler._chooser is None
        assert set(scheduler.dynamic_sd_lookup or ()) == {8}
        counts = e.counts()
    assert counts.accepted > 0
