"""Gathering a verification's arguments against torch's indexing, under Triton's interpreter (TRITON_INTERPRET=1)."""

from pathlib import Path

import pytest
import torch

from vllm_specplus.kernels import inputs as kernels
from vllm_specplus.kernels.inputs import Batch, Parameters, SampledDrafts, gather_inputs
from vllm_specplus.testing.ahead_of_time import AheadOfTime, run_without_interpreter

pytestmark = pytest.mark.interpreter

_MAX_NUM_REQS = 300
_NUM_SLOTS = 4


def parameters(filtered: bool) -> Parameters:
    numbers = torch.arange(_MAX_NUM_REQS)
    always = numbers / 7, numbers * 2**40 - 5
    return (
        Parameters(*always, numbers / 301, numbers.to(torch.int32) + 1, numbers / 999)
        if filtered
        else Parameters(*always)
    )


def batch(num_reqs: int) -> tuple[Batch, SampledDrafts]:
    """Requests of 1 to 5 rows, each vector cut out of a longer one."""
    random = torch.Generator().manual_seed(num_reqs)
    states = torch.randperm(_MAX_NUM_REQS, generator=random)[: num_reqs + 1].to(torch.int32)[1:]
    sizes = torch.randint(1, _NUM_SLOTS + 2, (num_reqs,), generator=random)
    bounds = torch.cat([torch.zeros(2, dtype=torch.int64), sizes.cumsum(0)]).to(torch.int32)[1:]
    num_rows = int(bounds[-1])
    tokens = torch.randint(-1, 1000, (num_rows + 1,), generator=random, dtype=torch.int32)[1:]
    slots = torch.cat([torch.arange(-1, 0), *(torch.arange(int(size)) for size in sizes)]).to(torch.int32)[1:]
    num_model = torch.randint(0, _NUM_SLOTS + 1, (_MAX_NUM_REQS,), generator=random, dtype=torch.int32)
    sampled = SampledDrafts(states.repeat_interleave(sizes), slots, num_model, _NUM_SLOTS)
    return Batch(states, bounds, tokens), sampled


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("num_reqs", [1, 5, 200])
def test_equals_indexing(num_reqs: int, filtered: bool) -> None:
    given, (asked, sampled) = parameters(filtered), batch(num_reqs)
    num_rows = len(asked.tokens)
    found = gather_inputs(given, asked, num_rows, sampled)
    for source, gathered in zip(given, found.parameters, strict=True):
        assert (source is None) == (gathered is None) == (not filtered and source is None)
        if source is not None:
            assert torch.equal(gathered, source[asked.idx_mapping.long()].to(gathered.dtype))
    assert found.parameters.top_k is None or found.parameters.top_k.dtype == torch.int64
    assert torch.equal(found.cu_num_rows, asked.cu_num_rows.long())
    is_bonus = torch.zeros(num_rows, dtype=torch.bool)
    is_bonus[asked.cu_num_rows[1:].long() - 1] = True
    assert torch.equal(found.draft_token_ids[~is_bonus], asked.tokens.long().roll(-1)[~is_bonus])
    states, slots = sampled.states.long(), sampled.slots.long()
    rows = torch.where(slots < sampled.num_model[states], states * _NUM_SLOTS + slots, -1)
    assert torch.equal(found.draft_rows, rows)
    every = gather_inputs(given, asked, num_rows, sampled._replace(num_model=None))
    assert torch.equal(every.draft_rows, torch.where(slots < _NUM_SLOTS, states * _NUM_SLOTS + slots, -1))


@pytest.mark.parametrize("num_reqs", [1, 200])
def test_one_row_each_and_no_drafts(num_reqs: int) -> None:
    given, (asked, _) = parameters(False), batch(num_reqs)
    found = gather_inputs(given, Batch(asked.idx_mapping), num_reqs)
    assert torch.equal(found.cu_num_rows, torch.arange(num_reqs + 1))
    assert torch.equal(found.draft_token_ids, torch.full((num_reqs,), -1))
    assert found.draft_rows is None
    assert torch.equal(found.parameters.temperature, given.temperature[asked.idx_mapping.long()])


def compile_ahead_of_time() -> None:
    """Run in a process of its own: compile the kernel as it is launched."""
    kernels._gather_kernel = kernel = AheadOfTime(kernels._gather_kernel)
    asked, sampled = batch(3)
    for filtered in (True, False):
        gather_inputs(parameters(filtered), asked, len(asked.tokens))
        gather_inputs(parameters(filtered), asked, len(asked.tokens), sampled)
        gather_inputs(parameters(filtered), Batch(asked.idx_mapping), 3)
    print("compiled", len(kernel.compiled))


def test_the_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    code = "from tests.kernels import test_inputs; test_inputs.compile_ahead_of_time()"
    assert "compiled 6" in run_without_interpreter(code, tmp_path)
