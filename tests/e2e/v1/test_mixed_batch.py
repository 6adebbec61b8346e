"""Requests of every kind in one batch: each answer is that of the same request alone.

No `verify_strategy` is set, so on a CPU the plugin verifies by its own lossless rule. By vLLM's own rejection sampling,
which reads memory that nothing wrote, greedy answers differ here and `top_k` ends the engine.
"""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.e2e.engines import PROMPTS, Engine, engine, speculative

ALLOWED = [10, 32, *range(97, 123)]
# What each prompt asks for: greedy, seeded and sampled, with and without filters, masks and logprobs.
REQUESTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 1, "top_k": 20},
    {"temperature": 1.3, "top_k": 5},
    {"logprobs": 3},
    {"temperature": 1.0, "seed": 2, "allowed_token_ids": ALLOWED, "logprobs": 2},
    {"allowed_token_ids": ALLOWED},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.0, "allowed_token_ids": ALLOWED, "top_k": 3},
    {"repetition_penalty": 1.2},
    {"temperature": 1.1, "seed": 4, "top_k": 30, "top_p": 0.8},
]
SAMPLED_DRAFTS = {"draft_sample_method": "probabilistic"}


def answers(e: Engine, requests: list[tuple[list[int], dict[str, Any]]]) -> list[tuple[list[int], list[float]]]:
    """The tokens and their logprobs, of requests that run together."""
    rules = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True}
    results = e.llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests],
        [SamplingParams(**rules | request) for _, request in requests],
        use_tqdm=False,
    )
    outputs = [result.outputs[0] for result in results]
    return [
        (
            list(output.token_ids),
            [row[token].logprob for token, row in zip(output.token_ids, output.logprobs or [], strict=False)],
        )
        for output in outputs
    ]


@pytest.mark.parametrize(
    ("proposer", "more"),
    [
        ("mtp_ngram", {}),
        pytest.param("mtp_suffix", {}, marks=pytest.mark.slow),
        pytest.param("ngram", {}, marks=pytest.mark.slow),
        ("mtp_ngram", SAMPLED_DRAFTS),
        ("mtp_ngram", {"adaptive": True}),
        ("mtp_suffix", {"adaptive": True} | SAMPLED_DRAFTS),
    ],
    ids=["mtp_ngram", "mtp_suffix", "ngram", "sampled_drafts", "adaptive", "adaptive_sampled_drafts"],
)
def test_each_answer_is_that_of_the_request_alone(
    proposer: str, more: dict[str, Any], trained: Path, draft: Path
) -> None:
    requests = [(PROMPTS[(i + k) % len(PROMPTS)], rules) for k in range(2) for i, rules in enumerate(REQUESTS)]
    is_sampled = "draft_sample_method" in more
    with engine(trained, speculative(proposer, draft, **more)) as e:
        assert e.runner.speculative_config.specplus.verify_strategy == ("rejection" if is_sampled else "target_match")
        alone = [answers(e, [request])[0] for request in requests]
        together = answers(e, requests)
        counts = e.counts()
    assert 0 < counts.accepted < counts.drafted
    for (_, rules), (tokens, logprobs), (expected, expected_logprobs) in zip(requests, together, alone, strict=True):
        assert len(tokens) == 32
        assert set(tokens) <= set(rules.get("allowed_token_ids", range(320)))
        assert len(logprobs) == (32 if "logprobs" in rules else 0)
        # Without a seed a sampled request has another text each time. With one it has too under `rejection`, where
        # vLLM draws the model's drafts without it.
        if "temperature" not in rules or ("seed" in rules and not is_sampled):
            assert tokens == expected
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)
