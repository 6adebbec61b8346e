"""vLLM's own speculative keys, read from the source of the installed vLLM without importing it.

Importing vLLM takes seconds and loads torch; parsing one of its files takes milliseconds. The plugin also learns the
keys of a vLLM that is newer than itself.
"""

import ast
import functools
import importlib.util
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, TypeAdapter, ValidationError

from vllm_specplus.config.errors import (
    SpecPlusConfigError,
    combined_error,
    nearest,
    not_allowed_error,
    schema_error,
    setting,
)

CONFIG_FILE = "config/speculative.py"
QUANTIZATION_FILE = "model_executor/layers/quantization/__init__.py"
ATTENTION_FILE = "v1/attention/backends/registry.py"
_BOUNDS = ("ge", "gt", "le", "lt")
_SIMPLE: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "dict": dict, "Any": Any}
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "dict": dict}
_SCALARS = (str, int, float, list, tuple)
_CONFIG_PACKAGE = "vllm.config"


class _NotSimpleError(Exception):
    """An annotation names a type of vLLM's own, so the value is left for vLLM to judge."""


@dataclass(frozen=True)
class StockKey:
    """One field of vLLM's ``SpeculativeConfig``.

    type: ``Any`` where it is not a simple one. bounds: numeric, by pydantic's names. default: None where it is not a
    literal. summary: the first sentence of vLLM's own documentation of it. fields: of the object that it holds, where
    that is a config of vLLM's own.
    """

    type: Any
    bounds: Mapping[str, Any] = field(default_factory=dict)
    default: Any = None
    summary: str = ""
    fields: Mapping[str, "StockKey"] = field(default_factory=dict)

    def parse(self, what: str, value: Any) -> Any:
        """Read `value` as vLLM's pydantic does: ``"False"`` is a bool.

        Raises:
            SpecPlusConfigError: vLLM would refuse the value; the message begins with `what`.
        """
        if self.fields:
            self._check_fields(what, value)
        if self.type is Any:
            return value
        bounded: Any = Annotated[self.type, Field(**self.bounds)]
        adapter: TypeAdapter[Any] = TypeAdapter(bounded)
        try:
            return adapter.validate_python(value)
        except ValidationError:
            raise schema_error(what, value, adapter.json_schema()) from None

    def _check_fields(self, what: str, value: Any) -> None:
        """Raise SpecPlusConfigError for a field that vLLM would refuse; an object of the engine's passes."""
        if isinstance(value, _SCALARS):
            raise not_allowed_error(what, "expected an object or null")
        problems: list[SpecPlusConfigError] = []
        for name, one in value.items() if isinstance(value, Mapping) else ():
            place = f"{setting(name, one)} in {what}"
            if name not in self.fields:
                meant = nearest(name, self.fields)
                hint = f"; did you mean {meant}?" if meant else ""
                problems.append(not_allowed_error(place, f"expected one of {', '.join(self.fields)}{hint}"))
                continue
            try:
                self.fields[name].parse(place, one)
            except SpecPlusConfigError as problem:
                problems.append(problem)
        if problems:
            raise combined_error(problems)


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
    tree = parse_source(source)
    aliases = _imported_aliases(package, tree) | _aliases(tree)
    body = _classes(tree).get("SpeculativeConfig")
    methods, mtp_methods = (_choices(aliases, name, source) for name in ("SpeculativeMethod", "MTPModelTypes"))
    if body is None:
        raise _unreadable_error(source, "class SpeculativeConfig is not there")
    fields = _fields(body, aliases)
    for name, fields_inside in _fields_of_configs(package, tree, body).items():
        fields[name] = replace(fields[name], fields=MappingProxyType(fields_inside))
    source = package / QUANTIZATION_FILE
    return StockKeys(
        keys=MappingProxyType(fields),
        methods=methods,
        mtp_methods=mtp_methods,
        quantizations=_choices(_aliases(parse_source(source)), "QuantizationMethods", source),
        attention_backends=_attention_backends(package),
    )


def _unreadable_error(source: Path, why: str) -> SpecPlusConfigError:
    return SpecPlusConfigError(f"cannot check the speculative config: vLLM's {source} cannot be read: {why}")


def parse_source(source: Path) -> ast.Module:
    """The syntax tree of one of vLLM's files.

    Raises:
        SpecPlusConfigError: it cannot be read.
    """
    try:
        return ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as problem:
        raise _unreadable_error(source, str(problem)) from None


