"""The line that an engine logs at its start."""

from typing import Any

import pytest

from tests.config.helpers import HYBRID, MTP, NGRAM, pretend_arctic
from vllm_specplus.config import resolve
from vllm_specplus.config.summary import summary

SUFFIX = HYBRID | {"mtp_strategy": "with_suffix", "verify_strategy": "target_match"}
OWN_REFERENCE = "the request's reference"


@pytest.fixture(autouse=True)
def _arctic_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_arctic(monkeypatch, True)


@pytest.mark.parametrize(
    ("config", "drafts", "verification", "shared"),
    [
        (
            HYBRID | {"adaptive": True},
            f"mtp, n-grams of the request's text, {OWN_REFERENCE} (what earns most)",
            "vLLM's own, lossless",
            "nothing",
        ),
        (
            NGRAM | {"verify_strategy": "topp", "adaptive": False},
            f"n-grams of the request's text, {OWN_REFERENCE}",
            "topp, lossy where a request samples: it changes the output distribution",
            "nothing",
        ),
        (
            SUFFIX | {"adaptive": False},
            f"mtp, suffix trees, {OWN_REFERENCE}",
            "target_match, lossless",
            "suffix trees of past answers, by requests of one cache_salt",
        ),
        (
            SUFFIX | {"suffix_decoding_scope": "shared", "allow_force_accept": True},
            f"mtp, n-grams of the request's text, suffix trees, {OWN_REFERENCE} (what earns most)",
            "target_match, lossless; lossy for requests that have all of their drafts accepted",
            "suffix trees of past answers, by all requests",
        ),
        (
            MTP | {"verify_strategy": "target_match", "accept_policy": "accept_all"},
            "mtp",
            "accept_all, which accepts every valid draft, for debugging: lossy",
            "nothing",
        ),
        (
            {"method": "naive", "verify_strategy": "greedy"},
            "none",
            "greedy, lossy where a request samples: it emits the argmax, whatever the temperature of a request",
            "nothing",
        ),
        (
            HYBRID | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0, "adaptive": False},
            f"mtp, n-grams of the request's text, {OWN_REFERENCE}",
            "vLLM's own, lossy",
            "nothing",
        ),
    ],
)
def test_summary(config: dict[str, Any], drafts: str, verification: str, shared: str) -> None:
    assert summary(resolve(config)) == f"drafts: {drafts}; verification: {verification}; shared: {shared}"
