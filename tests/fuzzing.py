"""Fuzz tests draw the same examples in every run, but those of the seed in SPECPLUS_FUZZ_SEED where that is set."""

import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import seed

_Test = TypeVar("_Test", bound=Callable[..., None])
_SEED = os.environ.get("SPECPLUS_FUZZ_SEED")
SEED = int(_SEED or 0)
"""For random cases that hypothesis does not draw."""


def fuzz(test: _Test) -> _Test:
    """Have a hypothesis test draw its examples by the seed, if one is set."""
    return test if _SEED is None else seed(int(_SEED))(test)
