"""Tuning of a cell, and its results at the setting that tuning found."""

import functools
import time
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np
from cells import FIRST_TUNING_SEED, grid_of, make_of
from rows import Cell, Row, by_cell
from tasks import TASKS, Task, stacked

import jaxslowmo as js

SEGMENTS = 20  # of the curves
# Replicas whose parameters and moments fit into the caches of two cores together.
REPLICAS_AT_ONCE = {"classifier": 768, "language": 16}


def row_of(cell: Cell, first_round: Any = None) -> Row:
    """Tune a cell and train it at its best setting; everything that is committed of it.

    A cell with a codec is not tuned: it has the setting of the cell without one.

    Args:
      cell: the cell.
      first_round: recorded validation losses of all settings, which are then not trained again.
    """
    began, task = time.perf_counter(), TASKS[cell.part]()
    if cell.codec:
        best, tuning = by_cell()[replace(cell, codec="")]["best"], {}
    else:
        best, tuning = _tuned(cell, task, first_round)
    return {
        **asdict(cell),
        "best": best,
        **final_of(cell, best),
        **tuning,
        "data": task.data,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _tuned(cell: Cell, task: Task, first_round: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the best setting, and the losses of all that were tried, as "tuning"."""
    grid = grid_of(cell)
    first, more = FIRST_TUNING_SEED, FIRST_TUNING_SEED + grid.seeds

    def validation(settings: dict[str, np.ndarray], seeds: range) -> np.ndarray:
        return losses_of(cell, task, settings, seeds, segments=1)["validation"][-1]

    if first_round is None:
        first_round = validation(grid.settings, range(first, more))
    tried = _ranked(np.array(first_round, float))
    order = tried.mean(1).argsort()[: grid.finalists]
    finalists = {name: values[order] for name, values in grid.settings.items()}
    losses = tried[order]
    tuning = {"settings": grid.settings, "validation": tried, "first_seed": first}
    if grid.more_seeds:
        again = _ranked(validation(finalists, range(more, more + grid.more_seeds)))
        losses = np.concatenate([losses, again], axis=1)
        tuning["finalists"] = {**finalists, "validation": losses}
    best = {name: _rounded(x[losses.mean(1).argmin()]) for name, x in finalists.items()}
    return best, {"tuning": _rounded(tuning)}


def _ranked(losses: np.ndarray) -> np.ndarray:
    """Return the losses, infinite where they are not finite, so that they come last."""
    return np.where(np.isfinite(losses), losses, np.inf)


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
    return _rounded(result)


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
    """Return numbers with six digits, in lists and dicts; what is not finite becomes None."""
    if isinstance(values, dict):
        return {name: _rounded(x) for name, x in values.items()}
    if isinstance(values, int):
        return values
    if np.ndim(values):
        return [_rounded(x) for x in values]
    return float(f"{values:.6g}") if np.isfinite(values) else None
