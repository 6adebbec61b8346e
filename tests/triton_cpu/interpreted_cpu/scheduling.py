"""Asynchronous scheduling, which vLLM takes away from every engine on a CPU."""

from collections.abc import Callable
from typing import Any

# In the environment: engines in processes of their own keep it.
VARIABLE = "INTERPRETED_CPU_ASYNC"


def apply() -> None:
    """Let all engines of this process have it."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.check_and_update_config = keeping(CpuPlatform.check_and_update_config)


def keeping(check: Callable[[Any], None]) -> Any:
    """A platform's check of a config, after which scheduling is asynchronous all the same."""

    def check_and_keep(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    return staticmethod(check_and_keep)
