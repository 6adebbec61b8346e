"""Tiny models made once per session."""

from pathlib import Path

import pytest

from tests.e2e.eagle_heads import make_eagle_head
from vllm_specplus.testing.tiny_model import make_draft_model, make_random, make_trained


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with an MTP head."""
    return make_random(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft model of the same vocabulary, and in folders of it EAGLE heads of the random model."""
    folder = make_draft_model(tmp_path_factory.mktemp("draft"))
    for method in ("eagle", "eagle3"):
        make_eagle_head(folder / method, method)
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model with an MTP head, whose drafts are accepted; made once per machine."""
    return make_trained(tmp_path_factory.mktemp("trained"))
