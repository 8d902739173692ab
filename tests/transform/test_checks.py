"""What updates are checked for: axes, states and types, each asked once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.transform import check_weight, checked_exchange, unless_idle

SMALL = {"w": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)}


def test_both_states_are_named():
    kept = js.sgp("replica", graph=js.topology.ring(4), overlap=3)
    late = js.sgp("replica", graph=js.topology.ring(4), overlap=1)
    update = lambda p: late.update(p, kept.init(p), p)[0]  # noqa: E731
    said = (
        r"sgp: `state` must be .*SGPState\(count: int32\[\], exchanges: int32\[\], weight: "
        r"float32\[\]\), got SGPState\(count: int32\[\], .*in_flight/0/mean/w: float32\[3\].*more\)"
    )
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(jax.vmap(update, axis_name="replica"), SMALL)


@pytest.mark.parametrize(("own", "times"), [(True, 0), (False, 1)])
def test_a_state_is_compared_once(own, times, monkeypatch):
    """Asking what `init` makes traces it: once for a kind, never where it was seen."""
    tx = js.sgp("replica", graph=js.topology.ring(4))
    start = tx.init if own else js.sgp("replica", graph=js.topology.ring(4)).init
    asked = []
    ask = jax.eval_shape

    def counting(fn, *args):
        found = ask(fn, *args)
        asked.extend([fn] if type(found) is js.SGPState else [])
        return found

    monkeypatch.setattr("jaxslowmo.transform._checks.jax.eval_shape", counting)
    for _ in range(3):
        update = lambda p: tx.update(p, start(p), p)[0]  # noqa: E731
        ask(jax.vmap(update, axis_name="replica"), SMALL)
    assert len(asked) == times


def test_sizes_are_told_apart_not_only_their_product():
    """Under vmap no mesh does: shards of 2 replicas of 4 devices are not those of 4 of 2."""
    base = js.local_sgd("replica", sync_every=1)
    made, used = (
        js.slowmo("replica", base=base, sync_every=2, local_axis_name="device") for _ in range(2)
    )
    for sizes in [(2, 4), (4, 2)]:
        params = jnp.ones((*sizes, 640))
        lift = lambda fn: jax.vmap(jax.vmap(fn, axis_name="device"), axis_name="replica")  # noqa: E731
        state = jax.eval_shape(lift(made.init), params)
        jax.eval_shape(lift(lambda p, s: used.update(p, s, p)), params, state)


def test_an_exchange_of_checked_arguments():
    found = checked_exchange("owner", ("node", "replica"), "device", None, 100)
    assert (found.axis_name, found.local_axis_name) == (("node", "replica"), "device")
    assert (found.param_specs, found.bucket_bytes) == (None, 100)
    for wrong, said in [
        (("",), "owner: `axis_name` must be the name of a mapped axis"),
        (("a", ("b", 2)), r"owner: `local_axis_name` must be .* got \('b', 2\)"),
        ((("a", "a"),), "owner: `axis_name` names an axis twice"),
        (("a", None, None, -1), "owner: `bucket_bytes` .* >= 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=said):
            checked_exchange(*("owner", *wrong))


@pytest.mark.parametrize("weight", [2, 2.0, True, np.int64(2), np.float64(0.5), jnp.ones([])])
def test_a_weight_is_a_float32_scalar(weight):
    found = check_weight("owner", weight)
    assert found is not None
    assert (found.shape, found.dtype) == ((), jnp.float32)
    assert float(found) == float(weight)


def test_updates_of_weight_0_are_zeros_whatever_they_hold():
    updates = {"nan": jnp.asarray(jnp.nan), "int": jnp.asarray(3)}
    assert unless_idle(updates, None) is updates
    assert unless_idle(updates, jnp.zeros([])) == {"nan": 0, "int": 0}
    assert unless_idle(updates, jnp.ones([]))["int"] == 3


def sharded_inside(mesh):
    placed = jax.device_put(np.ones((8, 3), np.float32), NamedSharding(mesh, P("fsdp")))
    return js.replicate({"w": placed}, mesh=mesh)


def traced_update(tx, mesh, state, params, **options):
    """An update in a loop of one's own, in which the compiler has all axes but the replicas'."""

    def one(params, state):
        params, state = jax.tree.map(lambda x: x[0], (params, state))
        out = tx.update(jax.tree.map(jnp.zeros_like, params), state, params, **options)
        return jax.tree.map(lambda x: x[None], out)

    spec = P("replica")
    mapped = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"replica"})
    return jax.jit(mapped).trace(params, state)


def of_own_loops(**options):
    local = js.local_sgd("replica", sync_every=1, **options)
    return {
        "local_sgd": local,
        "slowmo": js.slowmo("replica", base=local, sync_every=2, **options),
        "sgp": js.sgp("replica", graph=js.topology.ring(2), **options),
    }


def test_leaves_that_exchanges_gather_are_told_of_once(mesh_of):
    """In loops of one's own, where nobody reads layouts off the arrays."""
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    params, specs = sharded_inside(mesh), {"w": P("fsdp")}
    for name, tx in of_own_loops().items():
        said = rf"^{name}: no `param_specs` .* over \['fsdp'\] inside a replica are gathered"
        with pytest.warns(UserWarning, match=said) as caught:
            state = js.init(tx, params, mesh=mesh)
        assert len(caught) == 1
        traced_update(tx, mesh, state, params)  # another warning would be an error
    for tx in of_own_loops(param_specs=specs).values():
        traced_update(tx, mesh, js.init(tx, params, mesh=mesh), params)


