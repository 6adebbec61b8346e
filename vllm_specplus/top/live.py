"""The command ``vllm-specplus top``: one page, or a page that is drawn anew until Ctrl-C."""

import sys
import time
from typing import NoReturn

from rich.console import Console
from rich.live import Live

from vllm_specplus.top.page import page
from vllm_specplus.top.sample import Sample
from vllm_specplus.top.server import NoSampleError, Server

_INTERRUPTED = 130
_WIDTH = 80  # where the output is no terminal


def run(url: str, api_key: str, *, interval: float, once: bool) -> int:
    """Run the command.

    Returns:
        0 with `once`; 2 if the server gave no counts at first, or the output is no terminal; 130 after Ctrl-C.
    """
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    try:
        if not once and (not console.is_terminal or console.is_dumb_terminal):
            raise NoSampleError("the output is no terminal that a page can be drawn on: use --once")
        server = Server(url, api_key)
        total = server.sample()
        if not once:
            _watch(console, server, total, interval)
        console.print(page(url, total, None))
        return 0
    except NoSampleError as problem:
        print(problem, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


def _watch(console: Console, server: Server, total: Sample, interval: float) -> NoReturn:
    """Draw the page until Ctrl-C, and leave the last one on the screen."""
    last, shown = None, page(server.url, total, None)
    try:
        with Live(shown, console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    newest = server.sample()
                    total, last = newest, newest.since(total)
                    shown = page(server.url, total, last)
                except NoSampleError as problem:
                    shown = page(server.url, total, last, str(problem))
                live.update(shown, refresh=True)
    finally:
        console.print(shown)
