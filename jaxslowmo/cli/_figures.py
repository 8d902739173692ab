"""Functions that all pictures share: colours, axes, title, and saving."""

import contextlib
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from .._support.files import atomic_path

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


def new_figure(size: tuple[float, float], title: str, *lines: str, **spaces: Any) -> Figure:
    """Return a picture with a title, smaller lines below it, and room for axes.

    Args:
      size: width and height in inches.
      title: one line.
      *lines: smaller lines below the title, broken if they are too long.
      **spaces: `wspace` and `hspace` of the layout: space between axes.
    """
    width, height = size
    broken = [part for line in lines for part in textwrap.wrap(line, round(13 * width))]
    room = (0.55 + 0.2 * len(broken)) / height
    layout = ConstrainedLayoutEngine(rect=(0.005, 0.01, 0.99, 0.99 - room), **spaces)
    # Without pyplot: no global state and no display, whatever the user's backend is.
    figure = Figure(figsize=size, dpi=150, layout=layout)
    figure.text(0.012, 1 - 0.3 / height, title, size=14, weight="bold")
    figure.text(0.012, 1 - 0.4 / height, "\n".join(broken), size=9.5, color="#666666", va="top")
    return figure


def clean(axes: Axes, *, grid: Literal["both", "x", "y"] = "both") -> None:
    """Give axes thin lines at two sides, small letters, and a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(COLOURS["grey"])
    axes.tick_params(which="both", labelsize=9, labelcolor=INK, color=COLOURS["grey"])
    axes.grid(True, which="major", axis=grid, color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)


def draw_line(axes: Axes, xs: Any, ys: Any, style: dict[str, Any], **options: Any) -> Line2D:
    """Draw a line whose markers have a white edge, and return it.

    Args:
      axes: axes to draw on.
      xs: positions on the x axis.
      ys: positions on the y axis.
      style: arguments `color`, `marker` and `linestyle` of `Axes.plot`.
      **options: further ones.
    """
    look = style | {"linewidth": 1.7, "markersize": 5.5, "markeredgecolor": "white", "zorder": 3}
    return axes.plot(xs, ys, **look, markeredgewidth=0.7, **options)[0]


def draw_loss(records: Iterable[dict[str, Any]], summary: dict[str, Any], path: Path) -> None:
    """Draw the losses of a run against its steps.

    Args:
      records: lines of metrics.jsonl.
      summary: content of summary.json.
      path: path of the PNG.
    """
    about = f"{summary['parameters']:,} parameters, {summary['placement']}"
    figure = new_figure((7, 4), f"Loss of {summary['algorithm']}", about)
    axes, records = figure.subplots(), [*records]
    looks = {
        "loss": ("training, mean of the replicas", "grey", ""),
        "validation_loss": ("validation, consensus model", "vermilion", "o"),
    }
    for name, (label, colour, marker) in looks.items():
        points = [(x["step"], x[name]) for x in records if x.get(name) is not None]
        xs, ys = np.array(points).reshape(-1, 2).T
        look = {"color": COLOURS[colour], "marker": marker, "linestyle": "-"}
        draw_line(axes, xs, ys, look, label=label, clip_on=False)
    axes.set(xlabel="optimizer steps", ylabel="nats per byte")
    axes.set_xlim(left=0)
    axes.legend(frameon=False, labelcolor=INK, loc="upper right")
    clean(axes)
    with contextlib.suppress(OSError):  # a full disk: the numbers are in metrics.jsonl
        save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture completely or not at all; the suffix of the path decides its format."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary)
