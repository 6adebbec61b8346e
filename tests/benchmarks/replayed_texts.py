"""Prompts of four kinds for the trained tiny model, none of which it has seen, and drafters made of its own.

The model is tiny: its texts soon repeat themselves, and those of `edit` leave the passage after a few bytes.
"""

import errno
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from html.entities import html5
from http import HTTPStatus
from importlib import metadata
from keyword import iskeyword
from typing import Any

import numpy as np

from vllm_specplus.testing.tiny_corpus import held_out_files

Row = dict[str, Any]
"""A prompt or a trace, as `benchmarks/record.py` has it; the tiny model's tokens are bytes."""

KINDS = ("code", "json", "text", "edit")
NUM_PROMPTS = 25  # of each kind
NOISE = 300  # no text has this token
_SIZE = 600  # bytes of a prompt
_EDITED, _BEGUN = 240, 48  # bytes of a passage that is edited, and of its edited form, with which the prompt ends
_PACKAGES = ("anyio", "fsspec", "jinja2", "networkx", "pydantic", "requests", "starlette", "urllib3")
_LETTERS = range(0x410, 0x450)


def prompts() -> list[Row]:
    """`NUM_PROMPTS` of each kind, the kinds in turn; `edit` begins to give a passage back with one name changed."""
    found = {"code": _passages(1000, _SIZE), "json": _lists(), "text": _documents(), "edit": _passages(2000, _EDITED)}
    rows = []
    for number in range(NUM_PROMPTS):
        for kind in KINDS:
            prompt = found[kind][number]
            if kind == "edit":
                prompt += b"\n\n" + _renamed(prompt)[:_BEGUN]
            rows.append({"kind": kind, "name": f"{kind} {number}", "prompt": list(prompt)})
    return rows


def _passages(start: int, size: int) -> list[bytes]:
    """Passages of library files that training has not seen."""
    return [path.read_bytes()[start : start + size] for path in held_out_files(start + size)[:NUM_PROMPTS]]


def _lists() -> list[bytes]:
    """Parts of JSON lists, which the standard library's tables fill."""
    tables = [
        [{"status": s.value, "phrase": s.phrase, "description": s.description} for s in HTTPStatus],
        [{"errno": n, "name": name, "message": os.strerror(n)} for n, name in sorted(errno.errorcode.items())],
        [{"code": n, "name": unicodedata.name(chr(n)), "category": unicodedata.category(chr(n))} for n in _LETTERS],
        [{"entity": name, "text": text, "length": len(text)} for name, text in sorted(html5.items())],
    ]
    return [json.dumps(tables[n % 4][2 * n :], indent=(None, 1, 2)[n % 3]).encode()[:_SIZE] for n in range(NUM_PROMPTS)]


def _documents() -> list[bytes]:
    """Passages of licences, and of what packages say about themselves."""
    found = []
    for package in _PACKAGES:
        for path in metadata.files(package) or []:
            if path.name.startswith("LICENSE") or path.name == "METADATA":
                text = path.locate().read_bytes()
                if len(text) >= 2 * _SIZE:
                    found += [text[len(text) // 2 - _SIZE :][:_SIZE], text[-_SIZE:]]
    return found[:NUM_PROMPTS]


def _renamed(passage: bytes) -> bytes:
    """The passage with its most frequent name replaced."""
    names = Counter(word for word in re.findall(rb"[a-z_]{4,}", passage) if not iskeyword(word.decode()))
    return passage.replace(names.most_common(1)[0][0], b"other")


def with_drafts(traces: list[Row], share: float, token: Callable[[int, int], int]) -> list[Row]:
    """The traces with a `share` of all drafts replaced at random, by `token` of the true token and the draft."""
    random, changed = np.random.default_rng(0), []
    for trace in traces:
        drafts = []
        for i, row in enumerate(trace["drafts"], start=1):
            truth = trace["output"][i : i + len(row)]
            drafts.append([token(t, d) if random.random() < share else d for t, d in zip(truth, row, strict=False)])
        changed.append(trace | {"drafts": drafts})
    return changed
