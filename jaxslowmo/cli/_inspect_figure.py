"""The picture of graphs: what agreement costs in rounds, and in messages."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from jaxslowmo.topology import GraphAnalysis

# Okabe and Ito's colours and a grey, each with its marker; a second turn is dashed.
_STYLES = (
    ("#000000", "o"),
    ("#999999", "X"),
    ("#D55E00", "D"),
    ("#E69F00", "P"),
    ("#009E73", "^"),
    ("#CC79A7", "v"),
    ("#56B4E9", "p"),
    ("#0072B2", "s"),
    ("#7B4B94", "*"),
)
_INK, _FAINT = "#333333", "#d9d9d9"
LineStyle = Literal["-", "--"]
_POINTS = 100
_FOREVER = 1000  # rounds to draw of nodes that never agree


@dataclasses.dataclass(frozen=True)
class Curve:
    """The consensus error of one graph.

    Attributes:
        name: of the graph.
        rounds: where it was computed, from 0 on.
        errors: as many.
        messages: that the busiest node sends per round.
    """

    name: str
    rounds: tuple[int, ...]
    errors: tuple[float, ...]
    messages: int

    @classmethod
    def of(cls, name: str, analysis: GraphAnalysis) -> "Curve":
        """A graph's, until it is a little below its tolerance."""
        last = analysis.rounds_to_tolerance
        last = _FOREVER if last is None else int(1.2 * last) + 1
        later = (round(t) for t in np.geomspace(1, last, _POINTS))
        rounds = sorted({*range(min(last, _POINTS) + 1), *later})
        errors = tuple(analysis.error(t) for t in rounds)
        return cls(name, tuple(rounds), errors, analysis.messages_max)


def draw_graphs(
    curves: Mapping[int, Sequence[Curve]], path: Path, *, tolerance: float, mixing: str
) -> None:
    """Draws errors against rounds, and against messages of the busiest node.

    Args:
        curves: by number of nodes; a row of the picture each.
        path: of the PNG.
        tolerance: a line across.
        mixing: for the subtitle.
    """
    # Without pyplot: no global state and no display, whatever the user's backend is.
    height = 3.4 * len(curves) + 1.6
    top, bottom = 0.75 / height, 0.65 / height  # for titles and legend
    layout = ConstrainedLayoutEngine(
        rect=(0.005, bottom, 0.99, 1 - top - bottom), wspace=0.05, hspace=0.06
    )
    figure = Figure(figsize=(11, height), dpi=150, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(curves), 2, sharey=True, sharex="col", squeeze=False)
    styles, floor = _styles(curves), tolerance / 3
    for (nodes, found), (by_rounds, by_messages) in zip(curves.items(), grid, strict=True):
        for curve in found:
            style = styles[curve.name]
            _draw(by_rounds, curve, 1, floor, style)
            _draw(by_messages, curve, curve.messages, floor, style)
        by_rounds.set_ylabel(f"{nodes} nodes\nconsensus error", color=_INK)
        for axes in (by_rounds, by_messages):
            _clean(axes, tolerance, floor)
    for axes in grid[0]:  # which its column shares
        axes.set_xlim(left=0)
    grid[-1][0].set_xlabel("rounds", color=_INK)
    grid[-1][1].set_xlabel(
        "messages that the busiest node sends, each of the size of the model",
        color=_INK,
    )
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle=line, label=name)
        for name, (colour, marker, line) in styles.items()
    ]
    figure.legend(
        handles=handles, loc="lower center", ncols=5, frameon=False, labelcolor=_INK, fontsize=9.5
    )
    figure.text(
        0.012, 1 - 0.32 / height, "How fast graphs mix", size=14, weight="bold", color="#111111"
    )
    subtitle = (
        f"{mixing} mixing; largest distance of all nodes from the mean, 1 at the start; log scales"
    )
    figure.text(0.012, 1 - 0.58 / height, subtitle, size=9.5, color="#666666")
    figure.savefig(path)


def _styles(curves: Mapping[int, Sequence[Curve]]) -> dict[str, tuple[str, str, LineStyle]]:
    names = dict.fromkeys(curve.name for found in curves.values() for curve in found)
    return {
        name: (*_STYLES[i % len(_STYLES)], "-" if i < len(_STYLES) else "--")
        for i, name in enumerate(names)
    }


def _draw(axes: Axes, curve: Curve, scale: int, floor: float, style: tuple[str, str, str]) -> None:
    colour, marker, line = style
    # In steps, since nothing happens between two rounds: straight lines would promise agreement
    # before the first one is over. An error of 0 has no place on a logarithmic axis: there the line
    # leaves the picture.
    errors = np.maximum(curve.errors, floor / 1.2)
    shown = 1 + np.searchsorted(-errors, -floor)
    axes.plot(
        scale * np.array(curve.rounds)[:shown], errors[:shown],
        color=colour, linestyle=line, linewidth=1.6, drawstyle="steps-post", marker=marker,
        markersize=5.5,
        markeredgecolor="white", markeredgewidth=0.6, markevery=0.12, zorder=3,
    )  # fmt: skip


def _clean(axes: Axes, tolerance: float, floor: float) -> None:
    axes.set_xscale("symlog", linthresh=1, linscale=0.3)  # with a place for 0
    axes.set_yscale("log")
    axes.set_ylim(floor, 1.3)
    axes.axhline(tolerance, color="#777777", linewidth=0.9, linestyle=(0, (4, 3)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(which="both", colors=_INK, labelsize=9, color="#999999", length=3.5, pad=3.5)
    axes.tick_params(labelbottom=True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(True, which="major", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
