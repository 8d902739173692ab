"""Loss and AUC of a run, beside those of the trees."""

from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")  # a file, never a window

import matplotlib.pyplot as plt
import numpy as np

BLUE, ORANGE, GREY = "#4269d0", "#ff725c", "#8a8a8a"


class Curve(NamedTuple):
    """What a run measured.

    Attributes:
      losses: of every step.
      steps: after which the flights of `validation` and `test` were scored.
      validation: area under the ROC curve.
      test: the same.
    """

    losses: list[float]
    steps: list[int]
    validation: list[float]
    test: list[float]


def draw(path: Path, curve: Curve, trees: tuple[float, float] | None, title: str) -> None:
    """Write a PNG.

    Args:
      path: of the file.
      curve: of the DLRM.
      trees: AUC of the trees on validation and test flights; None leaves their lines out.
      title: above both panels.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    figure.suptitle(title)
    width = max(1, len(curve.losses) // 40)
    smooth = np.convolve(curve.losses, np.ones(width) / width, mode="valid")
    left.plot(np.arange(len(smooth)) + width, smooth, color=BLUE)
    left.set(xlabel="step", ylabel=f"loss (mean of {width} steps), nats")
    for name, scores, color, line in (
        ("validation (October)", curve.validation, BLUE, 0),
        ("test (November, December)", curve.test, ORANGE, 1),
    ):
        right.plot(curve.steps, scores, color=color, marker="o", ms=3, label=f"DLRM, {name}")
        if trees:
            label = f"boosted trees, {name}"
            right.axhline(trees[line], color=color, ls="--", lw=1, label=label)
    right.set(xlabel="step", ylabel="area under the ROC curve")
    right.legend(frameon=False, fontsize=8, loc="lower right")
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color=GREY, alpha=0.25)
    figure.savefig(path, dpi=150)
    plt.close(figure)
