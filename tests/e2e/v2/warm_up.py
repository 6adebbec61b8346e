"""Engines that warm up as on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from vllm import SamplingParams
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.warmup import warmup_kernels

from vllm_specplus.runners.v2 import install


@contextmanager
def warmed_up(look: Callable[[Any], None] = lambda runner: None) -> Iterator[None]:
    """Make an engine that starts in the block run steps of vLLM's made-up requests first.

    Args:
        look: is called with the model runner after these steps, before the worker goes on.
    """
    # vLLM's own requests need one of its kernels that does not run under the interpreter.
    made_up = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    warm_up = CPUWorker.compile_or_warm_up_model

    def with_steps(worker: Any) -> Any:
        install.warm_up(worker.model_runner)
        warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
        look(worker.model_runner)
        return warm_up(worker)

    with (
        patch.object(CPUWorker, "compile_or_warm_up_model", with_steps),
        patch.object(SamplingParams, "for_sampler_warmup", staticmethod(lambda: made_up)),
    ):
        yield
