"""What the command shows while it measures, and where it prints its tables."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

INTERRUPTED = 130
"""The exit status after Ctrl-C."""
Advance = Callable[[str], None]
"""Is told what is done next."""
_WIDTH = 120  # where the output is no terminal


class NothingMeasuredInterrupt(KeyboardInterrupt):
    """Ctrl-C before the end of the first run: there is nothing to write."""


def table_console() -> Console:
    """A console as wide as a table where stdout is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH)


@contextmanager
def progress(total: int) -> Iterator[Advance]:
    """Show how far the command is: a bar, or where there is no terminal a line for each of `total` parts."""
    console = Console(stderr=True)
    columns = BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False)
    # A part may take minutes; by default rich forgets after half a minute how long the last ones took.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=math.inf
    ) as bar:
        task = bar.add_task("", total=total)
        is_first = True

        def advance(next_step: str) -> None:
            nonlocal is_first
            bar.update(task, advance=0 if is_first else 1, description=next_step)
            is_first = False
            if not console.is_terminal:
                print(next_step, file=sys.stderr)

        yield advance
