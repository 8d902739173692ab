"""Anchors of which each replica keeps a part: how much, of what, and the same on the host."""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.algorithms.outer._anchor import ShardedAnchor
from jaxslowmo.transform import Exchange, StatePlacement
from jaxslowmo.tree import tree_bytes

SHAPES = st.lists(
    st.lists(st.integers(0, 300), max_size=2).map(tuple), min_size=1, max_size=4
).filter(lambda shapes: sum(math.prod(s) for s in shapes) > 0)


@pytest.mark.filterwarnings("ignore:.*has size 1")
@settings(max_examples=30)
@given(
    shapes=SHAPES,
    replicas=st.sampled_from([1, 2, 8, 33]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_state_of_sharded_slow_momentum_is_two_parts_of_the_parameters(shapes, replicas, dtype):
    """Per replica <= 2 N / replicas + 1 % + 64 KiB, N the float32 bytes: shapes only."""
    scale = 200 if len(shapes) == 1 else 1  # some trees of up to 18 million parameters
    params = {
        f"p{i}": jax.ShapeDtypeStruct((scale, *shape), dtype) for i, shape in enumerate(shapes)
    }
    slowmo = js.slowmo("replica", base=js.local_sgd("replica"), sync_every=6)
    state = jax.eval_shape(
        jax.vmap(slowmo.init, axis_name="replica", in_axes=None, axis_size=replicas), params
    )
    per_replica = tree_bytes(state) / replicas
    whole = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    assert 2 * whole / replicas <= per_replica <= 2 * whole / replicas * 1.01 + 64 * 1024


# On the host


def numbered(shapes) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"p{i}": rng.normal(size=shape).astype(np.float32 if i % 3 else np.float64)
        for i, shape in enumerate(shapes)
    }


@pytest.mark.parametrize("local", [None, "device"])
def test_devices_lay_them_out_likewise(local, mesh_of):
    """Leaves sharded over an automatic axis have blocks of their own."""
    mesh = mesh_of({"replica": 2, "device": 2, "model": 2})
    params = {k: x.astype(np.float32) for k, x in numbered([(6, 4), (4, 2, 3), (5,)]).items()}
    specs = {"p0": P(None, "model"), "p1": P("model"), "p2": P()}
    placed = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in params.items()}
    sync = js.diloco("replica", local_axis_name=local, param_specs=specs)
    stacked = js.replicate(placed, mesh=mesh)
    state = js.init(sync, stacked, mesh=mesh)
    at = StatePlacement(2, dict(mesh.shape), frozenset({"model"}))
    split = ShardedAnchor(Exchange("replica", local, specs)).split(params, params, at)
    assert len(split) == len(state.anchor) == 2  # leaves over "model", and the others
    for a, b in zip(split, state.anchor, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b))
    # Momentum as the anchor, and both over the axis of the leaves: else it alone would need the
    # memory that sharding saves.
    sharding = NamedSharding(mesh, P("replica", "model"))
    for x in (state.anchor[0], optax.tree.get(state.outer, "trace")[0]):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    found = js.read_anchor(sync, state, stacked, mesh=mesh)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.stack([y] * 2)), found, params)
