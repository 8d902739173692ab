"""Tuning of a cell, and its results at the setting that tuning found."""

import functools
import time
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
from cells import FIRST_TUNING_SEED, grid_of, make_of
from rows import Cell
from tasks import TASKS, Task, stacked

import jaxslowmo as js

SEGMENTS = 20  # of the curves
# Replicas whose parameters and moments fit into the caches of two cores together.
REPLICAS_AT_ONCE = {"classifier": 768, "language": 16}


def row_of(cell: Cell) -> dict[str, Any]:
    """Tune a cell and train it at its best setting; everything that is committed of it."""
    began, task, grid = time.perf_counter(), TASKS[cell.part](), grid_of(cell)
    seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + grid.seeds)
    tried = losses_of(cell, task, grid.settings, seeds, segments=1)["validation"][-1]
    means = np.where(np.isfinite(tried), tried, np.inf).mean(1)
    best = {name: _rounded(values[means.argmin()]) for name, values in grid.settings.items()}
    return {
        **asdict(cell),
        "best": best,
        **final_of(cell, best),
        "tuning": {
            "settings": {name: _rounded(values) for name, values in grid.settings.items()},
            "validation": _rounded(tried),
            "first_seed": FIRST_TUNING_SEED,
        },
        "data": task.data,
        "seconds": round(time.perf_counter() - began, 1),
    }


def final_of(cell: Cell, best: dict[str, float], seeds: int | None = None) -> dict[str, Any]:
    """Return the losses at one setting, of all final seeds, or of the first ones.

    "test" and "train" are those of the consensus, one per seed; "curve" is the mean test loss after
    each of the segments.
    """
    task = TASKS[cell.part]()
    segments = SEGMENTS if cell.steps % SEGMENTS == 0 else 1
    settings = {name: np.array([value], np.float32) for name, value in best.items()}
    losses = losses_of(cell, task, settings, range(seeds or task.final_seeds), segments=segments)
    result = {"test": losses["test"][-1, 0], "curve": losses["test"].mean((1, 2))}
    if "train" in losses:
        result["train"] = losses["train"][-1, 0]
    return {name: _rounded(x) for name, x in result.items()}


def losses_of(
    cell: Cell, task: Task, settings: dict[str, np.ndarray], seeds: range, segments: int
) -> dict[str, np.ndarray]:
    """Train, and return the consensus' losses by part: (segments, settings, seeds)."""
    sweep = js.Sweep(
        loss_fn=task.loss_fn,
        make=make_of(cell),
        settings=settings,
        replicas=cell.replicas,
        at_once=max(1, REPLICAS_AT_ONCE[cell.part] // (cell.replicas * len(seeds))),
    )
    batches = stacked(functools.partial(_batches, cell, task), seeds)
    held_out = stacked(task.held_out, seeds)

    @jax.jit
    def evaluate(models: Any, parts: Any) -> Any:
        def of_setting(model: Any) -> Any:
            return {name: jax.vmap(task.loss_fn)(model, x) for name, x in parts.items()}

        return jax.lax.map(of_setting, models)

    state, history = sweep.init(stacked(task.params, seeds)), []
    for part in np.split(batches, segments, axis=1):
        state, _ = sweep.run(state, part)
        history.append(evaluate(sweep.consensus(state), held_out))
    return jax.tree.map(lambda *x: np.stack(x), *jax.device_get(history))


def _batches(cell: Cell, task: Task, seed: int) -> np.ndarray:
    return task.batches(seed, cell.steps, cell.replicas)


def _rounded(values: Any) -> Any:
    """Return numbers with six digits, as lists; what is not finite becomes None."""
    if np.ndim(values):
        return [_rounded(x) for x in values]
    return float(f"{values:.6g}") if np.isfinite(values) else None
