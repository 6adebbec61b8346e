"""The backends for a CPU return exactly what the specification says."""

import math

import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from tests.fuzzing import fuzz
from vllm_specplus.verify import STRATEGIES, _rows, numba_backend, reference, torch_backend, verify_draft_tokens
from vllm_specplus.verify.noise import gumbel_noise
from vllm_specplus.verify.nucleus import _falling_order
from vllm_specplus.verify.types import VerifyInputs, VerifyOutput

from .cases import (
    DRAWN_AT_INFINITY,
    HUGE_CASES,
    OPEN_CASES,
    UNDRAWN_AT_INFINITY,
    Shape,
    assert_in_range,
    assert_same,
    make_case,
    make_huge_case,
    shapes_of,
)
from .guards import GuardedInputs, PoisonedMemory


def at_most_32_rows(counts: list[int]) -> list[int]:
    return [n for i, n in enumerate(counts) if sum(counts[: i + 1]) <= 32]


def run(inputs: VerifyInputs, *, pads_rows: bool = False) -> list[VerifyOutput]:
    """Verify with each backend, with guards around the inputs, and with memory that is wrong until it is written."""
    guarded, outputs = GuardedInputs(inputs, pads_rows=pads_rows), []
    for backend in (torch_backend, numba_backend) if numba_backend.takes(inputs) else (torch_backend,):
        with PoisonedMemory():
            output = backend.verify(guarded.inputs)
        guarded.check()
        for tensor in (output.token_ids, output.num_tokens):
            guarded.check_apart(tensor)
        assert output.token_ids.shape == (inputs.num_reqs, inputs.max_rows)
        assert output.num_tokens.shape == (inputs.num_reqs,)
        assert (output.token_ids.dtype, output.num_tokens.dtype) == (torch.int64, torch.int32)
        outputs.append(output)
    return outputs


def assert_all_same(outputs: list[VerifyOutput], expected: VerifyOutput) -> None:
    for output in outputs:
        assert_same(output, expected)


def test_writes_outside_of_outputs_and_unwritten_memory_show() -> None:
    shape = Shape([2, 1], 70, torch.bfloat16, "greedy", "normal", 0, None, ["normal"], set(), seed=1)
    for pads_rows in (False, True):
        for row, column in ((0, -1), (1, 70)):
            guarded = GuardedInputs(make_case(shape), pads_rows=pads_rows)
            guarded.check()
            logits = guarded.inputs.logits
            logits.as_strided((1,), (1,), logits[row].storage_offset() + column).fill_(3.0)
            with pytest.raises(AssertionError, match="logits"):
                guarded.check()
    with PoisonedMemory():
        assert torch.empty(3).isinf().all()
        assert torch.empty_like(torch.zeros(2)).isinf().all()
        assert (torch.zeros(2).new_empty(3, dtype=torch.int32) == -99).all()


BACKENDS = pytest.mark.parametrize("backend", ["torch", "numba"])
NUM_ROWS = st.sampled_from([1, 0, 2, 3, 4, 5, 6, 9, 17])


