"""Trees sharded inside a replica, on meshes of any combination of Auto and Explicit axes."""

import itertools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

KINDS = list(itertools.product([AxisType.Auto, AxisType.Explicit], repeat=2))
SPECS = {"b": P(), "key": P(), "v": P(None, "fsdp"), "w": P("fsdp")}
ONE = {
    "b": np.arange(6, dtype=np.float32),
    "v": np.arange(24, dtype=np.float32).reshape(3, 8),
    "w": np.arange(48, dtype=np.float32).reshape(8, 6),
}
FLOATS = tuple(ONE)


@pytest.fixture(params=KINDS, ids=lambda kinds: f"replica-{kinds[0].name}-fsdp-{kinds[1].name}")
def mesh(request):
    devices = np.array(jax.devices()).reshape(2, 4)
    return Mesh(devices, ("replica", "fsdp"), axis_types=request.param)


def placed(tree, mesh, *lead):
    return {
        key: jax.device_put(x, NamedSharding(mesh, P(*lead, *SPECS[key])))
        for key, x in tree.items()
    }


def two(mesh):
    """Stacked replicas that differ, put in place without the library."""
    return placed({key: np.stack([x, 3 * x]) for key, x in ONE.items()}, mesh, "replica")


def layout(x):
    """What its dimensions are sharded over, and whether the devices hold it so."""
    entries = tuple(x.sharding.spec)
    while entries and entries[-1] is None:
        entries = entries[:-1]
    blocks = {str(s.index) for s in x.addressable_shards}
    sizes = {"replica": 2, "fsdp": 4}
    assert len(blocks) == np.prod([sizes[e] for e in entries if e is not None], dtype=int)
    return P(*entries)


def test_replicate_keeps_the_layout(mesh):
    key = jax.device_put(jax.random.key(3), NamedSharding(mesh, P()))
    stacked = js.replicate({**placed(ONE, mesh), "key": key}, mesh=mesh)
    for name in FLOATS:
        assert layout(stacked[name]) == P("replica", *SPECS[name])
        assert np.array_equal(stacked[name], np.stack([ONE[name]] * 2))
    assert np.array_equal(jax.random.key_data(stacked["key"]), [[0, 3]] * 2)


def test_consensus_keeps_the_layout(mesh):
    one = js.consensus(two(mesh), mesh=mesh)
    for name in FLOATS:
        assert layout(one[name]) == SPECS[name]
        assert np.array_equal(one[name], 2 * ONE[name])


def test_replicas_are_compared(mesh):
    stacked = js.replicate(placed(ONE, mesh), mesh=mesh)
    assert js.check_in_sync(stacked, mesh=mesh).divergences == ()
    with pytest.raises(js.OutOfSyncError) as caught:
        js.check_in_sync(two(mesh), mesh=mesh)
    found = [(d.leaf, d.replica, d.difference) for d in caught.value.divergences]
    assert found == [("b", 1, 10.0), ("v", 1, 46.0), ("w", 1, 94.0)]


def test_state_lies_as_the_parameters(mesh):
    sync = js.slowmo(
        "replica",
        base=js.local_sgd("replica"),
        sync_every=3,
        shard_state=False,
        param_specs={name: SPECS[name] for name in FLOATS},
    )
    params = two(mesh)
    trace, slow = js.init(optax.chain(optax.trace(0.9), sync), params, mesh=mesh)
    anchor = js.read_anchor(sync, slow, params, mesh=mesh)
    for name in FLOATS:
        for leaf in (trace.trace[name], slow.anchor[name], slow.outer.velocity[name]):
            assert layout(leaf) == P("replica", *SPECS[name])
        assert np.array_equal(trace.trace[name], np.zeros((2, *ONE[name].shape)))
        assert layout(anchor[name]) == P("replica", *SPECS[name])
        assert np.array_equal(anchor[name], params[name])


def test_sharded_state_is_read_back(mesh):
    specs = {name: SPECS[name] for name in FLOATS}
    sync = js.diloco("replica", sync_every=3, param_specs=specs)
    params = js.replicate(placed(ONE, mesh), mesh=mesh)
    state = js.init(sync, params, mesh=mesh)
    assert [layout(x) for x in state.anchor] == [P("replica"), P("replica", "fsdp")]
    anchor = js.read_anchor(sync, state, params, mesh=mesh)
    for name in FLOATS:
        assert layout(anchor[name]) == P("replica", *SPECS[name])
        assert np.array_equal(anchor[name], np.stack([ONE[name]] * 2))
