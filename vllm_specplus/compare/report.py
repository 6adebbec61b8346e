"""The report: one page that a browser shows without a network, and its plots as pictures.

``python -m vllm_specplus.compare.report DIR`` writes both anew from ``DIR/results.json``.
"""

import argparse
import html
import json
import sys
from collections.abc import Iterable, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_specplus.compare.colors import INK, SERIES, SOURCE_COLORS, css_name, css_variables
from vllm_specplus.compare.plots import PLOTS, Plot, plots
from vllm_specplus.compare.results import UnwritableError, write_whole
from vllm_specplus.compare.runs import TARGET, UNKNOWN
from vllm_specplus.compare.sheets import Sheet, drafts, problems, speeds, times

_MOST_TOKENS = 200_000  # a browser shows that many at ease
_LINES = {"model": "solid", "ngram": "dashed", "suffix": "dotted", "reference": "double", UNKNOWN: "solid"}
# Nothing is fetched and nothing runs, whatever a text holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

Token = list[str]
"""Its text, and its source."""


def as_html(data: dict[str, Any], plots: Iterable[Plot] = ()) -> str:
    """The page of the results that ``results.json`` holds, with plots. Every text in it is escaped."""
    title = f"Comparison of {data['settings']['model']}"
    drawn = {plot.name: _figure(plot) for plot in plots}
    sections = (
        _section("Speed", drawn.get("speed", "") + _table(speeds(data))),
        _section("Drafts", drawn.get("accepted", "") + (_table(drafts(data)) or "<p>Nothing was drafted.</p>\n")),
        _section("Time", drawn.get("time", "") + (_table(times(data)) or "<p>No step was timed.</p>\n")),
        _section("Texts", _texts(data)),
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_text(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_style()}</style>\n</head>\n<body>\n"
        f"<header>\n<h1>{_text(title)}</h1>\n{_summary(data)}</header>\n{''.join(sections)}</body>\n</html>\n"
    )


def report_files() -> tuple[str, ...]:
    """The names of the files that `write_report` writes."""
    return "report.html", *(f"{name}.png" for name in PLOTS)


def write_report(folder: Path, data: dict[str, Any]) -> None:
    """Write ``report.html``, and a PNG file of each plot; without plots where matplotlib is not installed."""
    drawn = plots(data) if can_plot() else []
    remove_report(folder)
    for plot in drawn:
        write_whole(folder / f"{plot.name}.png", plot.png())
    write_whole(folder / "report.html", as_html(data, drawn).encode())


def remove_report(folder: Path) -> None:
    """Remove what `write_report` wrote for earlier results.

    Raises:
        UnwritableError: the folder cannot be changed.
    """
    for name in report_files():
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as problem:
            raise UnwritableError(f"cannot remove {folder / name}: {problem.strerror or problem}") from None


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def _figure(plot: Plot) -> str:
    return f"<figure>\n{plot.svg()}<figcaption>{_text(plot.title)}</figcaption>\n</figure>\n"


def _text(value: Any) -> str:
    """A value as text that stands for itself in HTML; a lone surrogate, which no file can hold, becomes ``?``."""
    return html.escape(str(value).encode("utf-8", "replace").decode())


def _style() -> str:
    meanings = {"ink": INK, "best": SERIES[2], "wrong": SERIES[4]}
    named = " ".join(f"--{name}: var({css_name(color[0])});" for name, color in meanings.items())
    tokens = "".join(
        f".{source} {{ border-bottom: 2px {_LINES[source]} var({css_name(color[0])}); "
        f"background: color-mix(in srgb, var({css_name(color[0])}) 18%, transparent); }}\n"
        for source, color in SOURCE_COLORS.items()
        if source != TARGET
    )
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {css_variables(1)} }} }}\n"
    sheet = files("vllm_specplus.compare").joinpath("report.css").read_text(encoding="utf-8")
    return f":root {{ {css_variables(0)} {named} }}\n{dark}{sheet}{tokens}"


