"""What an engine's process is given, and what it hands back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_specplus.compare.counts import Counts
from vllm_specplus.sources import SOURCES

TARGET = "target"
"""The source of a token that nobody drafted."""
UNKNOWN = "unknown"
"""The source of a drafted token of which nothing more is known."""

PARTS = ("target", "draft model", "matching", "verification", "rest")
"""The parts of a step's time. ``matching`` is all drafting but the draft model's passes. ``rest`` is the scheduler's
and the front end's part."""


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is started with.

    words: options of ``vllm serve``, as words of a command line.
    num_engines: how many engines share the device's memory.
    """

    model: str
    config: dict[str, Any] | None
    words: tuple[str, ...]
    num_engines: int


class Best(NamedTuple):
    """A token and its logit."""

    token_id: int
    text: str
    logit: float


@dataclass(frozen=True)
class Run:
    """Some prompts answered once.

    seconds: the answers' share of the engine's time: how long each one had its place, summed, over the places.
    token_ids: of each answer.
    num_steps, num_step_tokens: steps of requests behind the first one, which reads the prompt, and their tokens. A step
        in which two requests got tokens counts twice. Prompts that came again, or before, are here and in the counts.
    """

    seconds: float
    token_ids: list[list[int]]
    num_steps: int
    num_step_tokens: int
    counts: Counts

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        """Tokens over time, as of an engine whose places are always taken."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Profile:
    """Prompts answered one at a time under a clock, which slows the engine.

    texts: of each answer, the text and the source of each token.
    seconds: by part of a step, as `PARTS`; {} where several workers share an engine.
    """

    texts: list[list[tuple[str, str]]]
    seconds: dict[str, float] = field(default_factory=dict)


def sources_of_tokens(step_sizes: Sequence[int], by_step: Sequence[dict[str, int]]) -> list[str]:
    """Who made each token of a request that ran alone.

    A step's tokens are its accepted drafts and then one of the target's own. Drafts of the model come first.

    Args:
        step_sizes: tokens of each step.
        by_step: accepted drafts by source, of the steps that accepted any.
    """
    # An answer's end may cut its last step down to one token.
    is_known = len(by_step) - sum(size > 1 for size in step_sizes) in (0, 1)
    steps = iter(by_step)
    sources = []
    for size in step_sizes:
        names = [UNKNOWN] * (size - 1)
        if size > 1 and is_known:
            counts = next(steps)
            names = [source for source in SOURCES for _ in range(counts.get(source, 0))]
            names = (names + [UNKNOWN] * size)[: size - 1]
        sources += [*names, TARGET]
    return sources
