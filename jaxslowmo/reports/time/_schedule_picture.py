"""Draw a simulated step as a picture: time runs to the right, a bar is an operation."""

import os
from collections.abc import Sequence
from typing import Any

from ..._support.extras import needed_by
from ..._support.files import replacing
from ...pipeline.schedules import Simulation

# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS: dict[str, str] = {"F": "#0072B2", "B": "#009E73", "W": "#E69F00", "BW": "#D55E00"}
"""The colour of each kind of operation, in pictures and on terminals."""
_LEGEND = {
    "F": "F: forward",
    "B": "I: gradient of the input",
    "W": "W: gradient of the weights",
    "BW": "B: both gradients",
}
_INK, _GREY = "#333333", "#666666"
_WIDTH = 14.0  # inches
_MOST_LETTERS = 14.0 / 0.06  # digits of microbatch numbers that fit into the whole width


def schedule_picture(
    simulation: Simulation,
    path: str | os.PathLike[str],
    *,
    title: str = "",
    lines: Sequence[str] = (),
) -> None:
    """Draw a simulated step to scale and write it to a file.

    Each operation is a bar, coloured by its kind, with the number of its microbatch where that
    fits; chunks after the first one are lighter.

    Args:
      simulation: the result of `Schedule.simulate`.
      path: the file; its ending decides the format, such as .png, .pdf or .svg.
      title: text above the picture.
      lines: lines of smaller text below the title.

    Raises:
      ModuleNotFoundError: matplotlib, of the extra `train`, is not installed.
    """
    with needed_by("a picture of a schedule"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    stages = len(simulation.timeline)
    height = 0.42 * stages + 1.5 + 0.2 * len(lines)
    figure = Figure(figsize=(_WIDTH, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)  # without pyplot: no global state, no display
    top = (height - 0.55 - 0.2 * len(lines)) / height
    axes = figure.add_axes((0.045, 0.75 / height, 0.945, top - 0.75 / height))
    for stage, line in enumerate(simulation.timeline):
        _bars(axes, stage, line, simulation.time)
    _frame(axes, stages, simulation.time)
    _legend(figure, simulation)
    figure.text(0.012, 1 - 0.3 / height, title, size=13, weight="bold", color=_INK)
    for i, text in enumerate(lines):
        figure.text(0.012, 1 - (0.52 + 0.2 * i) / height, text, size=9.5, color=_GREY)
    with replacing(path) as temporary:
        figure.savefig(temporary)


def _bars(axes: Any, stage: int, line: Sequence[Any], time: float) -> None:
    chunks = 1 + max((timed.operation.chunk for timed in line), default=0)
    for operation, start, end in line:
        alpha = 1 - 0.55 * operation.chunk / max(chunks - 1, 1)
        axes.barh(
            stage, end - start, left=start, height=0.86, color=COLOURS[operation.kind],
            alpha=alpha, edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        letters = len(str(operation.microbatch))
        if (end - start) / time * _MOST_LETTERS >= letters:
            axes.text(
                (start + end) / 2, stage, str(operation.microbatch), ha="center", va="center",
                size=6.5, color="white" if alpha > 0.6 else _INK,
            )  # fmt: skip


def _frame(axes: Any, stages: int, time: float) -> None:
    axes.set_xlim(0, time)
    axes.set_ylim(stages - 0.5, -0.5)  # stage 0 on top
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.set_xlabel("time", color=_INK, size=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    axes.tick_params(colors=_INK, labelsize=8.5, color="#999999", length=3)
    axes.tick_params(axis="y", length=0)


def _legend(figure: Any, simulation: Simulation) -> None:
    from matplotlib.patches import Patch

    kinds = {timed.operation.kind for line in simulation.timeline for timed in line}
    handles = [
        Patch(color=COLOURS[kind], label=label) for kind, label in _LEGEND.items() if kind in kinds
    ]
    figure.legend(
        handles=handles, loc="lower left", ncols=4, frameon=False, labelcolor=_INK, fontsize=9
    )
