"""The tables of docs/features.md, each of whose cells is what a test finds.

The tests fail where the page says something else. With SPECPLUS_WRITE_TABLES in the environment they write it there.
"""

import os
import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "features.md"
_WRITES = "SPECPLUS_WRITE_TABLES" in os.environ


class Table:
    """A table of the page, by its header's first cell; each row is named by its first cell."""

    def __init__(self, head: str) -> None:
        self._lines = _PAGE.read_text().splitlines()
        self._start = next(i for i, line in enumerate(self._lines) if line.startswith(f"| {head} |"))
        self._end = self._start
        while self._end < len(self._lines) and self._lines[self._end].startswith("|"):
            self._end += 1
        self._columns = _cells(self._lines[self._start])
        self._rows = {row[0]: row for row in map(_cells, self._lines[self._start + 2 : self._end])}

    def column(self, name: str) -> dict[str, str]:
        """The cells of a column, by row."""
        at = self._columns.index(name)
        return {row: cells[at] for row, cells in self._rows.items()}

    def write(self, row: str, column: str, cell: str) -> None:
        """Put a cell into the page; a row that it lacks comes last."""
        cells = self._rows.setdefault(row, [row, *[""] * (len(self._columns) - 1)])
        cells[self._columns.index(column)] = cell
        lines = ["| " + " | ".join(cells).rstrip() + " |" for cells in self._rows.values()]
        _PAGE.write_text("\n".join([*self._lines[: self._start + 2], *lines, *self._lines[self._end :]]) + "\n")


def check_cell(head: str, row: str, column: str, found: str) -> None:
    """Fail where the page does not say what was found, or write it there."""
    if _WRITES:
        Table(head).write(row, column, found)
    assert Table(head).column(column).get(row) == found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
