"""vLLM's own speculative keys, read from the source of the installed vLLM without importing it.

Importing vLLM takes seconds and loads torch; parsing one of its files takes milliseconds. The plugin also learns the
keys of a vLLM that is newer than itself.
"""

import ast
import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import Field, TypeAdapter, ValidationError

from vllm_specplus.config.errors import SpecPlusConfigError, schema_error

CONFIG_FILE = "config/speculative.py"
QUANTIZATION_FILE = "model_executor/layers/quantization/__init__.py"
ATTENTION_FILE = "v1/attention/backends/registry.py"
_BOUNDS = ("ge", "gt", "le", "lt")
_SIMPLE: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": dict}


class _NotSimpleError(Exception):
    """An annotation names a type of vLLM's own, so the value is left for vLLM to judge."""


@dataclass(frozen=True)
class StockKey:
    """One field of vLLM's ``SpeculativeConfig``.

    type: ``Any`` where it is not a simple one. bounds: numeric, by pydantic's names. default: None where it is not a
    literal. summary: the first sentence of vLLM's own documentation of it.
    """

    type: Any
    bounds: Mapping[str, Any] = field(default_factory=dict)
    default: Any = None
    summary: str = ""

    def parse(self, what: str, value: Any) -> Any:
        """Read `value` as vLLM's pydantic does: ``"False"`` is a bool.

        Raises:
            SpecPlusConfigError: vLLM would refuse the value; the message begins with `what`.
        """
        if self.type is Any:
            return value
        bounded: Any = Annotated[self.type, Field(**self.bounds)]
        adapter: TypeAdapter[Any] = TypeAdapter(bounded)
        try:
            return adapter.validate_python(value)
        except ValidationError:
            raise schema_error(what, value, adapter.json_schema()) from None


@dataclass(frozen=True)
class StockKeys:
    """The keys, methods and other names of one installed vLLM.

    mtp_methods: ``mtp`` and vLLM's deprecated names for it. attention_backends: empty where they cannot be read.
    """

    keys: Mapping[str, StockKey]
    methods: tuple[str, ...]
    mtp_methods: tuple[str, ...]
    quantizations: tuple[str, ...]
    attention_backends: tuple[str, ...] = ()


def stock_keys() -> StockKeys:
    """The keys of the vLLM that ``import vllm`` would load.

    Raises:
        SpecPlusConfigError: vLLM is not installed, or its source cannot be read.
    """
    return read_stock_keys(vllm_folder())


def vllm_folder() -> Path:
    """The folder of the vLLM that ``import vllm`` would load.

    Raises:
        SpecPlusConfigError: vLLM is not installed.
    """
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / CONFIG_FILE).is_file():
            return Path(folder)
    raise SpecPlusConfigError(f"cannot check the speculative config: no installed vLLM with {CONFIG_FILE} was found")


@functools.lru_cache(maxsize=4)
def read_stock_keys(package: Path) -> StockKeys:
    """Parse the vLLM package in the folder `package`.

    Raises:
        SpecPlusConfigError: a file cannot be read; the message names it, and what is missing in it.
    """
    source = package / CONFIG_FILE
    tree = _parse(source)
    literals = _imported_literals(package, tree) | _literals(tree)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    body = classes.get("SpeculativeConfig")
    for name in ("SpeculativeMethod", "MTPModelTypes"):
        if not literals.get(name):
            raise _unreadable_error(source, f"{name} is not there as expected")
    if body is None:
        raise _unreadable_error(source, "class SpeculativeConfig is not there")
    source = package / QUANTIZATION_FILE
    quantizations = _literals(_parse(source)).get("QuantizationMethods")
    if not quantizations:
        raise _unreadable_error(source, "QuantizationMethods is not there as expected")
    return StockKeys(
        keys=MappingProxyType(_fields(body, literals)),
        methods=literals["SpeculativeMethod"],
        mtp_methods=literals["MTPModelTypes"],
        quantizations=quantizations,
        attention_backends=_attention_backends(package),
    )


def _unreadable_error(source: Path, why: str) -> SpecPlusConfigError:
    return SpecPlusConfigError(f"cannot check the speculative config: vLLM's {source} cannot be read: {why}")


def _parse(source: Path) -> ast.Module:
    try:
        return ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as problem:
        raise _unreadable_error(source, str(problem)) from None


