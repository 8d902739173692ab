"""What is checked for all parameter transforms: arguments, states, layouts."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.transform import check_weight, unless_idle

SMALL = {"w": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)}


class DoublingState(NamedTuple):
    count: jax.Array


@dataclass(frozen=True)
class Doubling(js.spec.Sync):
    """It doubles updates, and notes what its event was given."""

    seen: list
    owner = "doubling"
    state = DoublingState
    axes = ("replica",)

    def init(self, params):
        return DoublingState(jnp.zeros([], jnp.int32))

    def events(self):
        return [js.spec.Event("twice", js.every(1), self.twice)]

    def twice(self, operand, now):
        updates, others, state = operand
        self.seen.append((now.communicate, now.weight, now.phase, now.extra))
        return jax.tree.map(lambda u: 2 * u, updates), others, state


def doubling():
    seen: list = []
    return js.ParameterTransform(Doubling(seen)), seen


def updated(tx, params, updates=None, weight=None, **keywords):
    def one(p, u, weight):
        return tx.update(u, tx.init(p), p, weight=weight, **keywords)

    updates = params if updates is None else updates
    return jax.vmap(one, axis_name="replica", in_axes=(0, 0, None if np.ndim(weight) == 0 else 0))(
        params, updates, weight
    )


def test_a_step_is_given_checked_arguments():
    tx, seen = doubling()
    updates, state = updated(
        tx, jnp.ones((4, 2), jnp.bfloat16), weight=3, phase=("twice",), value=1
    )
    assert updates.dtype == jnp.float32
    assert jnp.array_equal(updates, jnp.full((4, 2), 2.0))
    assert state.count.tolist() == [1] * 4
    ((communicate, weight, phase, extra),) = seen
    assert (communicate, phase, extra) == (True, ("twice",), {"value": 1})
    assert (weight.dtype, weight.shape) == (jnp.float32, ())
    for wrong in ({"phase": ("once",)}, {"params": None}):
        with pytest.raises(ValueError, match="doubling"):
            tx.update(1.0, tx.init(1.0), **{"params": 1.0, **wrong})
    assert len(seen) == 1


def test_updates_of_an_idle_replica_do_not_reach_the_step():
    tx, _ = doubling()
    poison, weights = jnp.asarray([1.0, jnp.nan]), jnp.asarray([1.0, 0.0])
    assert updated(tx, jnp.ones(2), poison, weights)[0].tolist() == [2, 0]
    updates = {"nan": jnp.asarray(jnp.nan), "int": jnp.asarray(3)}
    assert unless_idle(updates, None) is updates
    assert unless_idle(updates, jnp.zeros([])) == {"nan": 0, "int": 0}


@pytest.mark.parametrize("weight", [0, 2.5, True, np.int64(2), jnp.ones([])])
def test_a_weight_is_a_float32_scalar(weight):
    found = check_weight("owner", weight)
    assert (found.shape, found.dtype, float(found)) == ((), jnp.float32, float(weight))


def test_the_state_of_another_transform_is_refused():
    """By structure or types alone; both are told."""
    kept, late = (js.sgp("replica", graph=js.topology.ring(4), overlap=n) for n in (3, 1))
    for other in (kept, js.local_sgd("replica")):
        update = lambda p, other=other: late.update(p, other.init(p), p)[0]  # noqa: E731
        with pytest.raises(ValueError, match=r"sgp: `state`.*weight: float32\[\]\), got "):
            jax.eval_shape(jax.vmap(update, axis_name="replica"), SMALL)


# Layouts, in loops of one's own, where nobody reads them off the arrays


def sharded_inside(mesh):
    placed = jax.device_put(np.ones((8, 3), np.float32), NamedSharding(mesh, P("fsdp")))
    return js.replicate({"w": placed}, mesh=mesh)


def traced_update(tx, mesh, state, params, **options):
    """An update in which the compiler has all axes but the replicas'."""

    def one(params, state):
        params, state = jax.tree.map(lambda x: x[0], (params, state))
        out = tx.update(jax.tree.map(jnp.zeros_like, params), state, params, **options)
        return jax.tree.map(lambda x: x[None], out)

    spec = P("replica")
    mapped = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"replica"})
    return jax.jit(mapped).trace(params, state)


def of_own_loops(**options):
    local = js.local_sgd("replica", sync_every=1, **options)
    slow = js.slowmo("replica", base=local, sync_every=2, **options)
    return {"local_sgd": local, "slowmo": slow}


def test_leaves_that_exchanges_gather_are_told_of_once(mesh_of):
    """By `init`; where a state was made without `js.init`, at the first update."""
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    params = sharded_inside(mesh)
    for name, tx in of_own_loops().items():
        with pytest.warns(UserWarning, match=rf"^{name}: .*`param_specs`.*\['fsdp'\]") as caught:
            state = js.init(tx, params, mesh=mesh)
        assert len(caught) == 1
        traced_update(tx, mesh, state, params)  # another warning would be an error
    for tx in of_own_loops(param_specs={"w": P("fsdp")}).values():
        traced_update(tx, mesh, js.init(tx, params, mesh=mesh), params)
    tx = js.only_finite(js.local_sgd("replica", sync_every=1))
    state = jax.vmap(tx.init)(params)
    with pytest.warns(UserWarning, match="local_sgd: .*`param_specs`"):
        traced_update(tx, mesh, state, params)
    traced_update(tx, mesh, state, params)


@pytest.mark.parametrize("explicit", [False, True])
def test_whole_leaves_and_types_that_tell_are_not_warned_of(mesh_of, explicit):
    mesh = mesh_of({"replica": 2, "fsdp": 4}, explicit=explicit)
    params = sharded_inside(mesh) if explicit else js.replicate(SMALL, mesh=mesh)
    for tx in of_own_loops().values():
        traced_update(tx, mesh, js.init(tx, params, mesh=mesh), params)


def test_a_base_of_slowmo_has_its_specs(mesh_of):
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    params = sharded_inside(mesh)
    base = js.local_sgd("replica", sync_every=1)
    tx = js.slowmo("replica", base=base, sync_every=2, param_specs={"w": P("fsdp")})
    traced = traced_update(tx, mesh, js.init(tx, params, mesh=mesh), params, phase=("average",))
    (row,) = js.comm_report_of(traced.lower(), compile=False).select(axis="replica")
    assert (row.collective, row.bytes) == ("all-reduce", 8 * 3 * 4 / 4)  # a device's block