@fuzz
@settings(max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(shapes_of(st.lists(NUM_ROWS, max_size=8).map(at_most_32_rows)))
@example(UNDRAWN_AT_INFINITY)
@example(DRAWN_AT_INFINITY)
def test_equals_reference(shape: Shape) -> None:
    inputs = make_case(shape)
    expected = reference.verify(inputs)
    longest = int(expected.num_tokens.max()) if inputs.num_reqs else 0
    event(f"{shape.strategy}, {shape.policy}, at most {min(longest, 3)} tokens")
    assert_all_same(run(inputs, pads_rows=shape.seed % 2 == 1), expected)
    valid = expected.token_ids[expected.token_ids != -1]
    assert ((valid >= 0) & (valid < shape.vocab_size)).all()


@pytest.mark.parametrize("with_draft_logits", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_huge_logits_and_extreme_temperatures(strategy: str, with_draft_logits: bool) -> None:
    with_draft_logits = with_draft_logits and strategy == "rejection"
    for scale, temperature in HUGE_CASES:
        inputs = make_huge_case(strategy, scale, temperature, with_draft_logits=with_draft_logits)
        expected = reference.verify(inputs)
        assert_in_range(expected, inputs)
        assert_all_same(run(inputs), expected)
    for scale, temperature in OPEN_CASES:
        inputs = make_huge_case(strategy, scale, temperature, with_draft_logits=with_draft_logits)
        assert_in_range(reference.verify(inputs), inputs)
        for output in run(inputs):
            assert_in_range(output, inputs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chunks_do_not_show(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(
        counts=[5, 1, 3, 7, 0, 2],
        vocab_size=100,
        dtype=torch.float32,
        strategy=strategy,
        policy="normal",
        verify_window=1,
        max_candidate_len=None,
        kinds=["normal", "tied"],
        filters={"top_p", "top_k", "min_p"},
        seed=3,
    )
    inputs = make_case(shape)
    whole = torch_backend.verify(inputs)
    for elements in (1, 250, 1000):
        monkeypatch.setattr(torch_backend, "_CHUNK_ELEMENTS", elements)
        assert_all_same(run(inputs), whole)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("filters", [set(), {"top_p"}, {"top_k"}, {"min_p"}, {"top_p", "top_k", "min_p"}])
def test_rows_of_several_thousand_tokens(strategy: str, filters: set[str]) -> None:
    """Rows of many blocks, most of which bounds leave unread; greedy and sampled requests in one batch."""
    temperatures: list[float] = []
    for seed in range(4):
        shape = Shape(
            counts=[3, 2, 1, 3],
            vocab_size=5000 + seed,
            dtype=torch.float32,
            strategy=strategy,
            policy="normal",
            verify_window=1,
            max_candidate_len=None,
            kinds=["normal", "peaked", "tied", "wide", "partly_nan", "all_masked", "infinite"],
            filters=filters,
            seed=seed,
            with_draft_logits=seed % 2 == 1,
        ).consistent()
        inputs = make_case(shape)
        temperatures += inputs.temperature.tolist()
        assert_all_same(run(inputs), reference.verify(inputs))
    assert 0 < temperatures.count(0.0) < len(temperatures)


@pytest.mark.parametrize(
    "row",
    [
        [-0.0, 0.0, -0.0],
        [0.0, 0.0, 1e-40],
        [math.inf, 0.0, math.inf],
        [-math.inf] * 3,
        [math.nan, 5.0, 5.0],
        [math.nan] * 3,
    ],
)
@pytest.mark.parametrize("vocab_size", [3, 64, 1500])
@BACKENDS
def test_largest_logit(row: list[float], vocab_size: int, backend: str) -> None:
    """The first of the largest logits, which may lie in the last block or be followed by equals."""
    for start in (0, vocab_size - 3):
        logits = torch.full((2, vocab_size), -math.inf)
        logits[0, start : start + 3] = torch.tensor(row)
        logits[1, -1] = 0.0
        out = verify_draft_tokens(
            logits,
            torch.tensor([0, 1, 2]),
            torch.full((2,), -1),
            torch.zeros(2),
            strategy="rejection",
            backend=backend,
        )
        expected = logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).argmax(dim=1)
        assert out.token_ids[:, 0].tolist() == expected.tolist()


@BACKENDS
def test_a_greedy_request_has_no_window(backend: str) -> None:
    """The second choice is not accepted at temperature 0, though the drafts behind it come first."""
    logits = torch.full((6, 8), -5.0)
    logits[::3, 1:3] = torch.tensor([2.0, 3.0])
    logits[1::3, 4] = logits[2::3, 6] = 5.0
    out = verify_draft_tokens(
        logits,
        torch.tensor([0, 3, 6]),
        torch.tensor([1, 4, -1, 1, 4, -1]),
        torch.tensor([0.0, 1.0]),
        top_k=torch.tensor([1, 1]),
        seeds=torch.tensor([0, 0]),
        positions=torch.arange(6),
        strategy="topp",
        verify_window=1,
        backend=backend,
    )
    assert out.token_ids.tolist() == [[2, -1, -1], [1, 4, 6]]


def test_every_strategy_has_a_number_of_its_own() -> None:
    assert set(_rows.CODES) == set(STRATEGIES)
    assert set(_rows.CODES.values()) == set(range(len(STRATEGIES)))


def test_wide_nucleus_is_ordered_by_value_then_by_id() -> None:
    """numpy sorts wide rows on a CPU: the order is that of torch's stable sort."""
    g = torch.Generator().manual_seed(0)
    z = torch.stack([torch.randn(3000, generator=g) * 3, torch.randn(3000, generator=g).round(), torch.zeros(3000)])
    z[2, ::2] = -0.0
    z[1, 7], z[0, 5:9] = math.inf, -math.inf
    expected = z.sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(_falling_order(z), expected)


@BACKENDS
def test_flat_row_of_a_large_vocabulary(backend: str) -> None:
    """The nucleus is found after several rounds: it is 1 % of equal tokens, the lowest ids."""
    vocab_size, num_reqs = 1 << 15, 20
    out = verify_draft_tokens(
        torch.zeros(num_reqs, vocab_size),
        torch.arange(num_reqs + 1),
        torch.full((num_reqs,), -1),
        torch.ones(num_reqs),
        top_p=torch.full((num_reqs,), 1 / 128),
        seeds=torch.arange(num_reqs),
        positions=torch.zeros(num_reqs, dtype=torch.int64),
        strategy="target_match",
        backend=backend,
    )
    noise = gumbel_noise(torch.arange(num_reqs), torch.zeros(num_reqs).long(), vocab_size)
    expected = noise[:, : vocab_size // 128].argmax(dim=1)
    assert out.token_ids[:, 0].tolist() == expected.tolist()


@BACKENDS
def test_masses_near_the_threshold_stay_near_it(backend: str) -> None:
    """Guarantee where rounding decides: whatever is emitted or accepted is a candidate by some
    top_p within 1e-6 of the one asked for."""
    vocab_size, num_rows = 1000, 64
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(num_rows, vocab_size, generator=g)
    mass = logits.double().softmax(dim=1).sort(descending=True, stable=True)
    rank = torch.randint(1, 400, (num_rows, 1), generator=g)
    # top_p is the mass above the token of this rank, rounded: the token may be in or out.
    above = mass.values.cumsum(dim=1).gather(1, rank - 1)[:, 0]
    draft = mass.indices.gather(1, rank)[:, 0]
    before, after = mass.indices.gather(1, rank - 1)[:, 0], mass.indices.gather(1, rank + 1)[:, 0]

    def accepted(tokens: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        out = verify_draft_tokens(
            logits.repeat_interleave(2, dim=0),
            torch.arange(num_rows + 1) * 2,
            torch.stack([tokens, torch.full_like(tokens, -1)], dim=1).flatten(),
            torch.ones(num_rows),
            top_p=top_p,
            strategy="topp",
            backend=backend,
        )
        return out.num_tokens == 2

    assert accepted(before, above.float()).all()
    assert not accepted(after, above.float()).any()
    assert accepted(draft, above.float() + 1e-6).all()
    assert not accepted(draft, above.float() - 1e-6).any()
