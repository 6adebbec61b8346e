"""Imports within the package run one way. `ALLOWED` restates the map of docs/design.md: change both together."""

import ast
from pathlib import Path

import pytest

import vllm_specplus

ROOT = Path(vllm_specplus.__file__).parent
LEAVES = {"sources", "strategies", "version"}
# What each room may import besides itself and the leaves.
ALLOWED = {
    "engine": {"runners", "requests", "proposers", "config", "compat"},
    "runners": {"requests", "kernels", "proposers", "verify", "config", "compat"},
    "requests": {"config"},
    "kernels": {"verify"},
    "proposers": set(),
    "verify": {"kernels"},
    "config": set(),
    "compat": set(),
    "testing": set(),
    "migrate": {"config"},
    "compare": {"requests", "config"},
    "top": set(),
    "cli": {"config", "migrate", "compare", "top"},
    "__init__": {"engine"},
} | {leaf: set() for leaf in LEAVES}
# `verify_draft_tokens` imports the kernels when it is asked for them.
UPWARDS = {("verify", "kernels"): "verify/__init__.py"}


def imports(path: Path) -> set[str]:
    """The rooms of the package that a module imports, at its top or within functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names if name.startswith("vllm_specplus.")]
    rooms = {part[1] for part in parts}
    return {room for room in rooms if (ROOT / room).is_dir() or (ROOT / f"{room}.py").is_file()}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    allowed = ALLOWED[room(path)] | LEAVES | {room(path)}
    assert imports(path) <= allowed


@pytest.mark.parametrize(("arrow", "place"), UPWARDS.items())
def test_the_only_import_upwards_is_late(arrow: tuple[str, str], place: str) -> None:
    """It is within a function, and in one file."""
    below, above = arrow
    users = [path for path in (ROOT / below).rglob("*.py") if above in imports(path)]
    assert users == [ROOT / place]
    top = ast.Module(
        [n for n in ast.parse(users[0].read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)], []
    )
    assert f"vllm_specplus.{above}" not in ast.unparse(top)
