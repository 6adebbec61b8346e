"""Tells the workers which requests have the same ``cache_salt``.

vLLM's salt goes no further than the scheduler, where it keys the prefix cache. So a subclass of the scheduler writes it
into what travels to the workers, where it keys the suffix trees.
"""

import hashlib
import os
from typing import TYPE_CHECKING, Any

from vllm_specplus.engine.scheduler_faults import FaultsMixin
from vllm_specplus.requests.options import SCOPE_ENTRY

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

_BYTES = 16


class SaltingMixin(FaultsMixin):
    """Marks each request with its scope: a digest of its salt, so that no log shows the salt; "" without one.

    A request whose salt cannot be read has no mark, and shares with none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._digest_key = os.urandom(_BYTES)

    def add_request(self, request: Any) -> None:
        """Mark a request, then add it as vLLM does; takes vLLM's ``Request``."""
        if request.sampling_params is not None:
            given = request.sampling_params.extra_args or {}
            mark = {}
            with self._faults.caught("requests"):
                # A session goes on under its id and keeps the salt that it began with.
                salt = self.requests.get(request.request_id, request).cache_salt
                mark = {SCOPE_ENTRY: self._digest(salt) if salt else ""}
            others = {name: value for name, value in given.items() if name != SCOPE_ENTRY}
            request.sampling_params.extra_args = others | mark
        super().add_request(request)

    def _digest(self, salt: str) -> str:
        encoded = salt.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(encoded, digest_size=_BYTES, key=self._digest_key).hexdigest()


def salting(scheduler: "type[Scheduler]") -> "type[Scheduler]":
    """The subclass of one of vLLM's schedulers that marks requests with their scope."""
    return type(f"Salting{scheduler.__name__}", (SaltingMixin, scheduler), {})
