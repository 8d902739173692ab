"""What all pictures share: colours, axes, title."""

import textwrap
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from .._support.files import replacing

# Okabe and Ito's colours, which colour-blind readers can tell apart, a grey and a violet.
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
INK = "#333333"  # of what stands beside the axes
_LINES, _GRID = "#999999", "#d9d9d9"
_TITLE, _TEXT = "#111111", "#666666"
LineStyle = dict[str, Any]  # color, marker and linestyle, as `Axes.plot` takes them


def new_figure(
    size: tuple[float, float], title: str, *lines: str, bottom: float = 0.05, **spaces: Any
) -> Figure:
    """Return a picture that holds a title, smaller lines below it, and room for axes.

    Args:
      size: in inches.
      title: one line.
      *lines: below it, broken where they are too long.
      bottom: inches below the axes that stay free.
      **spaces: `wspace` and `hspace` of the layout, between axes.
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
    """Thin lines at two sides, small letters, a faint grid below what is drawn."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_LINES)
    axes.tick_params(which="both", colors=INK, labelsize=9, color=_LINES, length=3.5, pad=3.5)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
    axes.grid(True, which="major", axis=grid, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def draw_line(axes: Axes, xs: Any, ys: Any, style: LineStyle, **options: Any) -> None:
    """Draw a line with markers that stay apart from it; `options` are those of `Axes.plot`."""
    axes.plot(
        xs, ys, **style, linewidth=1.7, markersize=5.5, markeredgecolor="white",
        markeredgewidth=0.7, zorder=3, **options,
    )  # fmt: skip


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a picture whole or not at all; the ending of the path decides its format."""
    with replacing(path) as temporary:
        figure.savefig(temporary)
