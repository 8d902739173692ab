"""Bytes of reports equal those computed from shapes, by formulas that share no code with them."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

ITEM = 4  # bytes of a float32
TILE = 8 * 128  # elements; longer rows are padded to an even number of these
BLOCK = 256  # elements of int8 that share a scale
ALIGNED = 32  # blocks from which a chunk holds whole ones
SHAPES = {
    "none divides": [(7, 5), (11,), ()],
    "some divide": [(8, 12, 5), (12,), (7,), ()],
    "rows of tiles": [(48, 257), (12, 99), (5,)],
}


def loss(params, batch, *, model_state):
    total = sum(jnp.sum(p) for p in params)
    mean = {"mean": model_state["mean"] + jnp.mean(batch), "count": model_state["count"] + 1}
    return total * jnp.mean(batch), ({"total": total}, mean)


def ring(nbytes, replicas, rounds=1):
    return rounds * nbytes * (replicas - 1) // replicas


def all_reduce(content, nbytes, replicas):
    return [("all-reduce", content, nbytes, 0, 2)] if nbytes and replicas > 1 else []


def two_halves(first, payload, padding):
    return [(name, "parameters", payload, padding, 1) for name in (first, "all-gather")]


def is_cut(shape, replicas):
    return any(n % replicas == 0 for n in shape)


def sharded(shapes, replicas):
    """Leaves that the replicas divide, in rows of whole tiles; the others by an all-reduce."""
    cut = sum(math.prod(s) for s in shapes if is_cut(s, replicas))
    whole = sum(math.prod(s) for s in shapes if not is_cut(s, replicas))
    tiles = -(-cut // replicas // TILE)
    row = cut // replicas if tiles < 3 else TILE * (tiles + tiles % 2)
    halves = two_halves("reduce-scatter", ITEM * cut, ITEM * (row * replicas - cut)) if cut else []
    return halves + all_reduce("parameters", ITEM * whole, replicas)


def in_int8(shapes, replicas):
    """All leaves in one buffer, of which each replica sums a chunk."""
    size = sum(map(math.prod, shapes))
    chunk = -(-size // replicas)
    chunk = chunk if chunk < ALIGNED * BLOCK else BLOCK * -(-chunk // BLOCK)
    used = chunk + ITEM * -(-chunk // BLOCK)
    row = used if used < 8 * 128 else 128 * -(-used // 128)
    payload = round(replicas * row * Fraction(used, row) * Fraction(size, replicas * chunk))
    return two_halves("all-to-all", payload, replicas * row - payload)


def whole(shapes, replicas):
    return all_reduce("parameters", ITEM * sum(map(math.prod, shapes)), replicas)


def to_one_peer(shapes, _):
    return [("collective-permute", "parameters", ITEM * sum(map(math.prod, shapes)), 0, None)]


local = {"base": js.local_sgd("replica", sync_every=2), "sync_every": 4, "learning_rate": 0.1}
ALGORITHMS = {  # the exchange of parameters, and the formula of each of its events
    "local_sgd": (js.local_sgd("replica", sync_every=2), {"average": whole}),
    "int8": (js.local_sgd("replica", codec=js.codecs.int8()), {"average": in_int8}),
    "slowmo": (js.slowmo("replica", **local), {"average": whole, "slow": sharded}),
    "diloco": (js.diloco("replica", sync_every=4), {"slow": sharded}),
    "whole": (js.diloco("replica", sync_every=4, shard_state=False), {"slow": whole}),
    "sgp": (js.sgp("replica"), {"round 0": to_one_peer}),
}


CASES = [
    ("local_sgd", "some divide", 2),
    ("int8", "rows of tiles", 4),
    ("int8", "none divides", 2),
    ("slowmo", "some divide", 4),
    ("diloco", "rows of tiles", 3),
    ("whole", "rows of tiles", 2),
    ("sgp", "none divides", 4),
]


def statistics(nbytes, replicas, name):
    if name == "sgp":
        return [("collective-permute", "statistics", nbytes, 0, None)]
    return all_reduce("statistics", nbytes, replicas)


def expected(parts, replicas):
    """Bytes into the collectives, and sent, by (collective, content)."""
    found: dict[tuple[str, str], list[int]] = {}
    for collective, content, payload, padding, rounds in parts:
        sent, own = payload + padding, payload
        if rounds is not None:
            sent, own = (ring(x, replicas, rounds) for x in (sent, own))
        pairs = [(content, payload, own)] + [("padding", padding, sent - own)] * bool(padding)
        for name, nbytes, wire in pairs:
            amounts = found.setdefault((collective, name), [0, 0])
            amounts[0] += nbytes
            amounts[1] += wire
    return {key: tuple(value) for key, value in found.items()}


def reported(report, kind):
    found: dict[tuple[str, str], list[int]] = {}
    for row in report.select(kind=kind, level="emitted"):
        amounts = found.setdefault((row.collective, row.content), [0, 0])
        amounts[0] += row.bytes
        amounts[1] += row.wire_bytes
    return {key: tuple(value) for key, value in found.items() if any(value)}


def report_of(shapes, mesh, num_statistics, **parts):
    step = js.make_train_step(loss, optax.adam(0.1), mesh=mesh, mode="host", **parts)
    params = [np.zeros(s, np.float32) for s in shapes]
    start = {"mean": np.zeros(num_statistics, np.float32), "count": np.int32(0)}
    state = jax.eval_shape(lambda: step.init(params, model_state=start))
    programs = step.traced_by_phase(
        state, jax.ShapeDtypeStruct((math.prod(mesh.shape.values()), 3), jnp.float32)
    )
    lowered = {kind: program.lower() for kind, program in programs.items()}
    return js.comm_report_of(lowered.get(None, lowered), compile=False)


@pytest.mark.filterwarnings("ignore:.* stay whole on each replica")
@pytest.mark.parametrize(("name", "shapes", "replicas"), CASES)
def test_rows_are_what_the_shapes_say(name, shapes, replicas):
    sync, events = ALGORITHMS[name]
    make = js.virtual_mesh if replicas == 3 else js.make_mesh
    report = report_of(SHAPES[shapes], make({"replica": replicas}), replicas + 4, sync=sync)
    for kind, formula in events.items():
        more = statistics(ITEM * (replicas + 4), replicas, name)
        wanted = expected(formula(SHAPES[shapes], replicas) + more, replicas)
        assert reported(report, kind) == wanted, kind
    if "local" in report.kinds:
        assert report.wire_bytes(kind="local") == 0


def test_gradients_statistics_and_metrics_have_their_names():
    """Between replicas, and inside of them, where metrics are averaged, too."""
    mesh = js.make_mesh({"replica": 2, "device": 2})
    both = js.all_reduce_gradients(("replica", "device"))
    report = report_of(SHAPES["none divides"], mesh, 6, gradients=both)
    size = ITEM * sum(map(math.prod, SHAPES["none divides"]))
    found = {}
    for row in report.select(level="emitted"):
        key = row.axis, row.content
        found[key] = found.get(key, 0) + row.bytes
    # The loss and one metric; of statistics also the counter.
    assert found == {
        ("replica,device", "gradients"): size,
        ("replica", "statistics"): ITEM * 6,
        ("device", "statistics"): ITEM * 7,
        ("device", "metrics"): ITEM * 2,
    }
