"""What one client learns of another's answers from the steps of its own."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import engine
from tests.e2e.guessing import CONFIG, GUESSES, SECRET, guess
from tests.e2e.v2.engines import async_engine

pytestmark = pytest.mark.interpreter


def test_shared_trees_tell_a_right_guess(tiny: Path) -> None:
    with engine(tiny, CONFIG | {"suffix_decoding_scope": "shared"}) as e:
        steps = guess(e, "victim", "attacker")
    assert steps.index(min(steps)) == GUESSES.index(SECRET)
    assert sorted(steps)[1] > min(steps)


@pytest.mark.parametrize("start", [engine, pytest.param(async_engine, marks=pytest.mark.slow)])
def test_salted_trees_tell_nothing(start: Any, tiny: Path) -> None:
    with start(tiny, CONFIG) as e:
        assert len(set(guess(e, "victim", "attacker"))) == 1
        # The same salt goes on sharing.
        steps = guess(e, "victim", "victim")
        assert min(steps) < max(steps)
