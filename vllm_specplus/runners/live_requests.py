"""What the requests of a worker have asked of the plugin, from their first step to their last."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from vllm.logger import init_logger

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.proposers.reference_text import ReferenceText
from vllm_specplus.requests.options import CARRIED, CarriedOptions
from vllm_specplus.runners.request_counts import RequestCounts

logger = init_logger("vllm.specplus")


class LiveRequest:
    """A request that asked something.

    Attributes:
        reference: what its output is expected to resemble, or None.
        max_drafts: at most so many drafts in a step, or None.
        key: the name under which its counts are kept, or None.
        num_cut: how many tokens of the reference were left out.
        encoded: what was carried here.
    """

    def __init__(self, encoded: Any, carried: CarriedOptions, options: SpecPlusOptions):
        self.encoded = encoded
        self.max_drafts = carried.max_drafts
        self.key = carried.key
        self.num_cut = carried.num_cut
        self.reference: ReferenceText | None = None
        if carried.token_ids is not None and carried.max_drafts != 0:
            self.reference = ReferenceText(
                carried.token_ids,
                edit=carried.edit,
                min_ngram_size=options.min_ngram_size,
                max_ngram_size=options.max_ngram_size,
            )


class LiveRequests:
    """The requests of a worker that asked something, by request id.

    Args:
        options: the plugin's.
        model_config: vLLM's.
        warns: whether this worker logs what was cut, one for all that do the same.
    """

    def __init__(self, options: SpecPlusOptions, model_config: Any, *, warns: bool):
        self._options = options
        self._vocab_size = model_config.get_vocab_size()
        self._max_model_len = model_config.max_model_len
        self._warns = warns
        self._live: dict[str, LiveRequest] = {}
        self.counts = RequestCounts()

    def __len__(self) -> int:
        return len(self._live)

    def get(self, req_id: str) -> LiveRequest | None:
        """What a request asked, if anything."""
        return self._live.get(req_id)

    def begin(self, new_requests: Iterable[Any]) -> None:
        """Take note of requests that are scheduled for the first time, again after they were preempted, or anew.

        Args:
            new_requests: vLLM's ``NewRequestData``.
        """
        for new in new_requests:
            encoded = (getattr(new.sampling_params, "extra_args", None) or {}).get(CARRIED)
            live = self._live.get(new.req_id)
            if live is not None and live.encoded == encoded:
                continue
            self.finish([new.req_id])
            if encoded is not None:
                self._begin(new.req_id, encoded)

    def _begin(self, req_id: str, encoded: Any) -> None:
        carried = CarriedOptions.decode(encoded)
        if carried is None or not self._is_possible(carried.token_ids):
            if self._warns:
                logger.warning_once("a request brings options that its check has not written: they are ignored")
            return
        live = self._live[req_id] = LiveRequest(encoded, carried, self._options)
        if live.key is not None:
            self.counts.begin(live.key)
        if live.num_cut and self._warns:
            logger.warning(
                "request %s: its reference is longer than the model length: %d tokens or more are cut off",
                req_id,
                live.num_cut,
            )

    def _is_possible(self, token_ids: np.ndarray | None) -> bool:
        if token_ids is None or not len(token_ids):
            return True
        return len(token_ids) <= self._max_model_len and token_ids.min() >= 0 and token_ids.max() < self._vocab_size

    def finish(self, req_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        for req_id in req_ids:
            live = self._live.pop(req_id, None)
            if live is not None and live.key is not None:
                self.counts.finish(live.key)

    def sizes(self) -> dict[str, int]:
        """How much is held, by kind; zeros when nothing runs and all counts were asked for."""
        references = sum(live.reference is not None for live in self._live.values())
        return {"requests": len(self._live), "references": references, "kept_counts": len(self.counts)}


def limits(live: LiveRequests, req_ids: Sequence[str], width: int) -> np.ndarray:
    """[B] int64: the drafts that each request allows in a step, at most `width`."""
    if not len(live):
        return np.full(len(req_ids), width, np.int64)
    allowed = [asked.max_drafts if (asked := live.get(req_id)) else None for req_id in req_ids]
    return np.array([width if most is None else min(most, width) for most in allowed], np.int64)
