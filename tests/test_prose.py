"""Documents, docstrings, comments and messages keep to short sentences (docs/contributing.md)."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_WORDS = 25
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MODULES = sorted(
    path
    for folder in ("vllm_specplus", "benchmarks", "ci", "examples", "tests")
    for path in ROOT.glob(f"{folder}/**/*.py")
)

SCRIPTS = sorted([*ROOT.glob("ci/**/*.sh"), *ROOT.glob("examples/**/*.sh"), ROOT / "pyproject.toml"])


def paragraphs(text: str) -> list[str]:
    """The running text of a Markdown document: no code, no tables, no headings; each list item by itself."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    lines = ["" if line.startswith(("#", "|")) else line for line in text.splitlines()]
    text = "\n".join(re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n", line) for line in lines)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def sentences(text: str) -> list[str]:
    """Sentences, and their parts before a colon or semicolon; code in backticks counts as one word."""
    text = re.sub(r"(`+)[^`]*\1", "code", re.sub(r"\]\([^)]*\)", "]", text))
    return [s for part in paragraphs(text) for s in re.split(r"(?<=[.!?])\**\s+|[;:]\s+", part)]


def long_sentences(text: str) -> list[str]:
    return [s for s in sentences(text) if len(s.split()) > MOST_WORDS]


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Strings that stand as statements: each argument by itself, without tables and code."""
    for node in ast.walk(tree):
        if is_docstring(node):
            lines = ast.literal_eval(node.value).splitlines()
            # A table or code has wide gaps, or stands further in than the text before it.
            text = ["" if re.search(r"\S {2,}\S|^\s*=+ =+|^ {4,}(python|bash) ", line) else line for line in lines]
            yield "\n".join(re.sub(r"^(\s+)(\w[\w, *]*: )", r"\n\1\2", line) for line in text)


def comments(source: str) -> Iterator[str]:
    """Comments: those of whole lines joined with their neighbours, each at a line's end by itself."""
    tokens = [
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT
    ]
    whole = [token for token in tokens if not token.line[: token.start[1]].strip()]
    yield from (token.string.removeprefix("#") for token in tokens if token not in whole)
    for _, block in groupby(enumerate(whole), key=lambda item: item[1].start[0] - item[0]):
        yield "\n".join(token.string.removeprefix("#") for _, token in block)


def script_comments(source: str) -> Iterator[str]:
    """Comments of a shell script that are whole lines, joined with their neighbours; without tables."""
    lines = source.splitlines()
    for is_comment, block in groupby(lines, key=lambda line: bool(re.match(r"\s*#(?!!)", line))):
        if is_comment:
            text = [line.partition("#")[2] for line in block]
            yield "\n".join("" if re.search(r"\S {2,}\S", line) else line for line in text)


def messages(tree: ast.Module) -> Iterator[str]:
    """Strings with a placeholder for each value that is put in."""
    skipped = {id(node.value) for node in ast.walk(tree) if is_docstring(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_sentences_of_documents_are_short(document: Path) -> None:
    long = long_sentences(document.read_text())
    assert not long, "\n".join(long)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_of_code_are_short(module: Path) -> None:
    source = module.read_text()
    tree = ast.parse(source)
    texts = [*docstrings(tree), *comments(source)]
    if module.is_relative_to(ROOT / "vllm_specplus"):
        texts += messages(tree)
    long = [s for text in texts for s in long_sentences(text)]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_of_scripts_are_short(script: Path) -> None:
    long = [s for text in script_comments(script.read_text()) for s in long_sentences(text)]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("place", ['"""{}"""', "x = 1  # {}", "# {}", 'x = "{}"', 'x = f"{} {{y}}"'])
@pytest.mark.parametrize(("text", "is_long"), [("word " * 26, True), ("word " * 25, False), ("Word. " * 26, False)])
def test_long_sentences_are_found_in_every_place(place: str, text: str, is_long: bool) -> None:
    source = place.format(text.strip().removesuffix(" word") if "{{y}}" in place else text)
    tree = ast.parse(source)
    found = [s for part in (*docstrings(tree), *comments(source), *messages(tree)) for s in long_sentences(part)]
    assert bool(found) == is_long


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 6 << 10
