"""The plots of a comparison, by matplotlib: of the extra ``plot``."""

import io
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_specplus.compare.colors import INK, PART_COLORS, SERIES, SOURCE_COLORS, css_name
from vllm_specplus.compare.runs import PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOTS = ("speed", "accepted", "time")
_WIDTH = 7.0  # inches
# Of a legend: what fits into the width, what a marker takes of it, and a row's height in inches.
_CHARACTERS, _MARKER_CHARACTERS, _LEGEND_ROW = 88, 8, 0.17
_MARKERS = "osD^vPX*"  # lines are told apart without colors too
_BAR = 0.45  # a bar's height, of the distance between two
_DODGE = 0.03  # between neighbours, of the distance between two concurrencies: bars must not hide each other
_STYLE: dict[Any, Any] = {
    # The text of an SVG stays text, and the same numbers give the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "vllm-specplus",
    # Names of configurations are no mathematics.
    "text.parse_math": False,
    "font.size": 9,
    "text.color": INK[0],
    "axes.labelcolor": INK[0],
    "axes.edgecolor": INK[0],
    "xtick.color": INK[0],
    "ytick.color": INK[0],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


class Plot:
    """A plot, drawn in the colors for light ground.

    Attributes:
        name: of its file, without ending.
        title: in the report.
    """

    def __init__(self, name: str, title: str, figure: "Figure") -> None:
        self.name, self.title, self._figure = name, title, figure
        # Laid out once: each drawing would move the axes a little further.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")

    def png(self) -> bytes:
        """The picture, on white."""
        return self._image("png", dpi=150, facecolor="white")

    def svg(self) -> str:
        """An ``svg`` element whose colors are the page's variables of `css_variables`."""
        text = self._image("svg", transparent=True, metadata={"Date": None}).decode()
        text = text[text.index("<svg") :]
        for color in {INK, *SERIES, *SOURCE_COLORS.values(), *PART_COLORS.values()}:
            text = text.replace(color[0], f"var({css_name(color[0])})")
        return text

    def _image(self, kind: str, **options: Any) -> bytes:
        from matplotlib import rc_context

        file = io.BytesIO()
        with rc_context(_STYLE):
            self._figure.savefig(file, format=kind, bbox_inches="tight", **options)
        return file.getvalue()


def plots(data: dict[str, Any]) -> list[Plot]:
    """The plots of the results that ``results.json`` holds; without those that would be empty."""
    from matplotlib import rc_context

    with rc_context(_STYLE):
        return [plot for plot in (_speed(data), _acceptance(data), _time(data)) if plot is not None]


def _speed(data: dict[str, Any]) -> Plot | None:
    """Speed against concurrency, a line for each configuration."""
    levels = data["settings"]["concurrency"]
    timed = [row for row in data["measurements"] if row["tokens_per_second"]]
    if not timed:
        return None
    figure, axes = _figure(3.2)
    series = list(_series(data))
    for i, (name, color) in enumerate(series):
        rows = [row for row in timed if row["configuration"] == name]
        if rows:
            speeds = [row["tokens_per_second"] for row in rows]
            below = [row["tokens_per_second"] - row["lowest"] for row in rows]
            above = [row["highest"] - row["tokens_per_second"] for row in rows]
            dodge = _DODGE * (i - (len(series) - 1) / 2)
            places = [levels.index(row["concurrency"]) + dodge for row in rows]
            marker = _MARKERS[i % len(_MARKERS)]
            axes.errorbar(places, speeds, (below, above), marker=marker, capsize=3, color=color, label=name)
    axes.set_xticks(range(len(levels)), [str(level) for level in levels])
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    _legend(figure)
    return Plot("speed", "tokens/s; bars from the lowest to the highest repeat", figure)


def _acceptance(data: dict[str, Any]) -> Plot | None:
    """The share of verifications whose draft was accepted, by position and source.

    A row of panels for each configuration that drafted, and a column for each concurrency.
    """
    from matplotlib.ticker import MaxNLocator

    drafting = [row for row in data["measurements"] if row.get("accepted_by_position")]
    levels = [level for level in data["settings"]["concurrency"] if any(r["concurrency"] == level for r in drafting)]
    names = [name for name, _ in _series(data) if any(row["configuration"] == name for row in drafting)]
    if not drafting:
        return None
    figure, panels = _figure(1.6 * len(names), (len(names), len(levels)))
    seen = {}
    for row in drafting:
        axes = panels[names.index(row["configuration"])][levels.index(row["concurrency"])]
        positions = range(1, len(row["accepted_by_position"]) + 1)
        bottom = [0.0] * len(positions)
        for source, counts in row["accepted_by_source"].items():
            totals = [sum(of[i] for of in row["accepted_by_source"].values()) for i in range(len(positions))]
            heights = [
                100 * share * count / total if total else 0.0
                for share, count, total in zip(row["accepted_by_position"], counts, totals, strict=True)
            ]
            if any(heights):
                seen[source] = axes.bar(positions, heights, bottom=bottom, color=SOURCE_COLORS[source][0])
                bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for name, axes_of_name in zip(names, panels, strict=True):
        axes_of_name[0].set_title(_wrapped(name), loc="left", fontsize=9)
        axes_of_name[0].set_ylabel("%")
    for level, axes in zip(levels, panels[-1], strict=True):
        axes.set_ylim(0, 100)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=max(16 // len(levels), 1), integer=True))
        axes.set_xlabel(f"position, {level} at once")
    _legend(figure, list(seen.values()), list(seen))
    return Plot("accepted", "drafts accepted, by their position in the step and by source", figure)


def _time(data: dict[str, Any]) -> Plot | None:
    """The shares of a step's parts, a bar for each configuration."""
    timed = [configuration for configuration in data["configurations"] if configuration["seconds"]]
    if not timed:
        return None
    figure, axes = _figure(0.8 + 0.45 * len(timed))
    left = [0.0] * len(timed)
    for part in PARTS:
        shares = [100 * c["seconds"][part] / sum(c["seconds"].values()) for c in timed]
        axes.barh(range(len(timed)), shares, _BAR, left=left, color=PART_COLORS[part][0], label=part)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set_yticks([])
    for i, configuration in enumerate(timed):
        axes.text(0, i - 0.6 * _BAR, _wrapped(configuration["name"]), va="bottom", in_layout=False)
    axes.set_ylim(len(timed) - 0.5, -0.5 - _BAR)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the time, one request at a time")
    _legend(figure)
    return Plot("time", "where the time goes", figure)


def _series(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The name and the color of each configuration."""
    for i, configuration in enumerate(data["configurations"]):
        yield configuration["name"], SERIES[i % len(SERIES)][0]


def _figure(height: float, panels: tuple[int, int] | None = None) -> tuple["Figure", Any]:
    """A figure with axes, or with rows and columns of axes that have the same range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    if panels is not None:
        return figure, figure.subplots(*panels, sharex=True, sharey=True, squeeze=False)
    axes: Axes = figure.subplots()
    return figure, axes


def _legend(figure: "Figure", handles: list[Any] | None = None, names: list[str] | None = None) -> None:
    """Put a legend on top, as wide as the plot at most; its rows make the figure higher."""
    if handles is None or names is None:
        handles, names = figure.axes[0].get_legend_handles_labels()
    columns = max(1, min(3, _CHARACTERS // (max(map(len, names), default=0) + _MARKER_CHARACTERS)))
    labels = [_wrapped(name) for name in names]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * -(-lines // columns))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns)


def _wrapped(name: str) -> str:
    """A name in lines that fit beside a marker."""
    return textwrap.fill(name, _CHARACTERS - _MARKER_CHARACTERS, break_on_hyphens=False)
