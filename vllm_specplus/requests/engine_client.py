"""Questions to vLLM's engine client, which stands before the engine in the server's process."""

from operator import attrgetter
from typing import Any

from vllm_specplus.requests.check import RequestCheck, check_of

_drafts_from_history = attrgetter("vllm_config.speculative_config.specplus.drafts_from_history")


def has_drafter(engine_client: Any) -> bool:
    """Whether the plugin drafts in the engine; False for None."""
    try:
        return bool(_drafts_from_history(engine_client))
    except AttributeError:
        return False


def check_of_engine(engine_client: Any) -> type[RequestCheck] | None:
    """The check of the engine's requests; None if nothing checks them."""
    return check_of(engine_client.vllm_config.model_config)


def speculates(engine_client: Any) -> bool:
    """Whether anything drafts in the engine."""
    return engine_client.vllm_config.speculative_config is not None


async def ask_workers(engine_client: Any, method: str, *args: Any) -> dict[str, Any] | None:
    """Call a method of every worker; return the first answer that is not None. All workers that answer agree.

    Raises:
        Exception: what the engine raises if it cannot be asked.
    """
    answers = await engine_client.collective_rpc(method, args=args)
    return next((answer for answer in answers if answer is not None), None)
