"""What the server's own process holds, for a test that waits until it is nothing."""

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_specplus.requests.check import handover
from vllm_specplus.requests.response import count_tasks
from vllm_specplus.requests.steps import step_counter

PATH = "/state-of-the-server"


class ServerState:
    """ASGI middleware for ``vllm serve --middleware tests.soak.server_state.ServerState``; it answers at `PATH`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == PATH:
            return await JSONResponse(_sizes(scope["app"].state.engine_client))(scope, receive, send)
        return await self.app(scope, receive, send)


def _sizes(engine_client: Any) -> dict[str, int]:
    return {
        "options": len(handover),
        "bytes of references": handover.num_bytes,
        "questions to workers": len(count_tasks),
        "counted steps": len(step_counter),
        "answers of vLLM": len(engine_client.output_processor.request_states),
    }
