"""What the documentation states of the command line and of the version is so."""

import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from vllm_specplus import __version__, cli
from vllm_specplus.compare.command import with_engine_args_joined

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def commands(page: Path) -> list[list[str]]:
    """The words of each command ``vllm-specplus`` in the blocks of a page, without its name."""
    return [words[1:] for words in commands_with(page, "vllm-specplus ")]


def commands_with(page: Path, beginning: str) -> list[list[str]]:
    """The words of each command in the blocks of a page that begins so."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        lines = block.replace("\\\n", " ").splitlines()
        found += [words_of(lines[i:]) for i, line in enumerate(lines) if line.startswith(beginning)]
    return found


def words_of(lines: list[str]) -> list[str]:
    """The words of the first command; a quoted text may run over several lines."""
    for number in range(1, len(lines)):
        with suppress(ValueError):
            return shlex.split("\n".join(lines[:number]), comments=True)
    return shlex.split("\n".join(lines), comments=True)


def test_the_documented_commands_are_allowed() -> None:
    parser = cli._parser()
    found = [words for page in PAGES for words in commands(page)]
    assert {words[0] for words in found} >= {"check", "compare", "top"}
    for words in found:
        try:
            parser.parse_args(with_engine_args_joined(words))
        except SystemExit:
            pytest.fail(f"refused: {shlex.join(words)}")


def test_the_documented_options_of_examples_are_theirs() -> None:
    found: dict[str, set[str]] = {}
    for page in PAGES:
        for _, script, *words in commands_with(page, "python examples/"):
            found.setdefault(script, set()).update(word.split("=")[0] for word in words if word.startswith("--"))
    # That script hands it on to vLLM.
    found["examples/pd_disaggregation/serve.py"].remove("--speculative-config")
    assert sum(map(bool, found.values())) == 4
    for script, options in found.items():
        if options:
            command = [sys.executable, ROOT / script, "--help"]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
            known = re.findall(r"--[a-z][a-z-]*", shown.partition("\noptions:")[2])
            assert options <= set(known), script


def test_the_options_of_compare_are_in_its_page() -> None:
    table = re.findall(r"^\| `(--[a-z-]+)` \|", (ROOT / "docs" / "compare.md").read_text(), re.MULTILINE)
    (subparsers,) = (action for action in cli._parser()._actions if isinstance(action.choices, dict))
    assert subparsers.choices is not None
    options = {option for action in dict(subparsers.choices)["compare"]._actions for option in action.option_strings}
    assert len(table) == len(set(table))
    assert set(table) == options - {"-h", "--help"}


def test_the_changelog_begins_with_this_version() -> None:
    (first,) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[:1]
    assert first == __version__


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of the tables in a text: the other cells, without bold, by the first."""
    rows = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return {name: [cell.replace("**", "") for cell in cells] for name, *cells in rows}


def section(page: Path, anchor: str) -> str:
    """The text from a heading to the next one of its level or a higher one."""
    text = page.read_text()
    for heading in re.finditer(r"^(#+) (.*)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading[2].lower())
        if words.replace(" ", "-") == anchor:
            behind = text[heading.end() :]
            end = re.search(rf"^#{{1,{len(heading[1])}}} ", behind, re.MULTILINE)
            return behind[: end.start()] if end else behind
    raise AssertionError(f"{page.name} has no heading {anchor}")


def numbers_of(text: str) -> set[str]:
    """The numbers with two decimals, but for bounds of intervals, which are in parentheses."""
    found = re.findall(r"(?<![\d.])\d?\.\d\d(?!\d)", re.sub(r"\([^()]* to [^()]*\)", "", text))
    return {number.removeprefix("0") for number in found}


def test_the_numbers_to_choose_by_are_in_the_sections_that_they_name() -> None:
    checked = 0
    for part in re.split(r"\n\n|\n- |\|", (ROOT / "docs" / "choosing.md").read_text()):
        for said, anchor in re.findall(r"(.*?)\]\(benchmarks\.md#([^)]*)\)", part, re.DOTALL):
            # Those with one decimal are made of two numbers there.
            missing = numbers_of(said) - numbers_of(section(ROOT / "docs" / "benchmarks.md", anchor))
            assert not missing, (anchor, missing)
            checked += len(numbers_of(said))
    assert checked > 30


def test_the_numbers_of_the_readme_are_those_of_the_benchmarks() -> None:
    measured = rows_of(section(ROOT / "docs" / "benchmarks.md", "six-ways-of-drafting"))
    shown = rows_of(section(ROOT / "README.md", "what-it-gains"))
    assert len(shown) == 5  # with the head
    for name, cells in list(shown.items())[1:]:
        (row,) = (row for key, row in measured.items() if key.startswith(f"{name}, "))
        assert [", ".join(cell.split(", ")[:2]) for cell in row] == cells
