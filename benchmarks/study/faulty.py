"""Trains digits with eight replicas, one of which is at fault, and merges of outer steps.

    python benchmarks/study/faulty.py     # a minute of one core; writes results/faulty.json

Two faults of the first replica, in every update: gradients of the wrong sign, and updates 30 times
too long. Settings are those that tuning found for `diloco` every 48 without a fault.
"""

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cells import schedule_of
from rows import DILOCO, RESULTS, STEPS, Cell, by_cell
from tasks import classifier

import jaxslowmo as js
from train import losses_of

CELL = Cell("classifier", "adamw", 8, DILOCO, 48, STEPS["classifier"])
SEEDS = range(20)
FAULTS = {
    "none": (1.0, 1.0),
    "gradients of the wrong sign": (-1.0, 1.0),
    "updates x 30": (1.0, 30.0),
}
MERGES: dict[str, Any] = {
    "mean": "mean",
    "rda": "rda",
    "norm_weighted(damping=1)": js.norm_weighted(damping=1.0),
    "norm_weighted(max_ratio=2)": js.norm_weighted(max_ratio=2.0),
}


def times_in_the_first(factor: float) -> optax.GradientTransformation:
    """Return a transform that multiplies what the first replica passes on."""

    def scaled(updates: Any, params: Any) -> Any:
        del params
        by = jnp.where(jax.lax.axis_index("replica") == 0, factor, 1.0)
        return jax.tree.map(lambda u: by * u, updates)

    return optax.stateless(scaled)


def losses(merge: Any, of_gradients: float, of_updates: float) -> list[float]:
    """Return the test loss of each seed."""

    def make(setting: Any) -> optax.GradientTransformation:
        outer = optax.sgd(setting["outer_rate"], momentum=setting["momentum"], nesterov=True)
        sync = js.diloco(
            "replica", sync_every=48, outer_optimizer=outer, aggregate=merge, shard_state=False
        )
        before, after = times_in_the_first(of_gradients), times_in_the_first(of_updates)
        return js.chain(before, optax.adamw(schedule_of(CELL, setting)), after, sync)

    best = by_cell()[CELL]["best"]
    settings = {name: np.float32([value]) for name, value in best.items()}
    found = losses_of(CELL, classifier(), settings, SEEDS, segments=1, make=make)
    return [float(f"{x:.6g}") for x in found["test"][-1, 0]]


def main() -> None:
    results: dict[str, dict[str, list[float]]] = {name: {} for name in MERGES}
    for (name, merge), (fault, factors) in itertools.product(MERGES.items(), FAULTS.items()):
        results[name][fault] = losses(merge, *factors)
        print(f"{name}, {fault}: {np.median(results[name][fault]):.3f}", flush=True)
    (RESULTS / "faulty.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
