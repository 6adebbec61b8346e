"""Reads how a server of another system is started: its command line, a file of variables, or a YAML file."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_specplus.config.dialects import FASTDEPLOY, PADDLENLP, RTP_LLM
from vllm_specplus.config.errors import SpecPlusConfigError
from vllm_specplus.migrate.shell import (
    UNQUOTED,
    VARIABLE,
    is_worked_out,
    literal,
    plain,
    split_commands,
    variables_in,
)

VLLM_ASCEND = "vLLM Ascend"
STARTER = "start_server"
"""The program of PaddleNLP's image; the model follows it."""
_SERVE = "serve"
# The names of programs whose next word is `serve`, of modules after `-m`, of files, and of images with a server.
_COMMANDS = {"vllm": VLLM_ASCEND, "fastdeploy": FASTDEPLOY}
_MODULES = {
    "vllm": VLLM_ASCEND,
    "fastdeploy": FASTDEPLOY,
    "rtp_llm": RTP_LLM,
    "maga_transformer": RTP_LLM,
}
_FILES = {"predictor.py": PADDLENLP, STARTER: PADDLENLP}
_IMAGE = re.compile(r"(?:.*/)?vllm-(?:openai|ascend)[\w-]*(?:[:@].*)?")
# PaddleNLP's launcher, whose own options tell the machines and the GPUs.
_LAUNCHER = "paddle.distributed.launch"
_CONTAINERS = ("docker", "podman", "nerdctl")
_SHELLS = ("bash", "sh", "zsh", "dash")
_EXPORTS = ("export", "env", "declare", "-x")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
# An option with one dash; a negative number is none.
_SHORT_OPTION = re.compile(r"-[A-Za-z]")
_JOINED_VARIABLE = re.compile(r"-e[A-Z_]")
_SCRIPT_OPTION = re.compile(r"-[a-z]*c[a-z]*")
_LINE = re.compile(r"""(?:export\s+)?([A-Za-z_]\w*)=(?:'([^']*)'|"([^"]*)"|((?:(?!\s\w+=).)*?))(?:\s+\#.*)?""")


