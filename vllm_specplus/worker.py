"""vLLM's workers, with the plugin's classes in place while the model runner is built."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_specplus.compat import SpecPlusCompatError


class SpecPlusWorkerMixin:
    """Builds the model runner with the plugin's drafter and verifier; all else is the worker's own."""

    vllm_config: Any
    use_v2_model_runner: bool
    model_runner: Any

    def init_device(self) -> None:
        """Build the runner under the overrides, then hand it to what was put in.

        Raises:
            SpecPlusCompatError: the config was made for the other model runner.
        """
        runner, options = self._runner_module(), self.vllm_config.speculative_config.specplus
        self._check_runner()
        with runner.installed(options):
            super().init_device()  # type: ignore[misc]
        if not self.use_v2_model_runner:
            runner.bind(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights; V2 builds its samplers here."""
        if not self.use_v2_model_runner:
            super().load_model(*args, **kwargs)  # type: ignore[misc]
            return
        runner, options = self._runner_module(), self.vllm_config.speculative_config.specplus
        with runner.installed(options):
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        runner.bind(self.model_runner)

    def _runner_module(self) -> Any:
        # Each imports vLLM's runner of that kind.
        if self.use_v2_model_runner:
            from vllm_specplus.runners import v2

            return v2
        from vllm_specplus.runners import v1

        return v1

    def _check_runner(self) -> None:
        if self.vllm_config.speculative_config.made_for_v2 != self.use_v2_model_runner:
            chosen, value = ("V2", 1) if self.use_v2_model_runner else ("V1", 0)
            raise SpecPlusCompatError(
                f"vLLM chose Model Runner {chosen} for reasons that vllm-specplus does not foresee: set "
                f"VLLM_USE_V2_MODEL_RUNNER={value}"
            )


class SpecPlusWorker(SpecPlusWorkerMixin, Worker):
    """The GPU worker."""
