"""What a log shows of a request: how long its references are and how many drafts it has, and not what they say.

vLLM prints a step's parameters and drafts when its engine dies, and with ``--enable-log-requests`` the parameters of
every request.
"""

import copy
import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.logging_utils import dump_input
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_specplus.requests.options import RESOLVED_ENTRY

_ORIGINAL = "specplus_original"
# A reference may come under a name that is not quite right. vLLM logs a request before that is refused.
_REFERENCE_NAME = re.compile("sp|force|predict", re.IGNORECASE)


class _Length:
    """Stands in for a reference in a representation."""

    def __init__(self, length: int, unit: str):
        self._length = f"{length} {unit}"

    def __repr__(self) -> str:
        return self._length


def shown_args(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """``extra_args`` for a log: each text, list and object under a name like ours is replaced by its length."""
    shown = {name: value if _is_short(name, value) else _length(value) for name, value in extra_args.items()}
    resolved = extra_args.get(RESOLVED_ENTRY)
    if isinstance(resolved, Mapping) and "token_ids" in resolved:
        shown[RESOLVED_ENTRY] = {**resolved, "token_ids": _length(resolved["token_ids"])}
    elif resolved is not None:
        shown[RESOLVED_ENTRY] = _length(resolved)
    return shown


def _is_short(name: Any, value: Any) -> bool:
    return isinstance(value, int | float | None) or not _REFERENCE_NAME.match(str(name))


def _length(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return _Length(memoryview(value).nbytes // np.dtype(np.int32).itemsize, "tokens")
    if isinstance(value, list | tuple | np.ndarray):
        return _Length(len(value), "tokens")
    if isinstance(value, str):
        return _Length(len(value), "characters")
    return None if value is None else type(value).__name__


def shown_output(output: SchedulerOutput) -> str:
    """A step for the dump of an engine that dies, as vLLM shows it, but for its drafts: each is a client's token."""
    drafts = {req_id: f"{len(tokens)} drafts" for req_id, tokens in output.scheduled_spec_decode_tokens.items()}
    shown = {**vars(output), "scheduled_spec_decode_tokens": drafts}
    items = (f"{name}={dump_input.prepare_object_to_dump(value)}" for name, value in shown.items())
    return f"{type(output).__name__}({', '.join(items)})"


def hide_references() -> None:
    """Have vLLM show a step by `shown_output` and parameters by `shown_args` in this process; idempotent."""
    # vLLM's dump asks each object for this method.
    SchedulerOutput.anon_repr = shown_output
    original = SamplingParams.__repr__
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def representation(params: SamplingParams) -> str:
        if params.extra_args:
            params = copy.copy(params)
            params.extra_args = shown_args(params.extra_args)
        return original(params)

    setattr(representation, _ORIGINAL, original)
    SamplingParams.__repr__ = representation
