"""The sources of drafts, and counts by source."""

import numpy as np

SOURCES = ("model", "ngram", "suffix", "reference", "unfilled")
"""Who made a draft. ``unfilled``: nobody; vLLM scheduled the slot, and it holds padding."""
MODEL, NGRAM, SUFFIX, REFERENCE, UNFILLED = range(len(SOURCES))
WHOLE_OUTPUT = 1 << 30
"""How many tokens speak for a reference that begins with a request's whole output: more than any text has."""


def by_source(counts: np.ndarray) -> dict[str, dict[str, list[int]]]:
    """``{"drafted": {source: [tokens by position]}, "accepted": ...}``.

    Args:
        counts: [2, len(SOURCES), K] int, drafted and accepted tokens.
    """
    return {
        what: dict(zip(SOURCES, rows, strict=True))
        for what, rows in zip(("drafted", "accepted"), counts.tolist(), strict=True)
    }
