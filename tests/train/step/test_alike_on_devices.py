"""Tables that devices share, and the same tables as ordinary parameters: options drawn at random.

What happens to gradients of dense leaves happens to rows, whatever stands beside what. A draw that
the step refuses must be refused without tables, too, or name the tables.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.step.tables import DENSE, SIZES, batches, loss, rowwise, step_of, whole

BATCHES, EXTRA = batches(5), batches(15, seed=1)
WEIGHTS = np.float32([[1, 3], [0, 2], [2, 0], [1, 1], [0, 0]])
mean, local = js.all_reduce_gradients("replica"), js.local_sgd("replica", sync_every=2)
active = js.all_reduce_gradients("replica", divide_by="active")
post = js.post_local_gradients(js.every(2, start=3), active)


def clip(max_norm=0.05, norm=2):
    return js.clip_by_global_norm(max_norm, norm=norm)


GRADIENTS = {
    "none": None,
    "clip": clip(),
    "mean": mean,
    "active": active,
    "mean, clip": js.chain(mean, clip()),
    "active, clip": js.chain(active, clip()),
    "post": post,
    "post, clip": js.chain(post, clip()),
    "largest": js.chain(mean, clip(0.01, np.inf)),
    "clip, mean": js.chain(clip(), mean),
}
SYNCS = {
    "none": "none",
    "local_sgd": local,
    "slowmo": js.slowmo("replica", base=local, sync_every=4),
    "sgp": js.sgp("replica"),
    "diloco": js.diloco("replica", sync_every=2),
    "only_finite": js.only_finite(local),
}
AROUND = {
    "alone": lambda optimizer: optimizer,
    "clipped": lambda optimizer: js.chain(clip(), optimizer),
    "scaled": lambda optimizer: js.dynamic_loss_scale(optimizer, initial=8.0, growth_interval=2),
}
KINDS = {"w": "dense", "b": "dense", "item": "table", "user": "table"}


def drawn(seed):
    one_of = random.Random(seed).choice
    run = {
        "gradients": one_of(sorted(GRADIENTS)),
        "sync": one_of(sorted(SYNCS)),
        "around": one_of(sorted(AROUND)),
        "num_shards": one_of([1, 2, 4]),
        "shard": one_of(["row", "column", "table"]),
        "accumulate": one_of([1, 1, 2]),
        "mode": one_of(["traced", "host"]),
        "validate": one_of(["before", "before", "after"]),
        "weighted": one_of([False, True]),
        "window": one_of([0, 0, 1, 2]),
        "num_batches": one_of([0, 1, 3]),
        "apply": one_of([False, True]),
    }
    return run if run["accumulate"] == 1 else {**run, "window": 0}


def dense_loss(params, batch):
    ids = batch["item"]
    there = (ids >= 0)[..., None]
    bags = jnp.where(there, params["item"][ids], 0).sum(1) / jnp.maximum(there.sum(1), 1)
    return loss(params, batch, embedded={"item": bags, "user": params["user"][batch["user"]]})


def started(run):
    """Both steps and their states; None where the options are refused."""
    around, sgd = AROUND[run["around"]], optax.sgd(0.3)
    options = {name: run[name] for name in ("accumulate", "mode", "validate")}
    options |= {"gradients": GRADIENTS[run["gradients"]], "sync": SYNCS[run["sync"]]}
    try:
        shared = step_of(run["num_shards"], shard=run["shard"], optimizer=around(sgd), **options)
        state = shared.init(DENSE)
    except ValueError as error:
        if "`validate`" not in str(error):  # of which there is nothing, or two clippings
            raise
        return None
    tables = {name: table[0] for name, table in whole(shared, state).items()}
    both = around(optax.partition({"dense": sgd, "table": rowwise()}, KINDS))
    twin = js.make_train_step(dense_loss, both, mesh=js.virtual_mesh({"replica": 2}), **options)
    return shared, state, twin, twin.init({**DENSE, **tables})


def updated(step, state, i, run):
    weight = WEIGHTS[i] if run["weighted"] else None
    if not run["window"]:
        return step(state, BATCHES[i], weight)
    window = None
    for j in range(run["window"]):
        window, _ = step.collect(
            state, EXTRA[3 * i + j], weight, window=window, num_batches=run["num_batches"]
        )
    if run["apply"]:
        return step.apply(state, window)
    return step(state, BATCHES[i], weight, window=window)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[pytest.mark.exhaustive] * (n not in (0, 10))) for n in range(60)],
)
def test_shared_tables_are_as_leaves(seed):
    run = drawn(seed)
    if (made := started(run)) is None:
        return
    shared, state, twin, twin_state = made
    first = whole(shared, state)
    for i in range(len(BATCHES)):
        state, metrics = updated(shared, state, i, run)
        twin_state, expected = updated(twin, twin_state, i, run)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-3, atol=1e-5)
    for name in SIZES:
        found = whole(shared, state)[name]
        np.testing.assert_allclose(found, twin_state.params[name], rtol=2e-3, atol=2e-4)
        assert np.abs(found - first[name]).max() > 1e-3, "nothing was learnt"
    for name in DENSE:
        found = state.params.dense[name]
        np.testing.assert_allclose(found, twin_state.params[name], rtol=2e-3, atol=2e-4)
    jax.clear_caches()
