"""One adapter for each vLLM model runner, and what every adapter offers the worker.

An adapter turns vLLM's structures into the arguments of `proposers` and `verify`, and their results into vLLM's.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from vllm_specplus.config import SpecPlusOptions

if TYPE_CHECKING:
    from vllm_specplus.runners.live_requests import LiveRequests

BuildStep = Literal["init_device", "load_model"]
"""A method of vLLM's worker in which it builds parts of the runner."""


class Tracker(Protocol):
    """Follows a runner's requests from step to step, and counts what becomes of their drafts."""

    live_requests: "LiveRequests"

    def before_step(self, scheduler_output: Any) -> None:
        """Take note of the requests that begin and end with a step; takes vLLM's ``SchedulerOutput``."""

    def after_step(self, output: Any) -> None:
        """Count what became of a step's drafts; takes what vLLM's ``sample_tokens`` has returned."""

    def stats(self) -> dict[str, Any]:
        """Counts by source and position, and the number of entries: see ``SpecPlusWorkerMixin.specplus_stats``."""

    def collect_request_stats(self, key: str) -> dict[str, int] | None:
        """Collect the counts of one key, once: see ``RequestCounts.collect``."""


class RunnerModule(Protocol):
    """What the `install` module of a runner's adapter offers the worker."""

    BUILD_STEPS: tuple[BuildStep, ...]
    """The steps in which vLLM builds what the plugin replaces, in their order."""

    def plugin_classes_installed(self, options: SpecPlusOptions) -> AbstractContextManager[None]:
        """Rebind names in vLLM's runner module to the plugin's classes while the block runs."""

    def connect(self, runner: Any) -> Tracker | None:
        """Give the parts of a built runner what vLLM does not pass to them; None where the plugin does not draft."""

    def forget_warm_up(self, runner: Any) -> None:
        """Clear what vLLM's warm-up has left in the plugin's parts of `runner`; no request runs."""
