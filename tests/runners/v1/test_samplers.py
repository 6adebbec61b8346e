"""What vLLM's samplers are asked on Model Runner V1."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    LogitsProcessors,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.sampler import Sampler

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.runners.v1.samplers import (
    RewindingSampler,
    StrategyRejectionSampler,
    StrategySampler,
    _are_processors_idle,
)

NUM_ROWS, VOCAB_SIZE = 16, 1024
LIMIT = 5


def test_rows_without_drafts_are_bonus_rows() -> None:
    """Otherwise vLLM applies a thinking budget to the rows of other requests."""
    asked: list[tuple[Any, dict[str, Any]]] = []
    sampler = StrategyRejectionSampler.__new__(StrategyRejectionSampler)
    torch.nn.Module.__init__(sampler)
    sampler.sampler = lambda *args, **kwargs: asked.append((args, kwargs))
    logits, metadata = torch.zeros(2, 8), object()
    sampler.forward(SimpleNamespace(num_draft_tokens=[0, 0]), None, logits, metadata)
    assert asked == [((logits, metadata), {"predict_bonus_token": True})]


@dataclass
class Generators:
    """The part of vLLM's sampling metadata that has the generators, by request."""

    generators: dict[int, Any]


def test_what_a_step_of_a_prompt_has_drawn_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request's own generator goes on where it stands, also when vLLM puts it into the batch again."""
    monkeypatch.setattr(
        Sampler,
        "sample",
        lambda self, logits, metadata, mode: [torch.rand(1, generator=g).item() for g in metadata.generators.values()],
    )
    sampler = RewindingSampler.__new__(RewindingSampler)
    plain, own = (torch.Generator().manual_seed(5) for _ in range(2))
    expected = [torch.rand(1, generator=plain).item() for _ in range(3)]
    batch = Generators({4: own})
    for _ in range(3):
        assert sampler.sample(torch.zeros(1), batch) == expected[:1]
        generator = batch.generators[4]
        generator.set_offset(generator.get_offset() - 4)
    assert sampler.sample(torch.zeros(1), batch) == expected[:1]
    assert sampler.sample(torch.zeros(1), batch) == expected[1:2]
    assert sampler.sample(torch.zeros(1), Generators({0: own})) == expected[2:]


def processor(kind: type, **state: Any) -> Any:
    made = kind.__new__(kind)
    vars(made).update(state)
    return made


IDLE: dict[str, Any] = {
    "no_penalties": True,
    "allowed_token_ids_mask": None,
    "bad_words_token_ids": {},
    "thinking_budget_state_holder": None,
}


@pytest.mark.parametrize(
    ("changes", "processors", "idle"),
    [
        ({}, [], True),
        ({}, [processor(MinTokensLogitsProcessor, min_toks={}), processor(LogitBiasLogitsProcessor, biases={})], True),
        ({"thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: False)}, [], True),
        ({}, [processor(MinTokensLogitsProcessor, min_toks={0: (1, [], {2}, False)})], False),
        ({}, [processor(LogitBiasLogitsProcessor, biases={0: {3: 1.0}})], False),
        ({}, [SimpleNamespace(is_argmax_invariant=lambda: False)], False),
        ({"no_penalties": False}, [], False),
        ({"allowed_token_ids_mask": torch.zeros(1, 8, dtype=torch.bool)}, [], False),
        ({"bad_words_token_ids": {0: [[3]]}}, [], False),
        ({"thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True)}, [], False),
    ],
)
def test_whether_processors_are_idle(changes: dict[str, Any], processors: list[Any], idle: bool) -> None:
    metadata = SimpleNamespace(**IDLE | changes, logitsprocs=LogitsProcessors(processors))
    assert _are_processors_idle(metadata) is idle


def sampler_of(strategy: str) -> StrategySampler:
    options = SpecPlusOptions(
        method="ngram",
        num_speculative_tokens=4,
        verify_strategy=strategy,
        max_candidate_len=LIMIT if strategy == "topp" else None,
    )
    sampler = StrategySampler()
    sampler.set_runner(
        SimpleNamespace(
            speculative_config=SimpleNamespace(specplus=options),
            device=torch.device("cpu"),
            query_start_loc=SimpleNamespace(gpu=torch.arange(NUM_ROWS + 1)),
            _get_positions=lambda indices: indices,
        )
    )
    return sampler


def sample(strategy: str, num_rows: int = NUM_ROWS, *, has_seeds: bool = False, top_p: float | None = None) -> set[int]:
    """Tokens of flat rows."""
    generators = {i: torch.Generator().manual_seed(i) for i in range(num_rows)} if has_seeds else {}
    metadata = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.ones(num_rows),
        top_p=None if top_p is None else torch.full((num_rows,), top_p),
        top_k=None,
        generators=generators,
        logitsprocs=SimpleNamespace(argmax_invariant=[]),
        max_num_logprobs=None,
        logprob_token_ids=None,
    )
    tokens, processed = sampler_of(strategy).sample(torch.zeros(num_rows, VOCAB_SIZE), metadata)
    assert processed is None
    return set(tokens.tolist())


@pytest.mark.parametrize("num_rows", [1, NUM_ROWS])
def test_the_limits_of_topp_do_not_hold_for_rows_without_seeds(num_rows: int) -> None:
    """Whether there are many logits or few: the plugin's code samples many, vLLM's few."""
    tokens = {token for _ in range(NUM_ROWS // num_rows) for token in sample("topp", num_rows)}
    assert len(tokens) > LIMIT
    assert sample("topp", has_seeds=True) <= set(range(LIMIT))


def test_many_rows_without_seeds_are_samples_of_the_nucleus() -> None:
    torch.manual_seed(0)
    assert max(sample("target_match", top_p=0.125)) < VOCAB_SIZE / 8 <= max(sample("target_match"))
