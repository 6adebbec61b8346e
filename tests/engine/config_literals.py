"""Finds the speculative configs that Python files write out, without importing the files."""

import ast
import functools
import json
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
METHOD_KEYS = ("method", "speculate_method", "sp_type")

Names = Mapping[str, Any]


def is_config(value: Any) -> bool:
    """Whether `value` looks like a speculative config: it says how to draft."""
    return isinstance(value, dict) and any(key in value for key in METHOD_KEYS)


def configs_in_text(text: str) -> Iterator[dict[str, Any]]:
    """The configs that a text shows as JSON."""
    for brace in re.finditer(r"\{", text):
        with suppress(ValueError):
            value, _ = json.JSONDecoder().raw_decode(text, brace.start())
            if is_config(value):
                yield value


def configs_in_file(path: Path) -> Iterator[dict[str, Any]]:
    """The configs in a Python file: dicts, also such as are joined from constants, and JSON text.

    Left out are configs that need a value of the file's functions.
    """
    yield from _configs_below(_parse(path), _constants(path))


def has_parameter(path: Path, names: Container[str]) -> bool:
    """Whether a test in the file has a parameter with one of `names`."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize":
            columns = ast.literal_eval(node.args[0])
            columns = columns.split(",") if isinstance(columns, str) else columns
            if any(column.strip() in names for column in columns):
                return True
    return False


def _configs_below(node: ast.AST, names: Names) -> Iterator[dict[str, Any]]:
    if isinstance(node, ast.Dict | ast.BinOp):
        with suppress(ValueError):
            value = _value(node, names)
            if is_config(value):
                # Parts of it are no configs by themselves.
                yield value
                return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from configs_in_text(node.value)
    for child in ast.iter_child_nodes(node):
        yield from _configs_below(child, names)


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _constants(path: Path) -> dict[str, Any]:
    """The names that a module gives to values known without running it, and those that it imports from other tests."""
    names: dict[str, Any] = {}
    for node in _parse(path).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            source = ROOT.joinpath(*node.module.split(".")).with_suffix(".py")
            constants = _constants(source) if source.is_file() else {}
            for alias in node.names:
                if alias.name in constants:
                    names[alias.asname or alias.name] = constants[alias.name]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with suppress(ValueError):
                names[node.targets[0].id] = _value(node.value, names)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            with suppress(ValueError):
                names[node.target.id] = _value(node.value, names)
    return names


def _value(node: ast.expr, names: Names) -> Any:
    """The value of an expression of constants; raises ValueError for any other."""
    match node:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Dict():
            value: dict[Any, Any] = {}
            for key, part in zip(node.keys, node.values, strict=True):
                value |= _value(part, names) if key is None else {_value(key, names): _value(part, names)}
            return value
        case ast.List() | ast.Tuple():
            values = _elements(node, names)
            return tuple(values) if isinstance(node, ast.Tuple) else values
        case ast.BinOp(op=ast.BitOr()):
            left, right = _value(node.left, names), _value(node.right, names)
            if isinstance(left, dict) and isinstance(right, dict):
                return left | right
            raise ValueError("not two dicts")
        case ast.Subscript():
            try:
                return _value(node.value, names)[_value(node.slice, names)]
            except (LookupError, TypeError):
                raise ValueError("no such part") from None
    return ast.literal_eval(node)


def _elements(node: ast.List | ast.Tuple, names: Names) -> list[Any]:
    values: list[Any] = []
    for part in node.elts:
        if isinstance(part, ast.Starred):
            values += _value(part.value, names)
        else:
            values.append(_value(part, names))
    return values
