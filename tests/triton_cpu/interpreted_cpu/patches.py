"""What vLLM's kernels need of Triton's interpreter beyond what it does: two gaps, and most of its time."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter


def apply() -> None:
    """Patch Triton, once per process, for engines."""
    speed_up()
    # Tests of kernels alone look for overflows. That makes four operations of one, a third of an engine's time.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    accept_any_mask()
    libdevice.log1p = _log1p


def speed_up() -> None:
    """Spare the interpreter most of its time, in which it derives the same things again and again."""
    # Not by the module: engines' tests load this one by two names, from PYTHONPATH and as a part of `tests`.
    if interpreter._patch_lang.__name__ != "patch_once":
        _patch_language_once()
        _find_dtypes_once()
        _derive_shapes_once()


def _patch_language_once() -> None:
    """The interpreter patches `triton.language` for each launch and again for each call of a device function.

    The patch depends only on the module that the function sees, one of two. Under the interpreter nobody needs the
    originals. So each module is patched at its first use and stays so.
    """
    patch = interpreter._patch_lang
    done: set[int] = set()

    def patch_once(function: FunctionType) -> Any:
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if not modules or modules - done:  # without either, Triton's own message is the right one
            patch(function)
            done.update(modules)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def _find_dtypes_once() -> None:
    """The interpreter makes a table of all types to look one up, in each operation."""
    find = interpreter._get_np_dtype
    find_once = cache(find)

    def np_dtype(kind: Any) -> np.dtype[Any]:
        scalar = kind.scalar
        return find(scalar) if scalar.is_ptr() else find_once(scalar)  # a pointer's type has no hash

    interpreter._get_np_dtype = np_dtype


def _derive_shapes_once() -> None:
    """Block types of a shape share what is derived from it, and so do tensors. Each operation makes several."""
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    types: dict[tuple[tl.dtype, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_type(kind: tl.block_type, element: tl.dtype, shape: Any) -> None:
        if element.is_ptr():  # has no hash
            make_type(kind, element, shape)
            return
        key = element, tuple([getattr(size, "value", size) for size in shape])
        if key not in types:
            make_type(kind, element, shape)
            types[key] = vars(kind).copy()
        vars(kind).update(types[key])

    def init_tensor(tensor: tl.tensor, handle: Any, kind: tl.dtype) -> None:
        key = tuple(kind.shape) if kind.is_block() else ()
        if key not in shapes:
            make_tensor(tensor, handle, kind)
            shapes[key] = tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = shapes[key]

    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor


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