def test_what_a_state_made_elsewhere_leaves_open_is_told_at_the_first_update(mesh_of):
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    params, count = sharded_inside(mesh), jnp.zeros(2, jnp.int32)
    tx = js.only_finite(js.local_sgd("replica", sync_every=1))
    state = jax.vmap(tx.init)(params)
    with pytest.warns(UserWarning, match="local_sgd: no `param_specs`"):
        traced_update(tx, mesh, state, params)
    traced_update(tx, mesh, state, params)
    silent = js.local_sgd("replica", sync_every=1, param_specs=P())
    traced_update(silent, mesh, js.LocalSGDState(count), params)


@pytest.mark.parametrize("explicit", [False, True])
def test_whole_leaves_and_types_that_tell_are_not_warned_of(mesh_of, explicit):
    mesh = mesh_of({"replica": 2, "fsdp": 4}, explicit=explicit)
    params = sharded_inside(mesh) if explicit else js.replicate(SMALL, mesh=mesh)
    for tx in of_own_loops().values():
        traced_update(tx, mesh, js.init(tx, params, mesh=mesh), params)


def test_specs_of_stacked_leaves_are_refused(mesh_of):
    """They are what one reads off the arrays at hand, and shift every dimension by one."""
    specs = {"w": sharded_inside(mesh_of({"replica": 2, "fsdp": 4}))["w"].sharding.spec}
    said = r"must not name the axis of the replicas, 'replica', got P.*spec\[1:\]"
    for make in (js.local_sgd, js.diloco, js.sgp):
        with pytest.raises(ValueError, match=said):
            make("replica", param_specs=specs)


def test_a_base_of_slowmo_has_its_specs(mesh_of):
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    params = sharded_inside(mesh)
    base = js.local_sgd("replica", sync_every=1)
    tx = js.slowmo("replica", base=base, sync_every=2, param_specs={"w": P("fsdp")})
    state = js.init(tx, params, mesh=mesh)
    report = js.comm_report_of(
        traced_update(tx, mesh, state, params, phase=("average",)).lower(), compile=False
    )
    (row,) = report.select(axis="replica")
    assert (row.collective, row.bytes) == ("all-reduce", 8 * 3 * 4 / 4)  # a device's block
