"""These tests run kernels under Triton's interpreter, which has to be chosen before Triton is imported."""

import os

import pytest

from tests.triton_cpu.interpreted_cpu.patches import patch_language_once

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/kernels needs TRITON_INTERPRET=1 in the environment, in a pytest process of its own")

patch_language_once()
