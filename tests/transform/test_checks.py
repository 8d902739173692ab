"""What is checked for all parameter transforms: arguments, states, layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

SMALL = {"w": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)}


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
