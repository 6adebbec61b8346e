"""The routes of the plugin; vLLM's engine is a stand-in."""

import asyncio
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.requests.stand_ins import Check, worker_call
from vllm_specplus.requests.endpoints import SpecPlusEndpoints, metric_families, totals
from vllm_specplus.requests.faults import request_faults
from vllm_specplus.requests.middleware import PredictedOutputs

STATS = {
    "drafted": {"model": [10, 8], "ngram": [0, 4], "unfilled": [0, 0], "reference": []},
    "accepted": {"model": [9, 6], "ngram": [0, 1], "unfilled": [0, 0]},
    "entries": {"requests": 3, "references": 1, "request_counts": 0},
    "faults": {"drafting": 2},
}
TOTALS = {
    "model": {"drafted": 18, "accepted": 15, "acceptance_rate": 15 / 18},
    "ngram": {"drafted": 4, "accepted": 1, "acceptance_rate": 0.25},
    "unfilled": {"drafted": 0, "accepted": 0, "acceptance_rate": None},
    "reference": {"drafted": 0, "accepted": 0, "acceptance_rate": None},
}


class Engine:
    def __init__(self, answers: list[Any], *other_engines: list[Any], drafts: bool = True):
        self.engines = [answers, *other_engines]
        self.engine_core = self
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        options = SimpleNamespace(drafts_from_history=drafts)
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(specplus=options),
            model_config=SimpleNamespace(logits_processors=[Check]),
        )

    async def call_utility_all_async(self, utility: str, *args: Any) -> list[list[Any]]:
        self.calls.append(worker_call(utility, *args))
        return self.engines


def client_for(engine: Any, **options: Any) -> TestClient:
    plugin, app = SpecPlusEndpoints(), FastAPI(**options)
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(engine, app.state, SimpleNamespace()))
    return TestClient(app)


