"""`weight` in every transform: weighted means, and replicas without data that follow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import jaxslowmo as js
from support.executions import EXECUTIONS, lift
from support.reports import FLOAT32_BYTES, HALF_BYTES, PARAMS

REPLICAS = 4
RNG = np.random.default_rng(0)
START = {"w": RNG.normal(size=(5,)).astype(np.float32), "b": np.float32(0.5)}
UPDATES = {
    "w": RNG.normal(size=(REPLICAS, 5)).astype(np.float32),
    "b": RNG.normal(size=REPLICAS).astype(np.float32),
}
RING = js.topology.ring(REPLICAS)


def slow(**options):
    """A slow step that takes the average as it is."""
    return js.slowmo("replica", sync_every=1, momentum=0.0, **options)


AVERAGES = {
    "local_sgd": js.local_sgd("replica", sync_every=1),
    "hierarchical_local_sgd": js.hierarchical_local_sgd({"replica": 1}),
    "slowmo": slow(base=js.local_sgd("replica", sync_every=1)),
    "slowmo whole": slow(base=js.local_sgd("replica", sync_every=1), shard_state=False),
    "slowmo inexact": slow(base=js.local_sgd("replica", sync_every=1), exact_average=False),
    "slowmo over sgp": slow(base=js.sgp("replica", graph=RING)),
    "diloco": js.diloco("replica", sync_every=1, outer_optimizer=optax.sgd(1.0)),
}
GRADIENTS = {
    by: js.all_reduce_gradients("replica", divide_by=by, bucket_bytes=8, first_bucket_bytes=0)
    for by in ("initial", "active")
}
# A float16 leaf: the weights then travel by themselves, ahead.
HALF = js.all_reduce_gradients("replica", divide_by="active")
HOOKED = js.all_reduce_gradients("replica", hook=js.hooks.mean(), divide_by="initial")


def one_update(params, updates, weight):
    """What each transform makes of the same update, all in one program."""
    out = {}
    for name, tx in {**AVERAGES, "sgp": js.sgp("replica", graph=RING)}.items():
        moved, _ = tx.update(updates, tx.init(params), params, weight=weight)
        out[name] = optax.apply_updates(params, moved)
    for name, tx in {**GRADIENTS, "hook": HOOKED}.items():
        out[name] = tx.update(updates, tx.init(params), params, weight=weight)[0]
    halves = {**updates, "half": updates["w"].astype(jnp.float16)}
    out["half"] = HALF.update(halves, HALF.init(halves), weight=weight)[0]["half"]
    return out


@functools.cache
def program(execution):
    return lift(one_update, {"replica": REPLICAS}, execution, (False,) * 3)


def close(found, wanted, tolerance=2e-6):
    np.testing.assert_allclose(
        np.asarray(found, np.float64), wanted, rtol=tolerance, atol=tolerance
    )


def check(execution, weight):
    weight = np.asarray(weight, np.float32)
    params = {k: np.stack([v] * REPLICAS) for k, v in START.items()}
    alive, total = weight > 0, weight.astype(np.float64).sum()
    given_updates = {k: u.copy() for k, u in UPDATES.items()}
    for u in given_updates.values():
        u[~alive] = np.nan  # what a replica without data computes is never looked at
    out = jax.tree.map(np.asarray, program(execution)(params, given_updates, weight))
    for k, u in UPDATES.items():
        own = np.where(alive.reshape(-1, *[1] * (u.ndim - 1)), u, 0)
        share = weight / total if total else weight
        mean = np.tensordot(share, own, 1)
        for name in AVERAGES:
            close(out[name][k], np.broadcast_to(START[k] + mean, u.shape))
        y = params[k] + own
        close(out["sgp"][k], (y + np.roll(y, 1, 0)) / 2)  # peers of one ring direction
        close(out["active"][k], np.broadcast_to(mean, u.shape))
        close(out["initial"][k], np.broadcast_to(mean * alive.mean(), u.shape))
        close(out["hook"][k], np.broadcast_to(mean * alive.mean(), u.shape))
        if k == "w":
            close(out["half"], np.broadcast_to(mean, u.shape), 4e-3)


weights = st.floats(0.125, 4096, width=32) | st.just(0.0)


@given(st.lists(weights, min_size=REPLICAS, max_size=REPLICAS))
@example([0.0] * REPLICAS)
@example([3.0] * REPLICAS)
def test_weighted_means(weight):
    check("vmap", weight)


@pytest.mark.parametrize("execution", [e for e in EXECUTIONS if e != "vmap"])
def test_on_devices(execution):
    check(execution, [3.0, 0.0, 1.0, 0.5])


def test_two_levels():
    """Each device of a replica moves its part of the weighted mean."""
    axes = {"replica": 2, "device": 2}
    tx = js.local_sgd("replica", sync_every=1, local_axis_name="device")

    def step(params, updates, weight):
        moved, _ = tx.update(updates, tx.init(params), params, weight=weight)
        return optax.apply_updates(params, moved)

    params = {k: np.stack([v] * 2) for k, v in START.items()}
    updates = {k: u[:2] for k, u in UPDATES.items()}
    out = lift(step, axes, "vmap", (False,) * 3)(params, updates, np.float32([1, 3]))
    for k, u in updates.items():
        close(out[k], np.broadcast_to(START[k] + (u[0] + 3 * u[1]) / 4, u.shape))


def sent(tx, weighted):
    """(collective, dtype-blind count, bytes) of one update over the axis."""

    def step(params, weight):
        given = {"weight": weight} if weighted else {}
        return tx.update(params, tx.init(params), params, **given)[0]

    mapped = lift(step, {"replica": REPLICAS}, "shard_map", (False, False))
    stacked = jax.tree.map(lambda s: jax.ShapeDtypeStruct((REPLICAS, *s.shape), s.dtype), PARAMS)
    weight = jax.ShapeDtypeStruct((REPLICAS,), jnp.float32)
    report = js.comm_report(mapped, stacked, weight)
    rows = report.select(axis="replica", level="emitted")
    return sum(r.count for r in rows), sum(r.bytes for r in rows)


def test_a_weight_travels_with_the_gradients():
    count, size = sent(js.all_reduce_gradients("replica"), weighted=False)
    assert size == FLOAT32_BYTES + HALF_BYTES
    assert sent(js.all_reduce_gradients("replica"), weighted=True) == (count, size + 8)


def test_a_weight_of_parameters_travels_ahead():
    tx = js.local_sgd("replica", sync_every=1)
    assert sent(tx, weighted=False) == (2, FLOAT32_BYTES + HALF_BYTES)
    assert sent(tx, weighted=True) == (3, FLOAT32_BYTES + HALF_BYTES + 8)


@pytest.mark.parametrize("transform", ["local_sgd", "slowmo", "diloco"])
def test_totals_are_not_rounded(transform):
    """A total weight of 257 is 256 in bfloat16."""
    make = {
        "local_sgd": lambda: js.local_sgd("replica", sync_every=1),
        "slowmo": lambda: js.slowmo(
            "replica", base=js.local_sgd("replica", sync_every=1), sync_every=1, momentum=0.0
        ),
        "diloco": lambda: js.diloco("replica", sync_every=1, outer_optimizer=optax.sgd(1.0)),
    }
    tx = make[transform]()
    rng = np.random.default_rng(0)
    start = {"half": jnp.bfloat16, "single": jnp.float32}
    one_copy = rng.normal(size=64)
    params = {k: jnp.asarray(np.tile(one_copy, (4, 1)), dtype) for k, dtype in start.items()}
    steps = {k: jnp.asarray(rng.normal(size=(4, 64)), jnp.float32) for k in start}
    weights = np.float32([200, 50, 6, 1])

    def one(p, u, weight):
        updates, _ = tx.update(u, tx.init(p), p, weight=weight)
        return jax.tree.map(lambda p, u: p.astype(jnp.float32) + u, p, updates)

    moved = jax.jit(jax.vmap(one, axis_name="replica"))(params, steps, weights)
    for key, tolerance in (("single", 1e-5), ("half", 2e-2)):
        y = np.asarray(params[key], np.float64) + np.asarray(steps[key], np.float64)
        mean = np.average(y, axis=0, weights=weights)
        error = np.asarray(moved[key], np.float64) - mean
        assert np.abs(error).max() < tolerance
        # A wrong total would make all of them too large, by 0.4 %.
        assert abs(np.sum(error * mean) / np.sum(mean**2)) < tolerance / 8
