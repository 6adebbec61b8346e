"""Tiny models made once per session."""

from pathlib import Path

import pytest

from vllm_specplus.testing.tiny_model import make_draft_model, make_random


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with an MTP head."""
    return make_random(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft model of the same vocabulary."""
    return make_draft_model(tmp_path_factory.mktemp("draft"))
