"""Draw the results of `verify.py`: time against batch, a panel for each vocabulary and setting.

    python benchmarks/plot.py benchmarks/results/verify-GPU.csv [--drafts 4] [--logits peaked] [--out FILE.svg]

Points are medians, bars the quartiles, the dashed line the time to read the logits at
the bandwidth of a copy. The file's ending chooses the format (svg, png, pdf). Needs the extra `plot`.
"""

import argparse
import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# The text of an SVG stays text, and the same numbers give the same file.
plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "verify"}
COLORS = {
    "ours": "tab:red",
    "target_match": "tab:orange",
    "topp": "tab:pink",
    "vLLM": "tab:blue",
    "FlashInfer chain": "tab:green",
    "FlashInfer rows": "tab:olive",
    "torch": "tab:gray",
}

Row = dict[str, str]


def read_rows(path: Path, drafts: int, logits: str) -> list[Row]:
    """The file's rows of one number of drafts and one kind of logits.

    Raises:
        ValueError: there are none, or none of them has a time.
    """
    with path.open(newline="") as file:
        every = list(csv.DictReader(file))
    rows = [row for row in every if (int(row["drafts"]), row["logits"]) == (drafts, logits)]
    if not any(row["median_us"] for row in rows):
        available = sorted({(int(row["drafts"]), row["logits"]) for row in every if row["median_us"]})
        raise ValueError(f"{path} has no times for {drafts} drafts and {logits} logits; it has {available}")
    return rows


def draw_panel(axes: plt.Axes, rows: list[Row]) -> None:
    """One vocabulary and setting: a line for each method, and the floor."""
    for method in dict.fromkeys(row["method"] for row in rows):
        timed = sorted(
            (int(row["batch"]), *(float(row[f"{name}_us"]) for name in ("median", "lower_quartile", "upper_quartile")))
            for row in rows
            if row["method"] == method and row["median_us"]
        )
        if timed:
            batch, median, low, high = zip(*timed, strict=True)
            below = [m - q for m, q in zip(median, low, strict=True)]
            above = [q - m for m, q in zip(median, high, strict=True)]
            style = {"label": method, "color": COLORS.get(method), "marker": ".", "capsize": 2, "linewidth": 1}
            axes.errorbar(batch, median, yerr=(below, above), **style)
    floor = sorted({(int(row["batch"]), float(row["floor_us"])) for row in rows})
    axes.plot(*zip(*floor, strict=True), "k--", linewidth=1, label="floor")
    batches = [batch for batch, _ in floor]
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def draw(rows: list[Row]) -> plt.Figure:
    """The whole picture: vocabularies down, settings across."""
    vocabs = sorted({int(row["vocab"]) for row in rows})
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    size = (3.4 * len(settings) + 1, 2.7 * len(vocabs) + 1.2)
    figure, grid = plt.subplots(len(vocabs), len(settings), figsize=size, squeeze=False, sharex=True, sharey="row")
    for i, vocab in enumerate(vocabs):
        for j, setting in enumerate(settings):
            panel = [row for row in rows if (int(row["vocab"]), row["setting"]) == (vocab, setting)]
            if panel:
                draw_panel(grid[i][j], panel)
            grid[i][j].set_title(f"{setting}, vocabulary {vocab:,}", fontsize=9)
        grid[i][0].set_ylabel("time per batch (µs)")
    for axes in grid[-1]:
        axes.set_xlabel("batch (requests)")
    first = rows[0]
    where = f"CUDA graphs; {first['gpu']}" if first["gpu"] else "interpreter on a CPU: times mean nothing"
    figure.suptitle(f"Verifying {first['drafts']} drafts, {first['logits']} bf16 logits, {where}", fontsize=10)
    by_label = {
        label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=8, fontsize=8)
    figure.set_layout_engine("constrained")
    return figure


def main(argv: list[str] | None = None) -> int:
    """Write the picture; 1 if the file has nothing to draw."""
    parser = argparse.ArgumentParser(description="Draw the results of verify.py.")
    parser.add_argument("csv", type=Path)
    parser.add_argument("--drafts", type=int, default=4, help="drafts per request; default 4")
    parser.add_argument("--logits", default="peaked", choices=["peaked", "flat"])
    parser.add_argument("--out", type=Path, help="default: beside the CSV file, ending in .svg")
    args = parser.parse_args(argv)
    try:
        rows = read_rows(args.csv, args.drafts, args.logits)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    out = args.out or args.csv.with_suffix(".svg")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Without a date, the same numbers give the same file.
    draw(rows).savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
