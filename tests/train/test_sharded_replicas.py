"""Replicas that are sharded over "fsdp" and "tensor" train as those of one device do.

Only "replica" is manual; the rest is the compiler's. Whatever a step is made of: its updates equal
those of virtual replicas on one device, nothing of the state is gathered, and what replicas send is
a device's own part. `tests/checkpoint/test_meshes.py` has saving and resumption.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

REPLICAS, PARTS = 2, 4
AXES = {"replica": REPLICAS, "fsdp": 2, "tensor": 2}
WIDTH, HIDDEN = 64, 96
SPECS = {"bias": P(), "in": P("fsdp", "tensor"), "out": P("tensor", "fsdp")}
RANDOM = np.random.default_rng(0)
SHAPES = {"bias": (WIDTH,), "in": (WIDTH, HIDDEN), "out": (HIDDEN, WIDTH)}
PARAMS = {name: 0.1 * RANDOM.normal(size=size).astype(np.float32) for name, size in SHAPES.items()}
OWN = 4 * (WIDTH + 2 * WIDTH * HIDDEN // PARTS)  # bytes of the parameters on a device
BATCHES = RANDOM.normal(size=(10, 16, WIDTH)).astype(np.float32)


CASES = [
    ("auto", "sgp overlap", "traced"),
    ("auto", "slowmo", "host"),
    ("explicit", "slowmo whole", "traced"),
    ("auto", "local_sgd, average", "traced"),
]
LOCAL = js.local_sgd("replica", sync_every=2)


SYNCS = {
    "sgp overlap": js.sgp("replica", overlap=2),
    "slowmo": js.slowmo("replica", base=LOCAL, sync_every=4, momentum=0.6),
    "slowmo whole": js.slowmo("replica", base=LOCAL, sync_every=4, shard_state=False),
    "local_sgd, average": js.local_sgd("replica", sync_every=2, inner_state="average"),
}


def loss_on(mesh):
    """Return the loss; over Explicit axes it says itself which products are of gathered weights."""
    explicit = AxisType.Explicit in getattr(mesh, "axis_types", ())

    def lies(x, *spec):
        return jax.sharding.reshard(x, P(*spec)) if explicit else x

    def loss(params, batch):
        batch = lies(batch, "fsdp")
        hidden = jnp.tanh(batch @ lies(params["in"], None, "tensor"))
        out = {"out_sharding": P("fsdp", None)} if explicit else {}
        found = jnp.matmul(hidden, lies(params["out"], "tensor"), **out) + params["bias"][None]
        return jnp.mean((found - batch) ** 2)

    return loss


def step_on(mesh, sync, mode):
    # Where a gradient is next to nothing Adam makes much of its last digit, with its usual eps.
    adam = optax.adam(1e-2, eps=1e-4)
    return js.make_train_step(loss_on(mesh), adam, sync=SYNCS[sync], mesh=mesh, mode=mode)


def placed(mesh):
    lies = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    return {name: jax.device_put(x, lies[name]) for name, x in PARAMS.items()}


def trained(step, state):
    for batch in BATCHES:
        state, _ = step(state, batch)
    return state


def check_places(mesh, state):
    """Assert that parameters and what mirrors them lie as they did."""
    adam = state.opt_state[0]
    for tree in (state.params, adam.mu, adam.nu):
        for name, leaf in tree.items():
            wanted = NamedSharding(mesh, P("replica", *SPECS[name]))
            assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), (name, leaf.sharding)


@pytest.mark.parametrize(("kind", "sync", "mode"), CASES)
def test_sharded_replicas_train_as_those_of_one_device(mesh_of, kind, sync, mode):
    whole = step_on(js.virtual_mesh({"replica": REPLICAS}), sync, mode)
    wanted = trained(whole, whole.init(PARAMS))
    mesh = mesh_of(AXES, explicit=kind == "explicit")
    step = step_on(mesh, sync, mode)
    start = step.init(placed(mesh))
    check_places(mesh, start)
    state = trained(step, start)
    check_places(mesh, state)
    for name, expected in wanted.params.items():
        np.testing.assert_allclose(state.params[name], expected, rtol=1e-5, atol=1e-5)


def test_replicas_send_a_device_s_part_and_gather_nothing(mesh_of):
    """Over "fsdp" and "tensor" every kind of step sends what the loss does, and no more."""
    step = step_on(mesh_of(AXES), "slowmo", "host")
    report = js.comm_report(step, step.init(placed(step.mesh)), BATCHES[0])
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
