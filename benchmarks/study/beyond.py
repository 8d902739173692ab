"""Tries what the grids of the study leave out, to find where its results end.

    python benchmarks/study/beyond.py     # 40 minutes of one core; writes results/beyond.json

Digits get slow rates above those of the grid. Text gets slow rates above 1, and windows that are
dealt out to the replicas anew in each update, so that no replica has files of its own. It prints
the best validation loss of plain averages and for each slow rate, with the seeds of the tuning.
"""

import itertools
import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cells import FIRST_TUNING_SEED
from rows import LOCAL_SGD, RESULTS, SLOWMO, STEPS, Cell
from tasks import Task, classifier, language, mixed_language

from train import losses_of

SEEDS = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + 2)


@dataclass(frozen=True)
class Trial:
    """A row of a table: slow momentum with a list of slow rates, beside plain averages.

    Attributes:
      task: the task.
      cell: the cell of slow momentum.
      plain_rates: learning rates of plain averages.
      rates, momenta, slow_rates: of slow momentum; all combinations are tried.
    """

    task: Task
    cell: Cell
    plain_rates: tuple[float, ...]
    rates: tuple[float, ...]
    momenta: tuple[float, ...]
    slow_rates: tuple[float, ...]

    def best(self, cell: Cell, rows: list[tuple[float, ...]]) -> dict[str, Any]:
        """Return the setting with the smallest mean validation loss, and that loss."""
        columns = np.array(rows, np.float32).T
        settings = dict(zip(("rate", "momentum", "outer_rate"), columns, strict=True))
        losses = losses_of(cell, self.task, settings, SEEDS, segments=1)["validation"][-1]
        means = np.nan_to_num(losses.mean(1), nan=np.inf)
        return {"best": rows[means.argmin()], "loss": round(float(means.min()), 4)}

    def results(self) -> dict[str, Any]:
        slow = {}
        for slow_rate in self.slow_rates:
            rows = list(itertools.product(self.rates, self.momenta, [slow_rate]))
            slow[f"{slow_rate:g}"] = self.best(self.cell, rows)
        plain = replace(self.cell, algorithm=LOCAL_SGD)
        averages = self.best(plain, [(rate, 0.0, 1.0) for rate in self.plain_rates])
        return {"averages": averages, "slow_rates": slow}


def trials() -> dict[str, Trial]:
    """Return the rows by the part and the words that stand before them in its table."""

    def cell(part: str, optimizer: str, replicas: int) -> Cell:
        return Cell(part, optimizer, replicas, SLOWMO, 48, STEPS[part])

    digits = ((0.079, 0.1, 0.126), (0.025, 0.05, 0.1), (0.2, 0.4, 0.6), (1.0, 1.4, 2.0, 2.8))
    text = ((0.004, 0.0057, 0.008), (0.001, 0.002, 0.004), (0.1, 0.4), (1.0, 1.4, 2.0))
    own, mixed = language(), mixed_language()
    return {
        "classifier, 8 replicas": Trial(classifier(), cell("classifier", "sgd", 8), *digits),
        "classifier, 32 replicas": Trial(classifier(), cell("classifier", "sgd", 32), *digits),
        "language, files of its own": Trial(own, cell("language", "adamw", 8), *text),
        "language, windows of all files": Trial(mixed, cell("language", "adamw", 8), *text),
    }


def main() -> None:
    results = {}
    for name, trial in trials().items():
        results[name] = trial.results()
        print(name, json.dumps(results[name]), flush=True)
    (RESULTS / "beyond.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
