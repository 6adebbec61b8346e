"""Splits shell text into commands and words, and quotes words for the shell.

A ``$`` or backquote that the shell takes as it stands (``'$x'``, ``\\$x``) is a character of its own inside a word.
So variables are put in only where the shell would put them in, and words are printed as they were meant.
"""

import re
import shlex

from vllm_specplus.config.errors import SpecPlusConfigError, show

# Characters for private use, which no command holds.
_LITERAL = str.maketrans("$`", "\ue000\ue001")
_PLAIN = str.maketrans("\ue000\ue001\ue002", "$`$")
UNQUOTED = "\ue002"
"""A ``$`` outside quotes: the shell splits the value of the variable into words."""
# The output of a command, without a third level of parentheses.
_OUTPUT = r"\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`"
_PIECE = re.compile(
    rf"""
    '(?P<single>[^']*)'
    |"(?P<double>(?:\\.|{_OUTPUT}|[^"\\])*)"
    |(?P<output>{_OUTPUT})
    |(?P<space>(?:\\\n|[^\S\n])+)
    |\\(?P<escaped>.)
    |(?<![^\s;&|()])(?P<comment>\#[^\n]*)
    |(?<!\S)(?P<file>\d*[<>]+&?\s*|&>+\s*)
    |(?P<redirection>[<>]+&?\s*)
    |(?P<end>[|&;\n()]+)
    |(?P<text>[^\s'"\\|&;()<>$`]+|\$(?!['"]))
    """,
    re.S | re.X,
)
_VARIABLE = r"([A-Za-z_]\w*)"
VARIABLE = re.compile(rf"[$\ue002](?:{_VARIABLE}|\{{{_VARIABLE}(?::?-[^{{}}]*)?\}})")
"""A variable that the shell puts in; its name is group 1 or 2."""
_WORKED_OUT = re.compile(rf"[$\ue002](?![A-Za-z_{{])|`|[$\ue002]\{{(?!{_VARIABLE}(?::?-[^{{}}]*)?\}})")


def split_commands(text: str) -> list[list[str]]:
    """The words of each command that the shell would run, without redirections and comments.

    Raises:
        SpecPlusConfigError: a quotation has no end, or is one of bash's alone (``$'x'``).
    """
    commands: list[list[str]] = [[]]
    word: str | None = None
    is_file = False
    place = 0
    text = text.replace("\r\n", "\n")
    while place < len(text):
        found = _PIECE.match(text, place)
        if found is None:
            raise SpecPlusConfigError(f"cannot read the command from {show(text[place:])} on")
        place = found.end()
        kind = found.lastgroup or ""
        if kind in ("space", "comment", "file", "redirection", "end"):
            if word is not None and not is_file:
                commands[-1].append(word)
            is_file = kind in ("file", "redirection") or (is_file and word is None)
            word = None
            if kind == "end":
                commands.append([])
        else:
            word = (word or "") + _as_word(kind, found[kind])
    if word is not None and not is_file:
        commands[-1].append(word)
    return [command for command in commands if command]


def _as_word(kind: str, piece: str) -> str:
    """A piece of a word without its quotation."""
    if kind in ("single", "escaped"):
        return literal(piece)
    if kind == "double":
        return re.sub(r'\\([\\"$`\n])|\$$', lambda found: literal((found[1] or "$").strip("\n")), piece)
    return UNQUOTED if piece == "$" else piece


def literal(text: str) -> str:
    """A word in which the shell puts in nothing."""
    return text.translate(_LITERAL)


def plain(word: str) -> str:
    """A word as a reader sees it."""
    return word.translate(_PLAIN)


def variables_in(word: str) -> list[str]:
    """The names of the variables that the shell puts into a word."""
    return [found[1] or found[2] for found in VARIABLE.finditer(word)]


def is_worked_out(word: str) -> bool:
    """Whether a part of a word is more than a variable: the output of a command, a script's argument."""
    return _WORKED_OUT.search(word) is not None


def quoted(word: str) -> str:
    """A word for the shell, which puts in the values of variables where it did before."""
    if not {"$", "`", UNQUOTED} & set(word):
        return shlex.quote(plain(word))
    return '"' + plain(re.sub(r'(["\\\ue000\ue001])', r"\\\1", word)) + '"'
