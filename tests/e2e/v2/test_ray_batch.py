"""examples/ray_batch.py on Model Runner V2."""

from pathlib import Path

import pytest

from tests.e2e.ray_runs import check_all_rows

pytestmark = pytest.mark.interpreter


@pytest.mark.slow
def test_all_rows_are_answered(trained: Path, tmp_path: Path) -> None:
    check_all_rows(trained, tmp_path, is_runner_v2=True)
