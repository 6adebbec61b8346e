"""A server whose engine dies shows nothing of its clients' texts in its log: Model Runner V2."""

from pathlib import Path

import pytest

from tests.e2e.dying_engine import check_a_dying_engine

pytestmark = pytest.mark.interpreter


@pytest.mark.slow
def test_an_engine_that_dies(trained: Path, tmp_path: Path) -> None:
    check_a_dying_engine(trained, tmp_path)
