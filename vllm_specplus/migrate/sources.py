"""Reads how a server of another system is started: its command line, a file of variables, or a YAML file."""

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
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.S)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_SEPARATORS = ("&&", ";", "&", "||", "export", "env")


@dataclass
class Start:
    """How a server is started.

    system: whose server it is, where the program tells. options: names, without leading dashes, and values; a flag
    without a value has "". words: what stands beside them. inserted_variables: those whose value has been put in
    where they are named.
    """

    system: str | None = None
    options: list[tuple[str, str]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    inserted_variables: set[str] = field(default_factory=set)

    def join(self, other: "Start") -> "Start":
        """Both together; a later option of the same name counts."""
        return Start(
            self.system or other.system,
            [*self.options, *other.options],
            [*self.words, *other.words],
            self.inserted_variables | other.inserted_variables,
        )


def read_command(text: str) -> Start:
    """Read a command line, with the variables that are set in front of it.

    Of ``docker run ... -c 'export A=b && start_server'`` only the inner script is read. A variable that the text sets
    is put in where the text names it later.

    Raises:
        SpecPlusConfigError: a quotation has no end.
    """
    tokens = _split(text)
    scripts = [token for token in tokens if re.search(r"\bexport\s", token)]
    if scripts:
        return read_command(scripts[0])
    start = Start()
    pending: str | None = None
    variables: dict[str, str] = {}
    for token in _insert_values(tokens, variables, start.inserted_variables):
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            start.options.append((name, value))
            pending = None if equals else name
        elif pending is not None and token not in _SEPARATORS:
            start.options[-1] = (pending, token)
            pending = None
        elif (found := _ASSIGNMENT.fullmatch(token)) is not None:
            start.options.append((found[1], found[2]))
            variables[found[1]] = found[2]
        elif token not in _SEPARATORS:
            start.words.append(token)
    start.system = _system(start.words)
    if _STARTER in start.words[:-1]:
        start.options.append(("model_name", start.words[start.words.index(_STARTER) + 1]))
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


def _split(text: str) -> list[str]:
    try:
        return [token.rstrip(";") or ";" for token in shlex.split(text.replace("\\\n", " "), comments=True)]
    except ValueError as problem:
        raise config_error(f"cannot read the command: {problem}") from None


def _system(words: Iterable[str]) -> str | None:
    for word in words:
        for program, system in _PROGRAMS:
            if program in word.rpartition("/")[2] or word.startswith(f"{program}."):
                return system
    return None


def read_environment(text: str) -> Start:
    """Read lines of ``NAME=value``, with or without ``export``; a ``#`` begins a comment."""
    return Start(None, list(_assignments(text)))


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    for line in text.replace("\\\n", " ").splitlines():
        for token in _split(line):
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
    return Start(None, [(str(name), _as_text(value)) for name, value in content.items()])


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
