"""Of replicas that are sharded over "fsdp" and "tensor" nothing is gathered, and each device sends
its own part to the other replicas.

`step/update/test_replica_step.py` and `test_with_exchange.py` have what they compute and where it
lies, `tests/checkpoint/test_meshes.py` saving and resumption.
"""

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from train.libraries import loss_fn

AXES = {"replica": 2, "fsdp": 2, "tensor": 2}
WIDTH, HIDDEN = 64, 96
SPECS = {"bias": P(), "in": P("fsdp", "tensor"), "out": P("tensor", "fsdp")}
SHAPES = {"bias": (WIDTH,), "in": (WIDTH, HIDDEN), "out": (HIDDEN, WIDTH)}
OWN = 4 * (WIDTH + 2 * WIDTH * HIDDEN // 4)  # bytes of the parameters on a device


def test_replicas_send_a_device_s_part_and_gather_nothing(mesh_of):
    """Over "fsdp" and "tensor" every kind of step sends what the loss does, and no more."""
    mesh, base = mesh_of(AXES), js.local_sgd("replica", sync_every=2)
    sync = js.slowmo("replica", base=base, sync_every=4, momentum=0.6)
    step = js.make_train_step(loss_fn, optax.adam(1e-2), sync=sync, mesh=mesh, mode="host")
    params = {
        name: jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, SPECS[name]))
        for name, shape in SHAPES.items()
    }
    report = js.comm_report(step, step.init(params), np.ones((16, WIDTH), np.float32))
    inside, between = {kind: set() for kind in report.kinds}, {}
    for row in report.select(level="compiled"):
        if row.axis != "replica":
            inside[row.kind].add((row.axis, row.collective, row.count, row.bytes))
    assert all(rows == inside["local"] for rows in inside.values()), inside
    for row in report.select(level="emitted"):
        assert row.axis == "replica"
        between[row.kind, row.collective] = row.bytes
    padded = OWN + 8192 * 3  # a shard is padded to whole tiles
    assert OWN <= between["slow", "reduce-scatter"] <= padded
    assert OWN <= between["slow", "all-gather"] <= padded
    assert between["average", "all-reduce"] == OWN
