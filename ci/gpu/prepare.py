"""Makes a folder of Python packages from what ``pack.py`` has gathered, on a machine without a network."""

import compileall
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import IO

_ROOT = Path(__file__).parents[2]
_MOST_SECONDS = 45.0  # that pip may take; its wheels are beside it


def prepare(packed: Path, site: Path) -> None:
    """Install the wheels, vLLM's Python files and the plugin's entry points into `site`, to go first on PYTHONPATH.

    Raises:
        subprocess.SubprocessError: pip fails, or is not done in time.
    """
    wheels = sorted(map(str, (packed / "wheels").glob("*.whl")))
    subprocess.run([*_pip(site), "--no-compile", "--upgrade", *wheels], check=True, timeout=_MOST_SECONDS)
    with tarfile.open(packed / "vllm.tar.gz") as archive:
        archive.extractall(site, filter="data")
    stand_in = Path(__file__).parent / "compiled_parts.py"
    shutil.copy(stand_in, site / "vllm" / "_C_stable_libtorch.py")
    # Without it vLLM's modules that name flash attention cannot be imported. It is never called.
    (site / "vllm" / "vllm_flash_attn" / "_vllm_fa2_C.py").write_text("")
    about = json.loads((packed / "pack.json").read_text())
    add_metadata(site, "vllm", about["vllm"])
    plugin = add_metadata(site, "vllm_specplus", "0")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nspecplus = vllm_specplus:register\n")
    # Without bytecode an engine takes two to three times as long to start.
    compileall.compile_dir(site, quiet=2, workers=0)


def build_suffix_trees(packed: Path, site: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start to build arctic-inference, which has no wheels, from its source into `site`."""
    sources = sorted(map(str, (packed / "sources").glob("*.tar.gz")))
    asked = subprocess.run([sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True)
    # As in ci/setup.sh, and for this Python, not another one that CMake may find.
    env = os.environ | {
        "CMAKE_PREFIX_PATH": asked.stdout.strip(),
        "CMAKE_ARGS": f"-DPython_EXECUTABLE={sys.executable}",
    }
    return subprocess.Popen([*_pip(site), "--no-build-isolation", *sources], stdout=log, stderr=log, env=env)


def add_metadata(site: Path, name: str, version: str) -> Path:
    """Make a package known by its name, and return the folder that says so."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def _pip(site: Path) -> list[str]:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    return [*pip, "--no-index", "--no-deps", "--no-cache-dir", "--target", str(site)]
