"""Whose answers the suffix trees of a request may hold, as the engine's scheduler has told (`engine.salts`)."""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.requests.options import SCOPE_ENTRY


class SuffixScopes:
    """The scopes of a worker's requests, by request id: see `suffix_decoding_scope`.

    A request whose salt nobody has told shares its trees with none.
    """

    def __init__(self, options: SpecPlusOptions):
        self._is_shared = options.suffix_decoding_scope == "shared"
        self._follows = options.needs_salts
        self._scopes: dict[str, str] = {}
        self._ended_requests: set[str] = set()

    def __len__(self) -> int:
        return len(self._scopes)

    def begin(self, new_requests: Iterable[Any]) -> None:
        """Take note of the scopes of requests that begin; takes vLLM's ``NewRequestData``."""
        if not self._follows:
            return
        for new in new_requests:
            scope = (getattr(new.sampling_params, "extra_args", None) or {}).get(SCOPE_ENTRY)
            self._ended_requests.discard(new.req_id)
            if isinstance(scope, str):
                self._scopes[new.req_id] = scope

    def end(self, req_ids: Iterable[str]) -> None:
        """Take note of requests that have ended; they are known until the next step, which may bring their last tokens.

        Args:
            req_ids: unknown ids are ignored.
        """
        for req_id in self._ended_requests:
            self._scopes.pop(req_id, None)
        self._ended_requests = set(req_ids)

    def of(self, req_ids: Sequence[str]) -> list[str | None] | None:
        """The scopes of requests, for `History.scopes`."""
        return None if self._is_shared else [self._scopes.get(req_id) for req_id in req_ids]
