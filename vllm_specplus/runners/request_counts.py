"""Who drafted what, and what became of it: counts by source and position, and of single requests."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_specplus.sources import MODEL

_MAX_KEPT = 1024


def count_step(
    counts: np.ndarray, num_model: np.ndarray, rest: np.ndarray, num_drafted: np.ndarray, num_accepted: np.ndarray
) -> None:
    """Add one step of B requests.

    Args:
        counts: [2, len(SOURCES), K] int64, changed in place.
        num_model: [B] int, leading drafts that are the model's.
        rest: [B] int, the source of the others.
        num_drafted, num_accepted: [B] int, drafts that were verified, and how many of them were accepted.
    """
    for row, tokens in zip(counts, (num_drafted, num_accepted), strict=True):
        of_model = np.minimum(num_model, tokens)
        row[MODEL] += _num_longer(of_model, row.shape[1])
        for source in np.unique(rest):
            chosen = rest == source
            row[source] += _num_longer(tokens[chosen], row.shape[1]) - _num_longer(of_model[chosen], row.shape[1])


def _num_longer(lengths: np.ndarray, width: int) -> np.ndarray:
    """[width] int: how many of `lengths` ([B], up to `width`) reach past each position."""
    return np.bincount(lengths, minlength=width + 1)[::-1].cumsum()[::-1][1:]


@dataclass
class _Kept:
    num_requests: int = 0
    live: int = 0
    is_collected: bool = False
    total: np.ndarray = field(default_factory=lambda: np.zeros(3, np.int64))
    later: list[Any] = field(default_factory=list)


class RequestCounts:
    """Steps and reference drafts of requests that somebody is going to ask about, by the key that they gave.

    Several requests may share a key. What nobody asks for is kept for the last requests that ended, and no more.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, key: str) -> None:
        """One more request of this key runs."""
        kept = self._kept.setdefault(key, _Kept())
        kept.num_requests += 1
        kept.live += 1

    def add(self, key: str, part: np.ndarray) -> None:
        """Add to a key's counts [3] int: engine steps that gave tokens, reference drafts, those accepted."""
        if key in self._kept:
            self._kept[key].total += part

    def add_later(self, key: str, part: Any) -> None:
        """As `add`, of a tensor that is read when the counts are asked for."""
        if key in self._kept:
            self._kept[key].later.append(part)

    def finish(self, key: str) -> None:
        """A request of this key has ended."""
        kept = self._kept.get(key)
        if kept is None:
            return
        kept.live -= 1
        if kept.live <= 0:
            # The last to end is the last to go.
            del self._kept[key]
            if not kept.is_collected:
                self._kept[key] = kept
        if len(self._kept) > _MAX_KEPT:
            ended = [k for k, other in self._kept.items() if other.live <= 0]
            for old in ended[:-_MAX_KEPT]:
                del self._kept[old]

    def collect(self, key: str, live: Iterable[Any] = ()) -> dict[str, int] | None:
        """A key's counts, to be forgotten when its requests have ended; None if nothing is known of it.

        Args:
            live: further tensors of counts, of requests that run.
        """
        kept = self._kept.get(key)
        if kept is None:
            return None
        steps, drafted, accepted = np.sum([kept.total, *(part.tolist() for part in (*kept.later, *live))], axis=0)
        kept.is_collected = True
        if kept.live <= 0:
            del self._kept[key]
        return {
            "num_requests": kept.num_requests,
            "num_steps": int(steps),
            "accepted": int(accepted),
            "rejected": int(drafted - accepted),
        }
