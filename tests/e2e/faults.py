"""Faults put into the plugin's own code while an engine serves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.e2e.engines import PROMPTS, Engine
from tests.e2e.references import ask, stats
from vllm_specplus.proposers.history import History
from vllm_specplus.proposers.suffix import SuffixMatcher

SECRET = "tokens 120 120 120"
# The prompt whose drafting fails, and the others.
FAULTY, OTHERS = PROMPTS[5], PROMPTS[:4]


class InjectedError(Exception):
    """A fault; its message has what must not be logged."""

    def __init__(self) -> None:
        super().__init__(SECRET)


@contextmanager
def fault(owner: Any, name: str, is_hit: Callable[..., bool]) -> Iterator[list[int]]:
    """Let a function raise where `is_hit` says so of its arguments; the list has an entry for each time it did."""
    hits: list[int] = []
    function = getattr(owner, name)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        if is_hit(*args, **kwargs):
            hits.append(len(hits))
            raise InjectedError
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, faulty)
        yield hits


def at_calls(*numbers: int) -> Callable[..., bool]:
    """Hit at these calls, counted from 0."""
    count = iter(range(10**9))
    return lambda *args, **kwargs: next(count) in numbers


def check_faults(e: Engine, part: str, log: pytest.LogCaptureFixture) -> None:
    """The faults are counted, and logged once with their stack and without the client's tokens."""
    assert stats(e)["faults"][part] >= 1
    said = [record.getMessage() for record in log.records if f"a fault in {part}" in record.getMessage()]
    assert len(said) == 1
    assert "InjectedError" in said[0]
    assert "in faulty" in said[0]
    assert SECRET not in log.text


def check_alive(e: Engine, expected: list[list[int]], max_tokens: int = 48) -> None:
    """Requests that come afterwards get their texts and their drafts; `expected`: the texts of `OTHERS`."""
    before = sum(map(sum, stats(e)["drafted"].values()))
    assert ask(e, OTHERS, [{}] * 4, max_tokens=max_tokens) == expected[:4]
    assert sum(map(sum, stats(e)["drafted"].values())) > before
    assert stats(e)["entries"]["requests"] == 0


def reads_the_faulty(matcher: Any, history: History, *args: Any) -> bool:
    """Whether a matcher is given the text of the faulty prompt."""
    texts = (history.tokens(i)[: len(FAULTY)] for i in range(len(history.req_ids)) if history.num_tokens[i])
    return any(np.array_equal(text, FAULTY) for text in texts)


def fail_in_worker(worker: Any) -> None:
    """Let matching fail for the faulty prompt, in a worker's process and to its end."""
    worker.fault = fault(SuffixMatcher, "match", reads_the_faulty)
    worker.fault.__enter__()
