"""Two answers of a server become a page."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from tests.top.stand_in import METRICS, STATS, scaled
from vllm_specplus.top.page import page, position_ranges
from vllm_specplus.top.sample import Sample, read_sample

URL = "http://localhost:8000"


def sample(stats: dict[str, Any] = STATS, metrics: str = METRICS, time: float = 0.0) -> Sample:
    return read_sample(json.dumps(stats).encode(), metrics, time)


def lines(total: Sample, last: Sample | None = None, problem: str = "") -> list[str]:
    console = Console(width=80, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(page(URL, total, last, problem))
    return [line.rstrip() for line in captured.get().splitlines()]


def cells(rows: Sequence[str], name: str) -> list[str]:
    (row,) = (row for row in rows if row.startswith(name))
    return row.removeprefix(name).split()


def test_since_start() -> None:
    rows = lines(sample())
    assert rows[:3] == [f"vllm-specplus top {URL}", "requests: 3 running, 4 waiting", "faults: none"]
    assert cells(rows, "tokens  ") == ["-", "21"]
    # Ten steps of a request; eight of them with drafts, of which eleven were accepted.
    assert cells(rows, "tokens per step  ") == ["-", "2.10"]
    assert cells(rows, "tokens per step with drafts") == ["-", "2.38"]
    assert cells(rows, "drafts accepted") == ["-", "-", "11", "50%"]
    assert cells(rows, "drafts wasted") == ["-", "-", "11", "50%"]
    assert cells(rows, "model") == ["-", "-", "-", "16", "10", "62%"]
    assert cells(rows, "ngram") == ["-", "-", "-", "6", "1", "17%"]
    assert cells(rows, "unfilled") == ["-", "-", "-", "2", "0", "0%"]
    assert cells(rows, "accepted at position") == ["1", "2", "3"]
    assert cells(rows, "last interval  ") == ["-", "-", "-"]
    assert cells(rows, "since start") == ["75%", "50%", "17%"]
    assert cells(rows, "  model") == ["75%", "50%", "-"]
    assert cells(rows, "  ngram") == ["-", "-", "17%"]
    # It has drafted nothing.
    assert not any("reference" in row for row in rows)


def test_last_interval() -> None:
    before = sample(time=10.0)
    metrics = METRICS.replace("} 9.0", "} 59.0").replace("} 8.0", "} 18.0").replace("} 11.0", "} 41.0")
    now = sample(scaled(3), metrics, time=12.5)
    rows = lines(now, now.since(before))
    assert cells(rows, "                            ") == ["last", "2.5", "s", "since", "start"]
    assert cells(rows, "tokens  ") == ["20.0/s", "71"]
    assert cells(rows, "tokens per step  ") == ["5.00", "3.55"]
    assert cells(rows, "tokens per step with drafts") == ["4.00", "3.28"]
    assert cells(rows, "drafts accepted") == ["8.8/s", "50%", "33", "50%"]
    assert cells(rows, "model") == ["12.8/s", "8.0/s", "62%", "48", "30", "62%"]
    assert cells(rows, "last 2.5 s  ") == ["75%", "50%", "17%"]


def test_faults() -> None:
    before = sample(STATS | {"faults": {"drafting": 1}})
    now = sample(STATS | {"faults": {"drafting": 3, "counting": 1}}, time=1.0)
    assert lines(now)[2] == "faults: 3 in drafting, 1 in counting"
    assert lines(now, now.since(before))[2] == "faults: 3 in drafting, 1 in counting (3 new)"


def test_a_problem_stands_above_the_last_counts() -> None:
    rows = lines(sample(), problem="no answer")
    assert rows[1] == "no answer"
    assert rows[2:] == lines(sample())[2:]


def test_an_idle_interval() -> None:
    last = sample(time=2.0).since(sample())
    rows = lines(sample(time=2.0), last)
    assert cells(rows, "tokens  ") == ["0.0/s", "21"]
    assert cells(rows, "tokens per step  ") == ["-", "2.10"]
    assert cells(rows, "drafts accepted") == ["0.0/s", "-", "11", "50%"]


def test_without_counts() -> None:
    """No worker has any yet, and the server shows no metrics."""
    rows = lines(sample({"totals": {}}, ""))
    assert rows[1] == "requests: - running, - waiting"
    assert cells(rows, "tokens  ") == ["-", "-"]
    assert cells(rows, "drafts accepted") == ["-", "-", "0", "-"]


def test_metrics_that_were_not_there_before() -> None:
    """Their first value is no amount of the interval."""
    last = sample(scaled(2), time=2.0).since(sample(metrics=""))
    assert last is not None
    assert cells(lines(sample(scaled(2), time=2.0), last), "tokens  ") == ["-", "21"]
    assert cells(lines(sample(scaled(2)), last), "drafts accepted") == ["5.5/s", "50%", "22", "50%"]


@pytest.mark.parametrize(
    ("stats", "metrics"),
    [
        (STATS, METRICS),
        (scaled(2) | {"accepted": {"model": [1]}}, METRICS),
        (scaled(2) | {"faults": {}}, METRICS),
        (scaled(2) | {"faults": {"drafting": 1}}, METRICS.replace("} 9.0", "} 8.0")),
        ({"totals": {}}, METRICS),
    ],
)
def test_a_server_that_has_started_anew(stats: dict[str, Any], metrics: str) -> None:
    earlier = sample(scaled(2) | {"faults": {"drafting": 1}})
    assert sample(stats, metrics, time=2.0).since(earlier) is None


def test_gauges_may_fall() -> None:
    assert sample(metrics=METRICS.replace("} 4.0", "} 0.0"), time=1.0).since(sample()) is not None


def test_it_fits_into_a_terminal_of_80_by_24() -> None:
    """With the most sources that draft in one engine, 128 positions, and large counts."""
    sources = ("model", "suffix", "reference", "unfilled")
    before, after = ({source: [count] * 128 for source in sources} for count in (10**9, 10**9 + 20_000))
    faults = {"faults": dict.fromkeys(("drafting", "counting", "requests"), 1000)}
    now = sample(STATS | {"drafted": after, "accepted": after} | faults, time=2.0)
    rows = lines(now, now.since(sample(STATS | {"drafted": before, "accepted": before})))
    assert cells(rows, "model")[:1] == ["1,280,000.0/s"]
    assert len(rows) < 24
    assert not any("…" in row for row in rows)
    assert cells(rows, "accepted at position")[3:] == ["4", "5-8", "9-16", "17-32", "33-64", "65-128"]


@pytest.mark.parametrize("num_positions", [*range(14), 16, 17, 64, 100, 128, 129])
def test_position_ranges(num_positions: int) -> None:
    ranges = position_ranges(num_positions)
    assert [i for positions in ranges for i in positions] == list(range(num_positions))
    assert len(ranges) <= 10


@pytest.mark.parametrize(
    "stats",
    [
        b"",
        b"{}",
        b"[]",
        b"<html>",
        b'{"detail": "Not Found"}',
        b"\xff",
        b'{"totals": {}, "drafted": {"model": 1}}',
        b'{"totals": {}, "drafted": {"model": [-1]}}',
        b'{"totals": {}, "drafted": {"model": [1.5]}}',
        b'{"totals": {}, "drafted": {"model": [NaN]}}',
        b'{"totals": {}, "drafted": {"model": [1' + b"0" * 30 + b"]}}",
        b'{"totals": {}, "drafted": {"\\u001b[2J": [1]}}',
        b'{"totals": {}, "faults": []}',
    ],
)
def test_answers_that_are_no_counts(stats: bytes) -> None:
    with pytest.raises(ValueError, match="validation error"):
        read_sample(stats, METRICS, 0.0)


@pytest.mark.parametrize("metrics", ["<html>", "vllm:generation_tokens_total what", "vllm:generation_tokens_total NaN"])
def test_metrics_that_cannot_be_read(metrics: str) -> None:
    assert sample(metrics=metrics).engine == {}
