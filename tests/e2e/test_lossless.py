"""Greedy text equals the text without speculation, whatever drafts."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import PROMPTS, PROPOSERS, engine, speculative

# An engine's arguments, by what they bring about.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix_caching": {"enable_prefix_caching": True, "block_size": 32},
    "chunked_prefill": {"max_num_batched_tokens": 64, "max_num_seqs": 4},
}
# Some longer than a chunk of the prefill, and than the blocks that a prefix cache drops for MTP's sake.
LONG = [*PROMPTS, PROMPTS[0] * 3, list(range(30, 250))]


@pytest.fixture(scope="module")
def plain_text(trained: Path) -> list[list[int]]:
    with engine(trained) as e:
        together = e.tokens(LONG)
        assert together == [t for p in LONG for t in e.tokens([p])]
    assert len(set(together[0])) > 1
    return together


@pytest.mark.parametrize("engine_kind", ENGINES)
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_greedy_text(proposer: str, engine_kind: str, trained: Path, draft: Path, plain_text: list[list[int]]) -> None:
    with engine(trained, speculative(proposer, draft), **ENGINES[engine_kind]) as e:
        assert e.tokens(LONG) == plain_text
        # Once more: what is cached of the first run, in blocks or in a suffix tree, changes no text.
        assert e.tokens(LONG) == plain_text
        assert [t for p in LONG[:3] for t in e.tokens([p])] == plain_text[:3]
        counts = e.counts()
    # Drafts are taken and drafts are refused, or the test would show little.
    if proposer == "naive":
        assert counts.drafted == 0
    else:
        assert 0 < counts.accepted < counts.drafted


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_up_to_the_models_length(proposer: str, tiny: Path, draft: Path) -> None:
    prompts = [list(range(40, 90)), [65, 66] * 31, list(range(40, 103))]
    with engine(tiny, max_model_len=64) as e:
        expected = e.tokens(prompts, max_tokens=None)
    with engine(tiny, speculative(proposer, draft), max_model_len=64) as e:
        assert e.tokens(prompts, max_tokens=None) == expected
    assert [len(t) for t in expected] == [14, 2, 1]


@pytest.mark.parametrize("proposer", ["mtp_ngram", "mtp_suffix", "draft_model_ngram", "ngram"])
def test_preempted_and_resumed(proposer: str, trained: Path, draft: Path) -> None:
    prompts = [[*PROMPTS[k % 4][:60], 65 + k] for k in range(8)]
    with engine(trained) as e:
        expected = e.tokens(prompts, max_tokens=120)
    with engine(trained, speculative(proposer, draft), num_gpu_blocks_override=20, block_size=32) as e:
        assert e.tokens(prompts, max_tokens=120) == expected
        preempted = {m.name: m for m in e.llm.get_metrics()}["vllm:num_preemptions"].value
    assert preempted > 0