def samples(text: str) -> Iterator[tuple[str, str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield family.type, sample.name, sample.labels, sample.value


def test_vllm_takes_the_plugin() -> None:
    """It loads by its name in pyproject.toml, and has the attributes that vLLM reads."""
    loaded = EntryPoint(
        "specplus", "vllm_specplus.requests.endpoints:SpecPlusEndpoints", "vllm.endpoint_plugins"
    ).load()
    plugin = loaded()
    assert plugin.name == "specplus"
    assert plugin.required_tasks == ("generate",)


def test_the_middleware_is_added() -> None:
    app = FastAPI()
    SpecPlusEndpoints().attach_router(app)
    assert [middleware.cls for middleware in app.user_middleware] == [PredictedOutputs]


@pytest.mark.parametrize("answers", [[STATS], [None, STATS, {"drafted": {"model": [99]}}]])
def test_stats(answers: list[Any]) -> None:
    engine = Engine(answers)
    got = client_for(engine).get("/specplus/stats")
    assert got.status_code == 200
    assert got.json() == STATS | {"totals": TOTALS}
    assert engine.calls == [("specplus_stats", ())]


@pytest.mark.parametrize("answers", [[STATS], [None, STATS]])
def test_metrics(answers: list[Any]) -> None:
    engine = Engine(answers)
    got = client_for(engine).get("/specplus/metrics")
    assert got.status_code == 200
    assert got.headers["content-type"].startswith("text/plain; version=")
    assert engine.calls == [("specplus_stats", ())]
    assert 'specplus:draft_tokens_total{position="1",source="ngram"} 4.0' in got.text
    counters = [
        ("counter", name, {"source": source, "position": str(position)}, count)
        for key, name in (("drafted", "specplus:draft_tokens_total"), ("accepted", "specplus:accepted_tokens_total"))
        for source, counts in STATS[key].items()
        for position, count in enumerate(counts)
    ]
    gauges = [("gauge", "specplus:entries", {"kind": kind}, count) for kind, count in STATS["entries"].items()]
    faults = [("counter", "specplus:faults_total", {"part": "drafting"}, 2)]
    assert list(samples(got.text)) == counters + gauges + faults


def test_faults_of_the_server_itself() -> None:
    request_faults.counts["reading a request"] = 3
    stats = client_for(Engine([STATS])).get("/specplus/stats").json()
    assert stats["faults"] == {"drafting": 2, "reading a request": 3}


def test_engines_are_added_up() -> None:
    other = {
        "drafted": {"ngram": [1], "model": [2, 2, 2]},
        "accepted": {"suffix": [1, 1], "model": [1, 0, 0]},
        "entries": {"requests": 2, "suffix_requests": 5},
        "faults": {"drafting": 1, "counting": 1},
    }
    engine = Engine([STATS, STATS], [None, None], [None, other])
    stats = client_for(engine).get("/specplus/stats").json()
    assert stats.pop("totals")["model"] == {"drafted": 24, "accepted": 16, "acceptance_rate": 16 / 24}
    assert stats == {
        "drafted": {"model": [12, 10, 2], "ngram": [1, 4], "unfilled": [0, 0], "reference": []},
        "accepted": {"model": [10, 6, 0], "ngram": [0, 1], "unfilled": [0, 0], "suffix": [1, 1]},
        "entries": {"requests": 5, "references": 1, "request_counts": 0, "suffix_requests": 5},
        "faults": {"drafting": 3, "counting": 1},
    }
    assert engine.calls == [("specplus_stats", ())]
    metrics = client_for(engine).get("/specplus/metrics").text
    assert 'specplus:accepted_tokens_total{position="0",source="model"} 10.0' in metrics


def test_scraped_twice() -> None:
    """The counts are the workers': nothing is added up here."""
    client = client_for(Engine([STATS]))
    assert client.get("/specplus/metrics").text == client.get("/specplus/metrics").text


@pytest.mark.parametrize("answers", [[], [None, None], [{}]])
def test_no_worker_has_counts(answers: list[Any]) -> None:
    client = client_for(Engine(answers))
    assert client.get("/specplus/stats").json() == {"faults": {}, "totals": {}}
    assert list(samples(client.get("/specplus/metrics").text)) == []


@pytest.mark.parametrize("path", ["stats", "metrics"])
@pytest.mark.parametrize("engine", [None, SimpleNamespace(), Engine([STATS], drafts=False)])
def test_an_engine_without_the_plugin(path: str, engine: Any) -> None:
    got = client_for(engine).get(f"/specplus/{path}")
    assert got.status_code == 404
    message = "no counts: the engine's speculative config has no method of vllm-specplus"
    assert got.json() == {"error": {"message": message, "type": "NotFoundError", "param": None, "code": 404}}
    assert not getattr(engine, "calls", [])


def test_below_a_root_path() -> None:
    assert client_for(Engine([STATS]), root_path="/prefix").get("/prefix/specplus/stats").status_code == 200


@pytest.mark.parametrize("path", ["stats", "metrics"])
@pytest.mark.parametrize("place", ["args", "environment"])
def test_the_routes_ask_for_the_servers_api_key(place: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine([STATS])
    client = client_for(engine)
    if place == "args":
        client.app.state.args = SimpleNamespace(api_key=["other", "key"])  # type: ignore[attr-defined]
    else:
        monkeypatch.setenv("VLLM_API_KEY", "key")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "key"}):
        got = client.get(f"/specplus/{path}", headers=headers)
        assert (got.status_code, got.json()) == (401, {"error": "Unauthorized"})
    assert not engine.calls
    assert client.get(f"/specplus/{path}", headers={"authorization": "Bearer key"}).status_code == 200
    for value, status in (("0", 401), ("1", 200)):
        monkeypatch.setenv("SPECPLUS_OPEN_ENDPOINTS", value)
        assert client.get(f"/specplus/{path}").status_code == status


def test_two_apps_of_a_process() -> None:
    first, second = (client_for(Engine([{"entries": {"requests": n}}])) for n in (1, 2))
    assert first.get("/specplus/stats").json()["entries"] == {"requests": 1}
    assert second.get("/specplus/stats").json()["entries"] == {"requests": 2}


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({}, {}),
        ({"entries": {"requests": 1}}, {}),
        ({"drafted": {"new": [2]}}, {"new": {"drafted": 2, "accepted": 0, "acceptance_rate": 0.0}}),
        ({"accepted": {"new": [2]}}, {"new": {"drafted": 0, "accepted": 2, "acceptance_rate": None}}),
        (STATS, TOTALS),
    ],
)
def test_totals(stats: dict[str, Any], expected: dict[str, Any]) -> None:
    assert totals(stats) == expected


def test_metric_families_are_there_without_counts() -> None:
    families = list(metric_families({}))
    assert [(f.name, f.type, f.samples) for f in families] == [
        ("specplus:draft_tokens", "counter", []),
        ("specplus:accepted_tokens", "counter", []),
        ("specplus:entries", "gauge", []),
        ("specplus:faults", "counter", []),
    ]
    assert all(f.documentation for f in families)
