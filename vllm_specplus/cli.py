"""The command ``vllm-specplus``: look at a speculative config without starting an engine."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_specplus.config import SpecPlusConfigError, parse_json, resolve
from vllm_specplus.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's own); returns the exit status."""
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-specplus",
        description="Further speculative decoding for vLLM: tools that need no engine.",
    )
    parser.add_argument("--version", action="version", version=f"vllm-specplus {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="print what a speculative config resolves to, or why it is refused",
        description="Print what a speculative config resolves to, as JSON, and exit 0; or print "
        "the error that the engine would give and exit 2. Notes and warnings go to stderr.",
    )
    source = check.add_mutually_exclusive_group(required=True)
    source.add_argument("config", nargs="?", metavar="JSON", help="the config, as JSON text")
    source.add_argument("--file", type=Path, metavar="FILE", help="a file that holds the config")
    check.set_defaults(run=_check)
    return parser


def _check(arguments: argparse.Namespace) -> int:
    text = arguments.config
    if arguments.file is not None:
        try:
            # A byte order mark, as some editors write, is no part of the JSON.
            text = arguments.file.read_text(encoding="utf-8-sig")
        except OSError as problem:
            return _fail(f"cannot read {arguments.file}: {problem.strerror or problem}")
        except UnicodeDecodeError:
            return _fail(f"cannot read {arguments.file}: it is not UTF-8 text")
    try:
        resolved = resolve(parse_json(text), strict=True)
    except SpecPlusConfigError as problem:
        return _fail(str(problem))
    for line in resolved.notes:
        print(f"note: {line}", file=sys.stderr)
    for line in resolved.warnings:
        print(f"warning: {line}", file=sys.stderr)
    print(resolved.as_json(indent=2))
    return 0


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 2
