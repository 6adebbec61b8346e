"""The colors of the report, each on light and on dark ground."""

from vllm_specplus.compare.runs import PARTS, TARGET, UNKNOWN
from vllm_specplus.sources import SOURCES, UNFILLED

INK = ("#1f2328", "#e6e8eb")
SERIES = (
    *(("#2f6fb3", "#6aa9ef"), ("#d9730d", "#f2a24f"), ("#2a8a4a", "#5fc47e"), ("#8a4fbf", "#b98bea")),
    *(("#c8353b", "#f07178"), ("#8c6239", "#c9a27a"), ("#0f8b8d", "#45c4c6"), ("#d0458f", "#f08bbf")),
)
"""Of the configurations, in turn."""
_OTHER = ("#8b949e", "#7d8590")
_NAMED = dict(zip(SOURCES[:UNFILLED], SERIES, strict=False))
SOURCE_COLORS = {TARGET: INK, **_NAMED, UNKNOWN: _OTHER}
"""Of the sources of tokens."""
PART_COLORS = dict(zip(PARTS, (SERIES[6], SERIES[0], SERIES[1], SERIES[3], _OTHER), strict=True))
"""Of the parts of a step."""


def css_name(color: str) -> str:
    """The variable of the page's style that stands for a color on light ground."""
    return f"--c{color.removeprefix('#')}"


def css_variables(ground: int) -> str:
    """All variables, on light ground (0) or dark ground (1)."""
    every = dict.fromkeys((INK, _OTHER, *SERIES))
    return " ".join(f"{css_name(color[0])}: {color[ground]};" for color in every)
