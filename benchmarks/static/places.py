"""Places in the source of kernels: a statement with the calls that led to it, the outermost first.

The line of a place is the first of its statement, or of the header of an `if` or a loop. A function's own line is that
of its `def`.
"""

import ast
from functools import cache
from pathlib import Path

Line = tuple[str, int]
Place = tuple[Line, ...]


class _Lines:
    """Of each line of a file: its statement, its function, and the headers of the loops around it."""

    def __init__(self, file: str) -> None:
        self.statement: dict[int, int] = {}
        self.function: dict[int, int] = {}
        self.loops: dict[int, tuple[int, ...]] = {}
        self._note(ast.parse(Path(file).read_text()), 0, ())

    def _note(self, node: ast.AST, function: int, loops: tuple[int, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt):
                continue
            within, around = function, loops
            if isinstance(child, ast.FunctionDef):
                within, around = child.lineno, ()
            elif isinstance(child, ast.For | ast.While):
                around = (*loops, child.lineno)
            body = getattr(child, "body", None)
            end = body[0].lineno - 1 if body else child.end_lineno or child.lineno
            for line in range(child.lineno, max(end, child.lineno) + 1):
                self.statement[line], self.function[line], self.loops[line] = child.lineno, within, around
            self._note(child, within, around)


@cache
def _lines_of(file: str) -> _Lines:
    return _Lines(file)


@cache
def is_within(file: str, folders: tuple[Path, ...]) -> bool:
    """Whether a file is in one of the folders."""
    return any(Path(file).is_relative_to(folder) for folder in folders)


def place_of(calls: tuple[Line, ...], folders: tuple[Path, ...]) -> Place:
    """The place of a line and the calls that led to it, up to the first call that leaves the folders."""
    place: list[Line] = []
    for file, line in calls:
        if not is_within(file, folders):
            break
        place.append((file, _lines_of(file).statement.get(line, line)))
    return tuple(place)


def function_of(place: Place) -> Place:
    """The place of the function that holds a place."""
    file, line = place[-1]
    return (*place[:-1], (file, _lines_of(file).function.get(line, line)))


def loops_of(place: Place) -> tuple[Place, ...]:
    """The places of all loops around a place, those around its callers included; a header is within its loop."""
    return tuple(
        (*place[:i], (file, loop))
        for i, (file, line) in enumerate(place)
        for loop in _lines_of(file).loops.get(abs(line), ())
        if loop != -line
    )


def reach_of(loop: Place) -> Place:
    """The place that counts how often a loop is reached: its header with a negative line."""
    file, line = loop[-1]
    return (*loop[:-1], (file, -line))
