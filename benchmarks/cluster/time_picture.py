"""The picture of README: validation loss against seconds, from the recorded runs.

    python benchmarks/cluster/time_picture.py        writes docs/time-to-loss.png

`time_to_target.py` made the records in benchmarks/results.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from jaxslowmo.cli._figures import COLOURS, INK, clean, new_figure, save_figure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PANELS = {
    "links of 200 Mbit/s": "cluster_time_to_target.json",
    "links of 20 Mbit/s": "cluster_time_to_target_20mbit.json",
}
LINES = {
    "DDP": ("torch DDP", "black"),
    "local_sgd(24)": ("local_sgd, every 24 steps", "blue"),
    "diloco(48)": ("diloco, every 48", "green"),
    "diloco(48, fragments=4, delay=10)": ("diloco, every 48, delayed", "vermilion"),
}


def draw_panel(axes: Axes, record: dict[str, Any]) -> None:
    """Draw every run of a record, and mark the median time at which each variant arrives."""
    target, arrivals = record["target"], {}
    for variant, (label, colour) in LINES.items():
        runs = [run for run in record["runs"] if run["variant"] == variant]
        look = {"color": COLOURS[colour], "linewidth": 1.7, "alpha": 0.75}
        for number, run in enumerate(runs):
            points = [point for point in run["curve"] if point["seconds"]]
            line = [[point[key] for point in points] for key in ("seconds", "validation")]
            axes.plot(*line, **look, label=None if number else label)
        if runs:
            arrivals[colour] = statistics.median(run["seconds"] for run in runs)
    for rank, (colour, median) in enumerate(sorted(arrivals.items(), key=lambda item: -item[1])):
        look = {"color": COLOURS[colour]}
        axes.plot(median, target, "o", **look, markersize=7, zorder=4)
        # The slowest arrives far from the others, whose labels stand below each other.
        where = {"textcoords": "offset points", "xytext": (-14, -16 - 12 * max(rank - 1, 0))}
        axes.annotate(f"{median:.1f} s", (median, target), **where, **look, size=9.5)
    axes.axhline(target, color=INK, linewidth=0.9, linestyle="--")
    axes.set_xscale("log")
    axes.set_ylim(2.05, 3.6)
    axes.xaxis.set_major_formatter("{x:g} s")
    clean(axes)


def main() -> None:
    """Write docs/time-to-loss.png."""
    what = (
        "A GPT of 1.88 MB on four hosts (one machine, shaped links); a line per seed. Dots: the "
        "median time to a validation loss of 2.4 nats per byte."
    )
    figure = new_figure((11, 4.6), "Seconds to the same loss", what, wspace=0.06)
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (name, file) in zip(panels, PANELS.items(), strict=True):
        draw_panel(axes, json.loads((RESULTS / file).read_text(encoding="utf-8")))
        axes.set_title(name, size=10.5, loc="left", color=INK)
        axes.set_xlabel("seconds of training (log scale)")
    panels[0].set_ylabel("validation loss, nats per byte")
    panels[0].legend(frameon=False, labelcolor=INK, loc="upper right", fontsize=9)
    save_figure(figure, ROOT / "docs" / "time-to-loss.png")


if __name__ == "__main__":
    main()
