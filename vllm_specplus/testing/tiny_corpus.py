"""Training text for the tiny model: sources of pure-Python packages, repeats and JSON lists.

vLLM requires each of these packages. Their wheels hold the same files for every Python and every platform, so the text
depends on their versions alone, which ``ci/constraints.txt`` pins. Training reads them where pip installed them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

END_OF_TEXT = 256

# Licences: MIT (anyio, pydantic, urllib3), BSD-3-Clause (fsspec, jinja2, networkx, starlette), Apache-2.0 (requests).
_PACKAGES = ("anyio", "fsspec", "jinja2", "networkx", "pydantic", "requests", "starlette", "urllib3")
_SKIPPED_FOLDERS = {"test", "tests"}
_HELD_OUT_SHARE = 8
# Values and replacement names of the synthetic sequences.
_WORDS = [
    "amber", "bridge", "cedar", "delta", "ember", "falcon", "garnet", "harbor", "indigo", "jasmine",
    "kernel", "lantern", "maple", "north", "onyx", "pebble", "quartz", "river", "saffron", "timber",
    "umber", "violet", "willow", "yarrow", "zephyr",
]  # fmt: skip


def corpus_files() -> list[Path]:
    """Return the packages' source files in a fixed order.

    Raises RuntimeError if one of the packages is not installed, or was installed without a list of its files.
    """
    found: list[Path] = []
    for package in _PACKAGES:
        try:
            listed = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            listed = []
        sources = [f for f in listed if f.suffix == ".py" and not _SKIPPED_FOLDERS & set(f.parts)]
        if not sources:
            raise RuntimeError(f"the training text, the sources of {package}, is not installed")
        found += [Path(str(f.locate())) for f in sorted(sources, key=lambda f: f.as_posix())]
    return found


def corpus_digest() -> str:
    """Return the SHA-256 of the whole text, in hexadecimal digits; the trained weights depend on it."""
    return hashlib.sha256(token_stream(corpus_files()).astype("<i2").tobytes()).hexdigest()


def is_held_out(path: Path) -> bool:
    """Tell whether a file is kept from training: by a hash of its name, one in eight."""
    return hashlib.sha256(path.name.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def held_out_files(min_bytes: int = 0) -> list[Path]:
    """Return the files that training never sees and that have at least ``min_bytes``."""
    return [p for p in corpus_files() if is_held_out(p) and p.stat().st_size >= min_bytes]


def token_stream(files: list[Path]) -> np.ndarray:
    """Return the files' bytes, each file followed by the end-of-text token, as one int16 array."""
    parts: list[np.ndarray] = []
    for path in files:
        parts.append(np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.int16))
        parts.append(np.array([END_OF_TEXT], dtype=np.int16))
    return np.concatenate(parts)


class Sampler:
    """Draws training sequences; all randomness comes from ``seed``.

    The share ``repeat_share`` of the sequences repeats a passage, three in ten of them with one name replaced. The
    share ``json_share`` holds lists of records. Both teach the model to copy from its context. Sources alone teach
    that too slowly.

    Args:
        stream: the training text, int16 tokens of shape ``[length]``.
        repeat_share: a share in [0, 1].
        json_share: a share in [0, 1].
        seed: of the draws.
    """

    def __init__(self, stream: np.ndarray, *, repeat_share: float, json_share: float, seed: int) -> None:
        self.stream = stream
        self.repeat_share = repeat_share
        self.json_share = json_share
        self.random = random.Random(seed)

    def batch(self, rows: int, length: int) -> np.ndarray:
        """Return ``[rows, length]`` int64 tokens."""
        return np.stack([self._row(length) for _ in range(rows)]).astype(np.int64)

    def _row(self, length: int) -> np.ndarray:
        draw = self.random.random()
        if draw < self.repeat_share:
            return self._repeats(length)
        if draw < self.repeat_share + self.json_share:
            return _tile(self._json_chunks(), length)
        return self._passage(length)

    def _passage(self, length: int) -> np.ndarray:
        start = self.random.randrange(len(self.stream) - length)
        return self.stream[start : start + length]

    def _repeats(self, length: int) -> np.ndarray:
        passage = self._passage(self.random.randrange(16, length // 2))
        if self.random.random() < 0.3:
            # Nothing but the context predicts shuffled text, so it teaches copying fastest.
            passage = np.array(self.random.sample(passage.tolist(), len(passage)), dtype=np.int16)
        again = self._renamed(passage) if self.random.random() < 0.3 else passage
        lead = self._passage(self.random.randrange(1, 32))
        return _tile(itertools.chain([lead, passage], itertools.repeat(again)), length)

    def _renamed(self, passage: np.ndarray) -> np.ndarray:
        if (passage == END_OF_TEXT).any():
            return passage
        text = passage.astype(np.uint8).tobytes()
        names = sorted({w for w in text.replace(b".", b" ").split() if w.isalpha() and len(w) > 3})
        if not names:
            return passage
        new = self.random.choice(_WORDS).encode()
        text = text.replace(self.random.choice(names), new)
        return np.frombuffer(text, dtype=np.uint8).astype(np.int16)

    def _json_chunks(self) -> Iterator[np.ndarray]:
        kinds = {key: self.random.randrange(3) for key in self.random.sample(_WORDS, 3)}
        indent = self.random.choice([None, 2, 4])
        yield np.frombuffer(b"[\n", dtype=np.uint8)
        for index in itertools.count(self.random.randrange(90)):
            record = {"id": index} | {key: self._json_value(kind) for key, kind in kinds.items()}
            line = json.dumps(record, indent=indent) + ",\n"
            yield np.frombuffer(line.encode(), dtype=np.uint8)

    def _json_value(self, kind: int) -> object:
        if kind == 0:
            return self.random.randrange(1000)
        return self.random.random() < 0.5 if kind == 1 else self.random.choice(_WORDS)


def _tile(chunks: Iterator[np.ndarray], length: int) -> np.ndarray:
    row = np.empty(length, dtype=np.int16)
    filled = 0
    while filled < length:
        chunk = next(chunks)[: length - filled]
        row[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
    return row
