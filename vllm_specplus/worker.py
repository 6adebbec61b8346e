"""vLLM's workers, with the plugin's classes in place while the model runner is built."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_specplus.compat import V2_REFUSAL, SpecPlusCompatError
from vllm_specplus.runners import v1


class SpecPlusWorkerMixin:
    """Builds the model runner with the plugin's drafter and verifier; all else is the worker's own."""

    vllm_config: Any
    use_v2_model_runner: bool
    model_runner: Any

    def init_device(self) -> None:
        """Build the runner under the overrides, then hand it to what was put in.

        Raises:
            SpecPlusCompatError: the model runner is one that the plugin does not support.
        """
        if self.use_v2_model_runner:
            raise SpecPlusCompatError(V2_REFUSAL)
        options = self.vllm_config.speculative_config.specplus
        with v1.installed(options):
            super().init_device()  # type: ignore[misc]
        v1.bind(self.model_runner)


class SpecPlusWorker(SpecPlusWorkerMixin, Worker):
    """The GPU worker."""
