"""Counts of drafts and accepted tokens: by source and position, and of single requests."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_specplus.sources import MODEL

_MAX_FINISHED_KEYS = 1024


def count_drafts(
    counts: np.ndarray,
    num_model: np.ndarray,
    fill_source: np.ndarray,
    num_drafted: np.ndarray,
    num_accepted: np.ndarray,
) -> None:
    """Add the drafts of B requests, each of one step.

    Args:
        counts: [2, len(SOURCES), K] int64, changed in place.
        num_model: [B] int, leading drafts that are the model's.
        fill_source: [B] int, the source of the other drafts.
        num_drafted, num_accepted: [B] int, drafts that were verified, and how many of them were accepted.
    """
    for row, tokens in zip(counts, (num_drafted, num_accepted), strict=True):
        of_model = np.minimum(num_model, tokens)
        row[MODEL] += _num_longer(of_model, row.shape[1])
        for source in np.unique(fill_source):
            chosen = fill_source == source
            row[source] += _num_longer(tokens[chosen], row.shape[1]) - _num_longer(of_model[chosen], row.shape[1])


def _num_longer(lengths: np.ndarray, width: int) -> np.ndarray:
    """[width] int: how many of `lengths` ([B], up to `width`) reach past each position."""
    return np.bincount(lengths, minlength=width + 1)[::-1].cumsum()[::-1][1:]


@dataclass
class _KeyCounts:
    num_requests: int = 0
    num_running: int = 0
    is_collected: bool = False
    total: np.ndarray = field(default_factory=lambda: np.zeros(3, np.int64))
    # On a GPU reading a tensor waits for the device, so it is read when the counts are collected.
    tensor: Any = None


class RequestCounts:
    """Per-key counts of steps and reference drafts, kept until collected.

    Several requests may share a key. Of keys that nobody collects, those of the last 1024 to end are kept.
    """

    def __init__(self) -> None:
        self._counts_by_key: dict[str, _KeyCounts] = {}

    def __len__(self) -> int:
        return len(self._counts_by_key)

    def begin(self, key: str) -> None:
        """Add a running request to a key."""
        counts = self._counts_by_key.setdefault(key, _KeyCounts())
        counts.num_requests += 1
        counts.num_running += 1

    def add(self, key: str, part: np.ndarray) -> None:
        """Add to a key's counts [3] int: engine steps that gave tokens, reference drafts, those accepted."""
        if key in self._counts_by_key:
            self._counts_by_key[key].total += part

    def add_later(self, key: str, part: Any) -> None:
        """Add a tensor like the array of `add` and take it over; it is read when the counts are collected."""
        counts = self._counts_by_key.get(key)
        if counts is not None:
            # One for each key: a request that is preempted brings one every time.
            counts.tensor = part if counts.tensor is None else counts.tensor.add_(part)

    def finish(self, key: str) -> None:
        """Take a request that has ended from a key."""
        counts = self._counts_by_key.get(key)
        if counts is None:
            return
        counts.num_running -= 1
        if counts.num_running <= 0:
            # Put back at the end: the keys that ended first are dropped first.
            del self._counts_by_key[key]
            if not counts.is_collected:
                self._counts_by_key[key] = counts
        if len(self._counts_by_key) > _MAX_FINISHED_KEYS:
            finished = [k for k, other in self._counts_by_key.items() if other.num_running <= 0]
            for old in finished[:-_MAX_FINISHED_KEYS]:
                del self._counts_by_key[old]

    def collect(self, key: str, running: Iterable[Any] = ()) -> dict[str, int] | None:
        """A key's counts; None if nothing is known of it. They are dropped when the key's requests have ended.

        Args:
            running: further tensors of counts, of requests that run.
        """
        counts = self._counts_by_key.get(key)
        if counts is None:
            return None
        own = () if counts.tensor is None else (counts.tensor,)
        parts = (part.tolist() for part in (*own, *running))
        num_steps, num_drafted, num_accepted = np.sum([counts.total, *parts], axis=0)
        counts.is_collected = True
        if counts.num_running <= 0:
            del self._counts_by_key[key]
        return {
            "num_requests": counts.num_requests,
            "num_steps": int(num_steps),
            "accepted": int(num_accepted),
            "rejected": int(num_drafted - num_accepted),
        }
