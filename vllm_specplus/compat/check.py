"""Checks that the installed vLLM has every name of the ledger, and rebinds names of its modules for a while.

The ledger is the gate, not a version number. It is read against the source files of the installed vLLM, so
that checking imports nothing of vLLM and costs a fraction of a second, and only when a plugin key is used.
"""

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_specplus.compat.ledger import LEDGER, TESTED_VERSIONS, Seam

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class SpecPlusCompatError(RuntimeError):
    """The installed vLLM lacks a name that the plugin needs; the message says which, and what for."""


def vllm_root() -> Path:
    """The folder of the installed ``vllm`` package, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SpecPlusCompatError("vllm is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def missing_seams(root: Path) -> list[str]:
    """What of the ledger the vLLM under ``root`` lacks, a line each; empty when all hold."""
    return [problem for seam in LEDGER if (problem := _problem(root, seam))]


@cache
def check_vllm() -> str | None:
    """Check the whole ledger against the installed vLLM, once per process.

    Returns:
        A warning for a version that was not tested, else None.

    Raises:
        SpecPlusCompatError: a seam is gone; the message names each.
    """
    version = importlib.metadata.version("vllm")
    if problems := missing_seams(vllm_root()):
        raise SpecPlusCompatError(f"vllm-specplus cannot run on vLLM {version}: " + "; ".join(problems))
    if not version.startswith(tuple(f"{v}." for v in TESTED_VERSIONS)):
        tested = " and ".join(TESTED_VERSIONS)
        return f"vLLM {version} is untested (tested: {tested}), but has every name that is needed"
    return None


@contextmanager
def override(module: ModuleType, names: dict[str, Any]) -> Iterator[None]:
    """Rebind ``names`` in ``module`` while the block runs, and put the old objects back after it."""
    saved = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)


def _problem(root: Path, seam: Seam) -> str | None:
    path = root.joinpath(*seam.module.split(".")[1:])
    tree = _parse(path.with_suffix(".py")) or _parse(path / "__init__.py")
    if tree is None:
        return f"module {seam.module} is gone (needed for {seam.name}: {seam.why})"
    scope: ast.AST = tree
    for part in seam.name.split("."):
        found = _bindings(scope).get(part)
        if found is None:
            return f"{seam} is gone ({seam.why})"
        scope = found
    if seam.parameters:
        if not isinstance(scope, _Function):
            return f"{seam} is no function any more ({seam.why})"
        given = _parameters(scope)
        if lost := [p for p in seam.parameters if p not in given]:
            return f"{seam} has no parameter {', '.join(lost)} ({seam.why})"
        if seam.is_exact and given != seam.parameters:
            return f"{seam} takes {', '.join(given)}, not just {', '.join(seam.parameters)} ({seam.why})"
    return None


def _parameters(function: _Function) -> tuple[str, ...]:
    """All but ``self``, in order."""
    arguments = function.args
    given = (*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg)
    return tuple(a.arg for a in given if a is not None and a.arg != "self")


@cache
def _parse(path: Path) -> ast.Module | None:
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None


@cache
def _bindings(scope: ast.AST) -> dict[str, ast.AST]:
    """Names bound in a module or class, attributes that its methods set included, to what binds them."""
    names: dict[str, ast.AST] = {}
    todo = list(getattr(scope, "body", []))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ClassDef | _Function):
            names[node.name] = node
            if isinstance(scope, ast.ClassDef):
                names = _attributes(node) | names
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update({alias.asname or alias.name: alias for alias in node.names})
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names.update({t.id: node for t in _targets(node) if isinstance(t, ast.Name)})
        elif isinstance(node, ast.If | ast.Try):
            todo += [*node.body, *node.orelse]
    return names


def _attributes(method: ast.AST) -> dict[str, ast.AST]:
    """What a method sets on ``self``."""
    return {
        target.attr: node
        for node in ast.walk(method)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in _targets(node)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part for t in targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])]
