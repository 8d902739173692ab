"""A leaf and a table's row train alike, whatever stands beside what.

Each run draws a value of every option: who averages what and when, how tables are shared, windows,
weights, clipping, loss scales. Its twin has the same tables as ordinary parameters, on virtual
replicas. Of `RUNS` runs each value is in at least one; `make test-exhaustive` draws more.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxslowmo as js
from support.exhaustive import covering, sweep
from train.step.tables import DENSE, RATE, SIZES, batches, embeddings, loss, rowwise, step_of, whole

UPDATES = 5
WEIGHTS = np.float32([[1, 3], [0, 2], [2, 0], [1, 1], [0, 0]])
mean, local = js.all_reduce_gradients("replica"), js.local_sgd("replica", sync_every=2)
active = js.all_reduce_gradients("replica", divide_by="active", hook=js.hooks.mean())
late = js.every(2, start=3)


def clip(max_norm=0.05, norm=2):
    return js.clip_by_global_norm(max_norm, norm=norm)


GRADIENTS = {
    "none": None,
    "clip": clip(),
    "mean": mean,
    "active, clip": js.chain(active, clip()),
    "largest": js.chain(mean, clip(0.01, np.inf)),
}
SYNCS = {
    "none": "none",
    "late": js.local_sgd("replica", sync_every=late, delay=1, merge=0.5),
    "slowmo": js.slowmo("replica", base=js.sgp("replica"), sync_every=4),
    "whole": js.only_finite(js.slowmo("replica", base=local, sync_every=4, shard_state=False)),
    "diloco": js.diloco("replica", sync_every=2),
    "norms": js.diloco("replica", sync_every=2, aggregate=js.norm_weighted(damping=1.0)),
}
AROUND = {
    "alone": lambda optimizer: optimizer,
    "clipped": lambda optimizer: js.chain(clip(), optimizer),
    "scaled": lambda optimizer: js.dynamic_loss_scale(optimizer, initial=8.0, growth_interval=2),
}
OPTIONS = {
    "gradients": list(GRADIENTS),
    "sync": list(SYNCS),
    "around": list(AROUND),
    # How many devices of a replica share tables, and by what; "virtual" replicas have one.
    "where": ["virtual", "row 2 explicit", "column 2", "table 2", "row 4"],
    "accumulate": [1, 1, 2],
    "mode": ["traced", "host"],
    "weighted": [False, True],
    "window": [0, 0, 1, 2],  # batches before the last one of an update
    "room": [0, 1, 3],  # batches for whose rows a window has room
    "apply": [False, True],
    "half": [False, True],
    "overflow": [False, True],
    "one user": [False, True],  # of all examples
}
RUNS = 6


def possible(run):
    """Return the run, without what cannot stand beside the rest."""
    is_scaled = run["around"] == "scaled"
    if run["accumulate"] > 1:
        run["window"] = 0
    return {**run, "half": run["half"] and is_scaled, "overflow": run["overflow"] and is_scaled}


def with_factor(params, batch, *, embedded):
    """Add a factor that is in the gradients of rows alone, not in those of dense parameters."""
    users = jnp.broadcast_to(embedded["user"], embedded["item"].shape)
    value = loss(params, batch, embedded={**embedded, "user": users})
    return value * batch["scale"] + jnp.mean(users[:, 0] * batch["factor"])


def dense_loss(params, batch):
    ids = batch["item"]
    there = (ids >= 0)[..., None]
    sums = jnp.where(there, params["item"][ids], 0).sum(1)
    bags = sums / jnp.maximum(there.sum(1), 1).astype(sums.dtype)
    found = {"item": bags, "user": params["user"][batch["user"]]}
    return with_factor(params, batch, embedded=found)


def started(run):
    """Return both steps and their states."""
    shard, num_shards, kind = (run["where"].replace("virtual", "row 1") + " auto").split()[:3]
    is_virtual, around, sgd = run["where"] == "virtual", AROUND[run["around"]], optax.sgd(0.3)
    options = {name: run[name] for name in ("accumulate", "mode")}
    options |= {"gradients": GRADIENTS[run["gradients"]], "sync": SYNCS[run["sync"]]}
    options |= {"policy": js.gradients.Policy("float16")} if run["half"] else {}
    rows = {"optimizer": js.rowwise_sgd(RATE)} if run["half"] else {}
    virtual = js.virtual_mesh({"replica": 2})
    shared = step_of(
        int(num_shards),
        loss_fn=with_factor,
        kinds=AxisType.Explicit if kind == "explicit" else AxisType.Auto,
        mesh=virtual if is_virtual else None,
        embeddings=embeddings(shard, axis=None if is_virtual else "shard", **rows),
        optimizer=around(sgd),
        **options,
    )
    state = shared.init(DENSE)
    tables = {name: table[0] for name, table in whole(shared, state).items()}
    kinds = {"w": "dense", "b": "dense", "item": "rows", "user": "rows"}
    of_rows = optax.sgd(RATE) if run["half"] else rowwise()
    both = around(optax.partition({"dense": sgd, "rows": of_rows}, kinds))
    twin = js.make_train_step(dense_loss, both, mesh=virtual, **options)
    return (shared, twin), [state, twin.init({**DENSE, **tables})]


def given(run):
    """Return the batches of each update; what an idle replica has is NaN."""
    sizes = [run["window"] + (not run["window"] or not run["apply"])] * UPDATES
    updates = [batches(size, seed) for seed, size in enumerate(sizes)]
    for i, update in enumerate(updates):
        for batch in update:
            batch |= {"factor": np.zeros_like(batch["y"]), "scale": np.float32(1 + i / 8)}
            if run["one user"]:
                batch["user"] = batch["user"][:1]
            if run["weighted"]:
                batch["y"][np.repeat(WEIGHTS[i] == 0, len(batch["y"]) // 2)] = np.nan
    if run["overflow"]:
        updates[3][0]["factor"][5] = np.inf
    return updates


def updated(step, state, update, weight, run):
    window, *batches = None, *update
    for batch in batches[: run["window"]]:
        window, _ = step.collect(state, batch, weight, window=window, num_batches=run["room"])
    if run["window"] and run["apply"]:
        return step.apply(state, window)
    return step(state, batches[-1], weight, window=window)


CASES = sweep(itertools.product((11, 0, 4), range(RUNS)), lambda seed, _: seed == 11)


@pytest.mark.parametrize(("seed", "number"), CASES)
def test_a_leaf_and_a_table_train_alike(seed, number):
    """All rows, the other leaves and all metrics are compared after every update."""
    run = possible(covering(OPTIONS, RUNS, seed)[number])
    steps, states = started(run)
    first = whole(steps[0], states[0])
    close = {"rtol": 1e-2, "atol": 5e-3} if run["half"] else {"rtol": 2e-3, "atol": 2e-4}
    for i, update in enumerate(given(run)):
        weight = WEIGHTS[i] if run["weighted"] else None
        both = [updated(*x, update, weight, run) for x in zip(steps, states, strict=True)]
        states = [state for state, _ in both]
        (table, metrics), (leaf, expected) = both
        for name, metric in expected.items():
            np.testing.assert_allclose(metrics[name], metric, **close, err_msg=f"{name} {run}")
        found = {**table.params.dense, **whole(steps[0], table)}
        for name, x in leaf.params.items():
            np.testing.assert_allclose(found[name], x, **close, err_msg=f"{name} in {i}, {run}")
    for name in SIZES:
        assert np.abs(found[name] - first[name]).max() > 1e-3, "nothing was learnt"
    if run["overflow"]:
        assert metrics["skipped_updates"].max() == 1
    jax.clear_caches()
