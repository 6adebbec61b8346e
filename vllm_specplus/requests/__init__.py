"""What a request asks of the plugin, from the HTTP body to the workers.

`PredictedOutputs` is imported on first use: workers read `requests.options` and must not load a web framework.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_specplus.requests.middleware import PredictedOutputs

__all__ = ["PredictedOutputs"]


def __getattr__(name: str) -> Any:
    if name != "PredictedOutputs":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_specplus.requests.middleware import PredictedOutputs

    return PredictedOutputs
