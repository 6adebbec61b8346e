"""The options of the command ``vllm-specplus compare``."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from vllm_specplus.compare.workloads import WORKLOADS

_ENGINE_ARGS = "--engine-args"


def with_engine_args_joined(argv: Sequence[str]) -> list[str]:
    """The words with ``--engine-args`` and its value as one: argparse takes a value such as ``--enforce-eager`` for an
    option of its own."""
    words = list(argv)
    if words[:1] == ["compare"] and _ENGINE_ARGS in words[:-1]:
        place = words.index(_ENGINE_ARGS)
        words[place : place + 2] = [f"{_ENGINE_ARGS}={words[place + 1]}"]
    return words


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument("--model", required=True, help="a folder or a repository's name, as for `vllm serve`")
    command.add_argument(
        "--serve", action="append", metavar="URL", help="measure a running server of the model instead; repeat it"
    )
    command.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="of the servers; default $OPENAI_API_KEY"
    )
    prompts = command.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompts", type=Path, metavar="FILE", help="a .jsonl file, or a .txt file with a prompt a line"
    )
    prompts.add_argument("--workload", choices=list(WORKLOADS), help="prompts that the command brings")
    command.add_argument(
        "--config", action="append", default=[], metavar="JSON", help="a speculative config; repeat it"
    )
    command.add_argument(
        "--baseline", default="none", metavar="JSON", help="what the others are compared with; default none"
    )
    command.add_argument(
        "--concurrency", type=whole_numbers, default=[1], metavar="N,...", help="requests at once; default 1"
    )
    command.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="of an answer; default 128")
    command.add_argument("--temperature", type=number_from_0, default=0.0, metavar="T", help="default 0")
    command.add_argument(
        "--repeat", type=positive, default=6, metavar="R", help="runs of each configuration; default 6"
    )
    command.add_argument(_ENGINE_ARGS, type=_words, default=[], metavar="'...'", help="options of `vllm serve`")
    command.add_argument(
        "--one-at-a-time", action="store_true", help="start engines anew for each run: the model fits into memory once"
    )
    command.add_argument("--out", type=_folder, required=True, metavar="DIR", help="gets the results")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    # The other commands go without what this one needs.
    from vllm_specplus.compare.comparison import run

    return run(arguments)


def positive(text: str) -> int:
    """The whole number in `text`; for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("a folder needs a name")
    return Path(text)


def whole_numbers(text: str) -> list[int]:
    """The different whole numbers in `text`, with commas between; for argparse."""
    return [*dict.fromkeys(positive(part) for part in text.split(","))]


def number_from_0(text: str) -> float:
    """The finite number in `text`; for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return number


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is not a command line: {problem}") from None
