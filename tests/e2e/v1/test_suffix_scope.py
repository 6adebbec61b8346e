"""What one client learns of another's answers from the steps of its own."""

from pathlib import Path

import pytest

from tests.e2e.engines import engine
from tests.e2e.guessing import CONFIG, GUESSES, SECRET, answer, guess


def test_shared_trees_tell_a_right_guess(tiny: Path) -> None:
    with engine(tiny, CONFIG | {"suffix_decoding_scope": "shared"}) as e:
        steps = guess(e, "victim", "attacker")
    assert steps.index(min(steps)) == GUESSES.index(SECRET)
    assert sorted(steps)[1] > min(steps)


@pytest.mark.parametrize("scope", ["salt", pytest.param("request", marks=pytest.mark.slow)])
def test_other_scopes_tell_nothing(scope: str, tiny: Path) -> None:
    with engine(tiny, CONFIG | {"suffix_decoding_scope": scope}) as e:
        for victim, attacker in (("victim", "attacker"), ("other victim", None), (None, "other attacker")):
            assert len(set(guess(e, victim, attacker))) == 1
        if scope == "salt":
            # The same salt goes on sharing.
            assert answer(e, SECRET, "victim") < answer(e, SECRET, "a third")
