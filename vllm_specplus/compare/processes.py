"""Functions in processes of their own, spoken to over a pipe."""

import os
import pkgutil
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

_SECONDS_TO_END = 5.0


class EngineFailedError(Exception):
    """An engine's process reported an error, or ended too early; one line."""


class RefusedError(Exception):
    """What the user asked for cannot be done; one line. It passes from the engine's process to this one."""


@dataclass(frozen=True)
class _Report:
    """What a process sends instead of an answer when it fails."""

    line: str
    is_refusal: bool


class EngineProcess:
    """A process that runs ``function(pipe, *args)``, with all that it prints in a log.

    The process has a session of its own. So Ctrl-C in the terminal reaches this process alone, and an end reaches
    whatever processes the engine has started.

    Args:
        function: what runs there; it has to be importable by name.
        args: its further arguments; they are pickled.
        log: gets the output of the process.
    """

    def __init__(self, function: Callable[..., None], *args: Any, log: Path):
        context = get_context("spawn")
        self._pipe, childs = context.Pipe()
        self.log = log
        self._process = context.Process(target=_run, args=(function, args, log, childs))
        self._process.start()
        # Or the pipe stays open when the process has ended.
        childs.close()

    def call(self, *message: Any) -> Any:
        """Send a message and wait for the answer.

        Raises:
            EngineFailedError: the process failed or ended.
            RefusedError: it refuses what the user asked for.
        """
        with suppress(BrokenPipeError):  # what it sent before it ended tells more
            self._pipe.send(message)
        return self.receive()

    def receive(self) -> Any:
        """Wait for a message; errors are those of `call`."""
        try:
            message = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            ended = f"the engine ended with exit code {self._process.exitcode}; its output is in {self.log}"
            raise EngineFailedError(ended) from None
        if isinstance(message, _Report):
            self._process.join()
            raise (RefusedError if message.is_refusal else EngineFailedError)(message.line)
        return message

    def end(self) -> None:
        """End the process: by itself once it has nobody to hear from, or by a signal after some seconds."""
        self._pipe.close()
        self._process.join(_SECONDS_TO_END)
        pid = self._process.pid
        assert pid
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._process.join()


def call_by_name(pipe: Connection, environment: dict[str, str], name: str, *args: Any) -> None:
    """Set variables of the environment; then run the function ``module:name``, whose module is imported by that."""
    os.environ.update(environment)
    pkgutil.resolve_name(name)(pipe, *args)


def first_line(problem: Exception) -> str:
    """The first line of an error that tells what is wrong."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if isinstance(problem, ValidationError):  # the first one only counts the errors
        found = problem.errors()[0]
        lines = [": ".join([*map(str, found["loc"]), found["msg"].splitlines()[0]])]
    return lines[0] if lines else type(problem).__name__


def _run(function: Callable[..., None], args: tuple[Any, ...], log: Path, pipe: Connection) -> None:
    os.setsid()
    with log.open("wb") as file:
        # The descriptors themselves, since libraries in C++ and vLLM's own processes print too.
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        function(pipe, *args)
    except Exception as problem:
        # Whatever an engine raises, the process that started this one has to learn of it.
        traceback.print_exc()
        is_refusal = isinstance(problem, RefusedError)
        line = first_line(problem)
        if not is_refusal:
            line = f"{type(problem).__name__}: {line}; the engine's output is in {log}"
        pipe.send(_Report(line, is_refusal))
        raise SystemExit(1) from None
