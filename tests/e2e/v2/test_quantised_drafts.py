"""Hybrids with quantised drafts on Model Runner V2."""

from pathlib import Path

import pytest

from tests.e2e.engines import PROMPTS, engine
from tests.e2e.quantised import CASES, HALF, check, config_of

pytestmark = pytest.mark.interpreter

MAX_TOKENS = 12


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[list[int]]:
    with engine(tiny, **HALF) as e:
        return e.tokens(PROMPTS[:4], max_tokens=MAX_TOKENS)


@pytest.mark.parametrize(("method", "drafter"), CASES)
def test_greedy_text(
    method: str, drafter: str, tiny: Path, draft: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    check(tiny, config_of(method, drafter, draft, tmp_path / "quantised"), plain, MAX_TOKENS)
