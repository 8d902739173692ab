"""The picture of graphs: what agreement costs in rounds, and in messages."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from ._style import COLOURS, INK, clean, new_figure, save_figure, write_title

# A marker for each colour; a second turn is dashed.
_STYLES = tuple(zip(COLOURS.values(), "oXDP^vps*", strict=True))
LineStyle = Literal["-", "--"]


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
    height = 3.4 * len(curves) + 1.6
    top, bottom = 0.75 / height, 0.65 / height  # for titles and legend
    rect = (0.005, bottom, 0.99, 1 - top - bottom)
    figure = new_figure((11, height), rect, wspace=0.05, hspace=0.06)
    grid = figure.subplots(len(curves), 2, sharey=True, sharex="col", squeeze=False)
    styles, floor = _styles(curves), tolerance / 3
    for (nodes, found), (by_rounds, by_messages) in zip(curves.items(), grid, strict=True):
        for curve in found:
            style = styles[curve.name]
            _draw(by_rounds, curve, 1, floor, style)
            _draw(by_messages, curve, curve.messages, floor, style)
        by_rounds.set_ylabel(f"{nodes} nodes\nconsensus error", color=INK)
        for axes in (by_rounds, by_messages):
            _scale(axes, tolerance, floor)
    for axes in grid[0]:  # which its column shares
        axes.set_xlim(left=0)
    grid[-1][0].set_xlabel("rounds", color=INK)
    grid[-1][1].set_xlabel(
        "messages that the busiest node sends, each of the size of the model",
        color=INK,
    )
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle=line, label=name)
        for name, (colour, marker, line) in styles.items()
    ]
    figure.legend(
        handles=handles, loc="lower center", ncols=5, frameon=False, labelcolor=INK, fontsize=9.5
    )
    subtitle = (
        f"{mixing} mixing; largest distance of all nodes from the mean, 1 at the start; log scales"
    )
    heights = (1 - 0.32 / height, 1 - 0.58 / height, 0)
    write_title(figure, "How fast graphs mix", [subtitle], heights=heights)
    save_figure(figure, path)


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


def _scale(axes: Axes, tolerance: float, floor: float) -> None:
    axes.set_xscale("symlog", linthresh=1, linscale=0.3)  # with a place for 0
    axes.set_yscale("log")
    axes.set_ylim(floor, 1.3)
    axes.axhline(tolerance, color="#777777", linewidth=0.9, linestyle=(0, (4, 3)))
    clean(axes)
    axes.tick_params(labelbottom=True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
