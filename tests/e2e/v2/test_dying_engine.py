"""A server whose engine dies shows nothing of its clients' texts in its log: Model Runner V2."""

import json
from pathlib import Path

import pytest

from tests.e2e.dying_engine import ENVIRONMENT, OPTIONS, check_a_dying_engine
from tests.e2e.serving import serve
from tests.e2e.v1.test_predicted_outputs import CONFIG

pytestmark = pytest.mark.interpreter


def test_an_engine_that_dies(trained: Path, tmp_path: Path) -> None:
    options = ["--speculative-config", json.dumps(CONFIG), *OPTIONS]
    with serve(trained, tmp_path, *options, VLLM_PLUGINS="specplus", **ENVIRONMENT) as server:
        check_a_dying_engine(server)
