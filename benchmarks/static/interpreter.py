"""Runs launches under Triton's interpreter (TRITON_INTERPRET=1), and tells a `Recorder` what they do.

Only files within the given folders have places. Calls from there into other files, such as Triton's own functions,
belong to the statement that calls. There is no way back: the process stays the interpreter's.
"""

import ast
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from static.counts import LaunchCounts, Recorder
from static.places import is_within
from triton.runtime import interpreter


class _TellStatements(ast.NodeTransformer):
    """Puts a call before each statement of a function: it tells the recorder which statement comes."""

    def __init__(self, recorder: Recorder, file: str) -> None:
        self._recorder, self._file = recorder, file

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = [self._tell("executes", node), *self._block(node.body)]
        return node

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        told: list[ast.stmt] = []
        for statement in statements:
            is_loop = isinstance(statement, ast.For | ast.While)
            told += [self._tell("reaches" if is_loop else "executes", statement), self._within(statement)]
        return told

    def _within(self, statement: ast.stmt) -> ast.stmt:
        """The statement with calls in its blocks; the test of a `while` is told each time."""
        for name in ("body", "orelse"):
            if block := getattr(statement, name, None):
                setattr(statement, name, self._block(block))
        if isinstance(statement, ast.While):
            statement.test = ast.BoolOp(ast.And(), [self._call("stands_at", statement), statement.test])
        if isinstance(statement, ast.For | ast.While):
            statement.body.insert(0, self._tell("executes", statement))
        return statement

    def _tell(self, event: str, statement: ast.stmt) -> ast.Expr:
        return ast.copy_location(ast.Expr(self._call(event, statement)), statement)

    def _call(self, event: str, statement: ast.stmt) -> ast.Call:
        line = self._recorder.number_of((self._file, statement.lineno))
        return ast.Call(ast.Name(f"_recorder_{event}", ast.Load()), [ast.Constant(line)], [])


def _patch_once(patch: Callable[[FunctionType], Any]) -> Callable[[FunctionType], Any]:
    """Takes the place of the interpreter's `_patch_lang`, which patches `triton.language` at each call of a function.

    That is most of its time. The patch depends only on what the function sees, `tl` or `tl.core`.
    """
    done: set[int] = set()

    def patch_new(function: FunctionType) -> Any:
        seen = function.__globals__
        if id(seen) not in done:
            languages = {
                id(language) for language in (tl, tl.core) if any(value is language for value in seen.values())
            }
            if not languages or languages - done:  # without either, Triton's own message is the right one
                patch(function)
                tl.range = tl.core.range = _tensor_range
            done.update(languages, [id(seen)])
        return interpreter._LangPatchScope()

    return patch_new


def _tensor_range(*bounds: Any, **options: Any) -> Iterator[Any]:
    """`tl.range`, whose index the interpreter leaves a plain integer. vLLM's filter needs a tensor."""
    return map(interpreter._implicit_cvt, range(*(bound.__index__() for bound in bounds)))


def _telling(access: Callable[..., Any], mask_at: int, tell: Callable[[np.ndarray], None]) -> Callable[..., Any]:
    """A load or store of the interpreter's builder, which tells the addresses."""

    def tell_and_access(self: Any, pointers: Any, *args: Any) -> Any:
        mask = args[mask_at].data
        tell(pointers.data if mask.all() else pointers.data[mask])
        return access(self, pointers, *args)

    return tell_and_access


@contextmanager
def counted_launches(folders: tuple[Path, ...], vocab_size: int, share: float) -> Iterator[list[LaunchCounts]]:
    """Count every launch of a kernel in files within `folders`.

    Args:
        share: how much there is of what grows with the batch, of the whole batch that this one stands for.
    """
    recorder = Recorder(vocab_size, share)
    builder, called = interpreter.InterpreterBuilder, interpreter.InterpretedFunction
    rewrite, run = interpreter.FunctionRewriter._transform_ast, interpreter.GridExecutor.__call__
    call, combine = called.__call__, interpreter.ReduceScanOpInterface.apply
    told = {f"_recorder_{event}": getattr(recorder, event) for event in ("stands_at", "reaches", "executes")}

    def rewrite_and_tell(self: Any, source: str) -> Any:
        tree = rewrite(self, source)
        if is_within(self.filename, folders):
            self.fn.__globals__.update(told)
            tree = ast.fix_missing_locations(_TellStatements(recorder, self.filename).visit(tree))
        return tree

    def call_and_tell(self: Any, *args: Any, **named: Any) -> Any:
        if not is_within(self.fn.__code__.co_filename, folders):
            return call(self, *args, **named)
        with recorder.within_call():
            return call(self, *args, **named)

    def combine_untold(self: Any, *args: Any) -> Any:
        # Called for each element here, but not on a GPU.
        with recorder.paused():
            return combine(self, *args)

    def run_and_tell(self: Any, *args: Any, **named: Any) -> None:
        recorder.begin(self.fn.__name__, [*args, *named.values()])
        run(self, *args, **named)
        recorder.end()

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        self.grid_idx = (x, y, z)
        recorder.begin_program((z, y, x))

    with ExitStack() as patches:
        for owner, name, function in (
            (interpreter, "_patch_lang", _patch_once(interpreter._patch_lang)),
            (interpreter.FunctionRewriter, "_transform_ast", rewrite_and_tell),
            (called, "__call__", call_and_tell),
            (called, "rewritten_fn", {}),
            (interpreter.ReduceScanOpInterface, "apply", combine_untold),
            (interpreter.GridExecutor, "__call__", run_and_tell),
            (builder, "set_grid_idx", set_grid_idx),
            (builder, "create_masked_load", _telling(builder.create_masked_load, 0, recorder.reads)),
            (builder, "create_masked_store", _telling(builder.create_masked_store, 1, recorder.writes)),
            # Each checked operation would be done twice.
            (interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(sanitize_overflow=False)),
        ):
            patches.enter_context(mock.patch.object(owner, name, function))
        yield recorder.launches