def _literals(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """The module's ``Name = Literal[...]`` aliases, nested aliases flattened."""
    found: dict[str, tuple[str, ...]] = {}
    for node in tree.body:
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        try:
            found[node.targets[0].id] = _literal_values(node.value, found)
        except _NotSimpleError:
            continue
    return found


def _imported_literals(package: Path, tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """The ``Literal[...]`` aliases that the module imports from files of vLLM's own config."""
    found: dict[str, tuple[str, ...]] = {}
    for node in tree.body:
        if not (isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm.config.")):
            continue
        source = package.joinpath(*node.module.split(".")[1:]).with_suffix(".py")
        if source.is_file():
            literals = _literals(_parse(source))
            names = [alias.name for alias in node.names]
            found |= {name: literals[name] for name in names if name in literals}
    return found


def _attention_backends(package: Path) -> tuple[str, ...]:
    """The members of vLLM's enum of attention backends; empty where it is not found."""
    source = package / ATTENTION_FILE
    if not source.is_file():
        return ()
    classes = {node.name: node for node in _parse(source).body if isinstance(node, ast.ClassDef)}
    if "AttentionBackendEnum" not in classes:
        return ()
    return tuple(
        target.id
        for node in classes["AttentionBackendEnum"].body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    )


def _literal_values(node: ast.expr, known: Mapping[str, tuple[str, ...]]) -> tuple[Any, ...]:
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal"):
        raise _NotSimpleError
    members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    values: list[Any] = []
    for member in members:
        if isinstance(member, ast.Constant):
            values.append(member.value)
        else:
            values.extend(_literal_values(member, known))
    return tuple(values)


def _fields(body: ast.ClassDef, literals: Mapping[str, tuple[str, ...]]) -> dict[str, StockKey]:
    rewritten = _rewritten_fields(body)
    fields: dict[str, StockKey] = {}
    for node, after in pairwise([*body.body, ast.Pass()]):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        name = node.target.id
        if name.startswith("_") or "ClassVar" in ast.dump(node.annotation):
            continue
        default, bounds = _default_and_bounds(node.value)
        try:
            kind = Any if name in rewritten else _type(node.annotation, literals)
        except _NotSimpleError:
            kind = Any
        fields[name] = StockKey(kind, MappingProxyType(bounds), default, _summary(after))
    return fields


def _summary(node: ast.stmt) -> str:
    """The first sentence of a field's documentation, which is the text that follows the field."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
        return ""
    return " ".join(node.value.value.split()).partition(". ")[0].rstrip(".")


def _rewritten_fields(body: ast.ClassDef) -> set[str]:
    """Fields with a validator of vLLM's own, which may accept more than the annotation says."""
    return {
        argument.value
        for function in body.body
        if isinstance(function, ast.FunctionDef)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Name)
        and decorator.func.id == "field_validator"
        for argument in decorator.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


def _default_and_bounds(value: ast.expr | None) -> tuple[Any, dict[str, float]]:
    if not isinstance(value, ast.Call):
        return (None if value is None else _constant(value)), {}
    keywords = {word.arg: _constant(word.value) for word in value.keywords if word.arg}
    bounds = {name: keywords[name] for name in _BOUNDS if keywords.get(name) is not None}
    return keywords.get("default"), bounds


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def _type(node: ast.expr, literals: Mapping[str, tuple[str, ...]]) -> Any:
    """The Python type an annotation stands for; raises _NotSimpleError for vLLM's own types."""
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.Name) and node.id in _SIMPLE:
        return _SIMPLE[node.id]
    if isinstance(node, ast.Attribute) and node.attr == "QuantizationMethods":
        return str
    if isinstance(node, ast.Name) and node.id in literals:
        return Literal[literals[node.id]]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return Union[_type(node.left, literals), _type(node.right, literals)]  # noqa: UP007
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return _subscript(node, node.value.id, literals)
    raise _NotSimpleError


def _subscript(node: ast.Subscript, name: str, literals: Mapping[str, tuple[str, ...]]) -> Any:
    if name == "Literal":
        return Literal[_literal_values(node, literals)]
    members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    types = tuple(_type(member, literals) for member in members)
    if name == "Optional":
        return Optional[types[0]]  # noqa: UP045
    if name == "Union":
        return Union[types]  # noqa: UP007
    if name in _CONTAINERS:
        return _CONTAINERS[name][types]
    raise _NotSimpleError
