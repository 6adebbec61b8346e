"""Training text for the tiny model: the standard library's sources, repeats and JSON lists."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

END_OF_TEXT = 256

# Tests, tables and generated files are no prose of the kind the demo continues.
_SKIPPED = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data",
    "lib2to3", "__pycache__",
}  # fmt: skip
_HELD_OUT_SHARE = 8
# Values and replacement names of the synthetic sequences.
_WORDS = [
    "amber", "bridge", "cedar", "delta", "ember", "falcon", "garnet", "harbor", "indigo", "jasmine",
    "kernel", "lantern", "maple", "north", "onyx", "pebble", "quartz", "river", "saffron", "timber",
    "umber", "violet", "willow", "yarrow", "zephyr",
]  # fmt: skip


def library_files() -> list[Path]:
    """Return the standard library's source files in a fixed order.

    Raises RuntimeError if this Python has come without them.
    """
    root = Path(sysconfig.get_path("stdlib"))
    kept: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = sorted(set(below) - _SKIPPED)
        kept += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    if not kept:
        raise RuntimeError(f"the training text, the standard library's sources, is not in {root}")
    return kept


def is_held_out(path: Path) -> bool:
    """Tell whether a file is kept from training: by a hash of its name, one in eight."""
    return hashlib.sha256(path.name.encode()).digest()[0] % _HELD_OUT_SHARE == 0


def held_out_files(min_bytes: int = 0) -> list[Path]:
    """Return the library files that training never sees and that have at least ``min_bytes``."""
    return [p for p in library_files() if is_held_out(p) and p.stat().st_size >= min_bytes]


def token_stream(files: list[Path]) -> np.ndarray:
    """Return the files' bytes, each file followed by the end-of-text token, as one int16 array."""
    parts: list[np.ndarray] = []
    for path in files:
        parts.append(np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.int16))
        parts.append(np.array([END_OF_TEXT], dtype=np.int16))
    return np.concatenate(parts)


class Sampler:
    """Draws training sequences; all randomness comes from ``seed``.

    A share ``repeat_share`` of the sequences repeats a passage, half the time with one name
    replaced throughout, and ``json_share`` holds lists of records: the model must learn to copy
    from its context, which the library's sources alone teach too slowly.
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
