"""Data parallelism on Model Runner V2: two engines behind one address, and a server each."""

from pathlib import Path

import pytest

from tests.e2e.engines import speculative
from tests.e2e.parallel_servers import check_two_engines, check_two_servers, plain_texts

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


@pytest.mark.slow
def test_one_api_server(texts: list[str], trained: Path, draft: Path, tmp_path: Path) -> None:
    """A hybrid that is not adaptive drafts without predictions too."""
    config = speculative("mtp_ngram", draft, num_speculative_tokens=8)
    check_two_engines(trained, config, texts, tmp_path, "--api-server-count", "1")


@pytest.mark.slow
def test_a_server_each(texts: list[str], trained: Path, draft: Path, tmp_path: Path) -> None:
    check_two_servers(trained, speculative("adaptive", draft, num_speculative_tokens=8), texts, tmp_path)
