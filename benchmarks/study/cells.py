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
    DEMO,
    DES_LOC,
    DES_LOC_BOTH,
    DILOCO,
    DILOCO_NORMS,
    DILOCO_RDA,
    INNER_STATES,
    LOCAL_ADAM,
    LOCAL_SGD,
    NOLOCO,
    PERIODS,
    REPLICAS,
    SGP,
    SLOWMO,
    SLOWMO_48,
    SLOWMO_SGP,
    SLOWMO_SPARTA,
    SPARTA,
    SPARTA_48,
    STEPS,
    Cell,
)

import jaxslowmo as js

AGGREGATES = {DILOCO_RDA: js.rda(), DILOCO_NORMS: js.norm_weighted(damping=1.0)}
DILOCOS = {DILOCO, *INNER_STATES, *AGGREGATES}
# Without settings beside the learning rate.
ALONE = {ALL_REDUCE, SGP, LOCAL_SGD, LOCAL_ADAM, DES_LOC, DES_LOC_BOTH, SPARTA, SPARTA_48, DEMO}
SHARES = {SPARTA: 0.005, SLOWMO_SPARTA: 0.005, SPARTA_48: 1 / 48}
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


def schedule_of(cell: Cell, setting: Mapping[str, Any]) -> optax.Schedule:
    """Return the learning rate by the number of the update."""

    def rate(count: Any) -> Any:
        t, warm_up = jnp.asarray(count, jnp.float32), max(cell.steps // 20, 1)
        falling = 0.5 * (1 + jnp.cos(jnp.pi * t / cell.steps))
        return setting["rate"] * jnp.minimum((t + 1) / warm_up, falling)

    return rate


def make_of(cell: Cell) -> Callable[[Mapping[str, Any]], optax.GradientTransformation]:
    """Return the function from a setting, of numbers or traced, to the transforms."""

    def make(setting: Mapping[str, Any]) -> optax.GradientTransformation:
        rate = schedule_of(cell, setting)
        optimizer = {
            "sgd": optax.sgd(rate, momentum=0.9),
            "adamw": optax.adamw(rate),
            "adamw_eps": optax.adamw(rate, eps=1e-4),
            "muon": optax.contrib.muon(rate),
            "sign": optax.sign_sgd(rate),
        }[cell.optimizer]
        if cell.algorithm == DEMO:
            return js.chain(js.demo("replica"), optimizer)
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
    if cell.algorithm == LOCAL_ADAM:
        return js.local_sgd("replica", sync_every=cell.period, inner_state="average")
    if cell.algorithm == DES_LOC:
        return js.des_loc("replica", sync_every=cell.period)
    if cell.algorithm == DES_LOC_BOTH:
        return js.des_loc("replica", sync_every=cell.period, moments={"mu": 3, "nu": 3})
    if cell.algorithm in (SPARTA, SPARTA_48):
        return js.sparta("replica", share=SHARES[cell.algorithm])
    if cell.algorithm == NOLOCO:
        return js.noloco(
            "replica",
            sync_every=cell.period,
            outer_learning_rate=setting["outer_rate"],
            outer_momentum=setting["momentum"],
        )
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
            aggregate=AGGREGATES.get(cell.algorithm, "mean"),
        )
    bases = {
        SLOWMO_SGP: js.sgp("replica"),
        SLOWMO_SPARTA: js.sparta("replica", share=SHARES[SLOWMO_SPARTA]),
    }
    average = js.local_sgd("replica", sync_every=cell.period)
    return js.slowmo(
        "replica",
        base=bases.get(cell.algorithm, average),
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
    is_alone = cell.algorithm in ALONE
    is_outer = cell.algorithm in {*DILOCOS, NOLOCO}
    if cell.part == "language":
        # A run is long, and at high rates seeds differ by more than settings do.
        two_rounds = {"seeds": 1, "finalists": 3, "more_seeds": 2}
        if is_alone:
            least = 2e-3 if cell.optimizer == "sign" else 5e-4
            return _grid(least * 2 ** (np.arange(12) / 2), [(0.0, 1.0)], **two_rounds)
        outer = [(0.9, 0.4), (0.9, 0.7), (0.5, 0.7), (0.5, 1.0)]
        slow = [(m, 1.0) for m in (0.1, 0.3, 0.5, 0.7)]
        pairs = outer if is_outer else slow
        return _grid(2e-3 * 2 ** np.arange(3), pairs, **two_rounds)
    least = {"sgd": 0.0125, "adamw": 0.0012, "adamw_eps": 0.0012, "muon": 0.0025, "sign": 0.002}[
        cell.optimizer
    ]
    if is_alone:
        return _grid(least * 2 ** (np.arange(24) / 3), [(0.0, 1.0)], seeds=8)
    outer = itertools.product((0.5, 0.7, 0.9), (0.3, 0.5, 0.7, 1.0))
    # In a first run, with the first list, most other rows took the largest of it.
    is_frequent_gossip = cell.algorithm == SLOWMO_SGP and cell.period == 12
    slow_rates = (0.7, 1.0, 1.4) if is_frequent_gossip else (1.0, 1.4, 2.0)
    slow = itertools.product((0.2, 0.4, 0.6, 0.8), slow_rates)
    pairs = outer if is_outer else slow
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
    return [*cells, *_coded_cells(), *_inner_state_cells(), *_other_cells()]


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


def _other_cells() -> list[Cell]:
    """Return the cells of other papers' algorithms."""
    cells = []
    columns = [("classifier", 8, PERIODS), ("classifier", 32, PERIODS), ("language", 8, (48,))]
    for part, replicas, periods in columns:
        one, steps = (part, "adamw", replicas), STEPS[part]
        names = (LOCAL_ADAM, DES_LOC, DES_LOC_BOTH, NOLOCO)
        cells += [Cell(*one, name, p, steps) for name, p in itertools.product(names, periods)]
        cells += [Cell(*one, name, 48, steps) for name in (DILOCO_RDA, DILOCO_NORMS, SLOWMO_SPARTA)]
        cells += [Cell(*one, name, 1, steps) for name in (SPARTA, SPARTA_48)]
        cells.append(Cell(part, "sign", replicas, DEMO, 1, steps))
        if part == "classifier":  # on text nothing diverged
            cells += [Cell(part, "adamw_eps", replicas, DES_LOC, p, steps) for p in periods]
    return cells


def _inner_state_cells() -> list[Cell]:
    """Return diloco that resets or averages moments, over 8 replicas."""
    names, steps = list(INNER_STATES), STEPS["classifier"]
    cells = [
        Cell("classifier", optimizer, 8, name, period, steps)
        for optimizer, name, period in itertools.product(("sgd", "adamw"), names, PERIODS)
    ]
    return cells + [Cell("language", "adamw", 8, name, 48, STEPS["language"]) for name in names]