def _choices(aliases: Mapping[str, Any], name: str, source: Path) -> tuple[str, ...]:
    """The values of the ``Literal[...]`` that `source` calls `name`."""
    alias = aliases.get(name)
    if get_origin(alias) is not Literal:
        raise _unreadable_error(source, f"{name} is not there as expected")
    return get_args(alias)


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _aliases(tree: ast.Module) -> dict[str, Any]:
    """The module's names for simple types and for ``Literal[...]``, whose nested aliases are flattened."""
    found: dict[str, Any] = {}
    for node in _executed(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not (isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and node.value):
            continue
        try:
            found[target.id] = _type(node.value, found)
        except _NotSimpleError:
            continue
    return found


def _executed(tree: ast.Module) -> Iterator[ast.stmt]:
    """The module's statements, as they are executed where ``TYPE_CHECKING`` is false."""
    for node in tree.body:
        is_for_types = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        yield from node.orelse if isinstance(node, ast.If) and is_for_types else (node,)


def _config_imports(package: Path, tree: ast.Module) -> Iterator[tuple[Path, list[str]]]:
    """The files of vLLM's own config that the module imports from, with the names."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith(f"{_CONFIG_PACKAGE}."):
            place = package.joinpath(*node.module.split(".")[1:])
            source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            if source.is_file():
                yield source, [alias.name for alias in node.names]


def _imported_aliases(package: Path, tree: ast.Module) -> dict[str, Any]:
    """The aliases that the module imports from files of vLLM's own config."""
    found: dict[str, Any] = {}
    for source, names in _config_imports(package, tree):
        aliases = _aliases(parse_source(source))
        found |= {name: aliases[name] for name in names if name in aliases}
    return found


def _fields_of_configs(package: Path, tree: ast.Module, body: ast.ClassDef) -> dict[str, dict[str, StockKey]]:
    """The fields inside each field of `body` that holds a config of vLLM's own or None, by the outer field's name."""
    found: dict[str, dict[str, StockKey]] = {}
    for node in body.body:
        match node:
            case ast.AnnAssign(
                target=ast.Name(id=name),
                annotation=ast.BinOp(left=ast.Name(id=class_name), op=ast.BitOr(), right=ast.Constant(value=None)),
            ):
                if fields := _fields_of_config(package, tree, class_name):
                    found[name] = fields
    return found


def _fields_of_config(package: Path, tree: ast.Module, name: str) -> dict[str, StockKey]:
    """The fields of the config that the module imports as `name`; empty where it is none, or inherits some."""
    for source, names in _config_imports(package, tree):
        if name not in names:
            continue
        inside = parse_source(source)
        body = _classes(inside).get(name)
        if body is None:
            # The package hands on what its files define.
            return _fields_of_config(package, inside, name)
        if body.bases or not any(isinstance(one, ast.Name) and one.id == "config" for one in body.decorator_list):
            return {}
        return _fields(body, _imported_aliases(package, inside) | _aliases(inside))
    return {}


def _attention_backends(package: Path) -> tuple[str, ...]:
    """The members of vLLM's enum of attention backends; empty where it is not found."""
    source = package / ATTENTION_FILE
    if not source.is_file():
        return ()
    classes = _classes(parse_source(source))
    if "AttentionBackendEnum" not in classes:
        return ()
    return tuple(
        target.id
        for node in classes["AttentionBackendEnum"].body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    )


def _literal_values(node: ast.expr, aliases: Mapping[str, Any]) -> tuple[Any, ...]:
    if isinstance(node, ast.Name) and get_origin(aliases.get(node.id)) is Literal:
        return get_args(aliases[node.id])
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal"):
        raise _NotSimpleError
    members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    values: list[Any] = []
    for member in members:
        if isinstance(member, ast.Constant):
            values.append(member.value)
        else:
            values.extend(_literal_values(member, aliases))
    return tuple(values)


def _fields(body: ast.ClassDef, aliases: Mapping[str, Any]) -> dict[str, StockKey]:
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
            kind = Any if name in rewritten else _type(node.annotation, aliases)
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
    """Fields with a validator of vLLM's own that runs first, and so may accept more than the annotation says."""
    return {
        argument.value
        for function in body.body
        if isinstance(function, ast.FunctionDef)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Name)
        and decorator.func.id == "field_validator"
        and any(word.arg == "mode" and _constant(word.value) != "after" for word in decorator.keywords)
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


def _type(node: ast.expr, aliases: Mapping[str, Any]) -> Any:
    """The Python type an annotation stands for; raises _NotSimpleError for vLLM's own types."""
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.Name) and node.id in _SIMPLE:
        return _SIMPLE[node.id]
    if isinstance(node, ast.Attribute) and node.attr == "QuantizationMethods":
        return str
    if isinstance(node, ast.Name) and node.id in aliases:
        return aliases[node.id]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _type(node.left, aliases) | _type(node.right, aliases)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return _subscript(node, node.value.id, aliases)
    raise _NotSimpleError


def _subscript(node: ast.Subscript, name: str, aliases: Mapping[str, Any]) -> Any:
    if name == "Literal":
        return Literal[_literal_values(node, aliases)]
    members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    types = tuple(_type(member, aliases) for member in members)
    if name == "Optional":
        return types[0] | None
    if name == "Union":
        return functools.reduce(operator.or_, types)
    if name in _CONTAINERS:
        return _CONTAINERS[name][types]
    raise _NotSimpleError
