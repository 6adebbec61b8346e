"""Faults of the plugin's own code in the process that takes the requests: the answer comes all the same."""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from vllm.logger import init_logger

from vllm_specplus.requests.options import RequestError

logger = init_logger("vllm.specplus")

RequestPart = Literal[
    "reading a request", "checking a request", "reading a reference", "counting steps", "reporting counts"
]


def stack_of(error: Exception) -> str:
    """The stack of a fault, without its message."""
    return "".join(traceback.format_tb(error.__traceback__))


class RequestFaults:
    """Catches faults and counts them; the first one of each part is logged.

    Attributes:
        counts: how many faults each part had.
    """

    def __init__(self) -> None:
        self.counts = Counter[RequestPart]()

    @contextmanager
    def caught(self, part: RequestPart, effect: str) -> Iterator[None]:
        """Catch an exception of the block, but for the refusal of a field.

        The log has the exception's type and stack. Its message might hold a client's text.

        Args:
            part: what the block does.
            effect: what the request lacks after a fault.
        """
        try:
            yield
        except RequestError:
            raise
        except Exception as error:
            self.counts[part] += 1
            if self.counts[part] == 1:
                logger.error("a fault in %s, %s: %s\n%s", part, type(error).__name__, effect, stack_of(error))


request_faults = RequestFaults()
