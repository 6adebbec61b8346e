"""Tiny models made once per session, and a guard against faults that no test has put in."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.eagle_heads import make_eagle_head
from tests.e2e.faults import InjectedError
from vllm_specplus.runners.faults import Faults
from vllm_specplus.testing.tiny_model import make_draft_model, make_random, make_trained
from vllm_specplus.testing.tiny_train import TrainSettings


@pytest.fixture(autouse=True)
def _no_faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test in whose process the plugin has caught a fault of its own, since no text shows one."""
    errors: list[Exception] = []
    note = Faults.note

    def noted(faults: Faults, part: Any, error: Exception, *args: Any) -> None:
        if not isinstance(error, InjectedError):
            errors.append(error)
        note(faults, part, error, *args)

    monkeypatch.setattr(Faults, "note", noted)
    yield
    if errors:
        raise ExceptionGroup("faults of the plugin", errors)


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
    """A trained model with an MTP head, many of whose drafts are accepted; trained once per machine.

    No test may expect the output of one set of weights. To run them with another set, name a number of training steps
    or a seed in the environment: SPECPLUS_TEST_MODEL_STEPS=135, SPECPLUS_TEST_MODEL_SEED=1.
    """
    chosen = {
        name: int(os.environ[variable])
        for name, variable in (("steps", "SPECPLUS_TEST_MODEL_STEPS"), ("seed", "SPECPLUS_TEST_MODEL_SEED"))
        if variable in os.environ
    }
    return make_trained(tmp_path_factory.mktemp("trained"), replace(TrainSettings(), **chosen))
