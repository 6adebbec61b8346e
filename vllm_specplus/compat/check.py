"""Checks that the installed vLLM has every name of the ledger, and rebinds names of its modules for a while.

The ledger decides, not a version number. It is compared with the source files of the installed vLLM. So the check
imports nothing of vLLM and takes a fraction of a second; it runs only where a plugin key is used.
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
    """The installed vLLM lacks a name that the plugin needs; the message has the name and the reason."""


def vllm_root() -> Path:
    """The folder of the installed ``vllm`` package, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SpecPlusCompatError("vllm is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def missing_seams(root: Path) -> list[str]:
    """The names of the ledger that the vLLM under ``root`` lacks, a line each."""
    return [problem for seam in LEDGER if (problem := problem_of(root, seam))]


@cache
def check_vllm() -> str | None:
    """Check the whole ledger against the installed vLLM, once per process.

    Returns:
        A warning if the version is not one of the tested ones, else None.

    Raises:
        SpecPlusCompatError: names are gone; the message lists them.
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
    """Rebind ``names`` in ``module`` while the block runs, and put the old objects back after it, also on an error."""
    originals = {name: getattr(module, name) for name in names}
    try:
        for name, value in names.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)


def function_source(root: Path, seam: Seam) -> str | None:
    """The function behind a seam in the vLLM under ``root``, without comments and layout; None if there is none."""
    node = _find(root, seam)
    return ast.unparse(node) if isinstance(node, _Function) else None


def problem_of(root: Path, seam: Seam) -> str | None:
    """What the vLLM under ``root`` lacks of a seam; None if it has all."""
    node = _find(root, seam)
    if isinstance(node, str):
        return None if seam.may_be_gone else node
    if seam.parameters:
        if not isinstance(node, _Function):
            return f"{seam} is not a function any more ({seam.why})"
        present = _parameters(node)
        if missing := [p for p in seam.parameters if p not in present]:
            return f"{seam} has no parameter {', '.join(missing)} ({seam.why})"
        if seam.is_exact and present != seam.parameters:
            return f"{seam} takes {', '.join(present)}, not just {', '.join(seam.parameters)} ({seam.why})"
    return None


def _find(root: Path, seam: Seam) -> ast.AST | str:
    """The node that binds a seam's name, or what is wrong."""
    path = root.joinpath(*seam.module.split(".")[1:])
    node: ast.AST | None = _parse(path.with_suffix(".py")) or _parse(path / "__init__.py")
    if node is None:
        return f"module {seam.module} is gone (needed for {seam.name}: {seam.why})"
    for part in seam.name.split("."):
        node = _bindings(node).get(part)
        if node is None:
            return f"{seam} is gone ({seam.why})"
    return node


def _parameters(function: _Function) -> tuple[str, ...]:
    """The names of all parameters but ``self``, in order."""
    arguments = function.args
    parameters = (*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg)
    return tuple(a.arg for a in parameters if a is not None and a.arg != "self")


@cache
def _parse(path: Path) -> ast.Module | None:
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None


@cache
def _bindings(scope: ast.AST) -> dict[str, ast.AST]:
    """The names that a module or class binds, also those its methods set on ``self``, with the nodes that bind them."""
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
    """The attributes that a method sets on ``self``, with the nodes that set them."""
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
