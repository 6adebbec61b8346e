"""docs/troubleshooting.md quotes messages that exist, and has each warning and error of the log and each refusal."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
LEVELS = {"warning", "warning_once", "error"}
# The classes that tell a user why something cannot be done, and the function that makes one of them.
REFUSALS = {
    "EngineFailedError",
    "NoSampleError",
    "RefusedError",
    "SpecPlusCompatError",
    "SpecPlusConfigError",
    "config_error",
}
# A refusal that has one of these says by itself what is allowed, so the page need not have it.
SAYS_WHAT_IS_ALLOWED = re.compile(
    r"is not allowed: |must (not )?(be|have) |is (required|needed)| one of |expected an? |such as |Allowed: |leave it "
)
# Other refusals that the page need not have.
ADD_NOTHING = {
    # These hand on another message, perhaps behind the name of an option or a place.
    "…",
    "…\n\n…",
    "…: …",
    "…: prompt …: …",
    "--engine-args: …",
    "--serve: …",
    "speculative_config: …",
    # These end with the system's own reason.
    "cannot read …: …",
    "cannot write to …: …",
}


def sources() -> Iterator[ast.Module]:
    for folder in ("vllm_specplus", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            yield ast.parse(path.read_text())


def text_of(node: ast.AST) -> str:
    """A text as the page quotes it: with … for each value, also of a format of the log."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return re.sub(r"%[\w.]+", "…", str(node.value)) if isinstance(node, ast.Constant) else "…"


def name_of(node: ast.AST) -> str:
    """The last part of the name of a variable or of what is called; "" for anything else."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "id", getattr(node, "attr", ""))


def definitions(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """By name: the values that variables get in a module, and those that its functions return."""
    found = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if name := name_of(target):
                    found[name].append(node.value)
        elif isinstance(node, ast.FunctionDef):
            found[node.name] += [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
    return found


def refusals(tree: ast.Module) -> Iterator[str]:
    """The messages of a module's refusals, also where a variable or a function of the module holds them."""
    defined = definitions(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and name_of(node) in REFUSALS:
            message = node.args[0]
            yield from map(text_of, defined.get(name_of(message), [message]))


def quoted_messages() -> list[str]:
    """The messages in the first column of the page's tables, perhaps behind an HTTP status."""
    section = PAGE.partition("## Messages in the log")[2]
    cells = re.findall(r"^\| (?:\d+, )?(`.+?`) \|", section, re.MULTILINE)
    return [quote for cell in cells for quote in re.findall("`(.+?)`", cell)]


QUOTED = quoted_messages()


def is_on_page(message: str) -> bool:
    return any(quote in message for quote in QUOTED)


def needs_no_row(message: str) -> bool:
    return message in ADD_NOTHING or bool(SAYS_WHAT_IS_ALLOWED.search(message))


def test_quoted_messages_exist() -> None:
    texts = "\n".join(
        text_of(node)
        for tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)
    )
    assert len(QUOTED) > 50
    assert min(map(len, QUOTED)) > 8
    assert [message for message in QUOTED if message not in texts] == []


def test_each_warning_is_there() -> None:
    formats = [
        text_of(node.args[0])
        for tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS
        if ast.unparse(node.func.value) == "logger"
    ]
    assert len(formats) > 8
    # "…" alone stands for a line that a rule of configs has written: it names its key and its value.
    assert [each for each in formats if each != "…" and not is_on_page(each)] == []


def test_each_refusal_is_there() -> None:
    found = {message for tree in sources() for message in refusals(tree)}
    assert len(found) > 60
    assert sorted(each for each in found if not needs_no_row(each) and not is_on_page(each)) == []
    assert found >= ADD_NOTHING


@pytest.mark.parametrize(
    "code",
    [
        'raise RefusedError(f"the moon is {phase}")',
        'raise processes.RefusedError("the moon is " + phase)',
        'why = f"the moon is {phase}"\nraise RefusedError(why)',
        'def _why(self):\n    return f"the moon is {phase}"\nraise NoSampleError(self._why())',
        'def _error():\n    return config_error(f"the moon is {phase}")',
    ],
)
def test_a_new_refusal_is_found(code: str) -> None:
    (message,) = refusals(ast.parse(code))
    assert message == "the moon is …"
    assert not needs_no_row(message)
    assert not is_on_page(message)
