"""One copy to stacked replicas and back, on Auto, Explicit and virtual meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.meshes import MESHES

AXES = {"replica": 4, "device": 2}


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


@pytest.mark.parametrize("kind", MESHES)
def test_stacked_parameters_are_not_stacked_again(kind):
    """Broadcasting may hide it: a loss that takes (4, 4, 3) for (4, 3) trains on."""
    mesh = MESHES[kind](AXES)
    # A leaf of one copy may be as long as there are replicas, and sharded over another axis.
    one = {"b": jnp.zeros(4), "w": jnp.ones((4, 3))}
    if kind != "virtual":
        one["w"] = jax.device_put(one["w"], NamedSharding(mesh, P("device")))
    stacked = js.replicate(one, mesh=mesh)
    with pytest.raises(ValueError, match=r"replicate: `params` .* stacked for 4 replicas already"):
        js.replicate(stacked, mesh=mesh)
    step = js.make_train_step(
        lambda params, batch: (params["w"] * batch).mean() + params["b"].sum(),
        optax.sgd(0.1),
        sync=js.local_sgd("replica"),
        mesh=mesh,
    )
    with pytest.raises(ValueError, match="stacked for 4 replicas already"):
        step.init(stacked)
    js.replicate(js.consensus(stacked, mesh=mesh), mesh=mesh)
