"""Tries what the grids of the study leave out: slow rates above theirs, and on text above 1.

    python benchmarks/study/beyond.py     # 10 minutes of one core; writes results/beyond.json

It prints the best validation loss for each slow rate, with the seeds of the tuning.
"""

import itertools
import json

import numpy as np
from cells import FIRST_TUNING_SEED
from rows import LOCAL_SGD, RESULTS, SLOWMO, STEPS, Cell, by_cell
from tasks import TASKS

from train import losses_of

# Learning rates, momenta and slow rates.
TRIED = {
    ("classifier", "sgd", 8): ((0.025, 0.05, 0.1), (0.2, 0.4, 0.6), (1.0, 1.4, 2.0, 2.8)),
    ("classifier", "sgd", 32): ((0.025, 0.05, 0.1), (0.2, 0.4, 0.6), (1.0, 1.4, 2.0, 2.8)),
    ("language", "adamw", 8): ((0.001, 0.002, 0.004), (0.1, 0.4), (1.4, 2.0)),
}
SEEDS = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + 2)


def validation(cell: Cell, rows: list[tuple[float, ...]]) -> np.ndarray:
    """Return the validation losses of these settings: (settings, seeds)."""
    columns = np.array(rows, np.float32).T
    names = ("rate", "momentum", "outer_rate")
    settings = dict(zip(names, columns, strict=True))
    return losses_of(cell, TASKS[cell.part](), settings, SEEDS, segments=1)["validation"][-1]


def main() -> None:
    recorded, results = by_cell(), []
    for (part, optimizer, replicas), lists in TRIED.items():
        plain = Cell(part, optimizer, replicas, LOCAL_SGD, 48, STEPS[part])
        best = recorded[plain]["best"]
        averages = validation(plain, [(best["rate"], 0.0, 1.0)]).mean()
        cell = Cell(part, optimizer, replicas, SLOWMO, 48, STEPS[part])
        rows = list(itertools.product(*lists))
        losses = validation(cell, rows)
        for slow_rate in lists[2]:
            means = {
                row: float(loss)
                for row, loss in zip(rows, losses.mean(1), strict=True)
                if row[2] == slow_rate
            }
            row, loss = min(means.items(), key=lambda pair: pair[1])
            results.append(
                {"cell": cell.key, "slow_rate": slow_rate, "best": row, "loss": round(loss, 4),
                 "averages": round(float(averages), 4)}
            )  # fmt: skip
            print(results[-1], flush=True)
    (RESULTS / "beyond.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
