"""The API key of vLLM's server, which guards vLLM's own routes by `GUARDED_PREFIX` alone."""

import os
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

OPEN_VARIABLE = "SPECPLUS_OPEN_ENDPOINTS"
"""The environment variable that opens the plugin's routes to requests without the API key, if it is ``1``."""


def lacks_api_key(state: Any, headers: Headers) -> bool:
    """Whether the server asks for an API key that a request with these headers does not bring.

    Args:
        state: the server's, with the arguments of its command; None where there is none.
        headers: the request's.
    """
    args = getattr(state, "args", None)
    # As vLLM's server reads them.
    keys = [key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key]
    return bool(keys) and not AuthenticationMiddleware(_no_app, keys).verify_token(headers)


def are_routes_open() -> bool:
    """Whether the plugin's own routes ask for no key, though the server has one."""
    return os.environ.get(OPEN_VARIABLE) == "1"


async def _no_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands for the app of a middleware that is not called."""
