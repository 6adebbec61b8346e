"""The sdist and the wheel: what they hold, what they say of themselves, and that they install."""

import email
import importlib
import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from vllm_specplus import __version__

ROOT = Path(__file__).parents[1]
NOT_SOURCE = shutil.ignore_patterns(".?*", "build", "dist", "*.egg-info", "__pycache__")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Return what it prints on stdout; fail with all that it prints if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist and of the wheel, which is made from what the sdist holds."""
    tree = tmp_path_factory.mktemp("package") / "tree"
    shutil.copytree(ROOT, tree, ignore=NOT_SOURCE)
    run(sys.executable, "-m", "build", "--no-isolation", cwd=tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"vllm_specplus-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"{info_folder()}/METADATA"))


def info_folder() -> str:
    return f"vllm_specplus-{__version__}.dist-info"


def test_sdist_holds_every_module_and_the_texts(dist: Path) -> None:
    with tarfile.open(dist / f"vllm_specplus-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "vllm_specplus").rglob("*.py")} <= names


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "vllm_specplus").rglob("*.py")}
    data = {"vllm_specplus/py.typed", "vllm_specplus/compare/report.css"}
    assert modules | data | {f"{info_folder()}/licenses/LICENSE"} <= names
    assert {name.partition("/")[0] for name in names} == {"vllm_specplus", info_folder()}


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "vllm-specplus"
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == {"dev", "docs", "plot", "ray", "real", "suffix", "test"}
    needs = {line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert needs == {"vllm>=0.32", "pydantic>=2.12", "rich>=14"}


PUBLIC = {
    "vllm_specplus": ["register"],
    "vllm_specplus.compat": ["LEDGER", "SpecPlusCompatError", "check_vllm", "missing_seams", "override"],
    "vllm_specplus.config": ["Resolved", "SpecPlusConfigError", "SpecPlusOptions", "parse_json", "resolve"],
    "vllm_specplus.requests": ["PredictedOutputs"],
    "vllm_specplus.verify": ["verify_draft_tokens"],
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PUBLIC.items() for name in names])
def test_public_path(module: str, name: str) -> None:
    """Users import these: a name that moves away takes their programs with it."""
    assert getattr(importlib.import_module(module), name) is not None


@pytest.mark.parametrize("module", ["vllm_specplus", "vllm_specplus.cli", "vllm_specplus.config"])
def test_what_loads_neither_vllm_nor_torch(module: str) -> None:
    program = f"import sys, {module}; heavy = {{'vllm', 'torch', 'numpy'}} & set(sys.modules); assert not heavy, heavy"
    run(sys.executable, "-c", program)


def test_entry_points(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    found = importlib.metadata.Distribution.at(tmp_path / info_folder()).entry_points
    assert {(entry.group, entry.name, entry.value) for entry in found} == {
        ("vllm.general_plugins", "specplus", "vllm_specplus:register"),
        ("vllm.endpoint_plugins", "specplus", "vllm_specplus.requests.endpoints:SpecPlusEndpoints"),
        ("console_scripts", "vllm-specplus", "vllm_specplus.cli:main"),
    }


def test_wheel_installs_and_registers_without_vllm(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv/bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel)
    assert (tmp_path / "venv/bin/vllm-specplus").exists()
    program = (
        "import importlib.util, vllm_specplus\n"
        "assert importlib.util.find_spec('vllm') is None\n"
        "vllm_specplus.register()\n"
        "print(vllm_specplus.__version__, vllm_specplus.__file__)"
    )
    version, file = run(python, "-I", "-c", program, cwd=tmp_path).split()
    assert version == __version__
    assert Path(file).is_relative_to(tmp_path)
