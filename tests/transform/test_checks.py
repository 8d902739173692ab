"""What is checked for all parameter transforms: arguments, states, layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.transform import check_weight, unless_idle

SMALL = {"w": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)}


def doubling():
    """It doubles updates, and notes what its event was given."""
    seen: list = []

    def twice(carry, replicas, context):
        seen.append(context)
        move = lambda y, x: 2 * y - x.astype(y.dtype)  # noqa: E731
        return carry._replace(params=jax.tree.map(move, carry.params, carry.before))

    algorithm = js.Algorithm((js.spec.Event("twice", js.every(1), twice),), owner="doubling")
    return js.ParameterTransform(algorithm, "replica"), seen


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
    (context,) = seen
    assert (context.communicate, context.phase) == (True, ("twice",))
    assert (context.weight.dtype, context.weight.shape) == (jnp.float32, ())
    for wrong in ({"phase": ("once",)}, {"weight": -1}):
        with pytest.raises(ValueError, match="doubling"):
            updated(tx, jnp.ones((4, 2)), **wrong)
    with pytest.raises(ValueError, match="doubling"):
        tx.update(1.0, tx.init(1.0))
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
        with pytest.raises(ValueError, match=r"sgp: `state`.*local/weight: float32\[\]\), got "):
            jax.eval_shape(jax.vmap(update, axis_name="replica"), SMALL)


# Layouts, in loops of one's own, where nobody reads them off the arrays


def sharded_inside(mesh):
    placed = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("fsdp")))
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


LOCAL = js.local_sgd("replica", sync_every=1)
SLOW = js.slowmo("replica", base=LOCAL, sync_every=2)


def test_state_of_leaves_whose_layout_is_not_known_stays_whole(mesh_of):
    """Automatic axes hide the layout in loops of one's own, and `with_specs` tells it."""
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    params, specs = sharded_inside(mesh), {"w": P("fsdp")}
    with pytest.warns(UserWarning, match=r"^slowmo: of the shared state \d+% .* stay whole"):
        whole = js.init(SLOW, params, mesh=mesh)
    assert whole.shared["anchor"]["w"].shape == (2, 8, 4)
    traced_update(SLOW, mesh, whole, params)
    tx = SLOW.with_specs(specs)
    state = js.init(tx, params, mesh=mesh)
    assert state.shared["anchor"]["w"].shape == (2, 8, 2)
    assert tx.with_specs(P()) is tx
    traced_update(tx, mesh, state, params)


def test_a_block_that_is_sharded_inside_a_replica_is_sent_as_it_is(mesh_of):
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    params, tx = sharded_inside(mesh), SLOW.with_specs({"w": P("fsdp")})
    state = js.init(tx, params, mesh=mesh)
    traced = traced_update(tx, mesh, state, params, phase=("slow",))
    rows = js.comm_report_of(traced.lower()).select(axis="replica", level="compiled")
    sent = {(row.collective, row.bytes) for row in rows}
    assert sent == {("reduce-scatter", 8 * 4 * 4 / 4), ("all-gather", 8 * 4 * 4 / 4)}


@pytest.mark.parametrize("explicit", [False, True])
def test_whole_leaves_and_types_that_tell_need_no_specs(mesh_of, explicit):
    mesh = mesh_of({"replica": 2, "fsdp": 4}, explicit=True)
    params = sharded_inside(mesh) if explicit else js.replicate({"w": np.ones((8, 4))}, mesh=mesh)
    state = js.init(SLOW, params, mesh=mesh)
    # The columns are sharded by no axis, or the rows by "fsdp" already.
    assert state.shared["anchor"]["w"].shape == ((2, 8, 2) if explicit else (2, 4, 4))


def test_a_base_of_slowmo_has_its_specs(mesh_of):
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    params, tx = sharded_inside(mesh), SLOW.with_specs({"w": P("fsdp")})
    traced = traced_update(tx, mesh, js.init(tx, params, mesh=mesh), params, phase=("average",))
    (row,) = js.comm_report_of(traced.lower()).select(axis="replica", level="compiled")
    assert (row.collective, row.bytes) == ("all-reduce", 8 * 4 * 4 / 4)  # a device's block