@dataclass
class Start:
    """How a server is started.

    system: whose server it is, where the program tells. program: the word that names it, "" without one.
    variables: of the environment. options: names, without dashes in front but for one of an option like ``-tp``, and
    the words up to the next option. words: what stands before the first option.
    inserted_variables: those whose value has been put in where they are named.
    unread: what was left out of it, and why. notes: what was left out and does not matter.
    has_file: whether options come from a YAML file. variable_files: those that a container reads.
    has_variable_file: whether variables come from a file.
    """

    system: str | None = None
    program: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    options: list[tuple[str, list[str]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    inserted_variables: set[str] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    has_file: bool = False
    variable_files: list[str] = field(default_factory=list)
    has_variable_file: bool = False

    def join(self, other: "Start") -> "Start":
        """A file and the command that reads it; a later option of the same name counts."""
        return Start(
            other.system,
            other.program,
            self.variables | other.variables,
            [*self.options, *other.options],
            other.words,
            self.inserted_variables | other.inserted_variables,
            [*self.unread, *other.unread],
            [*self.notes, *other.notes],
            self.has_file or other.has_file,
            other.variable_files,
            self.has_variable_file or other.has_variable_file,
        )


@dataclass
class _Variables:
    """What a text sets, in its order; inserted: those that it names later; files: of further ones.

    torn_off: the options that begin a command, since the one before ended too early.
    """

    values: dict[str, str] = field(default_factory=dict)
    inserted: set[str] = field(default_factory=set)
    files: list[str] = field(default_factory=list)
    torn_off: list[str] = field(default_factory=list)


def read_command(text: str) -> Start:
    """Read a command line, with the variables that are set in front of it.

    Of ``docker run ... bash -c 'export A=b && start_server'`` the inner script is read too. A variable that the text
    sets is put in where the text names it later. Where the text runs several programs, that of a server is read.

    Raises:
        SpecPlusConfigError: a quotation cannot be read.
    """
    variables = _Variables()
    starts = list(_starts(text, variables))
    servers = [start for start in starts if start.system] or starts
    result = max(servers, key=lambda start: len(start.options), default=Start())
    result.variables, result.inserted_variables = variables.values, variables.inserted
    result.variable_files = variables.files
    result.unread += [
        f"{plain(word)} begins a command: a backslash is missing at the end of the line before"
        for word in variables.torn_off
    ]
    result.unread += [
        f"{start.program} is started a second time: give each server to this command alone"
        for start in starts
        if start is not result and start.system
    ]
    return result


def _starts(text: str, variables: _Variables) -> Iterator[Start]:
    """The programs that a text runs; what it sets is added to `variables`."""
    for command in split_commands(text):
        words = list(_insert_values(command, variables))
        script = _script(words)
        program = _program(words)
        is_script = script >= 0 and (program < 0 or script <= program)
        _add_variables(words, script if is_script else program, variables)
        if is_script:
            yield from _starts(plain(words[script]), variables)
        elif program >= 0:
            yield _read_server(words, program)
        elif not _is_container(words):
            words = list(itertools.dropwhile(_is_setting, words))
            variables.torn_off += [word for word in words[:1] if word.startswith("-")]
            yield _read_options(Start(), words[1:])


def _insert_values(words: Sequence[str], variables: _Variables) -> Iterator[str]:
    """The words with the values of variables, which grow between two words."""
    values = dict(variables.values)
    for word in words:
        variables.inserted |= values.keys() & set(variables_in(word))
        inserted = _inserted(word, values)
        yield from inserted.split() if word.startswith(UNQUOTED) and inserted != word else (inserted,)
        if (found := _ASSIGNMENT.fullmatch(inserted)) is not None:
            values[found[1]] = found[2]


def _inserted(word: str, values: Mapping[str, str]) -> str:
    return VARIABLE.sub(lambda found: values.get(found[1] or found[2], found[0]), word)


def _add_variables(words: Sequence[str], program: int, variables: _Variables) -> None:
    """Add the variables that a command sets; `program`: the place of what it runs, -1 if that is unknown."""
    before = words[:program] if program >= 0 else words
    settings: Iterable[str] = before
    if _is_container(before):
        settings = _container_variables(before, variables)
    elif program < 0:
        settings = itertools.takewhile(_is_setting, words)
    for word in settings:
        found = _ASSIGNMENT.fullmatch(word)
        # A container's `-e A=$A` hands a variable on.
        if found is not None and plain(found[2]) not in (f"${found[1]}", f"${{{found[1]}}}"):
            variables.values[found[1]] = found[2]


def _container_variables(words: Sequence[str], variables: _Variables) -> Iterator[str]:
    for option, after in itertools.pairwise([*words, ""]):
        name, equals, value = option.partition("=")
        value = value if equals else after
        if name in ("-e", "--env"):
            yield value
        elif _JOINED_VARIABLE.match(name):
            yield option.removeprefix("-e")
        elif name == "--env-file":
            variables.files.append(value)


def _is_setting(word: str) -> bool:
    return word in _EXPORTS or _ASSIGNMENT.fullmatch(word) is not None


def _is_container(words: Sequence[str]) -> bool:
    return any(_name(word) in _CONTAINERS for word in words)


def _script(words: Sequence[str]) -> int:
    """The place of the script in ``bash -c 'script'``; -1 without one."""
    shells = [place for place, word in enumerate(words) if _name(word) in _SHELLS]
    for place in range(shells[-1] if shells else len(words), len(words)):
        if _SCRIPT_OPTION.fullmatch(words[place]):
            return next((i for i in range(place, len(words)) if not words[i].startswith("-")), -1)
    return -1


def _program(words: Sequence[str]) -> int:
    """The place of the word that names a server; -1 without one."""
    found = [place for place in range(len(words)) if _system(words, place)]
    # A word after another option than `-m` is more likely its value, and a name may be an image's.
    found.sort(key=lambda place: (words[place - 1] != "-m", place > 0 and _is_open_option(words[place - 1])))
    images = [i for i, word in enumerate(words) if _IMAGE.fullmatch(word) and _is_container(words[:i])]
    return next(iter((*found, *images)), -1)


def _is_open_option(word: str) -> bool:
    return word.startswith("-") and "=" not in word


def _system(words: Sequence[str], place: int) -> str | None:
    """The system whose server the word at a place starts."""
    word = words[place]
    if place > 0 and words[place - 1] == "-m":
        return _MODULES.get(word.partition(".")[0])
    if words[place + 1 : place + 2] == [_SERVE] and _name(word) in _COMMANDS:
        return _COMMANDS[_name(word)]
    if word.endswith(".py"):
        folders = [system for folder, system in _MODULES.items() if folder in word.split("/")[:-1]]
        return _FILES.get(_name(word)) or next(iter(folders), None)
    return _FILES.get(_name(word))


def _read_server(words: Sequence[str], program: int) -> Start:
    """Read one server's words."""
    start = Start(_system(words, program) or VLLM_ASCEND, plain(words[program]))
    before = words[:program]
    launcher = before.index(_LAUNCHER) + 1 if _LAUNCHER in before else program
    # What stands before a container's image is the container's.
    wrapper = [word for word in before[:launcher] if not _is_setting(word)]
    if not _is_container(before) and any(word[:1] == "-" and word not in ("-m", "-u") for word in wrapper):
        start.notes.append(f"{plain(' '.join(wrapper))}: stands before the server, so it was not read")
    _read_options(start, before[launcher:])
    own = words[program + 1 :]
    return _read_options(start, own[1:] if own[:1] == [_SERVE] else own)


def _read_options(start: Start, words: Sequence[str]) -> Start:
    """Add options, each with the words up to the next one."""
    values = start.words
    for word in words:
        if is_worked_out(word):
            start.unread.append(f"{plain(word)}: the shell works it out, so put in by hand what it gives")
        if word.startswith("--") or _SHORT_OPTION.match(word):
            name, equals, value = word.removeprefix("--").partition("=")
            values = [value] if equals else []
            start.options.append((name, values))
        else:
            values.append(word)
    return start


def _name(word: str) -> str:
    return word.rpartition("/")[2]


def read_environment(text: str) -> Start:
    """Read lines of ``NAME=value``, with or without quotation and ``export``; a ``#`` begins a comment."""
    start = Start(has_variable_file=True)
    for line in text.splitlines():
        line = line.strip()
        found = _LINE.fullmatch(line)
        if found is not None:
            name, single, double, bare = found.groups()
            value = literal(single) if single is not None else double if double is not None else bare
            start.variables[name] = _inserted(value, start.variables)
        elif line and not line.startswith("#"):
            start.unread.append(f"{line}: is no line of NAME=value")
    return start


def read_yaml(text: str) -> Start:
    """Read a YAML file of options; a null is none.

    Raises:
        SpecPlusConfigError: it is no YAML, no mapping, or has values that no option has.
    """
    import yaml  # type: ignore[import-untyped]  # vLLM brings it

    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise SpecPlusConfigError(f"malformed YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(content, dict):
        raise SpecPlusConfigError("expected a YAML mapping of options")
    values = {str(name): value if isinstance(value, list) else [value] for name, value in content.items()}
    options = [
        (name, [literal(_as_text(name, one)) for one in value])
        for name, value in values.items()
        if value and value != [None]
    ]
    return Start(options=options, has_file=True)


def _as_text(name: str, value: object) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        raise SpecPlusConfigError(f"malformed YAML: {name} is neither text, number, list nor mapping") from None
