"""Routes of vLLM's server that show what was drafted, and what of it was accepted."""

from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import State
from starlette.responses import JSONResponse

from vllm_specplus.requests.api_key import are_routes_open, lacks_api_key
from vllm_specplus.requests.engine_client import ask_workers, has_drafter
from vllm_specplus.requests.faults import request_faults
from vllm_specplus.requests.middleware import PredictedOutputs
from vllm_specplus.requests.response import error_response

Stats = Mapping[str, Mapping[str, Any]]
"""The answer of a worker's ``specplus_stats``. ``drafted`` and ``accepted`` are tokens by source, each a list by
position among a step's slots; ``entries`` is how many entries of each kind the worker holds, ``faults`` how many faults
it had in each part of the plugin. Any key may be absent."""

_COUNTERS = {
    "drafted": ("specplus:draft_tokens", "Draft tokens that were verified, by source and position."),
    "accepted": ("specplus:accepted_tokens", "Draft tokens that were accepted, by source and position."),
}


class SpecPlusEndpoints:
    """vLLM's endpoint plugin: it adds ``/specplus/stats``, ``/specplus/metrics`` and `PredictedOutputs` to a server."""

    name = "specplus"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the middleware and the routes, before the server starts."""
        app.add_middleware(PredictedOutputs)
        app.include_router(_router)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Keep the engine client that the routes ask."""
        state.specplus_engine_client = engine_client


def totals(stats: Stats) -> dict[str, dict[str, Any]]:
    """By source: tokens ``drafted`` and ``accepted`` at all positions, and their ratio; None if none was drafted."""
    drafted, accepted = stats.get("drafted", {}), stats.get("accepted", {})
    summed = {}
    for source in {**drafted, **accepted}:
        num_drafted, num_accepted = sum(drafted.get(source, ())), sum(accepted.get(source, ()))
        rate = num_accepted / num_drafted if num_drafted else None
        summed[source] = {"drafted": num_drafted, "accepted": num_accepted, "acceptance_rate": rate}
    return summed


def metric_families(stats: Stats) -> Iterator[Metric]:
    """The same as Prometheus metrics: the `_COUNTERS` by source and position, entries by kind, and faults by part."""
    for key, (name, documentation) in _COUNTERS.items():
        counter = CounterMetricFamily(name, documentation, labels=("source", "position"))
        for source, counts in stats.get(key, {}).items():
            for position, count in enumerate(counts):
                counter.add_metric((source, str(position)), count)
        yield counter
    gauge = GaugeMetricFamily("specplus:entries", "Entries that a worker holds now, by kind.", labels=("kind",))
    for kind, count in stats.get("entries", {}).items():
        gauge.add_metric((kind,), count)
    yield gauge
    faults = CounterMetricFamily("specplus:faults", "Faults of the plugin's own code, by part.", labels=("part",))
    for part, count in stats.get("faults", {}).items():
        faults.add_metric((part,), count)
    yield faults


@dataclass(eq=False)
class _Scrape(Collector):
    stats: Stats

    def collect(self) -> Iterator[Metric]:
        return metric_families(self.stats)


class _GuardedRoute(APIRoute):
    """A route that asks for the server's API key, as vLLM's guarded routes do."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_key(request: Request) -> Response:
            if not are_routes_open() and lacks_api_key(request.app.state, request.headers):
                return JSONResponse({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
            return await handle(request)

        return handle_with_key


_router = APIRouter(prefix="/specplus", route_class=_GuardedRoute)


@_router.get("/stats")
async def show_stats(request: Request) -> Response:
    """The workers' counts and their `totals`; 404 if the plugin does not draft."""
    stats = await _worker_stats(request)
    return _no_counts_response() if stats is None else JSONResponse({**stats, "totals": totals(stats)})


@_router.get("/metrics")
async def show_metrics(request: Request) -> Response:
    """The workers' counts for Prometheus; 404 if the plugin does not draft."""
    stats = await _worker_stats(request)
    if stats is None:
        return _no_counts_response()
    registry = CollectorRegistry()
    registry.register(_Scrape(stats))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


async def _worker_stats(request: Request) -> Stats | None:
    """The workers' counts, with the faults of this server's process; None if the plugin does not draft."""
    engine_client = request.app.state.specplus_engine_client
    if not has_drafter(engine_client):
        return None
    stats = await ask_workers(engine_client, "specplus_stats") or {}
    # The parts of a server's process and of a worker have different names.
    return {**stats, "faults": {**stats.get("faults", {}), **request_faults.counts}}


def _no_counts_response() -> Response:
    message = "no counts: the engine's speculative config has no method of vllm-specplus"
    return error_response(HTTPStatus.NOT_FOUND, "NotFoundError", message)
