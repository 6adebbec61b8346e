"""Fuzz tests draw the same examples in every run, but those of the seed in SPECPLUS_FUZZ_SEED where that is set."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import seed

_Test = TypeVar("_Test", bound=Callable[..., None])
_SEED = os.environ.get("SPECPLUS_FUZZ_SEED")
SEED = int(_SEED or 0)
"""For random cases that hypothesis does not draw."""
HUGE_INTEGERS = tuple(sign * 10**power for power in (4299, 4300) for sign in (1, -1))
"""Python parses and writes at most 4,300 digits: the first two have as many, the others one more."""


def fuzz(test: _Test) -> _Test:
    """Have a hypothesis test draw its examples by the seed, if one is set."""
    return test if _SEED is None else seed(int(_SEED))(test)


def to_json(value: Any, *, ensure_ascii: bool = True) -> str:
    """JSON of a value, whose integers may have any number of digits."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    finally:
        sys.set_int_max_str_digits(limit)
