"""Outer steps of large leaves, which on CPU are made chunk by chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.collectives import _means
from jaxslowmo.transform import _replica_group
from jaxslowmo.tree import noted_buffers

# Cut along rows, of which chunks take more than one, with some left; along columns; not at all.
SHAPES = {"rows": (520, 3), "flat": (1048,), "columns": (70, 8), "whole": (70, 3), "small": (2,)}
PARAMS = {
    name: np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for name, shape in SHAPES.items()
}
MESHES = {
    "virtual": lambda: js.virtual_mesh({"replica": 4}),
    "two devices": lambda: js.make_mesh({"replica": 4, "model": 2}),
    "explicit": lambda: jax.make_mesh(
        (4, 2), ("replica", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    ),
}
RESTARTS = optax.linear_schedule(0.3, 0.1, 3)
SYNCS = {
    "adam": lambda: js.diloco(
        "replica", sync_every=2, shard_state=True, outer_optimizer=optax.adam(0.1)
    ),
    "slowmo": lambda: js.slowmo(
        "replica", base=js.sgp("replica"), sync_every=2, nesterov=True, learning_rate=RESTARTS
    ),
}


def loss(params, batch):
    a, b = jnp.mean(batch), jnp.mean(batch**2)
    return sum(jnp.sum(a * jnp.sin(x) + b * x**2) for x in jax.tree.leaves(params))


def trained(mesh, sync, weight):
    step = js.make_train_step(loss, optax.sgd(0.1), mesh=MESHES[mesh](), sync=SYNCS[sync]())
    params = PARAMS
    if "model" in step.mesh.axis_names:
        spec = {name: P("model") if name in ("rows", "columns") else P() for name in PARAMS}
        params = {
            name: jax.device_put(x, NamedSharding(step.mesh, spec[name]))
            for name, x in PARAMS.items()
        }
    state = step.init(params)
    batch = np.linspace(-1, 1, 8, dtype=np.float32)
    for t in range(2):
        state, _ = step(state, np.roll(batch, t), **weight)
    return jax.tree.map(np.asarray, (state.params, state.exchange))


@pytest.mark.parametrize(
    ("mesh", "sync"), [("virtual", "slowmo"), ("two devices", "adam"), ("explicit", "slowmo")]
)
def test_chunks_change_no_bit(mesh, sync, monkeypatch):
    weight = {"weight": np.array([1, 0, 2, 1], np.float32)} if sync == "slowmo" else {}
    found = []
    for large in (1 << 24, 200):
        monkeypatch.setattr(_means, "_LARGE", large)
        monkeypatch.setattr(_replica_group, "LARGE_BYTES", large)
        with noted_buffers() as noted:
            found.append(trained(mesh, sync, weight))
    assert {"rows", "flat", "columns", "whole"} <= {
        "".join(x.leaves) for x in noted if x.exchange == "slow"
    }
    # Of divisions and roots the compiler rounds some differently.
    equal = np.testing.assert_array_equal
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close if sync == "adam" else equal, *found)
