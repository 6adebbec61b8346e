"""What vLLM's kernels need of Triton's interpreter beyond what it does: two gaps, and most of its time."""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter


def apply() -> None:
    """Patch Triton, once per process."""
    patch_language_once()
    accept_any_mask()
    libdevice.log1p = _log1p


def patch_language_once() -> None:
    """Spare the interpreter most of its time.

    It patches `triton.language` for each launch and again for each call of a device function. The patch depends only on
    the module that the function sees, one of two. Under the interpreter nobody needs the originals. So each module is
    patched at its first use and stays so.
    """
    patch = interpreter._patch_lang
    if patch.__module__ == __name__:
        return
    done: set[int] = set()

    def patch_once(function: FunctionType) -> Any:
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if not modules or modules - done:  # without either, Triton's own message is the right one
            patch(function)
            done.update(modules)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    # It builds a table of all types in each operation.
    find_dtype = interpreter._get_np_dtype
    find_dtype_once = cache(find_dtype)

    def np_dtype(kind: Any) -> np.dtype[Any]:
        scalar = kind.scalar
        return find_dtype(scalar) if scalar.is_ptr() else find_dtype_once(scalar)  # a pointer's type has no hash

    interpreter._get_np_dtype = np_dtype


def accept_any_mask() -> None:
    """Let a mask be of any type, as on a GPU: the interpreter's C++ takes none but numpy's bool."""
    builder = interpreter.interpreter_builder

    def cast(access: Callable[..., Any], position: int) -> Callable[..., Any]:
        def cast_and_access(*args: Any, **kwargs: Any) -> Any:
            mask = args[position]
            if mask.data.dtype != np.bool_:
                mask = interpreter.TensorHandle(mask.data.astype(np.bool_), tl.int1)
            return access(*args[:position], mask, *args[position + 1 :], **kwargs)

        return cast_and_access

    builder.create_masked_load = cast(builder.create_masked_load, 1)
    builder.create_masked_store = cast(builder.create_masked_store, 2)


def _log1p(value: Any) -> Any:
    """The interpreter has no `libdevice`, of which vLLM's rejection sampler takes this one."""
    with np.errstate(divide="ignore", invalid="ignore"):  # below -1 the kernel takes another value
        return tl.tensor(interpreter.interpreter_builder.unary_op(value.handle, np.log1p), value.type)
