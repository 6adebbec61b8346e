"""Imports within the package run one way, as the map of docs/design.md has it."""

import ast
import re
from pathlib import Path

import pytest

import vllm_specplus

ROOT = Path(vllm_specplus.__file__).parent
DESIGN = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
# Every room may import them.
LEAVES = {"_numba", "sources", "strategies", "version"}
# The package's own module hands on what its folders hold, and `python -m` runs the command.
ENTRY = {"__init__": {"engine"}, "__main__": {"cli"}}
# `verify_draft_tokens` imports the kernels when it is asked for them.
UPWARDS = {("verify", "kernels/verify"): "verify/__init__.py"}


def read_map() -> dict[str, set[str]]:
    """What each room of the map may import besides itself and the leaves; a row's folder holds those within it."""
    table = DESIGN.partition("| folder | holds | may import |")[2].partition("\n\n")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")
    ]
    names = [[name.strip("/").removesuffix(".py") for name in re.findall("`([^`]+)`", row[0])] for row in rows]
    allowed = {}
    for i, row in enumerate(rows):
        targets = set(re.findall("`([^`]+)`", row[2]))
        if row[2] == "all below":
            targets = {name for below in names[i + 1 :] for name in below}
        allowed |= dict.fromkeys(names[i], targets)
    return allowed


ALLOWED = read_map() | ENTRY | {leaf: set() for leaf in LEAVES}


def room_of(module: str) -> str:
    """The room of the map in which a module, such as ``kernels.verify.launch``, is."""
    parts = module.split(".")
    names = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((name for name in names if name in ALLOWED), parts[0])


def imports(path: Path) -> set[str]:
    """The rooms of the package that a module imports, at its top or within functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {room_of(name.removeprefix("vllm_specplus.")) for name in names if name.startswith("vllm_specplus.")}


def room(path: Path) -> str:
    return room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def may_import(name: str) -> set[str]:
    """The rooms that a room may import: those of the map and what they hold, but for its neighbours, and the leaves."""
    targets = ALLOWED[name] - {above for below, above in UPWARDS if below == name}
    outer = name.rpartition("/")[0]
    within = {other for other in ALLOWED for target in targets - {outer} if other.startswith(f"{target}/")}
    return targets | within | LEAVES | {name}


def test_the_map_has_every_room() -> None:
    """And no other: each of its rows is a folder or a module."""
    modules = {path for path in ROOT.rglob("*.py") if path.name != "__init__.py"}
    assert {room(path) for path in modules} | ENTRY.keys() == ALLOWED.keys()


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    upwards = {above for (below, above), place in UPWARDS.items() if path == ROOT / place}
    assert imports(path) <= may_import(room(path)) | upwards


@pytest.mark.parametrize(("arrow", "place"), UPWARDS.items())
def test_the_only_import_upwards_is_late(arrow: tuple[str, str], place: str) -> None:
    """It is within a function."""
    _, above = arrow
    statements = ast.parse((ROOT / place).read_text()).body
    top = ast.Module([node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)], [])
    assert above.replace("/", ".") not in ast.unparse(top)
    assert above in imports(ROOT / place)


def test_the_map_is_no_circle() -> None:
    """The folders that a folder may import do not import it in turn."""
    above: dict[str, set[str]] = {name: may_import(name) - LEAVES - {name} for name in ALLOWED}
    while above:
        lowest = {name for name, targets in above.items() if not targets & above.keys()}
        assert lowest, sorted(above)
        above = {name: targets for name, targets in above.items() if name not in lowest}
