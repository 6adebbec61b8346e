"""The documents keep to short sentences (docs/contributing.md)."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_WORDS = 25
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def paragraphs(text: str) -> list[str]:
    """The running text of a Markdown document: no code, no tables, no headings; each list item by itself."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    lines = ["" if line.startswith(("#", "|")) else line for line in text.splitlines()]
    text = "\n".join(re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n", line) for line in lines)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def sentences(text: str) -> list[str]:
    """Sentences, and their parts before a colon or semicolon; code in backticks counts as one word."""
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    return [s for part in paragraphs(text) for s in re.split(r"(?<=[.!?])\**\s+|[;:]\s+", part)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_sentences_are_short(document: Path) -> None:
    long = [s for s in sentences(document.read_text()) if len(s.split()) > MOST_WORDS]
    assert not long, "\n".join(long)


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 6 << 10
