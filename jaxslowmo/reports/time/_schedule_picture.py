"""Draw a simulated step as a picture: time runs to the right, a bar is an operation."""

import os
from collections.abc import Sequence

from ..._support.extras import needed_by
from ..._support.files import replacing
from ...pipeline.schedules import Simulation

# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = {"F": "#0072B2", "I": "#009E73", "W": "#E69F00", "B": "#D55E00"}
"""The colour of each letter of operations, in pictures and on terminals."""
_MEANING = {
    "F": "forward", "I": "gradient of the input", "W": "gradient of the weights",
    "B": "both gradients",
}  # fmt: skip
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
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    stages = len(simulation.timeline)
    size = (14.0, 0.42 * stages + 1.5 + 0.2 * len(lines))  # inches
    figure = Figure(figsize=size, dpi=150, layout="constrained")  # no pyplot: no global state
    axes = figure.subplots()
    axes.set_title("\n".join([title, *lines]), loc="left")
    all_timed = [timed for line in simulation.timeline for timed in line]
    chunks = 1 + max(operation.chunk for operation, _, _ in all_timed)
    for operation, start, end in all_timed:
        alpha = 1 - 0.55 * operation.chunk / max(chunks - 1, 1)
        axes.barh(
            operation.stage, end - start, left=start, height=0.86, alpha=alpha, edgecolor="white",
            color=COLOURS[operation.letter], linewidth=0.5,
        )  # fmt: skip
        number, middle = str(operation.microbatch), (start + end) / 2
        if (end - start) / simulation.time * _MOST_LETTERS >= len(number):
            look = {"size": 6.5, "color": "white" if alpha > 0.6 else "#333333"}
            axes.text(middle, operation.stage, number, ha="center", va="center", **look)
    axes.set(xlim=(0, simulation.time), ylim=(stages - 0.5, -0.5), xlabel="time")
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    used = {operation.letter for operation, _, _ in all_timed}
    patches = [Patch(color=COLOURS[k], label=f"{k}: {x}") for k, x in _MEANING.items() if k in used]
    figure.legend(handles=patches, loc="outside lower left", ncols=4, frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary)
