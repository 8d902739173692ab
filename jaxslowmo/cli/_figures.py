"""What all pictures share: colours, axes, title."""

from collections.abc import Sequence
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


def new_figure(
    size: tuple[float, float],
    rect: tuple[float, float, float, float],
    *,
    wspace: float | None = None,
    hspace: float | None = None,
) -> Figure:
    """An empty picture.

    Args:
      size: in inches.
      rect: where the axes are: left, bottom, width and height as shares of the picture.
      wspace: between axes beside each other; None: the usual.
      hspace: between axes above each other.
    """
    layout = ConstrainedLayoutEngine(rect=rect, wspace=wspace, hspace=hspace)
    figure = Figure(figsize=size, dpi=150, layout=layout, facecolor="white")
    # Without pyplot: no global state and no display, whatever the user's backend is.
    FigureCanvasAgg(figure)
    return figure


def clean(axes: Axes, *, grid: Literal["both", "x", "y"] = "both") -> None:
    """Thin lines at two sides, small letters, a faint grid below what is drawn."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_LINES)
    axes.tick_params(which="both", colors=INK, labelsize=9, color=_LINES, length=3.5, pad=3.5)
    axes.grid(True, which="major", axis=grid, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a picture whole or not at all; the ending of the path decides its format."""
    with replacing(path) as temporary:
        figure.savefig(temporary)


def write_title(
    figure: Figure,
    title: str,
    lines: Sequence[str],
    *,
    left: float = 0.012,
    heights: tuple[float, float, float],
    sizes: tuple[float, float] = (14, 9.5),
) -> None:
    """Writes a title, and lines in smaller letters below it.

    Args:
      figure: to write on.
      title: one line.
      lines: below it.
      left: where they begin, as a share of the width.
      heights: of the title, of the first line, and between lines, as shares of the height.
      sizes: of the letters of title and lines.
    """
    top, first, step = heights
    of_all: dict[str, Any] = {"size": sizes[1], "color": _TEXT}
    figure.text(left, top, title, size=sizes[0], weight="bold", color=_TITLE)
    for i, line in enumerate(lines):
        figure.text(left, first - step * i, line, **of_all)
