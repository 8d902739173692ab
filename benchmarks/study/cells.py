"""The cells of the study: which algorithm, how often, over how many replicas, with which grid."""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from rows import (
    ALL_REDUCE,
    DILOCO,
    INNER_STATES,
    LOCAL_SGD,
    PERIODS,
    REPLICAS,
    SGP,
    SLOWMO,
    SLOWMO_48,
    SLOWMO_SGP,
    STEPS,
    Cell,
)

import jaxslowmo as js

DILOCOS = {DILOCO, *INNER_STATES}
FIRST_TUNING_SEED = 1000  # those of the results are 0, 1, ...
_MAKERS = {
    "bfloat16": js.codecs.bfloat16,
    "int8": js.codecs.int8,
    "int4": js.codecs.int4,
    "top_k(0.02)": functools.partial(js.codecs.top_k, 0.02),
    'top_k(0.02, values="bits2")': functools.partial(js.codecs.top_k, 0.02, values="bits2"),
}
FEEDBACK = " with error feedback"
CODECS = {
    name + suffix: make(error_feedback=bool(suffix))
    for (name, make), suffix in itertools.product(_MAKERS.items(), (FEEDBACK, ""))
}
SPARSE_LOCO = 'top_k(0.02, values="bits2")' + FEEDBACK
TEXT_CODECS = [name + FEEDBACK for name in ("bfloat16", "int8", "int4", "top_k(0.02)")]
_SPARSE = (SPARSE_LOCO, SPARSE_LOCO.removesuffix(FEEDBACK))


