"""vLLM's adaptive verification with the arbiter's chances, as far as a CPU shows it.

vLLM's manager runs as it is. What it needs of a GPU is stubbed: full CUDA graphs, streams and events, and step costs
that are measured while graphs are captured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from tests.e2e.engines import engine
from tests.e2e.faults import fault
from tests.e2e.references import stats
from tests.e2e.v2.engines import FEW, async_engine, tokens
from vllm_specplus.engine import widths
from vllm_specplus.runners.v2 import adaptive_verification as ours
from vllm_specplus.runners.v2.adaptive import AdaptiveFiller

pytestmark = pytest.mark.interpreter

CONFIG = {"method": "mtp", "num_speculative_tokens": 6, "num_model_steps": 2, "mtp_strategy": "with_ngram"}
ON_THE_DEVICE = CONFIG | {"enable_adaptive_verification": True}
MAX_TOKENS = 20
TWO = FEW[:2]


class Stream:
    """Stands in for a CUDA stream or event where all work is done in order."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextmanager
def trimming_engine(model: Path, cost_of_token: float, config: dict[str, Any] = ON_THE_DEVICE) -> Iterator[Any]:
    """An engine that trims its drafts; a token more makes a step longer by a share of the first one."""

    @contextmanager
    def stream(*args: Any) -> Iterator[None]:
        yield

    cuda = SimpleNamespace(Stream=Stream, Event=Stream, current_stream=lambda device: Stream())
    fake_torch = SimpleNamespace(**{**vars(torch), "cuda": cuda})
    with (
        patch.object(widths, "reason_against_adaptive_verification", lambda setup: None),
        patch.object(VllmConfig, "_validate_adaptive_verification", lambda config: None),
        patch.object(ours, "_unsupported_backend", lambda runner: None),
        patch.object(adaptive_verification, "get_varlen_cudagraph_unsupported_backend", lambda *a, **k: None),
        patch.object(adaptive_verification, "torch", fake_torch),
        patch.object(adaptive_verification, "stream", stream),
        patch.object(model_runner, "resolve_adaptive_cudagraph_mode", lambda mode, **kwargs: mode),
        async_engine(model, config) as e,
    ):
        # vLLM takes a number of tokens between two that were measured for the larger one.
        of_target = [(number, 1.0 + (number - 1) * cost_of_token) for number in range(1, 65)]
        e.runner.adaptive_verification.set_cost_curves([(1, 0.1), (2, 0.1)], of_target)
        yield e


@pytest.fixture(scope="module")
def base(trained: Path) -> list[list[int]]:
    with engine(trained, None) as e:
        return tokens(e, TWO, max_tokens=MAX_TOKENS)


@contextmanager
def verified_drafts(e: Any) -> Iterator[list[tuple[int, int]]]:
    """For each step with slots: how many were scheduled, and how many were run."""
    seen, manager = [], e.runner.adaptive_verification
    get_num_tokens = manager.get_num_tokens

    def note(num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        num_tokens = get_num_tokens(num_tokens_per_req, draft_tokens)
        scheduled = sum(map(len, draft_tokens.values()))
        seen.append((scheduled, num_tokens - (sum(num_tokens_per_req.values()) - scheduled)))
        return num_tokens

    with patch.object(manager, "get_num_tokens", note):
        yield seen


@pytest.mark.parametrize("strategy", [pytest.param(None, marks=pytest.mark.every_version), "target_match"])
def test_empty_slots_are_not_run(strategy: str | None, trained: Path, base: list[list[int]]) -> None:
    config = ON_THE_DEVICE | ({"verify_strategy": strategy} if strategy else {})
    with trimming_engine(trained, 0.02, config) as e, verified_drafts(e) as seen:
        assert tokens(e, TWO, max_tokens=MAX_TOKENS) == base
        counts = stats(e)
        assert sum(counts["accepted"]["model"]) > 0
        # Drafts that were trimmed away are not counted.
        assert sum(map(sum, counts["drafted"].values())) == sum(run for _, run in seen)
        steps = [(scheduled, run) for scheduled, run in seen if scheduled]
    assert all(run <= scheduled for scheduled, run in steps)
    assert sum(run for _, run in steps) < 0.7 * sum(scheduled for scheduled, _ in steps)


def test_slots_that_cost_too_much_are_not_run(trained: Path, base: list[list[int]]) -> None:
    with trimming_engine(trained, 5.0) as e, verified_drafts(e) as seen:
        assert tokens(e, TWO, max_tokens=MAX_TOKENS) == base
    # The chances that vLLM begins with are 1.
    assert any(scheduled for scheduled, _ in seen[2:])
    assert sum(run for _, run in seen[2:]) == 0


def test_after_a_fault_no_slot_seems_to_hold_a_draft(trained: Path, base: list[list[int]]) -> None:
    failing = fault(AdaptiveFiller, "fill", lambda *args: True)
    with trimming_engine(trained, 0.02) as e, failing as hits, verified_drafts(e) as seen:
        confidences = e.runner.speculator.drafting.confidences
        confidences.fill_(1)
        assert tokens(e, TWO, max_tokens=MAX_TOKENS) == base
    assert hits
    # The chances that vLLM begins with are 1.
    assert any(scheduled for scheduled, _ in seen[2:])
    assert sum(run for _, run in seen[2:]) == 0
    assert float(confidences[: len(TWO)].max()) == 0


def test_confidences_are_the_chances_of_the_drafts(trained: Path) -> None:
    with trimming_engine(trained, 0.02) as e:
        drafting = e.runner.speculator.drafting
        filler, seen = drafting._slot_filler, []
        fill = filler.fill

        def note(*args: Any) -> Any:
            counts = fill(*args)
            num_drafts = counts.num_drafts_ptr.clone()
            seen.append((drafting.confidences[: len(num_drafts)].clone(), num_drafts))
            return counts

        with patch.object(filler, "fill", note):
            tokens(e, TWO, max_tokens=MAX_TOKENS)
        assert e.runner.speculator.draft_token_confidence_probs is drafting.confidences
        assert e.runner.speculator.acceptance_estimator is None
    assert any(bool((num_drafts > 0).any()) for _, num_drafts in seen)
    # Chances follow what is known of each draft.
    assert len({chance for confidences, _ in seen for chance in confidences.flatten().tolist()}) > 4
    for confidences, num_drafts in seen:
        holds_draft = torch.arange(confidences.shape[1]) < num_drafts[:, None]
        assert bool(((confidences > 0) == holds_draft).all())
        assert float(confidences.max()) <= 1


def test_a_backend_that_cannot_run_it_turns_it_off(
    trained: Path, base: list[list[int]], log: pytest.LogCaptureFixture
) -> None:
    """vLLM's backend for CPUs has no CUDA graphs."""
    with (
        patch.object(widths, "reason_against_adaptive_verification", lambda setup: None),
        patch.object(VllmConfig, "_validate_adaptive_verification", lambda config: None),
        async_engine(trained, ON_THE_DEVICE) as e,
    ):
        assert e.runner.adaptive_verification is None
        assert tokens(e, TWO, max_tokens=MAX_TOKENS) == base
    (line,) = [line for line in log.messages if "not in force" in line]
    assert "attention backend CPU_ATTN cannot run it" in line
