"""Trains for few outer steps, and compares the outer optimizers of `js.diloco` with plain averages.

    python benchmarks/study/first_steps.py            # half an hour of one core
    python benchmarks/study/first_steps.py --report   # the table, from results/first_steps.json

Each algorithm has the best of the learning rates by the validation loss after the last update, and
its test loss is recorded: of the consensus after every outer step, the mean over the seeds; and
after the last one, of each seed. "before" is the mean of the replicas before the last outer step.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
from cells import schedule_of
from rows import ALL_REDUCE, DILOCO, RESULTS, Cell
from statistics_of import interval
from tasks import TASKS, Task

import jaxslowmo as js
from train import losses_of

PATH = RESULTS / "first_steps.json"
RATES = {"classifier": (0.01, 0.02, 0.04), "language": (0.001, 0.002, 0.004)}
SEEDS = {"classifier": range(10), "language": range(3)}
# Replicas, period, updates.
RUNS = {
    "classifier": [
        *((replicas, 12, 192) for replicas in (2, 4, 8, 32)),
        *((replicas, 48, 480) for replicas in (2, 4, 8, 32)),
        (8, 48, 1920),
        (8, 12, 1920),
    ],
    "language": [
        *((replicas, 12, 192) for replicas in (2, 4, 8)),
        (8, 48, 480),
    ],
}
# Rates and momenta of `outer_nesterov`; with 1 and 0 its steps are plain averages.
GROWING = {"local_sgd": (1.0, 0.0), "default": (0.7, 0.9)}


def make(cell: Cell, algorithm: str) -> Callable[[Any], optax.GradientTransformation]:
    """Return a function from a setting to its transforms."""

    def transforms(setting: Any) -> optax.GradientTransformation:
        inner = optax.adamw(schedule_of(cell, setting))
        if algorithm == ALL_REDUCE:
            return js.chain(js.all_reduce_gradients("replica"), inner)
        if algorithm == "published":
            outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        elif algorithm == "rate_warm_up":
            warm_up = optax.linear_schedule(0.07, 0.7, 9)
            outer = optax.sgd(warm_up, momentum=0.9, nesterov=True)
        else:
            outer = js.algorithms.outer_nesterov(setting["outer_rate"], setting["momentum"])
        sync = js.diloco(
            "replica", sync_every=cell.period, outer_optimizer=outer, shard_state=False
        )
        return js.chain(inner, sync)

    return transforms


def settings_of(cell: Cell, algorithm: str) -> dict[str, np.ndarray]:
    """Return the settings of an algorithm, one for each learning rate."""
    rates = RATES[cell.part]
    outer_rate, momentum = GROWING.get(algorithm, (0.0, 0.0))
    columns = {"rate": rates, "outer_rate": [outer_rate] * 3, "momentum": [momentum] * 3}
    return {name: np.array(column, np.float32) for name, column in columns.items()}


def task_of(part: str) -> Task:
    """Return the task with fewer held-out windows of text, which are evaluated after each round."""
    task = TASKS[part]()
    if part == "classifier":
        return task
    return replace(
        task, held_out=lambda seed: {name: x[:256] for name, x in task.held_out(seed).items()}
    )


def train(cell: Cell) -> dict[str, dict[str, Any]]:
    """Return the best learning rate, the test losses, and the curve of each algorithm."""
    task, rounds = task_of(cell.part), cell.steps // cell.period
    found: dict[str, dict[str, Any]] = {}
    programs = [ALL_REDUCE], list(GROWING), ["published"]
    for names in (*programs, ["rate_warm_up"]) if warms_up(cell) else programs:
        columns = [settings_of(cell, name) for name in names]
        settings = {key: np.concatenate([x[key] for x in columns]) for key in columns[0]}
        program = make(cell, names[0])
        losses = losses_of(cell, task, settings, SEEDS[cell.part], rounds, program)
        for name, at in zip(names, (0, 3), strict=False):
            best = at + int(losses["validation"][-1, at : at + 3].mean(1).argmin())
            found[name] = {
                "rate": RATES[cell.part][best - at],
                "test": losses["test"][-1, best].tolist(),
                "curve": losses["test"][:, best].mean(1).tolist(),
            }
            if name not in (ALL_REDUCE, "rate_warm_up") and cell.part == "classifier":
                one = {key: x[best : best + 1] for key, x in settings.items()}
                found[name]["before"] = before_the_last_step(cell, task, one, program)
    return found


def warms_up(cell: Cell) -> bool:
    """Return whether the published optimizer with a rate that grows for ten steps is tried, too."""
    return cell.part == "classifier" and cell.steps <= 480


def before_the_last_step(cell: Cell, task: Task, setting: Any, program: Any) -> list[float]:
    """Return the test losses of the same run that ends one update earlier."""

    def batches(seed: int, steps: int, replicas: int) -> Any:
        return jax.tree.map(lambda x: x[:steps], task.batches(seed, steps + 1, replicas))

    ending, short = replace(task, batches=batches), replace(cell, steps=cell.steps - 1)
    losses = losses_of(short, ending, setting, SEEDS[cell.part], 1, program)
    return losses["test"][-1, 0].tolist()


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of docs/outer.md."""
    lines = [
        "| | replicas | every | outer steps | `local_sgd` | published | `outer_nesterov` |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        found, name = row["algorithms"], {"classifier": "digits", "language": "text"}[row["part"]]
        plain = np.array(found["local_sgd"]["test"])
        cells = [name, row["replicas"], row["period"], row["updates"] // row["period"]]
        cells.append(f"{plain.mean():.3f}")
        for algorithm in ("published", "default"):
            mean, half = interval(list(np.array(found[algorithm]["test"]) - plain))
            cells.append(f"{mean:+.3f} ± {half:.3f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def rises(rows: list[dict[str, Any]]) -> str:
    """Return the largest rise of the loss from one outer step to the next, and the last steps."""
    lines = []
    for part, algorithm in itertools.product(RUNS, ("published", "default")):
        found = [x["algorithms"][algorithm] for x in rows if x["part"] == part]
        rise = max((np.diff(x["curve"]).max() for x in found), default=0)
        last = [np.mean(x["test"]) - np.mean(x["before"]) for x in found if "before" in x]
        text = f", the last outer step {min(last):+.3f} to {max(last):+.3f}" if last else ""
        lines.append(f"{part}, {algorithm}: largest rise {rise:.3f}{text}")
    warm = [x["algorithms"] for x in rows if "rate_warm_up" in x["algorithms"]]
    above = [np.mean(x["rate_warm_up"]["test"]) - np.mean(x["published"]["test"]) for x in warm]
    lines.append(f"rate that grows: {min(above):+.3f} to {max(above):+.3f} above the published one")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true")
    rows = json.loads(PATH.read_text()) if PATH.exists() else []
    if not parser.parse_args().report:
        done = {(x["part"], x["replicas"], x["period"], x["updates"]) for x in rows}
        for part, runs in RUNS.items():
            for replicas, period, updates in runs:
                if (part, replicas, period, updates) in done:
                    continue
                cell = Cell(part, "adamw", replicas, DILOCO, period, updates)
                rows.append(
                    {"part": part, "replicas": replicas, "period": period, "updates": updates}
                    | {"algorithms": train(cell)}
                )
                PATH.write_text(json.dumps(rows, indent=1) + "\n")
                print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    print(rises(rows))


if __name__ == "__main__":
    main()