def _summary(data: dict[str, Any]) -> str:
    settings, environment = data["settings"], data["environment"]
    found = "".join(f"<li>{_text(line)}</li>\n" for line in problems(data))
    packages = ", ".join(f"{name} {number}" for name, number in environment["packages"].items() if number)
    facts = {
        "prompts": settings["prompts"],
        "concurrency": ", ".join(map(str, settings["concurrency"])),
        "most tokens": settings["max_tokens"],
        "temperature": settings["temperature"],
        "repeats": settings["repeat"],
        "engine args": " ".join(settings["engine_args"]) or "none",
        "engines": "one at a time" if settings["one_at_a_time"] else "all at once",
        "machine": f"{environment['cpu']}, {environment['cpu_count']} CPUs, {environment['platform']}",
        "packages": f"Python {environment['python']}, {packages}",
        **{c["name"]: json.dumps(c["config"], ensure_ascii=False) for c in data["configurations"] if c["config"]},
    }
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>\n" for name, value in facts.items())
    return (
        f'<p class="quiet">vllm-specplus compare {_text(data["version"])}, {_text(data["date"])}</p>\n'
        f'<p class="lead">{_text(data["recommendation"])}</p>\n'
        + (f'<ul class="problems">\n{found}</ul>\n' if found else "")
        + f"<details><summary>Settings, machine and configurations</summary>\n<dl>\n{rows}</dl>\n</details>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{content}</section>\n"


def _table(sheet: Sheet) -> str:
    """A table, or nothing if it has no row."""
    if not sheet.rows:
        return ""
    kinds = ["number" if column.is_number else "name" for column in sheet.columns]
    head = _cells("th", kinds, (column.name for column in sheet.columns))
    rows = ""
    for row in sheet.rows:
        names = " ".join(name for name, holds in (("best", row.is_best), ("ends", row.ends_group)) if holds)
        rows += f'<tr class="{names}">{_cells("td", kinds, row.cells)}</tr>\n'
    return (
        f'<p class="quiet">{_text(sheet.title)}</p>\n<div class="scroll"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n"
    )


def _cells(tag: str, kinds: Iterable[str], texts: Iterable[str]) -> str:
    return "".join(f'<{tag} class="{kind}">{_text(text)}</{tag}>' for kind, text in zip(kinds, texts, strict=True))


def _texts(data: dict[str, Any]) -> str:
    """The answers, a block for each configuration, by prompt; as many prompts as a page can hold."""
    if not data["texts"]:
        return "<p>No text was recorded.</p>\n"
    seen = {source for answers in data["texts"].values() for tokens in answers.values() for _, source in tokens}
    shown: list[dict[str, Any]] = []
    num_tokens = 0
    for prompt in data["prompts"]:
        num_tokens += sum(len(answers[prompt["name"]]) for answers in data["texts"].values())
        if shown and num_tokens > _MOST_TOKENS:
            break
        shown.append(prompt)
    rest = ""
    if len(shown) < len(data["prompts"]):
        rest = f"<p>These are {len(shown)} of {len(data['prompts'])} prompts; results.json has the rest.</p>\n"
    return (
        '<p class="quiet">Each token in the color of its source; … is a token that ends within a character.</p>\n'
        f"{_legend(seen)}{rest}{''.join(_prompt(data, prompt) for prompt in shown)}"
    )


def _legend(seen: set[str]) -> str:
    names = [source for source in SOURCE_COLORS if source in {_color_name(name) for name in seen}]
    items = "".join(f'<li><span class="token {name}">{name}</span></li>' for name in names)
    return f'<ul class="legend">{items}</ul>\n'


def _prompt(data: dict[str, Any], prompt: dict[str, Any]) -> str:
    if "messages" in prompt:
        asked = "".join(f"<h4>{_text(m['role'])}</h4><pre>{_text(m['content'])}</pre>\n" for m in prompt["messages"])
    else:
        asked = f"<pre>{_text(prompt['prompt'])}</pre>\n"
    if "prediction" in prompt:
        asked += f"<h4>prediction</h4><pre>{_text(prompt['prediction'])}</pre>\n"
    answers = "".join(_answer(data, configuration, prompt["name"]) for configuration in data["configurations"])
    return (
        f"<h3>Prompt {_text(prompt['name'])}</h3>\n<details><summary>What was asked</summary>\n{asked}</details>\n"
        f'<div class="answers">\n{answers}</div>\n'
    )


def _answer(data: dict[str, Any], configuration: dict[str, Any], prompt: str) -> str:
    """The block of a configuration."""
    name = configuration["name"]
    if name in data["texts"]:
        tokens = data["texts"][name][prompt]
        counts = {source: [_color_name(of) for _, of in tokens].count(source) for source in SOURCE_COLORS}
        said = ", ".join(f"{source} {count}" for source, count in counts.items() if count)
        content = f'<p class="quiet">{len(tokens)} tokens: {said}</p>\n<pre dir="auto">{_spans(tokens)}</pre>\n'
        if not tokens:
            content = '<p class="quiet">The answer is empty.</p>\n'
    elif configuration["error"]:
        content = f'<p class="quiet">FAILED: {_text(configuration["error"])}</p>\n'
    else:
        content = '<p class="quiet">Not recorded.</p>\n'
    return f"<article>\n<h4>{_text(name)}</h4>\n{content}</article>\n"


def _spans(tokens: Iterable[Token]) -> str:
    spans = []
    for text, source in tokens:
        kind = " part" if not text else " blank" if "\n" in text and not text.strip() else ""
        spans.append(f'<span class="token {_color_name(source)}{kind}">{_text(text)}</span>')
    return "".join(spans)


def _color_name(source: str) -> str:
    return source if source in SOURCE_COLORS else UNKNOWN


def main(argv: Sequence[str] | None = None) -> int:
    """Write a report anew; return 0, or 2 with a message on stderr if that cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_specplus.compare.report", description="Write the report of a comparison anew."
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="has the comparison's results.json")
    folder = parser.parse_args(argv).folder
    try:
        data = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        if "runs" in data:
            raise ValueError("a comparison of running servers has no report")
        write_report(folder, data)
    except UnwritableError as problem:
        print(problem, file=sys.stderr)
        return 2
    except (OSError, ValueError, KeyError, TypeError) as problem:
        print(f"cannot read {folder / 'results.json'}: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
