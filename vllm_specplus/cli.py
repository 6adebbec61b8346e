"""The command ``vllm-specplus``: checks a config, migrates a server's start, compares configs, or watches a server."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from vllm_specplus.compare.command import add_arguments as add_compare_arguments
from vllm_specplus.compare.command import with_engine_args_joined
from vllm_specplus.config import SpecPlusConfigError, parse_json, resolve
from vllm_specplus.config.explain import explain
from vllm_specplus.migrate import SYSTEMS, migrate, read_command, read_environment, read_yaml
from vllm_specplus.top.command import add_arguments as add_top_arguments
from vllm_specplus.version import __version__

_NOT_CHECKED = (
    "Not checked: whether the checkpoints are there and suit each other, the method and the quantization; "
    "whether a head's checkpoint states num_speculative_tokens; the platform; the engine's other options."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's own; return the exit status."""
    arguments = _parser().parse_args(with_engine_args_joined(sys.argv[1:] if argv is None else argv))
    return arguments.run(arguments)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="vllm-specplus",
        description="Further speculative decoding for vLLM: tools beside the engine.",
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
    _add_migrate(commands)
    add_compare_arguments(
        commands.add_parser(
            "compare",
            help="measure speculative configs on your own prompts, and say which one to use",
            description="Run each configuration in an engine of its own, in turns and repeatedly. Print tokens/s, "
            "accepted drafts and where the time goes; write the same to a folder. See docs/compare.md.",
        )
    )
    add_top_arguments(
        commands.add_parser(
            "top",
            help="show what a running server drafts, in a page that is drawn anew every few seconds",
            description="Show tokens per step, accepted and wasted drafts, requests and faults of a running server, in "
            "the last interval and since its start, until Ctrl-C. See docs/requests.md.",
        )
    )
    return parser


def _add_migrate(commands: Any) -> None:
    command = commands.add_parser(
        "migrate",
        help="turn another system's start of a server into a `vllm serve` command",
        description="Print the `vllm serve` command that does what a server of FastDeploy, PaddleNLP, RTP-LLM or vLLM "
        "Ascend did. Stderr tells what became of each option. Exit 2 where one that matters has no counterpart. "
        "Nothing is run, and no variable of this process is read.",
    )
    command.add_argument(
        "--from",
        dest="system",
        type=_system_name,
        choices=SYSTEMS,
        help="whose server it is, where nothing else tells; in any case, also as a dialect",
    )
    command.add_argument("--env", type=Path, metavar="FILE", help="a file of NAME=value lines")
    command.add_argument("--yaml", type=Path, metavar="FILE", help="a YAML file of options")
    command.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command, or -- COMMAND")
    command.set_defaults(run=_migrate)


def _system_name(text: str) -> str:
    """The system's name as the project spells it; any other text as it is."""
    spelling = re.sub("[^a-z]", "", text.lower())
    systems = {re.sub("[^a-z]", "", name.lower()): name for name in SYSTEMS}
    return systems.get(spelling) or systems.get(f"vllm{spelling}", text)


def _migrate(arguments: argparse.Namespace) -> int:
    words: list[str] = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    try:
        # One word is a whole command line in quotes.
        start = read_command(words[0] if len(words) == 1 else shlex.join(words))
        for path, read in ((arguments.env, read_environment), (arguments.yaml, read_yaml)):
            if path is not None:
                # A command line outranks a file.
                start = read(path.read_text(encoding="utf-8-sig")).join(start)
        result = migrate(start, arguments.system)
    except OSError as problem:
        return _fail(f"cannot read {problem.filename}: {problem.strerror or problem}")
    except (SpecPlusConfigError, UnicodeDecodeError) as problem:
        return _fail(str(problem))
    print(result.command)
    for line in result.lines:
        print(f"note: {line}", file=sys.stderr)
    for line in result.missing:
        print(f"missing: {line}", file=sys.stderr)
    return 2 if result.missing else 0


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
