"""Environment of every test: no network, vLLM's engine in this process."""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# The models are too tiny to gain from a second thread, and waiting for one on a busy machine costs far more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# vLLM's own n-gram drafter runs in threads of numba. On a CPU without AVX-512 a later engine of the process would give
# another text.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

# The same examples in every run. For others: `pytest --hypothesis-profile=random`.
settings.register_profile("random", deadline=None)
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("repeatable")

_HAS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
if _HAS_INTERPRETER:
    from tests.triton_cpu.interpreted_cpu.patches import speed_up

    speed_up()


@pytest.hookimpl(trylast=True)  # after the tests that -m and -k leave out have gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse tests of kernels where Triton has been imported without its interpreter."""
    if not _HAS_INTERPRETER and any(item.get_closest_marker("interpreter") for item in items):
        raise pytest.UsageError(
            "tests marked `interpreter` need TRITON_INTERPRET=1 in the environment: run `bash ci/test.sh PATH`, or "
            'leave them out by -m "not interpreter"'
        )


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """The plugin's log, whether or not vLLM has set its own logging up by now and keeps it from pytest."""
    logger = logging.getLogger("vllm.specplus")
    caplog.set_level(logging.DEBUG, "vllm.specplus")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
