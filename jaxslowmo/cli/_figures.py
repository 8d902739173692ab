"""Functions that all pictures share: colours, axes, title, and saving."""

import textwrap
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from .._support.files import replacing

# The colours of Okabe and Ito, which colour-blind readers can distinguish, a grey and a violet.
COLOURS = {
    "black": "#000000",
    "grey": "#999999",
    "vermilion": "#D55E00",
    "orange": "#E69F00",
    "green": "#009E73",
    "pink": "#CC79A7",
    "sky": "#56B4E9",
    "blue": "#0072B2",
    "violet": "#7B4B94",
}
INK = "#333333"  # of text next to the axes
_LINES, _GRID = "#999999", "#d9d9d9"
_TITLE, _TEXT = "#111111", "#666666"
LineStyle = dict[str, Any]  # arguments color, marker and linestyle of `Axes.plot`


def new_figure(
    size: tuple[float, float], title: str, *lines: str, bottom: float = 0.05, **spaces: Any
) -> Figure:
    """Return a picture with a title, smaller lines below it, and room for axes.

    Args:
      size: width and height in inches.
      title: one line.
      *lines: smaller lines below the title, broken if they are too long.
      bottom: free space below the axes in inches.
      **spaces: `wspace` and `hspace` of the layout: space between axes.
    """
    width, height = size
    broken = [part for line in lines for part in textwrap.wrap(line, round(13 * width))]
    top, bottom = (0.55 + 0.2 * len(broken)) / height, bottom / height
    layout = ConstrainedLayoutEngine(rect=(0.005, bottom, 0.99, 1 - top - bottom), **spaces)
    figure = Figure(figsize=size, dpi=150, layout=layout, facecolor="white")
    # Without pyplot: no global state and no display, whatever the user's backend is.
    FigureCanvasAgg(figure)
    figure.text(0.012, 1 - 0.3 / height, title, size=14, weight="bold", color=_TITLE)
    for i, line in enumerate(broken):
        figure.text(0.012, 1 - (0.55 + 0.2 * i) / height, line, size=9.5, color=_TEXT)
    return figure


def clean(axes: Axes, *, grid: Literal["both", "x", "y"] = "both") -> None:
    """Give axes thin lines at two sides, small letters, and a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_LINES)
    axes.tick_params(which="both", colors=INK, labelsize=9, color=_LINES, length=3.5, pad=3.5)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
    axes.grid(True, which="major", axis=grid, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def draw_line(axes: Axes, xs: Any, ys: Any, style: LineStyle, **options: Any) -> None:
    """Draw a line whose markers have a white edge; `options` are those of `Axes.plot`."""
    axes.plot(
        xs, ys, **style, linewidth=1.7, markersize=5.5, markeredgecolor="white",
        markeredgewidth=0.7, zorder=3, **options,
    )  # fmt: skip


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture completely or not at all; the suffix of the path decides its format."""
    with replacing(path) as temporary:
        figure.savefig(temporary)
