"""Counts the faults of the plugin's code in vLLM's scheduler, which nobody asks for counts."""

from typing import TYPE_CHECKING, Any

from vllm_specplus.runners.faults import Faults

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
else:
    Scheduler = object


class FaultsMixin(Scheduler):
    """Leaves the counts of its faults to the workers of the next step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._faults = Faults(logs=True)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule as vLLM does; returns vLLM's ``SchedulerOutput``."""
        output = super().schedule(*args, **kwargs)
        self._faults.hand_over(output)
        return output
