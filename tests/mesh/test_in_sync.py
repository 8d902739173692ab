"""Replicas that hold other values are found, wherever they differ and whatever the dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.mesh._in_sync import comparison_program, fingerprints, leaf_differences
from support.limits import TAKES_EMPTY_ARRAYS
from support.meshes import MESHES

REPLICAS = 4


def params():
    """One leaf of each kind, equal on all replicas."""
    one = {
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1 + 2j, 3]),
        "empty": jnp.zeros((0, 2) if TAKES_EMPTY_ARRAYS else (1, 2)),
        "half": jnp.arange(5, dtype=jnp.bfloat16),
        "int": jnp.arange(6, dtype=jnp.int8).reshape(2, 3),
        "key": jax.random.key(3),
        "layer": {"w": jnp.arange(12.0).reshape(3, 4), "nan": jnp.array([jnp.nan, 1.0, -0.0])},
        "scalar": jnp.float16(2.0),
    }
    return jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), one)


def changed():
    tree = params()
    tree["layer"]["w"] = tree["layer"]["w"].at[1, 2, 3].add(0.5).at[3, 0].add(-2.0)
    tree["layer"]["nan"] = tree["layer"]["nan"].at[2].set(jnp.array([0.0, jnp.nan, 0.0]))
    tree["int"] = tree["int"].at[2, 1, 1].set(-100)
    tree["bool"] = tree["bool"].at[3].set(False)
    tree["complex"] = tree["complex"].at[2, 0].set(1 + 4j)
    tree["half"] = tree["half"].at[1, 4].set(4.03125)
    tree["key"] = tree["key"].at[1].set(jax.random.key(4))
    return tree


EXPECTED = [
    ("bool", 3, 1.0, 1, 2, 0),
    ("complex", 2, 2.0, 1, 2, 0),
    ("half", 1, 0.03125, 1, 5, 0),
    ("int", 2, 104.0, 1, 6, 0),
    ("key", 1, np.inf, 1, 1, 0),
    ("layer/nan", 2, np.inf, 3, 3, 0),
    ("layer/w", 1, 0.5, 1, 12, 0),
    ("layer/w", 3, 2.0, 4, 12, 0),
]


@pytest.mark.parametrize("kind", ["explicit", "virtual"])
def test_every_leaf_and_replica_that_differs_is_listed(kind):
    mesh = MESHES[kind]({"replica": REPLICAS})
    assert js.check_in_sync(params(), mesh=mesh) == js.mesh.SyncReport(9, REPLICAS, ())
    with pytest.raises(js.mesh.OutOfSyncError) as caught:
        js.check_in_sync(changed(), mesh=mesh)
    assert list(map(tuple, caught.value.divergences)) == EXPECTED
    said = str(caught.value)
    assert "7 leaves" in said
    assert "layer/w: replica 1 by 0.5 in 1 of 12 elements, replica 3 by 2 in 4 of 12" in said


def test_tolerance_is_for_floating_leaves():
    mesh, tree = js.virtual_mesh({"replica": REPLICAS}), changed()
    with pytest.raises(js.mesh.OutOfSyncError, match="by more than 1 ") as caught:
        js.check_in_sync(tree, mesh=mesh, tolerance=1.0)
    accepted = {("half", 1), ("layer/w", 1)}
    beyond = [(d.leaf, d.replica) for d in caught.value.divergences]
    assert beyond == [(leaf, r) for leaf, r, *_ in EXPECTED if (leaf, r) not in accepted]
    near = {"w": tree["layer"]["w"]}
    report = js.check_in_sync(near, mesh=mesh, tolerance=2.0)
    assert [(d.replica, d.difference) for d in report.divergences] == [(1, 0.5), (3, 2.0)]


def test_leaves_that_are_sharded_inside_a_replica(mesh_of):
    mesh = mesh_of({"slice": 1, "replica": 2, "fsdp": 4})
    w = np.zeros((2, 8, 3), np.float32)
    w[1, 5, 2] = 1.0
    place = NamedSharding(mesh, P("replica", "fsdp"))
    tree = {"w": jax.device_put(w, place), "b": jnp.ones((2, 3))}
    with pytest.raises(js.mesh.OutOfSyncError, match="w: replica 1 by 1 in 1 of 24"):
        js.check_in_sync(tree, mesh=mesh, axis_name=("slice", "replica"))
    # Nothing of the table's size is moved to compare fingerprints.
    compiled = (
        comparison_program(fingerprints, mesh, "replica", frozenset({"fsdp"}))
        .lower([tree["w"]])
        .compile()
    )
    assert "all-gather" not in compiled.as_text()


def test_copies_inside_a_replica_are_compared(mesh_of):
    mesh = mesh_of({"replica": 2, "device": 2})
    place = NamedSharding(mesh, P("replica"))
    blocks = [np.full((1, 3), 7.0, np.float32) for _ in range(4)]
    blocks[3] = blocks[3] + np.array([[0.0, 0.25, 0.0]], np.float32)
    arrays = [jax.device_put(b, d) for b, d in zip(blocks, mesh.devices.ravel(), strict=True)]
    tree = {"w": jax.make_array_from_single_device_arrays((2, 3), place, arrays)}
    with pytest.raises(
        js.mesh.OutOfSyncError, match=r"w: replica 1 \(device 1\) by 0.25 in 1 of 3"
    ):
        js.check_in_sync(tree, mesh=mesh)
    virtual = js.virtual_mesh({"replica": 2, "device": 2})
    assert not js.check_in_sync({"w": jnp.ones((2, 3))}, mesh=virtual).divergences


def test_bytes(mesh_of):
    """Fingerprints of all leaves; of those that differ, replica 0's values."""
    mesh = mesh_of({"replica": REPLICAS})
    leaves = [jnp.zeros((REPLICAS, 1000)), jnp.zeros((REPLICAS, 10, 10))]
    prints = comparison_program(fingerprints, mesh, "replica", frozenset()).lower(leaves)
    apart = comparison_program(leaf_differences, mesh, "replica", frozenset()).lower(leaves[:1])
    prints, apart = (js.comm_report_of(x, compile=False) for x in (prints, apart))
    assert prints.bytes(axis="replica") == 8 * len(leaves) * REPLICAS
    assert prints.count(axis="replica") == 1
    assert apart.bytes(axis="replica") == 4000 + 8 * REPLICAS
