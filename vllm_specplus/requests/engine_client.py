"""Questions to vLLM's engine client, which stands before the engine in the server's process."""

from collections.abc import Sequence
from itertools import zip_longest
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
    """Call a method of every worker of every data-parallel engine, and add up the engines' counts.

    Of one engine's answers the first that is not None counts: all workers of an engine that answer agree.

    Returns:
        The sum, as `add_up` makes it; None if no worker has an answer.

    Raises:
        Exception: what an engine raises if it cannot be asked.
    """
    # `EngineClient.collective_rpc` calls every engine too, and returns the answers of the first one alone.
    ask_all = engine_client.engine_core.call_utility_all_async
    engines = await ask_all("collective_rpc", method, None, args, None)
    answers = (next((answer for answer in workers if answer is not None), None) for workers in engines)
    known = [answer for answer in answers if answer is not None]
    return add_up(known) if known else None


def add_up(counts: Sequence[Any]) -> Any:
    """The sum of counts of one form: numbers, lists by position, or dicts of such; what one lacks is 0."""
    first = counts[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for each in counts for key in each)
        return {key: add_up([each[key] for each in counts if key in each]) for key in keys}
    if isinstance(first, list):
        return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
    return sum(counts)
