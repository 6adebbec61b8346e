"""vLLM's workers, with the plugin's classes in place while the model runner is built."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_specplus.compat import SpecPlusCompatError
from vllm_specplus.requests.check import left_out


class SpecPlusWorkerMixin:
    """Builds the model runner with the plugin's drafter and verifier; all else is the worker's own."""

    vllm_config: Any
    use_v2_model_runner: bool
    model_runner: Any
    _requests: Any = None  # the runner's RequestTracker, where the plugin drafts
    _is_warm: bool = False

    def init_device(self) -> None:
        """Build the runner under the overrides, then hand it to what was put in.

        Raises:
            SpecPlusCompatError: vLLM chose otherwise than was foreseen when the config was made.
        """
        runner, options = self._runner_module(), self.vllm_config.speculative_config.specplus
        self._check_runner()
        with runner.installed(options), left_out(self.vllm_config.model_config):
            super().init_device()  # type: ignore[misc]
        if not self.use_v2_model_runner:
            self._requests = runner.bind(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights; V2 builds its samplers here."""
        if not self.use_v2_model_runner:
            super().load_model(*args, **kwargs)  # type: ignore[misc]
            return
        runner, options = self._runner_module(), self.vllm_config.speculative_config.specplus
        with runner.installed(options), left_out(self.vllm_config.model_config):
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._requests = runner.bind(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's, whose warm-up on V2 runs steps of made-up requests: they are forgotten.

        Not those of a later warm-up, when an engine has grown or shrunk: what real requests left is worth more.
        """
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        if self._requests is not None and self.use_v2_model_runner and not self._is_warm:
            self._runner_module().forget(self.model_runner)
        self._is_warm = True
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step, having noted what its new requests ask for."""
        if self._requests is not None:
            self._requests.before_step(scheduler_output)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Choose a step's tokens, and count what became of its drafts."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if self._requests is not None:
            self._requests.after_step(output)
        return output

    def specplus_stats(self) -> dict[str, Any] | None:
        """Drafted and accepted tokens by source and position, and how much is held; None where nothing is drafted.

        Returns:
            ``{"drafted": {source: [tokens by position]}, "accepted": {...}, "live": {"requests": n, ...}}``
        """
        return None if self._requests is None else self._requests.stats()

    def specplus_request_stats(self, key: str) -> dict[str, int] | None:
        """What became of the requests that gave this key, once: see ``RequestCounts.collect``."""
        return None if self._requests is None else self._requests.request_stats(key)

    def _runner_module(self) -> Any:
        # Each imports vLLM's runner of that kind.
        if self.use_v2_model_runner:
            from vllm_specplus.runners.v2 import speculator as v2

            return v2
        from vllm_specplus.runners.v1 import drafter as v1

        return v1

    def _check_runner(self) -> None:
        if self.vllm_config.speculative_config.made_for_v2 != self.use_v2_model_runner:
            chosen, value = ("V2", 1) if self.use_v2_model_runner else ("V1", 0)
            raise SpecPlusCompatError(
                f"vLLM chose Model Runner {chosen} for reasons that vllm-specplus does not foresee: set "
                f"VLLM_USE_V2_MODEL_RUNNER={value}"
            )
        num_stages = self.vllm_config.parallel_config.pipeline_parallel_size
        drafts = self.vllm_config.speculative_config.specplus.drafts_from_history
        if drafts and num_stages > 1 and not self.vllm_config.scheduler_config.async_scheduling:
            raise SpecPlusCompatError(
                f"pipeline_parallel_size={num_stages} is not allowed here: vLLM has left asynchronous scheduling off, "
                "without which its scheduler does not go together with drafts and a pipeline"
            )


class SpecPlusWorker(SpecPlusWorkerMixin, Worker):
    """The GPU worker."""
