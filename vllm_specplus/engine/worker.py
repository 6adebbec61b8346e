"""vLLM's workers, with the plugin's classes in place while the model runner is built."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.v1.worker.gpu_worker import Worker

from vllm_specplus.compat import SpecPlusCompatError
from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.requests.check import without_request_check
from vllm_specplus.runners import BuildStep, RunnerModule, Tracker

_T = TypeVar("_T")

if TYPE_CHECKING:

    class _VllmWorker:
        """What the mixin reads and extends of vLLM's workers."""

        vllm_config: Any
        use_v2_model_runner: bool
        model_runner: Any

        def init_device(self) -> None: ...
        def load_model(self, *args: Any, **kwargs: Any) -> None: ...
        def compile_or_warm_up_model(self) -> Any: ...
        def execute_model(self, scheduler_output: Any) -> Any: ...
        def sample_tokens(self, grammar_output: Any) -> Any: ...

else:
    _VllmWorker = object


class SpecPlusWorkerMixin(_VllmWorker):
    """Builds the model runner with the plugin's drafter and verifier; all else is vLLM's worker."""

    _runner_module: RunnerModule
    _tracker: Tracker | None = None
    """Follows the runner's requests; None where the plugin does not draft."""
    _is_warm: bool = False

    def init_device(self) -> None:
        """Build the runner with the plugin's classes.

        Raises:
            SpecPlusCompatError: vLLM chose another runner or schedule than the config was made for.
        """
        self._runner_module = self._import_runner_module()
        self._check_scheduling()
        with self._building("init_device"):
            super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights; on V2 vLLM builds its samplers here, from the plugin's classes."""
        with self._building("load_model"):
            super().load_model(*args, **kwargs)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, and forget the made-up requests of the first warm-up.

        A later warm-up, when an engine has grown or shrunk, keeps what is there: it is mostly of real requests.
        """
        times = super().compile_or_warm_up_model()
        if self._tracker is not None and not self._is_warm:
            self._runner_module.forget_warm_up(self.model_runner)
        self._is_warm = True
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """Take note of what the step's new requests ask for, then run the step."""
        if self._tracker is not None:
            faults = self._tracker.live_requests.faults
            faults.take_over(scheduler_output)
            with faults.caught("requests"):
                self._tracker.before_step(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Choose a step's tokens, then count what became of its drafts."""
        output = super().sample_tokens(grammar_output)
        if self._tracker is not None:
            with self._tracker.live_requests.faults.caught("counting"):
                self._tracker.after_step(output)
        return output

    def specplus_stats(self) -> dict[str, Any] | None:
        """Drafted and accepted tokens by source and position, and how many entries of each kind the worker holds.

        Returns:
            ``{"drafted": {source: [tokens by position]}, "accepted": {...}, "entries": {"requests": n, ...}}``; None
            where the plugin does not draft, and after a fault.
        """
        return self._ask(lambda tracker: tracker.stats())

    def specplus_collect_request_stats(self, key: str) -> dict[str, int] | None:
        """Collect the counts of the requests that gave this key, once: see ``RequestCounts.collect``."""
        return self._ask(lambda tracker: tracker.collect_request_stats(key))

    def _ask(self, question: Callable[[Tracker], _T]) -> _T | None:
        """The answer of the tracker; None where there is none, and after a fault.

        Where one of several workers raises, vLLM takes the answers of the others for those to its next question.
        """
        if self._tracker is None:
            return None
        with self._tracker.live_requests.faults.caught("counting"):
            return question(self._tracker)
        return None

    def _import_runner_module(self) -> RunnerModule:
        """Import what goes with the runner that vLLM has chosen.

        Raises:
            SpecPlusCompatError: the config was made for the other runner.
        """
        on_v2 = self.use_v2_model_runner
        if self.vllm_config.speculative_config.made_for_v2 != on_v2:
            raise SpecPlusCompatError(
                f"vLLM chose Model Runner {'V2' if on_v2 else 'V1'} for a reason that vllm-specplus did not foresee: "
                f"set VLLM_USE_V2_MODEL_RUNNER={int(on_v2)}"
            )
        # Each imports vLLM's runner of its kind.
        if on_v2:
            from vllm_specplus.runners.v2 import install as v2

            return v2
        from vllm_specplus.runners.v1 import install as v1

        return v1

    @contextmanager
    def _building(self, step: BuildStep) -> Iterator[None]:
        """Install the plugin's classes if vLLM builds them in this step, and connect them after the last such step."""
        runner = self._runner_module
        if step not in runner.BUILD_STEPS:
            yield
            return
        options: SpecPlusOptions = self.vllm_config.speculative_config.specplus
        with runner.plugin_classes_installed(options), without_request_check(self.vllm_config.model_config):
            yield
        if step == runner.BUILD_STEPS[-1]:
            self._tracker = runner.connect(self.model_runner)

    def _check_scheduling(self) -> None:
        num_stages = self.vllm_config.parallel_config.pipeline_parallel_size
        options: SpecPlusOptions = self.vllm_config.speculative_config.specplus
        if options.drafts_from_history and num_stages > 1 and not self.vllm_config.scheduler_config.async_scheduling:
            raise SpecPlusCompatError(
                f"pipeline_parallel_size={num_stages} is not allowed here: vLLM has asynchronous scheduling off, "
                "and without it vLLM cannot draft in a pipeline"
            )


class SpecPlusWorker(SpecPlusWorkerMixin, Worker):
    """vLLM's GPU worker with the plugin's classes."""