def make_of(cell: Cell) -> Callable[[Mapping[str, Any]], optax.GradientTransformation]:
    """Return the function from a setting, of numbers or traced, to the transforms."""

    def make(setting: Mapping[str, Any]) -> optax.GradientTransformation:
        def rate(count: Any) -> Any:
            t, warm_up = jnp.asarray(count, jnp.float32), max(cell.steps // 20, 1)
            falling = 0.5 * (1 + jnp.cos(jnp.pi * t / cell.steps))
            return setting["rate"] * jnp.minimum((t + 1) / warm_up, falling)

        sgd, adamw = optax.sgd(rate, momentum=0.9), optax.adamw(rate)
        optimizer = {"sgd": sgd, "adamw": adamw, "muon": optax.contrib.muon(rate)}[cell.optimizer]
        if cell.algorithm == ALL_REDUCE:
            return js.chain(js.all_reduce_gradients("replica"), optimizer)
        return js.chain(optimizer, _sync(cell, setting, rate))

    return make


def _sync(
    cell: Cell, setting: Mapping[str, Any], rate: optax.Schedule
) -> optax.GradientTransformation:
    if cell.algorithm == SGP:
        return js.sgp("replica")
    codec = CODECS[cell.codec] if cell.codec else None
    if cell.algorithm == LOCAL_SGD:
        return js.local_sgd("replica", sync_every=cell.period, codec=codec)
    # Virtual replicas share a memory, so nothing is gained by shards.
    if cell.algorithm in DILOCOS:
        outer = optax.sgd(setting["outer_rate"], momentum=setting["momentum"], nesterov=True)
        inner: Any = INNER_STATES.get(cell.algorithm, "keep")
        return js.diloco(
            "replica",
            sync_every=cell.period,
            outer_optimizer=outer,
            shard_state=False,
            codec=codec,
            inner_state=inner,
        )
    is_gossip = cell.algorithm == SLOWMO_SGP
    base = js.sgp("replica") if is_gossip else js.local_sgd("replica", sync_every=cell.period)
    return js.slowmo(
        "replica",
        base=base,
        sync_every=48 if cell.algorithm == SLOWMO_48 else cell.period,
        momentum=setting["momentum"],
        slow_learning_rate=setting["outer_rate"],
        learning_rate=rate,
        shard_state=False,
    )


@dataclass(frozen=True)
class Grid:
    """The settings that tuning tries for a cell, some of them with more seeds than others.

    Attributes:
      settings: "rate", "momentum" and "outer_rate" by name, one number per setting.
      seeds: number of seeds of each setting.
      finalists: number of settings that are tried with more seeds.
      more_seeds: number of further seeds of these.
    """

    settings: dict[str, np.ndarray]
    seeds: int
    finalists: int = 1
    more_seeds: int = 0


def grid_of(cell: Cell) -> Grid:
    """Return the grid of a cell; all cells of a part have the same number of runs."""
    is_alone = cell.algorithm in (ALL_REDUCE, SGP, LOCAL_SGD)
    if cell.part == "language":
        # A run is long, and at high rates seeds differ by more than settings do.
        two_rounds = {"seeds": 1, "finalists": 3, "more_seeds": 2}
        if is_alone:
            return _grid(5e-4 * 2 ** (np.arange(12) / 2), [(0.0, 1.0)], **two_rounds)
        outer = [(0.9, 0.4), (0.9, 0.7), (0.5, 0.7), (0.5, 1.0)]
        slow = [(m, 1.0) for m in (0.1, 0.3, 0.5, 0.7)]
        pairs = outer if cell.algorithm in DILOCOS else slow
        return _grid(2e-3 * 2 ** np.arange(3), pairs, **two_rounds)
    least = {"sgd": 0.0125, "adamw": 0.0012, "muon": 0.0025}[cell.optimizer]
    if is_alone:
        return _grid(least * 2 ** (np.arange(24) / 3), [(0.0, 1.0)], seeds=8)
    outer = itertools.product((0.5, 0.7, 0.9), (0.3, 0.5, 0.7, 1.0))
    # In a first run, with the first list, most other rows took the largest of it.
    is_frequent_gossip = cell.algorithm == SLOWMO_SGP and cell.period == 12
    slow_rates = (0.7, 1.0, 1.4) if is_frequent_gossip else (1.0, 1.4, 2.0)
    slow = itertools.product((0.2, 0.4, 0.6, 0.8), slow_rates)
    pairs = outer if cell.algorithm in DILOCOS else slow
    return _grid(least * 2 ** np.arange(8), list(pairs), seeds=2)


def _grid(rates: np.ndarray, pairs: list[tuple[float, float]], **numbers: int) -> Grid:
    rows = [(rate, *pair) for rate in rates for pair in pairs]
    columns = np.array(rows, np.float32).T
    return Grid(dict(zip(("rate", "momentum", "outer_rate"), columns, strict=True)), **numbers)


def all_cells() -> list[Cell]:
    """Return the cells of both parts."""
    cells, steps = [], STEPS["classifier"]
    for optimizer, replicas in itertools.product(("sgd", "adamw"), REPLICAS["classifier"]):
        one = ("classifier", optimizer, replicas)
        # The first have as many bytes as one exchange in a period.
        cells += [Cell(*one, ALL_REDUCE, 1, steps // period) for period in PERIODS]
        cells += [Cell(*one, ALL_REDUCE, 1, steps), Cell(*one, SGP, 1, steps)]
        names = (LOCAL_SGD, SLOWMO, SLOWMO_SGP, DILOCO)
        cells += [Cell(*one, name, p, steps) for name, p in itertools.product(names, PERIODS)]
        cells.append(Cell(*one, SLOWMO_48, 12, steps))
    steps = STEPS["language"]
    for replicas in REPLICAS["language"]:
        one = ("language", "adamw", replicas)
        cells += [Cell(*one, ALL_REDUCE, 1, count) for count in (steps // 48, steps)]
        cells += [Cell(*one, name, 48, steps) for name in (LOCAL_SGD, SLOWMO, DILOCO)]
    return cells + _coded_cells()


def _coded_cells() -> list[Cell]:
    """Return the cells whose exchanges are sent in few bits, and what they are compared with."""
    cells = []
    for replicas in (8, 32):
        outer = Cell("classifier", "adamw", replicas, DILOCO, 48, STEPS["classifier"])
        cells += [replace(outer, codec=name) for name in CODECS]
        cells += [
            replace(outer, algorithm=LOCAL_SGD, period=period, codec=codec)
            for period, codec in itertools.product(PERIODS, _SPARSE)
        ]
    muon = Cell("classifier", "muon", 8, DILOCO, 48, STEPS["classifier"])
    text = Cell("language", "adamw", 8, DILOCO, 48, STEPS["language"])
    cells += [muon, replace(muon, codec="int4" + FEEDBACK)]
    cells += [replace(text, codec=name) for name in TEXT_CODECS]
    return [*cells, replace(text, algorithm=LOCAL_SGD, codec=SPARSE_LOCO)]


def inner_state_cells() -> list[Cell]:
    """Return diloco with other inner states, over 8 replicas; `all_cells` has it with "keep"."""
    names, steps = list(INNER_STATES), STEPS["classifier"]
    cells = [
        Cell("classifier", optimizer, 8, name, period, steps)
        for optimizer, name, period in itertools.product(("sgd", "adamw"), names, PERIODS)
    ]
    return cells + [Cell("language", "adamw", 8, name, 48, STEPS["language"]) for name in names]
