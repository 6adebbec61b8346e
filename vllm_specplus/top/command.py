"""The options of the command ``vllm-specplus top``."""

import argparse
import os

_KEY_VARIABLE = "OPENAI_API_KEY"  # as vLLM's own clients read it
_SHORTEST, _LONGEST = 0.1, 3600.0


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument("url", metavar="URL", help="of the server, such as http://localhost:8000")
    command.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="SECONDS", help="between two looks at it; default 2"
    )
    command.add_argument("--once", action="store_true", help="print the counts since its start, and end")
    command.add_argument(
        "--api-key",
        default=os.environ.get(_KEY_VARIABLE, ""),
        metavar="KEY",
        help=f"the server's key; default: the variable {_KEY_VARIABLE}",
    )
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    # The other commands go without what this one needs.
    from vllm_specplus.top.live import run

    return run(arguments.url, arguments.api_key, interval=arguments.interval, once=arguments.once)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not _SHORTEST <= number <= _LONGEST:
        raise argparse.ArgumentTypeError(f"{text} is not a number from {_SHORTEST:g} to {_LONGEST:g}")
    return number
