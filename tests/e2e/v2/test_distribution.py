"""A hybrid whose model samples its drafts keeps the distribution of the target.

Statistics need more texts than an engine can make under the interpreter. So the tests call the functions that the
runner calls, with such arguments as it passes. One test on an engine checks that it passes them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from tests.e2e.engines import engine
from tests.e2e.v2.engines import FEW, tokens
from tests.verify.test_distribution import DRAFT_LOGITS, LOGITS, TEMPERATURE, VOCAB, chi_squared, likeliest
from vllm_specplus.kernels.drafts import write_one_hot_rows
from vllm_specplus.runners.v2 import drafting
from vllm_specplus.verify import verify_draft_tokens

pytestmark = pytest.mark.interpreter

NUM_REQS = 900
REQUESTS = torch.arange(NUM_REQS)
ROWS = REQUESTS.repeat_interleave(3)  # request of each row: two drafts and a bonus row
LOCAL = torch.arange(3).repeat(NUM_REQS)
POSITIONS = LOCAL + 40
P = (LOGITS.double() / TEMPERATURE).softmax(dim=1).numpy()


def drafts_of_two_sources() -> tuple[torch.Tensor, torch.Tensor]:
    """[N, 2] drafts, one that the model sampled and one that a match found; and the draft logits of both slots.

    The logits of the second slot are left from another step.
    """
    q = (DRAFT_LOGITS[0] / TEMPERATURE).softmax(dim=0)
    sampled = torch.multinomial(q, NUM_REQS, replacement=True, generator=torch.Generator().manual_seed(4))
    drafts = torch.stack([sampled, torch.full_like(sampled, likeliest(1))], dim=1)
    return drafts, torch.stack([DRAFT_LOGITS[0], torch.zeros(VOCAB)]).repeat(NUM_REQS, 1, 1)


def by_vllm(tells_matches: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify by vLLM, which knows of the match by one-hot rows."""
    drafts, draft_logits = drafts_of_two_sources()
    if tells_matches:
        ones = torch.ones(NUM_REQS, dtype=torch.int32)
        write_one_hot_rows(draft_logits, REQUESTS, drafts, 2 * ones, ones)
    fed_in = torch.cat([torch.zeros(NUM_REQS, 1, dtype=torch.int64), drafts], dim=1)
    return rejection_sample(
        (LOGITS / TEMPERATURE).repeat(NUM_REQS, 1),
        draft_logits,
        fed_in.flatten().to(torch.int32),
        torch.arange(NUM_REQS + 1, dtype=torch.int32) * 3,
        POSITIONS,
        REQUESTS,
        ROWS,
        LOCAL.to(torch.int32),
        torch.full((NUM_REQS,), TEMPERATURE),
        REQUESTS - 700,
        2,
    )


def by_the_plugin(tells_matches: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify by strategy `rejection`, which knows of the match by `draft_rows`."""
    drafts, draft_logits = drafts_of_two_sources()
    rows = torch.where((1 if tells_matches else 2) > LOCAL, 2 * ROWS + LOCAL, -1)
    out = verify_draft_tokens(
        LOGITS.repeat(NUM_REQS, 1),
        torch.arange(NUM_REQS + 1) * 3,
        torch.cat([drafts, torch.full((NUM_REQS, 1), -1)], dim=1).flatten(),
        torch.full((NUM_REQS,), TEMPERATURE),
        seeds=REQUESTS - 700,
        positions=POSITIONS,
        strategy="rejection",
        backend="torch",
        draft_logits=draft_logits.flatten(0, 1),
        draft_rows=rows,
    )
    return out.token_ids, out.num_tokens


@pytest.mark.parametrize("verify", [pytest.param(by_vllm, marks=pytest.mark.slow), by_the_plugin])
def test_sampled_drafts_and_matches(verify: Callable[[bool], tuple[torch.Tensor, torch.Tensor]]) -> None:
    token_ids, num_tokens = verify(True)
    second = token_ids[num_tokens > 1, 1]
    assert len(second) > 250
    assert chi_squared(token_ids[:, 0], P[0]) > 1e-3
    assert chi_squared(second, P[1]) > 1e-3
    # Bug: the match counts as sampled from the logits of its slot.
    token_ids, num_tokens = verify(False)
    assert chi_squared(token_ids[num_tokens > 1, 1], P[1]) < 1e-6


def test_the_runner_writes_one_hot_rows(trained: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand in its draft logits, for all drafts that the model did not sample."""
    num_checked = {"matched": 0, "sampled": 0}

    def check(draft_logits: Any, idx_mapping: Any, drafts: Any, num_drafts: Any, num_model: Any) -> None:
        write_one_hot_rows(draft_logits, idx_mapping, drafts, num_drafts, num_model)
        for i, state in enumerate(idx_mapping.tolist()):
            for slot in range(int(num_drafts[i])):
                q = draft_logits[state, slot].softmax(dim=0)
                is_matched = slot >= num_model[i]
                assert (q[drafts[i, slot]] == 1) == is_matched
                num_checked["matched" if is_matched else "sampled"] += 1

    monkeypatch.setattr(drafting, "write_one_hot_rows", check)
    config = {
        "method": "mtp",
        "num_speculative_tokens": 4,
        "num_model_steps": 2,
        "mtp_strategy": "with_ngram",
        "match_override_len": 3,
        "draft_sample_method": "probabilistic",
    }
    with engine(trained, config) as e:
        tokens(e, FEW, temperature=0.7, seed=3)
    assert num_checked["matched"] > 10
    assert num_checked["sampled"] > 10
