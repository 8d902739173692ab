"""The pictures of docs/study.md, from the recorded rows."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from rows import (
    ALL_REDUCE,
    DILOCO,
    LOCAL_SGD,
    PARAMETERS,
    PERIODS,
    REPLICAS,
    SGP,
    SLOWMO,
    SLOWMO_48,
    STEPS,
    Cell,
    Row,
)
from statistics_of import interval
from tables import OPTIMIZERS, TASKS, Study, closed

from jaxslowmo.cli._figures import COLOURS, INK, clean, draw_line, new_figure, save_figure

STYLES = {
    ALL_REDUCE: ("black", "o"),
    SGP: ("pink", "v"),
    LOCAL_SGD: ("blue", "s"),
    SLOWMO: ("vermilion", "D"),
    DILOCO: ("green", "^"),
}
# The rows of the demo and of study.png.
SHOWN = [
    Cell("classifier", "sgd", 32, name, 1 if name == ALL_REDUCE else 48, STEPS["classifier"])
    for name in (ALL_REDUCE, LOCAL_SGD, SLOWMO, DILOCO)
]


def style(algorithm: str) -> dict[str, Any]:
    colour, marker = STYLES[algorithm]
    return {"color": COLOURS[colour], "marker": marker}


def draw(study: Study, folder: Path) -> list[Path]:
    """Draw all pictures, and return their paths."""
    pictures = {
        "study.png": draw_bytes,
        "study-replicas.png": draw_replicas,
        "study-gaps.png": draw_gaps,
        "study-momentum.png": draw_momentum,
    }
    for name, function in pictures.items():
        function(study, folder / name)
    return [folder / name for name in pictures]


def draw_bytes(study: Study, path: Path) -> None:
    """Draw loss against updates, and against bytes, where slow momentum pays."""
    rows = [study.rows[cell] for cell in SHOWN]
    draw_runs(rows, path)


def draw_runs(rows: Sequence[Row], path: Path) -> None:
    """Draw the losses of these rows of digits against updates, and against bytes."""
    count, seeds = rows[0]["replicas"], len(rows[0]["test"])
    what = (
        f"Handwritten digits, {count} replicas, SGD with momentum, one exchange in "
        f"{rows[-1]['period']} updates; each at its best rates; means of {seeds} seeds."
    )
    title = "With the bytes of plain averages, slow momentum comes closer to the all-reduce"
    figure = new_figure((11, 5), title, what, wspace=0.06)
    by_updates, by_bytes = figure.subplots(1, 2, sharey=True)
    for row in rows:
        updates = np.arange(1, len(row["curve"]) + 1) * row["steps"] // len(row["curve"])
        mean, half = interval(row["test"])
        label = f"{row['algorithm']}: {mean:.3f} ± {half:.3f}"
        look = style(row["algorithm"])
        draw_line(by_updates, updates, row["curve"], look, label=label)
        kilobytes = 4 * PARAMETERS[row["part"]] / 1e3
        draw_line(by_bytes, updates // row["period"] * kilobytes, row["curve"], look)
    by_updates.set(xlabel="updates", ylabel="held-out loss of the consensus model")
    by_bytes.set(xscale="log", xlabel="kilobytes sent by each replica (log scale)")
    by_bytes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    by_updates.set_ylim(bottom=0)
    by_updates.legend(frameon=False, labelcolor=INK)
    for axes in (by_updates, by_bytes):
        clean(axes)
    save_figure(figure, path)


def draw_replicas(study: Study, path: Path) -> None:
    """Draw loss against replicas: a panel per optimizer and period."""
    what = "Digits; each algorithm with its best rates. Means of 20 seeds, with intervals of 95 %."
    figure = new_figure((11, 8), "Held-out loss by number of replicas", what)
    panels = figure.subplots(2, 2, sharey=True, sharex=True)
    counts = REPLICAS["classifier"]
    for line, optimizer in zip(panels, OPTIMIZERS, strict=True):
        for axes, period in zip(line, PERIODS, strict=True):
            for name in STYLES:
                every = 1 if name in (ALL_REDUCE, SGP) else period
                found = [study.losses("classifier", optimizer, n, name, every) for n in counts]
                means, halves = zip(*map(interval, found), strict=True)
                draw_line(axes, counts, means, style(name), label=name)
                axes.errorbar(
                    counts, means, halves, color=style(name)["color"], linewidth=0, elinewidth=1.2
                )
            _by_replicas(axes, counts)
            axes.set_title(
                f"{OPTIMIZERS[optimizer]}, every {period} updates", size=10.5, loc="left"
            )
        line[0].set_ylabel("held-out loss")
    panels[0][0].legend(frameon=False, labelcolor=INK)
    save_figure(figure, path)


def _by_replicas(axes: Axes, counts: Sequence[int]) -> None:
    clean(axes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{n}" for n in counts])
    axes.set_xlabel("replicas")


def draw_gaps(study: Study, path: Path) -> None:
    """Draw the share of the gap that slow momentum and diloco close, by replicas."""
    what = (
        "The gap is that between plain averages with as many bytes and the all-reduce. "
        "Bars: intervals of 95 %, over seeds."
    )
    figure = new_figure((12, 4.8), "Share of the gap that is closed", what, wspace=0.06)
    panels = figure.subplots(1, 3, sharey=True)
    colours = {"sgd": COLOURS["vermilion"], "adamw": COLOURS["blue"]}
    lines = [("classifier", *look) for look in itertools.product(OPTIMIZERS, PERIODS)]
    lines.append(("language", "adamw", 48))
    titles = {
        SLOWMO: "slow momentum in each average",
        SLOWMO_48: "slow momentum in every fourth average",
        DILOCO: "diloco",
    }
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for part, optimizer, period in lines:
            if name == SLOWMO_48 and period == 48:
                continue
            counts = REPLICAS[part]
            found = [closed(study, optimizer, n, name, period, part) for n in counts]
            middle, low, high = 100 * np.array(found).T
            is_text = part == "language"
            colour = COLOURS["black"] if is_text else colours[optimizer]
            what = f"{TASKS[part]}, {OPTIMIZERS[optimizer]}, every {period}"
            axes.errorbar(
                counts, middle, np.abs([low - middle, high - middle]), color=colour, marker="o",
                linestyle="--" if period == 48 else "-", capsize=2, elinewidth=1, label=what,
            )  # fmt: skip
        _by_replicas(axes, REPLICAS["classifier"])
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_title(title, size=10.5, loc="left")
    panels[0].set_ylabel("% of the gap to the all-reduce")
    panels[0].legend(frameon=False, labelcolor=INK, fontsize=8.5)
    save_figure(figure, path)


def draw_momentum(study: Study, path: Path) -> None:
    """Draw the best loss at each slow momentum, less that of plain averages, by replicas."""
    what = (
        "Validation loss with the best rates for each momentum, less the best of plain averages, "
        "with two seeds. Below 0 slow momentum is better."
    )
    figure = new_figure((11, 7.2), "Which slow momentum?", what)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    shades = [COLOURS[name] for name in ("sky", "blue", "orange", "vermilion")]
    for line, optimizer in zip(panels, OPTIMIZERS, strict=True):
        for axes, period in zip(line, PERIODS, strict=True):
            for count, colour in zip(REPLICAS["classifier"], shades, strict=True):
                one = ("classifier", optimizer, count)
                plain = min(_by_value(study.row(*one, LOCAL_SGD, period), "momentum").values())
                found = _by_value(study.row(*one, SLOWMO, period), "momentum")
                ys = [value - plain for value in found.values()]
                look = {"color": colour, "marker": "o"}
                draw_line(axes, list(found), ys, look, label=f"{count} replicas")
            axes.axhline(0, color=INK, linewidth=0.8)
            clean(axes)
            axes.set_title(
                f"{OPTIMIZERS[optimizer]}, every {period} updates", size=10.5, loc="left"
            )
    for axes in panels[1]:
        axes.set_xlabel("slow momentum")
    for axes in panels[:, 0]:
        axes.set_ylabel("loss less that of averages")
    panels[0][0].legend(frameon=False, labelcolor=INK)
    save_figure(figure, path)


def _by_value(row: dict[str, Any], name: str) -> dict[float, float]:
    """Return the smallest mean validation loss of the first two seeds for each value."""
    best: dict[float, float] = {}
    losses = np.nan_to_num(np.array(row["tuning"]["validation"], float)[:, :2], nan=np.inf)
    for value, loss in zip(row["tuning"]["settings"][name], losses.mean(1), strict=True):
        best[value] = min(best.get(value, np.inf), float(loss))
    return best
