"""What the real model is asked, so that an EAGLE head can learn from its answers, and the texts it reads besides.

All of it comes with Python: sources and documentation of the standard library, and licences of installed packages. The
workloads of ``vllm-specplus compare`` and the prompts of ``benchmarks/adaptive.py`` are left out, so that they stay
fresh. No question and no opening comes twice.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import import_module, metadata
from pathlib import Path

_FORMS = (
    "What is {}?",
    "Explain {} to a beginner.",
    "Give me five facts about {}.",
    "Write a short story about {}.",
    "Why does {} matter?",
    "What are the advantages and disadvantages of {}?",
    "Write a poem about {}.",
    "How would you teach a child about {}?",
    "Write a mail to a friend about {}.",
    "Summarise the history of {} in a few sentences.",
    "List ten words that have to do with {}, and explain each.",
    "What do people often get wrong about {}?",
    "Compare {} with {}.",
    "Write a dialogue of two people about {} and {}.",
    "Give me step by step instructions for {}.",
    "Write a Python class that models {}.",
    "Write a JSON list of six objects with name, size and price, about {}.",
    "Write a Python function that prints a table about {}, with a docstring.",
)
_TOPICS = (
    "bees", "bicycles", "black holes", "board games", "bridges", "butterflies", "candles", "castles", "cats",
    "cheese", "chess", "chocolate", "clouds", "coffee", "comets", "cooking rice", "coral reefs", "democracy",
    "deserts", "dogs", "dreams", "earthquakes", "electric cars", "elephants", "email", "exercise", "fire",
    "fishing", "forests", "friendship", "gardening", "glaciers", "gold", "gravity", "guitars", "healthy food",
    "horses", "insurance", "jazz", "kindness", "knitting", "languages", "learning to swim", "libraries",
    "magnets", "maps", "meditation", "mirrors", "money", "mountains", "museums", "music", "newspapers",
    "oceans", "olive oil", "painting a room", "paper", "photography", "planets", "plastic", "prime numbers",
    "public transport", "radio", "rain", "recycling", "robots", "sailing", "salt", "saving money", "school",
    "sharks", "shoes", "silk", "sleep", "snow", "soap", "solar energy", "sorting algorithms", "spiders",
    "spreadsheets", "statistics", "steel", "sugar", "taxes", "teamwork", "telescopes", "theatre", "time zones",
    "tomatoes", "traffic", "trees", "trust", "vaccines", "volcanoes", "volunteering", "water", "wind", "wolves",
    "writing", "yoga",
)  # fmt: skip
_FRESH_TOPICS = (
    "avalanches", "bakeries", "beetles", "carpets", "fountains", "glass", "harbours", "keyboards", "lemons",
    "lighthouses", "marathons", "orchids", "passports", "penguins", "pottery", "puppets", "quartz", "rivers",
    "saddles", "subways", "thunder", "tides", "turtles", "umbrellas", "vines", "violins", "whistles", "yeast",
    "zebras",
)  # fmt: skip
# None of them is among `_FRESH_MODULES`.
_ASKED_ABOUT = (
    "ast", "bisect", "colorsys", "difflib", "fnmatch", "glob", "inspect", "locale", "mimetypes",
    "netrc", "operator", "pprint", "quopri", "random", "sched", "shlex", "stat", "string", "tempfile", "token",
    "trace", "types", "uuid", "wave", "weakref", "zipfile",
)  # fmt: skip
# What workloads and benchmarks take their texts from.
_FRESH_MODULES = {
    "bz2", "calendar", "cmd", "contextlib", "copy", "csv", "dis", "filecmp", "gzip", "heapq", "imaplib", "lzma",
    "mailbox", "shutil", "statistics", "tarfile", "textwrap",
}  # fmt: skip
_QUESTIONS_ON_CODE = (
    "Explain what this function does.\n\n```python\n{}```",
    "Add a docstring to this function and give the whole function back.\n\n```python\n{}```",
    "Write this function again with type hints.\n\n```python\n{}```",
    "Give this function back, with shorter names.\n\n```python\n{}```",
)
_MOST_CODE = 900  # characters of a function that is asked about
_CODE_OPENING = 500  # characters of a file that the model continues


def questions(seed: int) -> Iterator[str]:
    """Yield questions, tens of thousands, no two alike: three in four on topics, the rest on code."""
    return _distinct(_questions(seed))


def fresh_questions(seed: int) -> Iterator[str]:
    """Yield questions on topics of which none of `questions` asks, no two alike."""
    rng = random.Random(seed)
    return _distinct(rng.choice(_FORMS).format(*rng.sample(_FRESH_TOPICS, 2)) for _ in itertools.count())


def openings(seed: int) -> Iterator[str]:
    """Yield beginnings of texts that the model continues as they stand, no two alike: sources, JSON, documentation."""
    return _distinct(_openings(seed))


def _distinct(texts: Iterable[str]) -> Iterator[str]:
    seen = set()
    for text in texts:
        if text not in seen:
            seen.add(text)
            yield text


def _questions(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    functions = list(_functions())
    while True:
        if rng.random() < 0.25:
            yield rng.choice(_QUESTIONS_ON_CODE).format(rng.choice(functions))
        else:
            yield rng.choice(_FORMS).format(*rng.sample(_TOPICS, 2))


def _openings(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    texts = [text for text in _sources() if len(text) > 4 * _CODE_OPENING]
    documentation = list(_documentation())
    while True:
        draw = rng.random()
        if draw < 0.2:
            keys = rng.sample(("id", "name", "city", "price", "age", "kind", "tags", "is_open"), 4)
            rows = [{key: rng.choice((i, i * 10 + 5, f"{key} {i}", i % 2 == 0)) for key in keys} for i in range(6)]
            yield json.dumps(rows, indent=rng.choice((None, 1, 2)))[:-2] + ","
        elif draw < 0.4:
            text = rng.choice(documentation)
            yield text[: min(len(text), 300)]
        else:
            text = rng.choice(texts)
            start = text.find("\n", rng.randrange(len(text) - _CODE_OPENING)) + 1
            yield text[start : start + _CODE_OPENING]


def passages(seed: int) -> Iterator[str]:
    """Yield texts to read in a random order, each once: sources, documentation and licences."""
    # Packages share licences.
    texts = [*_distinct((*_sources(), *_documentation(), *_licences()))]
    random.Random(seed).shuffle(texts)
    yield from texts


def _functions() -> Iterator[str]:
    """Short functions of the standard library."""
    for name in _ASKED_ABOUT:
        source = (_standard_library() / f"{name}.py").read_text(errors="replace")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                function = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]) + "\n"
                if len(function) < _MOST_CODE:
                    yield function


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _sources() -> Iterator[str]:
    """The modules of the standard library, without packages."""
    for path in sorted(_standard_library().glob("*.py")):
        if path.stem not in _FRESH_MODULES:
            yield path.read_text(errors="replace")


def _documentation() -> Iterator[str]:
    """Python's language reference, by topic."""
    topics = import_module("pydoc_data.topics").topics
    yield from (topics[name] for name in sorted(topics))


def _licences() -> Iterator[str]:
    """The different licences of installed packages."""
    seen = set()
    for distribution in metadata.distributions():
        for file in distribution.files or []:
            if "dist-info" in file.parts[0] and file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")):
                text = Path(str(file.locate())).read_text(errors="replace")
                if text not in seen:
                    seen.add(text)
                    yield text
