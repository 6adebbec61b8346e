"""Helpers of the compiled code: cached compilation and some intrinsics. Importing this module imports numba."""

from collections.abc import Callable
from typing import Any

import numba as nb
from llvmlite import ir  # type: ignore[import-untyped]  # it brings no types
from numba.core import cgutils, types
from numba.extending import intrinsic


def compiled(*signature: Any, allocates: bool = True, **options: Any) -> Callable[[Callable], Any]:
    """`numba.njit` with a cache on disk, where a folder for it can be written.

    Args:
        signature: of the function; without one each new combination of types is compiled when it comes.
        allocates: whether the function makes arrays. If not, numba counts no references to those that it reads from a
            tuple, which costs more than most of what is done with them.
        options: further options of `numba.njit`.
    """
    if not allocates:
        options["_nrt"] = False

    def compile_function(function: Callable) -> Any:
        try:
            return nb.njit(*signature, cache=True, nogil=True, **options)(function)
        except RuntimeError:  # "no locator available": neither __pycache__ nor ~ is writable
            return nb.njit(*signature, nogil=True, **options)(function)

    return compile_function


@intrinsic
def to_pointer(typingctx: Any, address: Any) -> Any:
    """int64 address -> void pointer, for `numba.carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array.flat[index]` without waiting for it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), cgutils.voidptr_t)
        int32 = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, int32, int32, int32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], function_type)
        read, keep, data_cache = (ir.Constant(int32, value) for value in (0, 3, 1))
        builder.call(prefetch, [pointer, read, keep, data_cache])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


def _reinterpret(kind: Any, result: types.Type) -> Any:
    """An intrinsic that reads a 32-bit value's bits as another type; it goes into a vector instruction."""

    @intrinsic
    def reinterpret(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(signature.return_type))

        return result(kind), codegen

    return reinterpret


bits_of = _reinterpret(types.float32, types.int32)
float_of = _reinterpret(types.int32, types.float32)
