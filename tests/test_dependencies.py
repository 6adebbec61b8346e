"""docs/dependencies.md names all that the project asks for or imports; the lowest versions are tested ones."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("vllm_specplus", "benchmarks", "ci", "examples", "tests")
# Scripts import what lies beside them, and these folders, by their bare names.
OWN_FOLDERS = ("examples", "interpreted_cpu", "static", "tests")
# The module that a package is imported as, where it has another name.
PACKAGES = {"yaml": "pyyaml", "arctic_inference": "arctic-inference"}


def rows() -> list[tuple[set[str], str]]:
    """The packages of each row of the tables, and its last cell."""
    lines = (ROOT / "docs" / "dependencies.md").read_text().splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("| `")]
    return [(set(re.findall("`(.+?)`", first)), last.strip(" `")) for first, *_, last in cells]


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", each)[0] for each in requirements} - {"vllm-specplus"}


def test_requirements() -> None:
    asked = {"always": names(PROJECT["dependencies"])}
    asked |= {extra: names(requirements) for extra, requirements in PROJECT["optional-dependencies"].items()}
    for who, packages in asked.items():
        assert {name for found, last in rows() if last == who for name in found} == packages


def test_imports() -> None:
    modules, own = set(), {"vllm_specplus", *OWN_FOLDERS}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(node.module.partition(".")[0])
        if not path.is_relative_to(ROOT / "vllm_specplus"):
            own.add(path.stem)
    foreign = modules - sys.stdlib_module_names - own
    named = {name for found, _ in rows() for name in found}
    assert {PACKAGES.get(module, module) for module in foreign} <= named


def test_lowest_versions_are_installed_somewhere() -> None:
    """``ci/release.sh`` installs those of its extras; those of the others are what ``ci/constraints.txt`` pins."""
    (tried,) = re.findall(r"extras=(\S+)$", (ROOT / "ci" / "release.sh").read_text(), re.MULTILINE)
    pinned = (ROOT / "ci" / "constraints.txt").read_text().splitlines()
    for extra, requirements in PROJECT["optional-dependencies"].items():
        for each in requirements:
            assert ">=" in each or each.startswith("vllm-specplus["), each
            if extra not in tried.split(",") and ">=" in each:
                assert each.partition(",")[0].replace(">=", "==") in pinned
