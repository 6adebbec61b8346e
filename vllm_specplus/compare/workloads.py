"""Workloads that need no file: chat, edit, json, code and prose; their sources are texts of the standard library."""

import inspect
import json
import textwrap
from collections.abc import Callable
from importlib import import_module

from vllm_specplus.compare.prompts import Prompt

_QUESTIONS = {
    "sky": "Why is the sky blue at noon and red in the evening? Explain it to a child of ten.",
    "interview": "I have a job interview tomorrow and I am nervous. Give me five pieces of advice.",
    "bread": "Write a recipe for a simple bread without a machine, with the amounts in grams.",
    "train": "A train leaves at 9:40 and takes 2 hours and 35 minutes. When does it arrive? Show your steps.",
    "lists": "What is the difference between a list and a tuple in Python? When would you use which?",
    "story": "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "mail": "Write a polite mail to my landlord: the heating has been broken for three days.",
    "plan": "Plan three days in a city by the sea for a family with two small children, as a list for each day.",
}
_OPENINGS = {
    "harbour": "The harbour had been quiet since the last ferry stopped in October. Only the old crane still moved, "
    "a little, when the wind came from the north. Nobody in the town could say who oiled it.",
    "letter": "Dear Marta, you asked me how the first winter in the mountains was. I will tell you about the snow "
    "first, and about the goats later, because the snow came first too.",
    "clock": "The clockmaker of the upper town owned forty clocks, and no two of them agreed. He said that this was "
    "the only honest way to keep the time.",
    "river": "A river does not choose its bed. It takes the lowest way that is open to it, carries off what is loose, "
    "and leaves the rest. In a thousand years that is enough to cut a valley.",
    "market": "On Thursdays the market filled the square before it was light. The woman with the apples was always "
    "first, and she always put her table under the same lamp.",
    "tea": "Tea was grown on small farms for a long time before it was traded by sea. Its way from the hills to the "
    "coast took weeks, and each station on the road took its share.",
    "archive": "The archive was in the cellar of the town hall, behind a door that nobody had locked in years. What "
    "lay there was sorted neither by date nor by name, but by colour.",
    "island": "There is an island that appears on three old maps and on no new one. Sailors who looked for it found "
    "shallow water, a great many birds, and nothing to stand on.",
}
# Functions that are edited, the name that is changed, and what it becomes.
_EDITS = (
    ("bz2.open", "filename", "path"),
    ("calendar.monthrange", "month", "month_number"),
    ("contextlib.closing", "thing", "resource"),
    ("filecmp.cmp", "shallow", "quick"),
    ("heapq.nsmallest", "key", "rank"),
    ("shutil.copyfile", "src", "source"),
    ("textwrap.dedent", "margin", "indent"),
    ("statistics.median_low", "data", "values"),
)
_MODULES = ("csv", "calendar", "contextlib", "filecmp", "gzip", "heapq", "shutil", "textwrap")
_CODE_CHARACTERS = 1200
_ITEMS = ("chair", "lamp", "desk", "shelf", "clock", "mirror", "carpet", "curtain")


def workload(name: str) -> list[Prompt]:
    """The prompts of one of the `WORKLOADS`."""
    return WORKLOADS[name]()


def _chat() -> list[Prompt]:
    return [_question(name, question) for name, question in _QUESTIONS.items()]


def _edit() -> list[Prompt]:
    prompts = []
    for place, old, new in _EDITS:
        module, _, name = place.partition(".")
        source = textwrap.dedent(inspect.getsource(getattr(import_module(module), name)))
        question = f"Rename `{old}` to `{new}` in this function, change nothing else, and give the whole function back."
        prompts.append(_question(place, f"{question}\n\n```python\n{source}```", source))
    return prompts


def _json() -> list[Prompt]:
    prompts = []
    for number, item in enumerate(_ITEMS):
        rows = [
            {"id": 10 * number + i, "name": f"{item} {i}", "price": 10 * number + 5 * i, "in_stock": i % 2 == 0}
            for i in range(4)
        ]
        lines = "\n".join(
            f"{row['name']}: {row['price']} euros, {'' if row['in_stock'] else 'not '}in stock" for row in rows
        )
        question = (
            "Turn this list into JSON with the keys id, name, price and in_stock, one object a line. The first id is "
            f"{10 * number}. Go on with four more of your own.\n\n{lines}\n\nIt begins so:\n{json.dumps(rows[0])}"
        )
        prompts.append(_question(item, question))
    return prompts


def _code() -> list[Prompt]:
    return [Prompt(name, inspect.getsource(import_module(name))[:_CODE_CHARACTERS]) for name in _MODULES]


def _prose() -> list[Prompt]:
    return [Prompt(name, text) for name, text in _OPENINGS.items()]


def _mixed() -> list[Prompt]:
    first, second, *_ = zip(_chat(), _edit(), _json(), _code(), _prose(), strict=True)
    return [*first, *second]


def _question(name: str, question: str, reference: str = "") -> Prompt:
    return Prompt(name, messages=({"role": "user", "content": question},), reference=reference)


WORKLOADS: dict[str, Callable[[], list[Prompt]]] = {
    "chat": _chat,
    "edit": _edit,
    "json": _json,
    "code": _code,
    "prose": _prose,
    "mixed": _mixed,
}
"""``code`` and ``prose`` are continued; the others are asked. ``edit`` brings the old text as a reference. ``mixed``
has two of each."""
