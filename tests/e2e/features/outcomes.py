"""What becomes of a feature, and the words for it in docs/features.md."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from pydantic import ValidationError
from vllm.exceptions import VLLMValidationError

from tests.e2e.engines import Engine
from tests.e2e.references import stats

WORKS, REFUSED, AS_VLLM = "works", "refused by vLLM", "not in vLLM either"
STOCK = {"method": "mtp", "num_speculative_tokens": 2}

# Starts an engine: a model's folder, a speculative config, further arguments.
Start = Callable[..., AbstractContextManager[Engine]]
_Ask = TypeVar("_Ask")


class Refusal(str):
    """The words in which an engine refused."""

    __slots__ = ()


class Lack(str):
    """The words of an error that is no refusal: vLLM has no such thing, or its engine has ended."""

    __slots__ = ()


class Near(float):
    """A logprob, equal to those that differ by no more than sums of floats in another order do."""

    __slots__ = ()
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-4

    def __ne__(self, other: object) -> bool:
        return not self == other


def registered(features: dict[str, _Ask], name: str) -> Callable[[_Ask], _Ask]:
    """Enter what is asked under a feature's name; what it returns must be the same with speculation."""

    def register(ask: _Ask) -> _Ask:
        features[name] = ask
        return ask

    return register


def drafted(e: Engine, config: dict[str, Any]) -> int:
    """The drafts of an engine so far. Under asynchronous scheduling vLLM counts slots without a draft too."""
    return filled(stats(e)) if "mtp_strategy" in config else e.counts().drafted


def filled(stats: dict[str, Any], what: str = "drafted") -> int:
    """The drafts in the plugin's counts, or those "accepted", without padding."""
    return sum(sum(row) for source, row in stats[what].items() if source != "unfilled")


def outcome(ask: Callable[[], Any]) -> Any:
    """What a feature returns, or how it fails."""
    try:
        return ask()
    except VLLMValidationError as error:
        return Refusal(error)
    except (ValueError, TypeError) as error:
        return Lack(error)


def engine_outcome(start_and_ask: Callable[[], Any]) -> Any:
    """What a feature returns, or the words in which vLLM refuses to start an engine for it."""
    try:
        return start_and_ask()
    except ValidationError as error:
        return Refusal(error.errors()[0]["msg"])
    except (ValueError, VLLMValidationError) as error:
        return Refusal(error)


def verdict(plain: Any, stock: Any, ours: Any) -> str:
    """The cell of a feature, from its outcomes without speculation, with vLLM's own drafter and with the plugin's.

    `stock` is None where it has not been asked, because the other two are the same.
    """
    has_answer = not isinstance(ours, Refusal | Lack)
    if not has_answer and ours in (plain, stock):
        return REFUSED if isinstance(ours, Refusal) else AS_VLLM
    if ours == plain:
        return WORKS
    if has_answer and stock != plain:
        return AS_VLLM
    return f"fails: {ours!r}, without speculation {plain!r}, with vLLM's drafter {stock!r}"
