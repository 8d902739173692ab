"""Meshes of devices, slices of TPUs and virtual replicas; programs that are kept for them."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.mesh._meshes import slice_major_devices


class OfSlice:
    """A device of the CPU that says of which slice it is."""

    def __init__(self, device, slice_index):
        self._device, self.slice_index = device, slice_index

    def __getattr__(self, name):
        return getattr(self._device, name)


def test_outer_axes_run_over_slices():
    """Each slice after the other."""
    for slices, *sizes in ((2, 4, 2), (2, 2, 4), (2, 1, 8), (4, 2, 4), (4, 2, 2, 2), (2, 8)):
        devices = [OfSlice(d, i * slices // 8) for i, d in enumerate(jax.devices()[:8])]
        found = slice_major_devices(dict(zip("abc", sizes, strict=False)), devices)
        assert found.shape == tuple(sizes)
        assert [d.id for d in found.flat] == [d.id for d in jax.devices()[:8]]


def test_virtual_mesh_is_a_value():
    mesh = js.virtual_mesh({"replica": 4, "device": 2})
    assert dict(mesh.shape) == {"replica": 4, "device": 2}
    assert mesh.axis_names == ("replica", "device")
    assert mesh != js.virtual_mesh({"device": 2, "replica": 4})
    assert len({mesh, js.virtual_mesh({"replica": 4, "device": 2})}) == 1
    with pytest.raises(TypeError):
        mesh.shape["replica"] = 3


SPECS = {"b": P(), "w": P("fsdp")}


def stacked(mesh, seed=0, specs=None):
    rng = np.random.default_rng(seed)
    params = {"b": rng.normal(size=6), "w": rng.normal(size=(8, 4))}
    params = {key: jnp.asarray(x, jnp.float32) for key, x in params.items()}
    if specs is not None:
        params = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in params.items()}
    return js.replicate(params, mesh=mesh)


def slow(**options):
    return js.slowmo("replica", base=js.local_sgd("replica"), sync_every=3, **options)


def test_the_second_call_compiles_nothing(mesh_of, compilations):
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    sync = slow().with_specs(SPECS)
    tx = optax.chain(optax.trace(0.9), sync)
    compiled = []
    for seed in range(3):
        params = stacked(mesh, seed, SPECS)
        before = compilations.count
        state = js.init(tx, params, mesh=mesh)
        anchor = js.read_anchor(sync, state[-1], params, mesh=mesh)
        compiled.append(compilations.count - before)
        for key, x in params.items():  # of these parameters, not of earlier ones
            assert np.array_equal(anchor[key], x)
    assert compiled[0] >= 2
    assert compiled[1:] == [0, 0]


def test_nothing_outlives_the_transform_and_the_arrays(mesh_of):
    """Else every model of a session would stay in memory."""
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    big = jnp.ones(1000)
    tx = (lambda big: optax.stateless(lambda u, p: u)._replace(init=lambda p: big + p["b"][0]))(big)
    sync = slow().with_specs(SPECS)
    params = stacked(mesh, specs=SPECS)
    state = js.init(tx, params, mesh=mesh)
    slow_state = js.init(sync, params, mesh=mesh)
    anchor = js.read_anchor(sync, slow_state, params, mesh=mesh)
    arrays = [*jax.tree.leaves((params, state, slow_state, anchor)), big]
    alive = [weakref.ref(x) for x in arrays]
    alive += [weakref.ref(tx.init), weakref.ref(sync.init), weakref.ref(sync.anchor)]
    del params, state, slow_state, anchor, arrays
    gc.collect()
    assert [ref() for ref in alive[:-4]] == [None] * len(alive[:-4])  # whatever still is in use
    del tx, sync, big
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
