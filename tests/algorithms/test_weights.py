"""`weight` in every algorithm: weighted means, and replicas without data that follow."""

import jax
import numpy as np
import optax
from hypothesis import example, given
from hypothesis import strategies as st

import jaxslowmo as js
from support.executions import lift

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


LOCAL = js.local_sgd("replica", sync_every=1)
AVERAGES = {
    "sparta": js.sparta("replica", share=1.0),
    "local_sgd": LOCAL,
    "hierarchical_local_sgd": js.hierarchical_local_sgd({"replica": 1}),
    "slowmo": slow(base=LOCAL),
    "slowmo whole": slow(base=LOCAL, shard_state=False),
    "slowmo inexact": slow(base=LOCAL, exact_average=False),
    "slowmo over sgp": slow(base=js.sgp("replica", graph=RING)),
    "diloco": js.diloco("replica", sync_every=1, outer_optimizer=optax.sgd(1.0)),
}


def one_update(params, updates, weight):
    """What each transform makes of the same update, all in one program."""
    out = {}
    for name, tx in {**AVERAGES, "sgp": js.sgp("replica", graph=RING)}.items():
        moved, _ = tx.update(updates, tx.init(params), params, weight=weight)
        out[name] = optax.apply_updates(params, moved)
    return out


PROGRAM = lift(one_update, {"replica": REPLICAS}, "vmap", (False,) * 3)


def close(found, wanted, tolerance=2e-6):
    np.testing.assert_allclose(
        np.asarray(found, np.float64), wanted, rtol=tolerance, atol=tolerance
    )


weights = st.floats(0.125, 4096, width=32) | st.just(0.0)


@given(st.lists(weights, min_size=REPLICAS, max_size=REPLICAS))
@example([0.0] * REPLICAS)
@example([3.0] * REPLICAS)
def test_weighted_means(weight):
    weight = np.asarray(weight, np.float32)
    params = {k: np.stack([v] * REPLICAS) for k, v in START.items()}
    alive, total = weight > 0, weight.astype(np.float64).sum()
    given_updates = {k: u.copy() for k, u in UPDATES.items()}
    for u in given_updates.values():
        u[~alive] = np.nan  # what a replica without data computes is never looked at
    out = jax.tree.map(np.asarray, PROGRAM(params, given_updates, weight))
    for k, u in UPDATES.items():
        own = np.where(alive.reshape(-1, *[1] * (u.ndim - 1)), u, 0)
        share = weight / total if total else weight
        mean = np.tensordot(share, own, 1)
        for name in AVERAGES:
            close(out[name][k], np.broadcast_to(START[k] + mean, u.shape))
        y = params[k] + own
        close(out["sgp"][k], (y + np.roll(y, 1, 0)) / 2)  # peers of one ring direction
