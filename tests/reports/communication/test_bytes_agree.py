"""What of the bytes of a report is payload, by name, and what is padding; and what is sent of it.

`algorithms/test_communication.py` has the sums.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

ITEM, REPLICAS = 4, 4
SHAPES = [(48, 257), (12, 99), (5,)]
SIZE, CUT = 48 * 257 + 12 * 99 + 5, 48 * 257 + 12 * 99  # elements of all leaves, of those divided
STATISTICS = ITEM * 6
TILES = -(-CUT // REPLICAS // 1024)
ROWS = ITEM * REPLICAS * 1024 * (TILES + TILES % 2)  # an even number of tiles for each replica


def int8():
    """All leaves in one buffer of which each replica sums a chunk; 256 elements share a scale."""
    chunk = -(-SIZE // REPLICAS)
    used = chunk + ITEM * -(-chunk // 256)
    whole, payload = REPLICAS * 128 * -(-used // 128), round(used * SIZE / chunk)
    own = payload, payload * 3 // 4
    parts = {"parameters": own, "padding": (whole - own[0], whole * 3 // 4 - own[1])}
    return {(name, part): parts[part] for name in ("all-to-all", "all-gather") for part in parts}


def whole(content, nbytes):
    return {("all-reduce", content): (nbytes, 2 * nbytes * 3 // 4)}


SHARDED = {
    (name, part): (x, x * 3 // 4)
    for name in ("reduce-scatter", "all-gather")
    for part, x in (("parameters", ITEM * CUT), ("padding", ROWS - ITEM * CUT))
}
AVERAGE = js.local_sgd("replica", sync_every=2)
CASES = {
    "local_sgd": (AVERAGE, "average", whole("parameters", ITEM * SIZE)),
    "int8": (js.local_sgd("replica", codec=js.codecs.int8()), "average", int8()),
    "diloco": (
        js.diloco("replica", sync_every=4), "slow", SHARDED | whole("parameters", ITEM * 5)
    ),
    "sgp": (
        js.sgp("replica"), "round 0",
        {("collective-permute", "parameters"): (ITEM * SIZE, ITEM * SIZE)},
    ),
}  # fmt: skip


def loss(params, batch, *, model_state):
    total = sum(jnp.sum(p) for p in params)
    mean = {"mean": model_state["mean"] + jnp.mean(batch), "count": model_state["count"] + 1}
    return total * jnp.mean(batch), ({"total": total}, mean)


def report_of(mesh, **parts):
    step = js.make_train_step(loss, optax.adam(0.1), mesh=mesh, mode="host", **parts)
    params = [np.zeros(s, np.float32) for s in SHAPES]
    start = {"mean": np.zeros(6, np.float32), "count": np.int32(0)}
    state = jax.eval_shape(lambda: step.init(params, model_state=start))
    batch = jax.ShapeDtypeStruct((math.prod(mesh.shape.values()), 3), jnp.float32)
    programs = step.traced_by_phase(state, batch)
    lowered = {kind: program.lower() for kind, program in programs.items()}
    return js.comm_report_of(lowered.get(None, lowered), compile=False)


@pytest.mark.filterwarnings("ignore:.* stay whole on each replica")
@pytest.mark.parametrize("name", CASES)
def test_rows_are_what_the_shapes_say(name):
    sync, kind, wanted = CASES[name]
    report, found = report_of(js.make_mesh({"replica": REPLICAS}), sync=sync), {}
    for row in report.select(kind=kind, level="emitted"):
        nbytes, sent = found.get((row.collective, row.content), (0, 0))
        found[row.collective, row.content] = nbytes + row.bytes, sent + row.wire_bytes
    statistics = whole("statistics", STATISTICS)
    if name == "sgp":
        statistics = {("collective-permute", "statistics"): (STATISTICS, STATISTICS)}
    assert {key: amounts for key, amounts in found.items() if any(amounts)} == wanted | statistics
    if "local" in report.kinds:
        assert report.wire_bytes(kind="local") == 0


def test_gradients_statistics_and_metrics_have_their_names():
    """Between replicas, and inside of them, where metrics are averaged, too."""
    both = js.all_reduce_gradients(("replica", "device"))
    report, found = report_of(js.make_mesh({"replica": 2, "device": 2}), gradients=both), {}
    for row in report.select(level="emitted"):
        key = row.axis, row.content
        found[key] = found.get(key, 0) + row.bytes
    # The loss and one metric; of statistics also the counter.
    assert found == {
        ("replica,device", "gradients"): ITEM * SIZE,
        ("replica", "statistics"): STATISTICS,
        ("device", "statistics"): STATISTICS + ITEM,
        ("device", "metrics"): ITEM * 2,
    }
