"""docs/metrics.md lists the metrics of the plugin, with their types, labels and the labels' values, and no other."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

from prometheus_client import Metric

from vllm_specplus.config import resolve
from vllm_specplus.requests.endpoints import metric_families
from vllm_specplus.requests.faults import RequestPart
from vllm_specplus.runners.faults import FaultyPart
from vllm_specplus.runners.live_requests import LiveRequests
from vllm_specplus.sources import SOURCES

DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ONE_OF_EACH = {
    "drafted": {"model": [1]},
    "accepted": {"model": [1]},
    "entries": {"requests": 1},
    "faults": {"drafting": 1},
}


def rows(header: str) -> list[list[str]]:
    """The cells of the table with this header."""
    table = DOCUMENT.partition(header)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table]


def described(family: Metric) -> tuple[str, str, str]:
    (sample,) = family.samples
    return sample.name, family.type, ", ".join(sample.labels)


def test_metrics() -> None:
    listed = [tuple(row[:3]) for row in rows("| metric | type | labels | meaning |")]
    assert listed == [described(family) for family in metric_families(ONE_OF_EACH)]


def test_values_of_labels() -> None:
    listed: dict[str, list[str]] = {}
    for label, value, _ in rows("| label | value | meaning |"):
        listed.setdefault(label, []).append(value)
    options: Any = resolve({"method": "ngram", "num_speculative_tokens": 3, "max_ngram_size": 3}).options
    model = SimpleNamespace(get_vocab_size=lambda: 8, max_model_len=8)
    assert listed.pop("position") == ["0, 1, ..."]
    assert listed == {
        "source": list(SOURCES),
        "kind": list(LiveRequests(options, model, warns=False).sizes()),
        "part": [*get_args(FaultyPart), *get_args(RequestPart)],
    }


def test_no_other_metric_is_named() -> None:
    names = {described(family)[0] for family in metric_families(ONE_OF_EACH)}
    assert set(re.findall(r"specplus:\w+", DOCUMENT)) == names
