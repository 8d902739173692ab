"""`js.init` and `js.read_anchor` compile once; what they keep lives as long as the transform."""

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


@pytest.mark.parametrize("kind", ["virtual", "auto", "explicit", "fsdp"])
def test_the_second_call_compiles_nothing(mesh_of, kind, compilations):
    specs = SPECS if kind == "fsdp" else None
    if kind == "virtual":
        mesh = js.virtual_mesh({"replica": 2})
    elif kind == "fsdp":
        mesh = mesh_of({"replica": 2, "fsdp": 4})
    else:
        mesh = mesh_of({"replica": 2}, explicit=kind == "explicit")
    sync = slow(param_specs=specs)
    tx = optax.chain(optax.trace(0.9), sync)
    compiled = []
    for seed in range(3):
        params = stacked(mesh, seed, specs)
        before = compilations.count
        state = js.init(tx, params, mesh=mesh)
        anchor = js.read_anchor(sync, state[-1], params, mesh=mesh)
        compiled.append(compilations.count - before)
        for key, x in params.items():  # of these parameters, not of earlier ones
            assert np.array_equal(anchor[key], x)
    assert compiled[0] >= 2
    assert compiled[1:] == [0, 0]


def test_another_transform_mesh_or_shape_has_a_program_of_its_own(mesh_of):
    mesh = mesh_of({"replica": 2})
    params = stacked(mesh)
    for shard_state in (True, False, True):
        state = js.init(slow(shard_state=shard_state), params, mesh=mesh)
        assert isinstance(state.anchor, tuple if shard_state else dict)
    tx = optax.trace(0.9)
    for other in (mesh, js.virtual_mesh({"replica": 2}), mesh_of({"replica": 2, "device": 2})):
        state = js.init(tx, stacked(other), mesh=other)
        assert state.trace["w"].shape == (2, 8, 4)
    assert js.init(tx, {"w": jnp.ones((2, 5))}, mesh=mesh).trace["w"].shape == (2, 5)


def test_state_follows_the_layout_of_the_parameters_it_is_asked_for(mesh_of):
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    tx = optax.trace(0.9)
    for spec in (P("fsdp"), P(None, "fsdp"), P("fsdp")):
        trace = js.init(tx, stacked(mesh, specs={"b": P(), "w": spec}), mesh=mesh).trace["w"]
        assert trace.sharding.is_equivalent_to(NamedSharding(mesh, P("replica", *spec)), 3)


def big_transform(big):
    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: x + big[0], params), lambda u, s, p=None: (u, s)
    )


def test_nothing_outlives_the_transform_and_the_arrays(mesh_of):
    """Else every model of a session would stay in memory."""
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    big = jnp.ones(1000)
    tx, sync = big_transform(big), slow(param_specs=SPECS)
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


class Unhashable:
    """Compares by value, as a dataclass does."""

    def __eq__(self, other):
        return isinstance(other, Unhashable)

    __hash__ = None

    def __call__(self, params):
        return jax.tree.map(jnp.zeros_like, params)


class Slotted:
    """Takes no weak reference."""

    __slots__ = ()

    def __call__(self, params):
        return jax.tree.map(jnp.zeros_like, params)


@pytest.mark.parametrize("kind", [Unhashable, Slotted])
def test_what_cannot_be_kept_works_all_the_same(kind):
    mesh = js.virtual_mesh({"replica": 2})
    tx = optax.GradientTransformation(kind(), lambda u, s, p=None: (u, s))
    for seed in range(2):
        state = js.init(tx, stacked(mesh, seed), mesh=mesh)
        assert np.array_equal(state["w"], np.zeros((2, 8, 4)))
