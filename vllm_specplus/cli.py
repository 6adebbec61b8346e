"""The command ``vllm-specplus``: checks a speculative config without an engine."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_specplus.config import SpecPlusConfigError, parse_json, resolve
from vllm_specplus.config.explain import explain
from vllm_specplus.version import __version__

_NOT_CHECKED = (
    "Not checked: whether the checkpoints are there and suit each other, the method and the quantization; "
    "whether a head's checkpoint states num_speculative_tokens; the platform; the engine's other options."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's own; return the exit status."""
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
        description="Print what a speculative config resolves to, as JSON, and exit 0; or print the error that the "
        f"engine would give, and exit 2. Notes and warnings go to stderr. {_NOT_CHECKED}",
    )
    source = check.add_mutually_exclusive_group(required=True)
    source.add_argument("config", nargs="?", metavar="JSON", help="the config as JSON text")
    source.add_argument("--file", type=Path, metavar="FILE", help="a file that holds the config")
    check.add_argument(
        "--explain", action="store_true", help="print what each key does in this config, a line each, and no JSON"
    )
    check.set_defaults(run=_check)
    return parser


def _check(arguments: argparse.Namespace) -> int:
    text = arguments.config
    if arguments.file is not None:
        try:
            # Some editors write a byte order mark, which is no part of the JSON.
            text = arguments.file.read_text(encoding="utf-8-sig")
        except OSError as problem:
            return _fail(f"cannot read {arguments.file}: {problem.strerror or problem}")
        except UnicodeDecodeError:
            return _fail(f"cannot read {arguments.file}: it is not UTF-8 text")
    try:
        config = parse_json(text)
        resolved = resolve(config, strict=True)
    except SpecPlusConfigError as problem:
        return _fail(str(problem))
    for line in resolved.notes:
        print(f"note: {line}", file=sys.stderr)
    for line in resolved.warnings:
        print(f"warning: {line}", file=sys.stderr)
    if arguments.explain:
        print(*explain(config, resolved), _NOT_CHECKED, sep="\n")
    else:
        print(resolved.as_json(indent=2))
    return 0


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 2
