"""Few bits in training steps: with devices inside replicas, stages, tables, and half precision."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

WIDTH, STEPS = 48, 8
RANDOM = np.random.default_rng(0)
PARAMS = {k: np.float32(0.2 * RANDOM.normal(size=(WIDTH, WIDTH))) for k in ("in", "out")}
BATCHES = RANDOM.normal(size=(STEPS, 16, WIDTH)).astype(np.float32)


def loss(params, batch):
    first, second = (params[name].astype(batch.dtype) for name in ("in", "out"))
    return jnp.mean((jnp.tanh(batch @ first) @ second - batch) ** 2)


def moved(step, params):
    """Return how far training leads the consensus, as one vector, and the last state."""
    state = step.init(params)
    start = step.consensus(state)
    for batch in BATCHES:
        state, _ = step(state, batch)
    way = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), step.consensus(state), start)
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(way)]), state


CODECS = None, js.codecs.int8(block=32)
SPECS = {"in": P(None, "tensor"), "out": P("tensor")}


def sync_of(name, codec, **options):
    options |= {"sync_every": 4, "codec": codec}
    if name == "late":
        options |= {"shard_state": False, "delay": 1, "fragments": 2}
    return (js.local_sgd if name == "local_sgd" else js.diloco)("replica", **options)


def trained(mesh, name, params=PARAMS, loss_fn=loss, mode="traced", **options):
    """Yield states and reports of runs without a codec and with one, which end near each other."""
    ways = []
    for codec in CODECS:
        sync, adam = sync_of(name, codec, **options), optax.adam(1e-2)
        step = js.make_train_step(loss_fn, adam, sync=sync, mesh=mesh, mode=mode)
        way, state = moved(step, params)
        ways.append(way)
        yield state, js.comm_report(step, state, BATCHES[0])
    wanted, found = ways
    assert 0 < np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)


@pytest.mark.parametrize(("name", "mode"), [("diloco", "host"), ("late", "traced")])
def test_devices_of_a_replica_share_the_work(name, mode):
    """Each sends its half between replicas in few bits; what is inside stays in float32."""
    mesh = js.make_mesh({"replica": 2, "device": 2})
    reports = [x for _, x in trained(mesh, name, mode=mode, local_axis_name="device")]
    rows = [report.select(axis="replica", level="emitted") for report in reports]
    plain, few = (sum(row.wire_bytes for row in of_one) for of_one in rows)
    assert few < 0.35 * plain
    coded = [row for row in reports[1].select(axis="replica") if "uint8" in row.dtypes]
    assert {row.collective for row in coded} == {"all-to-all", "all-gather"}


@pytest.mark.parametrize(("name", "explicit"), [("local_sgd", False), ("late", True)])
def test_replicas_that_are_sharded(name, explicit, mesh_of):
    """Each device encodes its own part, and gathers nothing of the others."""
    mesh = mesh_of({"replica": 2, "tensor": 2}, explicit=explicit)

    def gathered(params, batch):
        return loss(jax.tree.map(lambda x: jax.sharding.reshard(x, P()), params), batch)

    lies = {k: jax.NamedSharding(mesh, spec) for k, spec in SPECS.items()}
    params = {k: jax.device_put(v, lies[k]) for k, v in PARAMS.items()}
    for state, _ in trained(mesh, name, params, gathered if explicit else loss):
        local = state.exchange.local  # () of an algorithm that keeps nothing
        for leaf in jax.tree.leaves(dict(local).get("sent", ())):  # what error feedback remembers
            assert leaf.addressable_shards[0].data.size * 4 == leaf.size
