"""The picture of measured bucket limits."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from matplotlib.axes import Axes

from .._units import format_limit
from ._style import COLOURS, INK, clean, new_figure, save_figure, write_title

_SUBTITLE_WIDTH = 110


class Measured(Protocol):
    """What a limit's place in the picture needs."""

    @property
    def limit(self) -> int: ...
    @property
    def bucket_sizes(self) -> tuple[int, ...]: ...
    @property
    def seconds(self) -> tuple[float, ...]: ...
    @property
    def median(self) -> float: ...
    @property
    def quartiles(self) -> tuple[float, float]: ...


def draw_limits(rows: Sequence[Measured], best: int, path: Path, *, subtitle: str) -> None:
    """Draws the time of a step by limit: every round, quartiles and median.

    Args:
      rows: in the order of the axis.
      best: the limit to mark.
      path: of the PNG.
      subtitle: what was run.
    """
    lines = textwrap.wrap(subtitle, _SUBTITLE_WIDTH)
    lines.append("Lines: medians; bars: quartiles; dots: rounds, from left to right.")
    figure = new_figure((8.5, 4.8), (0.005, 0.01, 0.985, 0.89 - 0.045 * len(lines)))
    axes = figure.subplots()
    for x, row in enumerate(rows):
        colour = COLOURS["vermilion"] if row.limit == best else COLOURS["blue"]
        times = [1e3 * value for value in row.seconds]
        low, high = (1e3 * value for value in row.quartiles)
        # Rounds from left to right, so that a drift of the machine shows.
        spread = [x + 0.44 * ((i + 0.5) / len(times) - 0.5) for i in range(len(times))]
        axes.plot(spread, times, "o", color=colour, alpha=0.3, markersize=4, markeredgewidth=0)
        axes.plot([x, x], [low, high], color=colour, linewidth=7, alpha=0.35, solid_capstyle="butt")
        median = 1e3 * row.median
        axes.plot([x - 0.3, x + 0.3], [median, median], color=colour, linewidth=2.2, zorder=3)
        label = f"{median:.3g} ms" + ("\nbest" if row.limit == best else "")
        axes.annotate(
            label, (x + 0.3, median), xytext=(4, 0), textcoords="offset points", va="center",
            size=9.5, color=colour, weight="bold" if row.limit == best else "normal",
        )  # fmt: skip
    axes.set_xticks(range(len(rows)), [_tick(row) for row in rows])
    axes.set_xlim(-0.5, len(rows) - 0.25)
    _limit(axes, rows)
    axes.set_xlabel("bucket limit", color=INK)
    axes.set_ylabel("ms per training step", color=INK)
    clean(axes, grid="y")
    write_title(
        figure, "Step time by size of gradient buckets", lines, left=0.014,
        heights=(0.935, 0.885, 0.045), sizes=(13, 9),
    )  # fmt: skip
    save_figure(figure, path)


def _tick(row: Measured) -> str:
    count = len(row.bucket_sizes)
    name = format_limit(row.limit) if row.limit else "per leaf"
    return f"{name}\n{count} bucket{'s' if count != 1 else ''}"


def _limit(axes: Axes, rows: Sequence[Measured]) -> None:
    """Around the quartiles: a round that the machine disturbed should not flatten the rest."""
    low = min(row.quartiles[0] for row in rows)
    high = max(row.quartiles[1] for row in rows)
    span = max(high - low, 0.1 * high)
    shown = [1e3 * t for row in rows for t in row.seconds]
    bottom = max(min(shown), 1e3 * (low - 0.8 * span))
    top = min(max(shown), 1e3 * (high + 0.8 * span))
    margin = 0.06 * (top - bottom) or 0.06 * top  # one measurement has no span
    axes.set_ylim(bottom - margin, top + margin)
