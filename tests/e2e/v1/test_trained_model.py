"""The trained tiny model is good enough to show what drafting is worth."""

from pathlib import Path

from tests.e2e.engines import engine
from vllm_specplus.testing.tiny_corpus import held_out_files


def test_first_draft_is_accepted_on_half_of_the_steps_of_unseen_files(trained: Path) -> None:
    files = held_out_files(4000)[:8]
    assert len(files) == 8
    prompts = [list(file.read_bytes()[2000:2400]) for file in files]
    with engine(trained, {"method": "mtp", "num_speculative_tokens": 1}) as e:
        e.tokens(prompts, max_tokens=64)
        counts = e.counts()
    assert counts.drafts > 100
    assert counts.accepted / counts.drafts >= 0.5
