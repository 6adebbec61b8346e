"""What the server's own process holds, and its workers, for a test that waits until it is nothing."""

from collections import Counter
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.soak.census import CountingWorker, census
from vllm_specplus.requests.check import handover
from vllm_specplus.requests.engine_client import ask_workers
from vllm_specplus.requests.response import count_tasks
from vllm_specplus.requests.steps import step_counter

PATH = "/state-of-the-server"
CENSUS_PATH = "/census"


class ServerState:
    """ASGI middleware for ``vllm serve --middleware tests.soak.server_state.ServerState``.

    It answers at `PATH` and `CENSUS_PATH`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if path not in (PATH, CENSUS_PATH):
            return await self.app(scope, receive, send)
        engine_client = scope["app"].state.engine_client
        answer = _sizes(engine_client) if path == PATH else await _census(engine_client)
        return await JSONResponse(answer)(scope, receive, send)


def _sizes(engine_client: Any) -> dict[str, int]:
    return {
        "options": len(handover),
        "bytes of references": handover.num_bytes,
        "questions to workers": len(count_tasks),
        "counted steps": len(step_counter),
        "answers of vLLM": len(engine_client.output_processor.request_states),
    }


async def _census(engine_client: Any) -> dict[str, int]:
    """The `census` of this process and of a worker, added up."""
    of_workers = await ask_workers(engine_client, CountingWorker.take_census.__name__) or {}
    return census() + Counter(of_workers)
