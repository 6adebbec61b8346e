"""Gathering parameters against torch's indexing, under Triton's interpreter (TRITON_INTERPRET=1)."""

import pytest
import torch

from vllm_specplus.kernels import parameters as kernels
from vllm_specplus.kernels.parameters import Parameters, gather_parameters
from vllm_specplus.testing.ahead_of_time import AheadOfTime, run_without_interpreter

pytestmark = pytest.mark.interpreter

_MAX_NUM_REQS = 300


def made(filtered: bool) -> Parameters:
    numbers = torch.arange(_MAX_NUM_REQS)
    always = numbers / 7, numbers * 2**40 - 5
    return (
        Parameters(*always, numbers / 301, numbers.to(torch.int32) + 1, numbers / 999)
        if filtered
        else Parameters(*always)
    )


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("num_reqs", [0, 1, 200])
def test_equals_indexing(num_reqs: int, filtered: bool) -> None:
    rows = torch.randperm(_MAX_NUM_REQS, generator=torch.Generator().manual_seed(1))[:num_reqs]
    parameters = made(filtered)
    for source, gathered in zip(parameters, gather_parameters(parameters, rows), strict=True):
        assert (source is None) == (gathered is None) == (not filtered and source is None)
        if source is not None:
            assert gathered is not None
            assert gathered.dtype == source.dtype
            assert torch.equal(gathered, source[rows])


def compile_ahead_of_time() -> None:
    """Run in a process of its own: compile the kernel as it is launched."""
    kernels._gather_kernel = kernel = AheadOfTime(kernels._gather_kernel)
    for filtered in (True, False):
        gather_parameters(made(filtered), torch.arange(3))
    print("compiled", len(kernel.compiled))


def test_the_kernel_compiles_for_a_gpu(tmp_path) -> None:
    code = "from tests.kernels import test_parameters; test_parameters.compile_ahead_of_time()"
    assert "compiled 2" in run_without_interpreter(code, tmp_path)
