"""Draws one training step of a pipeline to scale, as docs/model-parallel.md shows it.

python benchmarks/schedule_picture.py KIND STAGES MICROBATCHES OUT.png
python benchmarks/schedule_picture.py zero_bubble 4 8 docs/schedule.png
"""

import argparse
from pathlib import Path

from matplotlib.patches import Patch

import jaxslowmo as js
from jaxslowmo.cli._figures import COLOURS, INK, new_figure, save_figure

_LOOKS = {
    "F": ("blue", "forward"), "I": ("green", "gradient of the input"),
    "W": ("orange", "gradient of the weights"), "B": ("vermilion", "both gradients"),
}  # fmt: skip
_MOST_DIGITS = 14.0 / 0.06  # of microbatch numbers that fit into the whole width


def draw(schedule: js.pipeline.Schedule, path: Path) -> None:
    """Draw a bar for each operation, lighter after the first chunk, with its microbatch."""
    simulation, stages = schedule.simulate(), schedule.num_stages
    title = f"{schedule.name}: {stages} stages, {schedule.num_microbatches} microbatches"
    line = f"equal times of all operations; bubble {simulation.bubble:.1%}"
    figure = new_figure((14.0, 0.42 * stages + 1.9), title, line)
    axes = figure.subplots()
    all_timed = [timed for of_stage in simulation.timeline for timed in of_stage]
    for operation, start, end in all_timed:
        alpha = 1 - 0.55 * operation.chunk / max(schedule.num_chunks - 1, 1)
        axes.barh(
            operation.stage, end - start, left=start, height=0.86, alpha=alpha, edgecolor="white",
            color=COLOURS[_LOOKS[operation.letter][0]], linewidth=0.5,
        )  # fmt: skip
        number, middle = str(operation.microbatch), (start + end) / 2
        if (end - start) / simulation.time * _MOST_DIGITS >= len(number):
            look = {"size": 6.5, "color": "white" if alpha > 0.6 else INK}
            axes.text(middle, operation.stage, number, ha="center", va="center", **look)
    axes.set(xlim=(0, simulation.time), ylim=(stages - 0.5, -0.5), xlabel="time")
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    used = {operation.letter for operation, _, _ in all_timed}
    looks = [(letter, *look) for letter, look in _LOOKS.items() if letter in used]
    patches = [Patch(color=COLOURS[name], label=f"{k}: {text}") for k, name, text in looks]
    figure.legend(handles=patches, loc="outside lower left", ncols=4, frameon=False)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=js.schedules.KINDS)
    parser.add_argument("stages", type=int)
    parser.add_argument("microbatches", type=int)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    draw(js.schedules.by_name(asked.kind, asked.stages, asked.microbatches), asked.out)


if __name__ == "__main__":
    main()
