"""Data parallelism on Model Runner V2: two engines behind one address."""

from pathlib import Path

import pytest

from tests.e2e.data_parallel import check_two_engines, plain_texts
from tests.e2e.engines import speculative

pytestmark = pytest.mark.interpreter


@pytest.fixture(scope="module")
def texts(trained: Path) -> list[str]:
    return plain_texts(trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proposer", "strategy"),
    [("mtp_ngram", "topp"), ("suffix", "target_match"), ("adaptive", "greedy"), ("mtp_suffix", "rejection")],
)
def test_two_engines_of_one_address(
    proposer: str, strategy: str, texts: list[str], trained: Path, draft: Path, tmp_path: Path
) -> None:
    config = speculative(proposer, draft, num_speculative_tokens=8, verify_strategy=strategy)
    check_two_engines(trained, config, texts, tmp_path)
