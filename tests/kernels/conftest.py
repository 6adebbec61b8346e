"""These tests run kernels under Triton's interpreter, which has to be chosen before Triton is imported."""

import os
from collections.abc import Iterator
from types import FunctionType

import pytest
import triton.language as tl
from triton.runtime import interpreter

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/kernels needs TRITON_INTERPRET=1 in the environment, in a pytest process of its own")


@pytest.fixture(autouse=True, scope="session")
def _patch_language_once() -> Iterator[None]:
    """Spare the interpreter most of its time: it patches `triton.language` anew for each call of a device function."""
    patch = interpreter._patch_lang
    patched: set[int] = set()

    def patch_once(function: FunctionType) -> object:
        if tl.core.is_builtin(tl.load):  # nothing is patched: a kernel begins
            patched.clear()
        module = id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        patched.add(module)
        return patch(function)

    interpreter._patch_lang = patch_once
    yield
    interpreter._patch_lang = patch
