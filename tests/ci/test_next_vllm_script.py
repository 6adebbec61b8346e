"""ci/next_vllm.sh: which release it looks at, and its exit code, with a package index of two releases in a folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vllm_specplus import compat

ROOT = Path(__file__).parents[2]
OLDER, NEWEST = "9.9.0", "9.10.0"
SCRIPTS = ("next_vllm.sh", "next_vllm.py", "vllm_overlay.py")
# The environment is the tests' own.
SETUP = """
set -euo pipefail
log=setup.log
fail() {
  echo "setup: $1" >&2
  exit 1
}
"""
SUITE = """
echo "the suite runs with $*"
exit "$SUITE_CODE"
"""


def add_release(index: Path, version: str, files: dict[str, str]) -> None:
    """Put a wheel of vLLM into an index."""
    info = f"vllm-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    folder = index / "vllm"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"vllm-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    links = (f'<a href="{path.name}">{path.name}</a>' for path in folder.glob("*.whl"))
    (folder / "index.html").write_text("\n".join(links))


def ledger_files() -> dict[str, str]:
    """The text of each module of the ledger, by its name in a wheel."""
    root = compat.vllm_root()
    stems = {root.joinpath(*seam.module.split(".")[1:]) for seam in compat.LEDGER}
    paths = (path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py"))
    return {f"vllm/{path.relative_to(root)}": path.read_text() for path in paths if path.is_file()}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts, beside stand-ins for those that install and test, and the index."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "ci").mkdir()
    for name in SCRIPTS:
        shutil.copy(ROOT / "ci" / name, folder / "ci")
    (folder / "ci" / "setup.sh").write_text(SETUP)
    (folder / "ci" / "test.sh").write_text(SUITE)
    files = ledger_files()
    add_release(folder / "index", NEWEST, files)
    lost = f"vllm/{compat.LEDGER[0].module.replace('.', '/').removeprefix('vllm/')}.py"
    add_release(folder / "index", OLDER, {name: text for name, text in files.items() if name != lost})
    return folder


def run(project: Path, *arguments: str, index: str = "index", suite_code: int = 0) -> subprocess.CompletedProcess[str]:
    own = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": (project / index).as_uri(),
        "SUITE_CODE": str(suite_code),
    }
    others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    command = ["bash", project / "ci" / "next_vllm.sh", *arguments]
    return subprocess.run(command, env=others | own, capture_output=True, text=True)


def test_the_newest_release(project: Path) -> None:
    done = run(project)
    assert done.returncode == 0, done.stderr
    title, _, broken, *_ = done.stdout.splitlines()
    assert title.startswith(f"# vLLM {NEWEST} beside ")
    assert broken == f"0 of {len(compat.LEDGER)} seams are broken."


def test_a_release_on_which_the_plugin_cannot_run(project: Path) -> None:
    done = run(project, OLDER)
    assert done.returncode == 1
    assert done.stdout.startswith(f"# vLLM {OLDER} beside ")
    assert f"\n- module {compat.LEDGER[0].module} is gone" in done.stdout
    assert "the suite" not in done.stdout


@pytest.mark.parametrize(
    ("version", "suite_code", "code"), [(None, 0, 0), (None, 5, 1), (OLDER, 0, 1)], ids=["passes", "fails", "broken"]
)
def test_the_suite_runs_after_the_page(project: Path, version: str | None, suite_code: int, code: int) -> None:
    done = run(project, "--test", *([] if version is None else [version]), suite_code=suite_code)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(f"# vLLM {version or NEWEST} beside ")
    assert done.stdout.endswith(f"the suite runs with --vllm {version or NEWEST}\n")


def test_an_index_without_vllm(project: Path) -> None:
    (project / "empty").mkdir()
    done = run(project, index="empty")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "the package index names no release of vLLM" in done.stderr
