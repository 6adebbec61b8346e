"""Reads how a server of another system is started: its command line, a file of variables, or a YAML file."""

import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from vllm_specplus.config.dialects import FASTDEPLOY, PADDLENLP, RTP_LLM
from vllm_specplus.config.errors import config_error

VLLM_ASCEND = "vLLM Ascend"
_PROGRAMS = (
    ("fastdeploy", FASTDEPLOY),
    ("rtp_llm", RTP_LLM),
    ("maga_transformer", RTP_LLM),
    ("predictor.py", PADDLENLP),
    ("start_server", PADDLENLP),
    ("vllm", VLLM_ASCEND),
)
# The program of PaddleNLP's image; the model follows it.
_STARTER = "start_server"
_CONTAINERS = ("docker", "podman", "nerdctl")
_SHELLS = ("bash", "sh")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
# An option with one dash; a negative number is none.
_SHORT_OPTION = re.compile(r"-[A-Za-z]")
# What the shell reads as one piece, before words: quotations, escapes, comments, ends of lines, a stream's number.
_SHELL_PIECES = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|\\\n|\\.|(?<!\S)\#[^\n]*|\n|(?<!\S)\d(?=[<>])""",
    re.S,
)
_OPERATOR = re.compile(r"[|&;<>]+")


@dataclass
class Start:
    """How a server is started.

    system: whose server it is, where the program tells. program: its place among the words, -1 without one.
    options: names, without dashes in front but for one of an option like ``-tp``, and values; a flag without a value
    has "". words: what stands beside them. inserted_variables: those whose value has been put in where they are named.
    unread: what was left out of it, and why. has_file: whether options come from a YAML file.
    """

    system: str | None = None
    options: list[tuple[str, str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    inserted_variables: set[str] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)
    program: int = -1
    has_file: bool = False

    def join(self, other: "Start") -> "Start":
        """A file and the command that reads it; a later option of the same name counts."""
        return Start(
            self.system or other.system,
            [*self.options, *other.options],
            other.words,
            self.inserted_variables | other.inserted_variables,
            [*self.unread, *other.unread],
            other.program,
            self.has_file or other.has_file,
        )

    @property
    def arguments(self) -> list[str]:
        """The words after the program."""
        return self.words[self.program + 1 :]


def read_command(text: str) -> Start:
    """Read a command line, with the variables that are set in front of it.

    Of ``docker run ... -c 'export A=b && start_server'`` only the inner script is read. A variable that the text sets
    is put in where the text names it later. Where the text runs several programs, that of a server is read.

    Raises:
        SpecPlusConfigError: a quotation has no end.
    """
    commands = _commands(text)
    for command in commands:
        for before, token in itertools.pairwise(command):
            if re.search(r"\bexport\s", token) or (
                before.startswith("-") and " " in token.strip() and any(_name(word) in _SHELLS for word in command)
            ):
                return read_command(token)
    variables: dict[str, str] = {}
    inserted: set[str] = set()
    starts = [_read_simple(_insert_values(command, variables, inserted), variables) for command in commands]
    # Another command may name a program too, such as `pip install vllm`.
    servers = [start for start in starts if start.system] or starts
    chosen = max(servers, key=lambda start: len(start.options), default=Start())
    result = Start(chosen.system, list(variables.items()), chosen.words, inserted, program=chosen.program)
    result.options += chosen.options
    result.unread += [
        f"{start.words[start.program]} is started a second time: give each server to this command alone"
        for start in starts
        if start is not chosen and start.system and start.options
    ]
    if _STARTER in result.words[:-1]:
        result.options.append(("model_name", result.words[result.words.index(_STARTER) + 1]))
    return result


def _read_simple(tokens: Iterable[str], variables: dict[str, str]) -> Start:
    """Read one program's words; assignments are added to `variables`."""
    start = Start()
    pending: str | None = None
    is_container = False
    for token in tokens:
        is_program = start.system is None and _system(token) is not None
        is_option = token.startswith("--") or (start.program >= 0 and _SHORT_OPTION.match(token) is not None)
        if is_option:
            name, equals, value = token.removeprefix("--").partition("=")
            # What stands before the image is the container's.
            if not is_container or start.system:
                start.options.append((name, value))
                pending = None if equals else name
        elif pending is not None and not is_program:
            start.options[-1] = (pending, token)
            pending = None
        elif (found := _ASSIGNMENT.fullmatch(token)) is not None:
            variables[found[1]] = found[2]
        elif token not in ("export", "env"):
            is_container |= _name(token) in _CONTAINERS
            if is_program:
                start.system, start.program, pending = _system(token), len(start.words), None
            start.words.append(token)
    return start


def _insert_values(tokens: Iterable[str], variables: Mapping[str, str], names: set[str]) -> Iterator[str]:
    """The tokens with the values of variables, which may grow between two tokens; adds the names to `names`."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name not in variables:
            return found[0]
        names.add(name)
        return variables[name]

    for token in tokens:
        yield _VARIABLE.sub(value, token)


def _commands(text: str) -> list[list[str]]:
    """The words of each command that the shell would run, without redirections."""
    lexer = shlex.shlex(_SHELL_PIECES.sub(_plain_piece, text), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands: list[list[str]] = [[]]
    is_file = False
    try:
        for token in lexer:
            if is_file:
                is_file = False
            elif _OPERATOR.fullmatch(token) is None:
                commands[-1].append(token)
            elif set(token) & {"<", ">"}:
                is_file = True
            else:
                commands.append([])
    except ValueError as problem:
        raise config_error(f"cannot read the command: {problem}") from None
    return [command for command in commands if command]


def _plain_piece(found: re.Match[str]) -> str:
    """A piece of shell text in the form that `shlex` reads."""
    piece = found[0]
    if piece == "\n":
        return " ; "
    return " " if piece == "\\\n" or piece[0] == "#" or piece.isdigit() else piece


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def _system(word: str) -> str | None:
    """The system whose server a word starts."""
    for program, system in _PROGRAMS:
        if program in _name(word) or word.startswith(f"{program}."):
            return system
    return None


def read_environment(text: str) -> Start:
    """Read lines of ``NAME=value``, with or without ``export``; a ``#`` begins a comment."""
    return Start(options=list(_assignments(text)))


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    for command in _commands(text):
        for token in command:
            if (found := _ASSIGNMENT.fullmatch(token)) is not None:
                yield found[1], found[2]


def read_yaml(text: str) -> Start:
    """Read a YAML file of options.

    Raises:
        SpecPlusConfigError: it is no YAML, or no mapping.
    """
    import yaml  # type: ignore[import-untyped]  # vLLM brings it

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise config_error(f"malformed YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(content, dict):
        raise config_error("expected a YAML mapping of options")
    return Start(options=[(str(name), _as_text(value)) for name, value in content.items()], has_file=True)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
