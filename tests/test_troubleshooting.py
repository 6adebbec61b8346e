"""docs/troubleshooting.md quotes messages that exist, and has each warning and error of the log."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
LEVELS = {"warning", "warning_once", "error"}


def sources() -> Iterator[ast.Module]:
    for folder in ("vllm_specplus", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            yield ast.parse(path.read_text())


def text_of(node: ast.AST) -> str:
    """A constant's text, also of an f-string, whose values become one blank mark each."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def test_quoted_messages_exist() -> None:
    known = {
        text_of(node) for tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)
    }
    texts = "\n".join(re.sub(r"%[\w.]+|{}", "", text) for text in known)
    section = PAGE.partition("## Messages in the log")[2]
    quoted = [re.match(r"\| (?:\d+[^`]*)?`(.+?)` \|", line) for line in section.splitlines()]
    messages = [match[1] for match in quoted if match]
    assert len(messages) > 15
    assert [message for message in messages if message not in texts] == []


def test_each_warning_is_there() -> None:
    formats = [
        text_of(node.args[0])
        for tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS
        if ast.unparse(node.func.value) == "logger"
    ]
    assert len(formats) > 8
    quoted = re.findall("`(.+?)`", PAGE)
    # "%s" alone stands for a line that a rule of configs has written: it names its key and its value.
    own = [each for each in formats if each != "%s"]
    assert [each for each in own if not any(q in re.sub(r"%\w", "", each) for q in quoted if len(q) > 8)] == []
