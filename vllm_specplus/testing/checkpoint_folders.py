"""Folders of checkpoints: where they are cached, and how they are written."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """Return the folder of all caches: ``vllm-specplus`` under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-specplus"


def cached(final: Path, write: Callable[[Path], object]) -> Path:
    """Return folder ``final``, letting ``write`` fill it first if it is not there.

    Of several processes or threads that call this at once, one writes and the others wait for it. The folder appears
    whole or not at all. Raises OSError if it cannot be written.
    """
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.parent):
        if not final.is_dir():
            with tempfile.TemporaryDirectory(dir=final.parent, prefix=f"{final.name}.") as scratch:
                built = Path(scratch) / "model"
                built.mkdir()
                write(built)
                built.rename(final)
    return final


def install(out: str | Path, write: Callable[[Path], object]) -> Path:
    """Let ``write`` fill a scratch folder, then move its files into ``out`` one by one; return ``out``.

    Each file appears whole or not at all, and writers of the same model do not disturb each other. Raises OSError if
    ``out`` cannot be written.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as scratch:
        write(Path(scratch))
        for path in sorted(Path(scratch).iterdir()):
            os.replace(path, folder / path.name)
    return folder


def install_copy(out: str | Path, cached: Path) -> Path:
    """Copy the files of folder ``cached`` into ``out`` as :func:`install` does; return ``out``."""
    return install(out, lambda folder: shutil.copytree(cached, folder, dirs_exist_ok=True))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the only lock of ``folder``; the system gives it back when this process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
