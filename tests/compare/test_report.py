"""The report: a page whose texts are only texts, and its plots."""

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from vllm_specplus.compare import report
from vllm_specplus.compare.plots import PLOTS, plots
from vllm_specplus.compare.report import as_html, main, write_report
from vllm_specplus.compare.runs import PARTS

HOSTILE = "</script><script>alert(1)</script><b>&amp;\"'</b><img src=x onerror=alert(1)> 日本 \u202e مر \ud800"
FAILED = "eagle3 model=<i>x</i>"
SECONDS = dict.fromkeys(PARTS, 0.2)
DATA: dict[str, Any] = {
    "version": "0.1.0",
    "date": "2026-01-01T00:00:00+00:00",
    "environment": {
        "cpu": "CPU",
        "cpu_count": 2,
        "load_average": 0.1,
        "platform": "Linux",
        "python": "3.11",
        "packages": {"vllm": "0.32.0", "torch": None},
    },
    "settings": {
        "model": f"/models/{HOSTILE}",
        "prompts": 3,
        "concurrency": [1, 4],
        "max_tokens": 16,
        "temperature": 0.0,
        "repeat": 2,
        "engine_args": ["--dtype", HOSTILE],
        "one_at_a_time": False,
    },
    "prompts": [
        {"name": "first", "prompt": HOSTILE},
        {"name": "empty", "messages": [{"role": "user", "content": HOSTILE}], "prediction": HOSTILE},
    ],
    "interrupted": False,
    "baseline": "none",
    "configurations": [
        {"name": "none", "config": None, "error": None, "seconds": SECONDS},
        {"name": "mtp $x$", "config": {"method": "mtp", "model": HOSTILE}, "error": None, "seconds": SECONDS},
        {"name": FAILED, "config": {"method": "eagle3"}, "error": f"ValueError: {HOSTILE}", "seconds": None},
    ],
    "measurements": [
        {
            "configuration": name,
            "concurrency": level,
            "tokens_per_second": speed,
            "lowest": speed and speed * 0.9,
            "highest": speed and speed * 1.1,
            "ratio": ratio,
            "ratio_low": ratio,
            "ratio_high": ratio,
            "mean_accepted_length": speed and 1.0,
            "accepted_by_position": [0.5, 0.25] if drafted else [],
            "drafted": drafted,
            "drafted_by_source": {"model": 8, "ngram": 4} if drafted else {},
            "accepted_by_source": {"model": [4, 0], "ngram": [0, 2]} if drafted else {},
            "wasted": 0.5,
            "error": None if speed else "ValueError",
        }
        for level in (1, 4)
        for name, speed, ratio, drafted in (
            ("none", 100.0, 1.0, 0),
            ("mtp $x$", 150.0, 1.5, 12),
            (FAILED, None, None, 0),
        )
    ],
    "differences": [
        {
            "configuration": "mtp $x$",
            "concurrency": 1,
            "prompt": "first",
            "position": 2,
            "expected": HOSTILE,
            "found": "",
            "best": [{"token_id": 1, "text": HOSTILE, "logit": 1.0}],
            "is_near_tie": True,
        }
    ],
    "texts": {
        "none": {"first": [["a", "target"], [HOSTILE, "target"]], "empty": []},
        "mtp $x$": {"first": [["a", "target"], ["", "model"], ["\n", "ngram"], ["z", HOSTILE]], "empty": []},
    },
    "recommendation": f"Use {HOSTILE}",
}
# What stands for itself; no file can hold a lone surrogate.
SHOWN = HOSTILE.replace("\ud800", "?")


class Page(HTMLParser):
    """What a browser would find: the elements with their attributes, and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def tags(page: Page) -> set[str]:
    return {tag for tag, _ in page.elements}


def test_texts_are_texts() -> None:
    page = Page(as_html(DATA, plots(DATA)))
    assert not tags(page) & {"script", "img", "b", "i", "link", "iframe"}
    assert not [attributes for _, attributes in page.elements if any(name.startswith("on") for name in attributes)]
    # In the model's name, the recommendation, a prompt, a chat, a prediction, a text, an error, and more.
    assert page.text.count(SHOWN) >= 8
    assert FAILED in page.text


def test_nothing_comes_from_elsewhere() -> None:
    text = as_html(DATA, plots(DATA))
    page = Page(text)
    # Parts of a plot refer to each other.
    links = [v for _, attributes in page.elements for k, v in attributes.items() if k.endswith(("src", "href"))]
    assert all(link is not None and link.startswith("#") for link in links)
    assert all(found.startswith("url(#") for found in re.findall(r"url\(.", text))
    assert "@import" not in text
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": report._POLICY}) in page.elements


def test_every_state_of_a_configuration_is_said() -> None:
    text = Page(as_html(DATA)).text
    assert "The answer is empty." in text
    assert "FAILED: ValueError" in text
    assert "NEAR-TIE: mtp $x$" in text
    assert "4 tokens: target 1, model 1, ngram 1, unknown 1" in text


def test_nothing_was_measured() -> None:
    data = copy.deepcopy(DATA) | {"interrupted": True, "texts": {}}
    data["measurements"] = [row for row in data["measurements"] if row["configuration"] == FAILED]
    data["configurations"] = [c | {"seconds": None} for c in data["configurations"]]
    assert plots(data) == []
    text = Page(as_html(data)).text
    for said in ("Interrupted", "Nothing was drafted.", "No step was timed.", "No text was recorded."):
        assert said in text


def test_more_texts_than_a_page_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_MOST_TOKENS", 4)
    data = copy.deepcopy(DATA)
    data["texts"]["none"]["empty"] = [["a", "target"]]
    text = Page(as_html(data)).text
    assert "These are 1 of 2 prompts" in text
    assert "Prompt empty" not in text


def test_plots_are_files_and_parts_of_the_page(tmp_path: Path) -> None:
    write_report(tmp_path, DATA)
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", *(f"{name}.png" for name in PLOTS)}
    for name in PLOTS:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "report.html").read_text()
    assert text.count("<svg") == len(PLOTS)
    # A name is no mathematics, and text stays text.
    assert text.count("mtp $x$</text>") == len(PLOTS)
    # The colors are the page's, for light and for dark ground.
    assert not re.findall(r"(?:fill|stroke): #(?!ffffff)\w+", text)


def test_long_names_do_not_widen_a_plot() -> None:
    def width(data: dict[str, Any]) -> int:
        (speed,) = (plot for plot in plots(data) if plot.name == "speed")
        return int.from_bytes(speed.png()[16:20])  # of the header

    data = copy.deepcopy(DATA)
    long = " ".join(f"some_key_number_{i}={i}" for i in range(8))
    for row in data["configurations"]:
        row["name"] = f"{long} {row['name']}"
    for row in data["measurements"]:
        row["configuration"] = f"{long} {row['configuration']}"
    assert width(data) == pytest.approx(width(DATA), rel=0.02)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "speed.png").write_text("of an earlier run")
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    write_report(tmp_path, DATA)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert "svg" not in tags(Page((tmp_path / "report.html").read_text()))


def test_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text(json.dumps(DATA))
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text() == as_html(DATA, plots(DATA))
    assert main([str(tmp_path / "other")]) == 2
    assert capsys.readouterr().err.startswith(f"cannot read {tmp_path / 'other' / 'results.json'}: ")
