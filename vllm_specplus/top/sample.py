"""What a server has counted at a moment: the plugin's counts, and those of vLLM's metrics that go with them."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

from prometheus_client.parser import text_string_to_metric_families
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

TOKENS = "vllm:generation_tokens_total"
DRAFTING_STEPS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
# vLLM observes one of these in each step of a request that gives tokens.
STEPS = ("vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count")
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_COUNTERS = (TOKENS, DRAFTING_STEPS, ACCEPTED, *STEPS)


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("not printable")
    return name


_Name = Annotated[str, AfterValidator(_printable)]
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Stats(BaseModel):
    model_config = ConfigDict(strict=True)

    drafted: dict[_Name, list[_Count]] = {}
    accepted: dict[_Name, list[_Count]] = {}
    faults: dict[_Name, _Count] = {}
    # Never absent: other JSON has it not.
    totals: dict[str, object]


@dataclass(frozen=True)
class Sample:
    """What a server has counted, or what it has counted between two moments.

    Attributes:
        time: in seconds, of a clock without steps; between two moments, the time from one to the other.
        drafted, accepted: tokens by source and position among a step's slots, from 0.
        faults: by part of the plugin.
        engine: samples of vLLM's metrics by name, added up over its engines; {} if the server shows none.
    """

    time: float
    drafted: Counter[tuple[str, int]]
    accepted: Counter[tuple[str, int]]
    faults: Counter[str]
    engine: dict[str, float]

    def since(self, earlier: "Sample") -> "Sample | None":
        """What was counted after `earlier`; None if a count is smaller now, so that the server has started anew."""
        both = [name for name in _COUNTERS if name in self.engine and name in earlier.engine]
        fell = earlier.drafted - self.drafted or earlier.accepted - self.accepted or earlier.faults - self.faults
        if fell or any(self.engine[name] < earlier.engine[name] for name in both):
            return None
        return Sample(
            self.time - earlier.time,
            self.drafted - earlier.drafted,
            self.accepted - earlier.accepted,
            self.faults - earlier.faults,
            {name: self.engine[name] - earlier.engine[name] for name in both},
        )


def read_sample(stats: bytes, metrics: str, time: float) -> Sample:
    """Read the answers of ``/specplus/stats`` and ``/metrics``.

    Args:
        stats: the first one's JSON.
        metrics: the second one's text; what is no Prometheus text counts as empty.
        time: when they came, in seconds.

    Raises:
        ValueError: `stats` are no counts of the plugin.
    """
    parsed = _Stats.model_validate_json(stats)
    drafted, accepted = (
        Counter({(source, i): n for source, counts in by_source.items() for i, n in enumerate(counts)})
        for by_source in (parsed.drafted, parsed.accepted)
    )
    return Sample(time, drafted, accepted, Counter(parsed.faults), _engine_metrics(metrics))


def _engine_metrics(text: str) -> dict[str, float]:
    summed: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in (*_COUNTERS, RUNNING, WAITING) and math.isfinite(sample.value):
                    summed[sample.name] = summed.get(sample.name, 0) + sample.value
    except ValueError:
        return {}
    return summed
