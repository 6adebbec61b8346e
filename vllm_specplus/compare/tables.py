"""The tables that the command prints."""

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_specplus.compare.sheets import Sheet, drafts, problems, speeds, times


def print_tables(console: Console, data: dict[str, Any]) -> None:
    """Print the tables of speeds, of drafts and of times, then what went wrong, then the recommendation."""
    for sheet in (speeds(data), drafts(data), times(data)):
        if sheet.rows:
            console.print(_table(sheet))
    for line in problems(data):
        console.print(line, style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print(data["recommendation"], highlight=False, markup=False, soft_wrap=True)


def _table(sheet: Sheet) -> Table:
    table = Table(title=sheet.title, box=SIMPLE)
    for column in sheet.columns:
        if column.is_number:
            table.add_column(escape(column.name), justify="right")
        else:
            # A name that is cut off could be another one's.
            table.add_column(escape(column.name), overflow="fold")
    for row in sheet.rows:
        table.add_row(*map(escape, row.cells), style="bold" if row.is_best else None, end_section=row.ends_group)
    return table
