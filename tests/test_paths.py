"""The files and functions that the documents name are there, and the kernels keep to the size that they promise."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_specplus"
# docs/migration.md names the files of other systems.
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "migration.md"})
MOST_ARGUMENTS = 19
MOST_LINES = 330


def paths(text: str) -> list[str]:
    """What stands in backticks and looks like the path of a file."""
    return re.findall(r"`([\w./*-]+/[\w.*-]+\.(?:py|sh|md|json|toml|css))`", text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_exist(document: Path) -> None:
    missing = [name for name in paths(document.read_text()) if not any([*ROOT.glob(name), *PACKAGE.glob(name)])]
    assert not missing


def named_functions() -> Iterator[tuple[str, str]]:
    """Each function or class of a file that the contributing guide names: ``path.py: name, name``."""
    text = (ROOT / "docs" / "contributing.md").read_text()
    for path, names in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", text):
        yield from ((path, name) for name in re.findall(r"`(\w+)`", names))


def test_named_functions_exist() -> None:
    found = list(named_functions())
    assert found
    for path, name in found:
        tree = ast.parse((PACKAGE / path).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert name in defined, (path, name)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("kernels/**/*.py")), ids=lambda path: path.stem)
def test_kernels_take_few_arguments(path: Path) -> None:
    """Pointers that belong together travel in NamedTuples."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            assert len(node.args.args) <= MOST_ARGUMENTS, node.name


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("kernels/verify/*.py")), ids=lambda path: path.stem)
def test_files_of_verification_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES
