"""Stacked states of transforms on Auto, Explicit and virtual meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.meshes import MESHES


@pytest.mark.parametrize("kind", MESHES)
def test_donated_parameters_leave_source_and_state_alive(kind):
    mesh = MESHES[kind]({"replica": 4})
    source = jax.tree.map(jnp.asarray, {"w": np.ones((3, 2), np.float32)})
    if kind != "virtual":
        source = jax.device_put(source, NamedSharding(mesh, P()))
    tx = optax.chain(
        optax.trace(0.9),
        js.slowmo("replica", base=js.local_sgd("replica"), sync_every=3, shard_state=False),
    )
    stacked = js.replicate(source, mesh=mesh, axis_name="replica")
    state = js.init(tx, stacked, mesh=mesh, axis_name="replica")
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(stacked)
    assert stacked["w"].is_deleted()
    for leaf in jax.tree.leaves((source, state)):
        assert not leaf.is_deleted()
        np.asarray(leaf)
    assert np.array_equal(state[-1].anchor["w"], np.ones((4, 3, 2)))


@pytest.mark.parametrize("kind", MESHES)
def test_state_is_stacked(kind):
    mesh = MESHES[kind]({"replica": 4})
    tx = optax.chain(
        optax.adam(0.1), js.slowmo("replica", base=js.local_sgd("replica"), sync_every=3)
    )
    stacked = js.replicate({"w": jnp.arange(10.0)}, mesh=mesh, axis_name="replica")
    state = js.init(tx, stacked, mesh=mesh, axis_name="replica")
    for leaf in jax.tree.leaves(state):
        assert leaf.shape[0] == 4
        if kind != "virtual":
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("replica")), leaf.ndim)
    (anchor,) = state[-1].anchor
    assert np.array_equal(np.asarray(anchor).reshape(-1)[:10], np.arange(10.0))
    sync = js.slowmo("replica", base=js.local_sgd("replica"), sync_every=3)
    whole = js.read_anchor(sync, state[-1], stacked, mesh=mesh)
    assert np.array_equal(whole["w"], np.broadcast_to(np.arange(10.0), (4, 10)))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_unplaced_stacked_parameters_are_placed(kind):
    mesh = MESHES[kind]({"replica": 4})
    state = js.init(
        js.diloco("replica"), {"w": np.ones((4, 2), np.float32)}, mesh=mesh, axis_name="replica"
    )
    assert state.count.sharding.is_equivalent_to(NamedSharding(mesh, P("replica")), 1)


def test_state_of_leaves_sharded_inside_a_replica_is_sharded_too():
    """Otherwise momentum alone would need the memory that sharding saves."""
    mesh = js.make_mesh({"replica": 2, "fsdp": 4})
    specs = {"w": P("fsdp")}
    placed = {"w": jax.device_put(jnp.arange(48.0).reshape(8, 6), NamedSharding(mesh, P("fsdp")))}
    stacked = js.replicate(placed, mesh=mesh, axis_name="replica")
    tx = optax.chain(
        optax.trace(0.9),
        js.slowmo("replica", base=js.local_sgd("replica"), sync_every=3, param_specs=specs),
    )
    trace, slow = js.init(tx, stacked, mesh=mesh, axis_name="replica")
    expected = NamedSharding(mesh, P("replica", "fsdp"))
    for leaf in (slow.anchor[0], slow.outer.velocity[0], trace.trace["w"]):
        assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), leaf.sharding


def test_anchor_of_a_tuple_of_parameters_is_read():
    mesh = js.virtual_mesh({"replica": 2})
    params = (jnp.arange(10.0),)
    stacked = js.replicate(params, mesh=mesh, axis_name="replica")
    sync = js.diloco("replica")
    state = js.init(sync, stacked, mesh=mesh, axis_name="replica")
    (anchor,) = js.read_anchor(sync, state, stacked, mesh=mesh)
    assert np.array_equal(anchor, np.broadcast_to(np.arange(10.0), (2, 10)))


def test_transforms_without_an_anchor_have_none_to_read():
    mesh = js.virtual_mesh({"replica": 2})
    stacked = js.replicate({"w": jnp.ones(3)}, mesh=mesh)
    sync = js.local_sgd("replica")
    with pytest.raises(ValueError, match=r"`sync` must be made by js\.slowmo or js\.diloco"):
        js.read_anchor(sync, js.init(sync, stacked, mesh=mesh), stacked, mesh=mesh)


def test_state_of_an_object_with_methods():
    """`optax.MultiSteps` has an `init` that is a bound method: nobody else holds it."""
    stacked = {"w": np.ones((2, 3), np.float32)}
    mesh = js.virtual_mesh({"replica": 2})
    state = js.init(optax.MultiSteps(optax.sgd(0.1), 2), stacked, mesh=mesh)
    assert state.mini_step.shape == (2,)


def test_an_optimizer_that_takes_exchanges_back_is_told_of():
    """A loop of one's own cannot reach into its state; `js.chain` can."""
    parts = optax.apply_if_finite(optax.contrib.cocob(), 3), js.local_sgd("replica")
    mesh = js.virtual_mesh({"replica": 2})
    stacked = js.replicate({"w": np.ones(3, np.float32)}, mesh=mesh)
    with pytest.warns(UserWarning, match=r"remembers parameters \(COCOBState\).*js\.chain"):
        js.init(optax.chain(*parts), stacked, mesh=mesh)
    ours, unlike = js.chain(*parts), optax.chain(optax.contrib.dog(), parts[1])
    wrapped = optax.masked(ours, True), optax.chain(optax.clip(1.0), ours)
    for silent in (ours, *wrapped, parts[0], unlike):
        js.init(silent, stacked, mesh=mesh)  # warnings are errors
    with pytest.warns(UserWarning, match=r"\(COCOBState\)"):  # the other one's copies follow
        js.init(optax.chain(parts[0], ours), stacked, mesh=mesh)
