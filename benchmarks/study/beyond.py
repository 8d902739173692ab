"""Tries what the grids of the study leave out, to find where its results end.

    python benchmarks/study/beyond.py     # writes results/beyond.json

Digits get slow rates above those of the grid. Text gets slow rates above 1, and windows that are
dealt out to the replicas anew in each update, so that no replica has files of its own. It prints
the best validation loss of plain averages and for each slow rate, with the seeds of the tuning.
"""

import itertools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from cells import FIRST_TUNING_SEED
from rows import LOCAL_SGD, RESULTS, SLOWMO, STEPS, Cell
from tasks import Task, classifier, language, mixed_language

from train import losses_of

PERIOD = 48
SEEDS = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + 2)


@dataclass(frozen=True)
class Trial:
    """One table's row: a task, and the settings that are tried.

    Attributes:
      label: what names it in the table.
      task: the task.
      part, optimizer, replicas: those of a `Cell`.
      plain_rates: learning rates of plain averages.
      rates, momenta, slow_rates: of slow momentum; all combinations are tried.
    """

    label: str
    task: Task
    part: str
    optimizer: str
    replicas: int
    plain_rates: tuple[float, ...]
    rates: tuple[float, ...]
    momenta: tuple[float, ...]
    slow_rates: tuple[float, ...]

    def best(self, algorithm: str, rows: list[tuple[float, ...]]) -> dict[str, Any]:
        """Return the setting with the smallest mean validation loss, and that loss."""
        columns = np.array(rows, np.float32).T
        settings = dict(zip(("rate", "momentum", "outer_rate"), columns, strict=True))
        cell = Cell(self.part, self.optimizer, self.replicas, algorithm, PERIOD, STEPS[self.part])
        losses = losses_of(cell, self.task, settings, SEEDS, segments=1)["validation"][-1]
        means = np.nan_to_num(losses.mean(1), nan=np.inf)
        return {"best": rows[means.argmin()], "loss": round(float(means.min()), 4)}

    def results(self) -> dict[str, Any]:
        slow = {}
        for slow_rate in self.slow_rates:
            rows = list(itertools.product(self.rates, self.momenta, [slow_rate]))
            slow[f"{slow_rate:g}"] = self.best(SLOWMO, rows)
        averages = self.best(LOCAL_SGD, [(rate, 0.0, 1.0) for rate in self.plain_rates])
        return {"averages": averages, "slow_rates": slow}


def trials() -> list[Trial]:
    digits, text = ("classifier", "sgd"), ("language", "adamw", 8)
    grid = ((0.025, 0.05, 0.1), (0.2, 0.4, 0.6), (1.0, 1.4, 2.0, 2.8))
    small = ((0.001, 0.002, 0.004), (0.1, 0.4), (1.0, 1.4, 2.0))
    rates, text_rates = (0.079, 0.1, 0.126), (0.004, 0.0057, 0.008)
    return [
        Trial("8 replicas", classifier(), *digits, 8, rates, *grid),
        Trial("32 replicas", classifier(), *digits, 32, rates, *grid),
        Trial("files of its own", language(), *text, text_rates, *small),
        Trial("windows of all files", mixed_language(), *text, text_rates, *small),
    ]


def main() -> None:
    results = {}
    for trial in trials():
        results[f"{trial.part}, {trial.label}"] = trial.results()
        print(trial.label, json.dumps(results[f"{trial.part}, {trial.label}"]), flush=True)
    (RESULTS / "beyond.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
