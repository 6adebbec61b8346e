"""How long a run is timed."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_specplus.compare import engine
from vllm_specplus.compare.counts import Counts
from vllm_specplus.compare.engine import Session


class Places(Session):
    """Answers of these lengths, a token in each step."""

    def __init__(self, lengths: list[int]) -> None:
        self._prompts = [[length] for length in lengths]
        self._left: dict[str, int] = {}

    def _add(self, token_ids: list[int], params: Any, copy: int = 0) -> str:
        name = str(len(self._left))
        self._left[name] = token_ids[0]
        return name

    def _params(self, number: int, temperature: float, max_tokens: int) -> Any:
        return None

    def _counts(self) -> Counts:
        return Counts()

    def _step(self, timer: Any) -> list[Any]:
        self._left = {name: left - 1 for name, left in self._left.items()}
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[7])], finished=left == 0)
            for name, left in self._left.items()
            if left >= 0
        ]


@pytest.mark.parametrize(
    ("lengths", "concurrency", "seconds", "num_tokens"),
    [
        pytest.param([4, 1, 1], 2, 2, 4, id="the last answer alone"),
        pytest.param([3, 3, 3, 3], 2, 6, 12, id="all at once"),
        pytest.param([2, 5], 1, 7, 7, id="one place"),
    ],
)
def test_a_run_is_timed_while_all_places_are_taken(
    lengths: list[int], concurrency: int, seconds: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=count().__next__))
    session = Places(lengths)
    requests, timed = session._drain(range(len(lengths)), concurrency, 0.0, 9)
    assert timed == (seconds, num_tokens)
    assert [len(request.token_ids) for request in requests] == lengths
