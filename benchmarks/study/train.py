"""Tuning of a cell, and its results at the setting that tuning found."""

import functools
import time
from dataclasses import asdict, replace
from typing import Any

import jax
import numpy as np
import optax
from cells import FIRST_TUNING_SEED, grid_of, make_of
from rows import Cell, Row, by_cell
from tasks import TASKS, Task, stacked

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
    cell: Cell,
    task: Task,
    settings: dict[str, np.ndarray],
    seeds: range,
    segments: int,
    make: Any = None,
) -> dict[str, np.ndarray]:
    """Train, and return the consensus' losses by part: (segments, settings, seeds).

    `make` returns the transforms of a setting; None makes those of the cell.
    """
    make = make or make_of(cell)
    over_replicas = functools.partial(jax.vmap, axis_name="replica", axis_size=cell.replicas)

    def one_run(setting: Any, params: Any, batches: Any, held_out: Any) -> Any:
        tx = make(setting)

        def update(model: Any, batch: Any) -> Any:
            params, state = model
            gradients = jax.grad(task.loss_fn)(params, batch)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        def segment(models: Any, batches: Any) -> Any:
            models, _ = jax.lax.scan(lambda *x: (over_replicas(update)(*x), None), models, batches)
            # The graphs of the study's gossip are regular, so its replicas have equal weights.
            consensus = jax.tree.map(lambda x: x.mean(0), models[0])
            return models, {name: task.loss_fn(consensus, x) for name, x in held_out.items()}

        models = over_replicas(lambda p: (p, tx.init(p)), in_axes=None)(params)
        parts = jax.tree.map(lambda x: x.reshape(segments, -1, *x.shape[1:]), batches)
        return jax.lax.scan(segment, models, parts)[1]

    @jax.jit
    def all_runs(settings: Any, *of_seeds: Any) -> Any:
        def one_setting(setting: Any) -> Any:
            return jax.vmap(functools.partial(one_run, setting))(*of_seeds)

        at_once = max(1, REPLICAS_AT_ONCE[cell.part] // (cell.replicas * len(seeds)))
        return jax.lax.map(one_setting, settings, batch_size=at_once)

    def batches_of(seed: int) -> Any:
        return task.batches(seed, cell.steps, cell.replicas)

    of_seeds = (stacked(make, seeds) for make in (task.params, batches_of, task.held_out))
    losses = jax.device_get(all_runs(settings, *of_seeds))
    return jax.tree.map(lambda x: np.moveaxis(x, -1, 0), losses)


def _rounded(values: Any) -> Any:
    """Return numbers with six digits, in lists and dicts; what is not finite becomes None."""
    if isinstance(values, dict):
        return {name: _rounded(x) for name, x in values.items()}
    if isinstance(values, int):
        return values
    if np.ndim(values):
        return [_rounded(x) for x in values]
    return float(f"{values:.6g}") if np.isfinite(values) else None
