"""One copy to stacked replicas and back, on Auto, Explicit and virtual meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

AXES = {"replica": 4, "device": 2}


def explicit_mesh(axes):
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))


MESHES = {"auto": js.make_mesh, "explicit": explicit_mesh, "virtual": js.virtual_mesh}


def tree():
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32),
        "h": jnp.asarray(rng.normal(size=5), jnp.bfloat16),
        "count": jnp.int32(7),
        "mask": jnp.array([True, False]),
        "zero": jnp.ones((0, 3)),
        "empty": {},
    }


@pytest.mark.parametrize("kind", MESHES)
def test_replicas_are_copies(kind):
    mesh, params = MESHES[kind](AXES), tree()
    stacked = js.replicate(params, mesh=mesh, axis_name="replica")
    assert jax.tree.structure(stacked) == jax.tree.structure(params)
    for one, many in zip(jax.tree.leaves(params), jax.tree.leaves(stacked), strict=True):
        assert many.dtype == one.dtype
        assert np.array_equal(many, np.broadcast_to(one, (4, *one.shape)))
        if kind != "virtual" and many.size:  # jax replicates arrays without elements
            assert many.sharding.is_equivalent_to(NamedSharding(mesh, P("replica")), many.ndim)


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("axis_name", ["replica", ("replica", "device")])
def test_consensus_is_the_mean(kind, axis_name):
    mesh = MESHES[kind](AXES)
    replicas = 8 if isinstance(axis_name, tuple) else 4
    rng = np.random.default_rng(1)
    x = rng.normal(size=(replicas, 3, 2)).astype(np.float32)
    half = rng.normal(size=(replicas, 5)).astype(jnp.bfloat16)
    stacked = {"w": x, "h": half, "n": np.arange(replicas, dtype=np.int32) + 3}
    one = js.consensus(stacked, mesh=mesh, axis_name=axis_name)
    np.testing.assert_allclose(one["w"], x.mean(0), atol=1e-6)
    assert one["h"].dtype == jnp.bfloat16
    exact = half.astype(np.float64).mean(0)
    assert np.all(np.abs(np.asarray(one["h"], np.float64) - exact) <= 2.0**-8 * np.abs(exact))
    assert one["n"].dtype == np.int32
    assert int(one["n"]) == 3  # replica 0's
    if kind != "virtual":
        assert one["w"].sharding.is_fully_replicated
        copies = [np.asarray(s.data) for s in one["w"].addressable_shards]
        assert len(copies) == 8
        assert all(np.array_equal(c, copies[0]) for c in copies)


@pytest.mark.parametrize("kind", MESHES)
def test_consensus_undoes_replicate(kind):
    mesh, params = MESHES[kind](AXES), tree()
    stacked = js.replicate(params, mesh=mesh, axis_name="replica")
    one = js.consensus(stacked, mesh=mesh, axis_name="replica")
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(one), strict=True):
        assert after.dtype == before.dtype
        assert np.array_equal(before, after)


@pytest.mark.parametrize("kind", MESHES)
def test_consensus_of_prng_keys_is_the_first(kind):
    mesh = MESHES[kind]({"replica": 4})
    stacked = js.replicate({"dropout": jax.random.key(3)}, mesh=mesh, axis_name="replica")
    one = js.consensus(stacked, mesh=mesh, axis_name="replica")
    expected = jax.random.key_data(jax.random.key(3))
    assert np.array_equal(jax.random.key_data(one["dropout"]), expected)


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


def sharded_inside(mesh):
    specs = {"b": P(), "w": P("fsdp")}
    params = {"b": jnp.arange(6.0), "w": jnp.arange(48.0).reshape(8, 6)}
    placed = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
    return specs, params, placed


def test_leaves_sharded_inside_a_replica_stay_sharded():
    mesh = js.make_mesh({"replica": 2, "fsdp": 4})
    specs, params, placed = sharded_inside(mesh)
    stacked = js.replicate(placed, mesh=mesh, axis_name="replica")
    for key, spec in specs.items():
        expected = NamedSharding(mesh, P("replica", *spec))
        assert stacked[key].sharding.is_equivalent_to(expected, stacked[key].ndim)
        assert np.array_equal(stacked[key], np.broadcast_to(params[key], (2, *params[key].shape)))
    one = js.consensus(stacked, mesh=mesh, axis_name="replica")
    for key, spec in specs.items():
        assert one[key].sharding.is_equivalent_to(NamedSharding(mesh, spec), one[key].ndim)
        assert np.array_equal(one[key], params[key])


def test_state_of_leaves_sharded_inside_a_replica_is_sharded_too():
    """Otherwise momentum alone would need the memory that sharding saves."""
    mesh = js.make_mesh({"replica": 2, "fsdp": 4})
    specs = {"w": P("fsdp")}
    placed = {"w": sharded_inside(mesh)[2]["w"]}
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
