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


def moved(step, params=PARAMS, batches=BATCHES):
    """Return how far training leads the consensus, as one vector, and the last state."""
    state = step.init(params)
    start = step.consensus(state)
    for batch in batches:
        state, _ = step(state, batch)
    way = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), step.consensus(state), start)
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(way)]), state


def remembered(state):
    """Return the memory of error feedback; () without a codec."""
    local = state.exchange.local  # () of an algorithm that keeps nothing
    return dict(local).get("sent", ())


def check_near(found, wanted, share):
    assert np.linalg.norm(found - wanted) < share * np.linalg.norm(wanted)
    assert np.any(found != wanted)


def syncs(codec, **options):
    return {
        "local_sgd": js.local_sgd("replica", sync_every=4, codec=codec, **options),
        "diloco": js.diloco("replica", sync_every=4, codec=codec, **options),
        "late": js.diloco(
            "replica", sync_every=4, codec=codec, shard_state=False, delay=1, fragments=2, **options
        ),
    }


@pytest.mark.parametrize(("name", "mode"), [("diloco", "host"), ("late", "traced")])
def test_devices_of_a_replica_share_the_work(name, mode):
    """Each sends its half between replicas in few bits; what is inside stays in float32."""
    mesh = js.make_mesh({"replica": 2, "device": 2})
    found, reports = [], []
    for codec in (None, js.codecs.int8(block=32)):
        sync = syncs(codec, local_axis_name="device")[name]
        step = js.make_train_step(loss, optax.adam(1e-2), sync=sync, mesh=mesh, mode=mode)
        way, state = moved(step)
        found.append(way)
        reports.append(js.comm_report(step, state, BATCHES[0]))
    check_near(found[1], found[0], 0.02)
    rows = [report.select(axis="replica", level="emitted") for report in reports]
    plain, few = (sum(row.wire_bytes for row in of_one) for of_one in rows)
    assert few < 0.35 * plain
    coded = [row for row in reports[1].select(axis="replica") if "uint8" in row.dtypes]
    assert {row.collective for row in coded} == {"all-to-all", "all-gather"}


@pytest.mark.parametrize(("name", "explicit"), [("local_sgd", False), ("late", True)])
def test_replicas_that_are_sharded(name, explicit, mesh_of):
    """Each device encodes its own part, and gathers nothing of the others."""
    specs = {"in": P(None, "tensor"), "out": P("tensor")}
    mesh, ways = mesh_of({"replica": 2, "tensor": 2}, explicit=explicit), []

    def loss_fn(params, batch):
        if not explicit:
            return loss(params, batch)
        whole = jax.tree.map(lambda x: jax.sharding.reshard(x, P()), params)
        return loss(whole, batch)

    lies = {k: jax.NamedSharding(mesh, spec) for k, spec in specs.items()}
    placed = {k: jax.device_put(v, lies[k]) for k, v in PARAMS.items()}
    for codec in (None, js.codecs.int8(block=32)):
        sync = syncs(codec)[name]
        step = js.make_train_step(loss_fn, optax.adam(1e-2), sync=sync, mesh=mesh)
        way, state = moved(step, placed)
        ways.append(way)
        for leaf in jax.tree.leaves(remembered(state)):
            assert leaf.addressable_shards[0].data.size * 4 == leaf.size
    check_near(ways[1], ways[0], 0.02)
