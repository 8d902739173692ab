"""Each algorithm sends what its formula says: collectives and bytes per kind of step."""

import functools

import pytest

import jaxslowmo as js
from support.reports import FLOAT32_BYTES, HALF_BYTES, SLOW_BYTES, report, rows
from support.transforms import FLOAT16, IRREGULAR

NODES = 4
BYTES = FLOAT32_BYTES + HALF_BYTES
# Of a sharded slow step: the nodes divide a dimension of "embedding" and "kernel", and their rows
# are whole tiles of 8 KiB.
CUT = 4 * (96 * 64 + 64 * 33)
PADDED = NODES * 8192 * -(-CUT // (NODES * 8192))
REST = SLOW_BYTES - CUT

# Each is (collective, number, bytes).
AVERAGE = {("all-reduce", 2, BYTES)}  # one buffer per dtype
WHOLE = {("all-reduce", 1, SLOW_BYTES)}


def coded(codec, buffer=SLOW_BYTES):
    """All leaves as one float32 buffer, of which each node encodes a part for each."""
    size = NODES * codec.num_bytes(-(-buffer // 4 // NODES))
    return {("all-to-all", 1, size), ("all-gather", 1, size)}


def sharded(scalars=0):
    """Leaves that are cut; those that stay whole and further numbers, by an all-reduce each."""
    rest = ("all-reduce", 1 + scalars, REST + 4 * scalars)
    return {("all-gather", 1, PADDED), ("reduce-scatter", 1, PADDED), rest}


def permutes(count, weights=False, num_bytes=BYTES):
    """One exchange: both buffers, and 4 bytes of w where nodes send it, in every permutation."""
    return {("collective-permute", count * (2 + weights), count * (num_bytes + 4 * weights))}


def rounds(*args, **events):
    return {f"round {i}": permutes(*args) for i in (0, 1)} | events


TWO_PERCENT = 4 * (-(-96 * 64 // 50) + -(-64 * 33 // 50) + 1 + 1) + 2 * 1


def pairs(num_bytes, count=1):
    return {f"round {i}": {("collective-permute", count, num_bytes)} for i in range(4)}


local = functools.partial(js.local_sgd, "replica", sync_every=2)
sgp = functools.partial(js.sgp, "replica")
slow = functools.partial(js.slowmo, "replica", sync_every=4)
diloco = functools.partial(js.diloco, "replica", sync_every=5)
RING, OVER_IRREGULAR = js.topology.ring, sgp(graph=IRREGULAR)
INEXACT = {"average": AVERAGE, "average+slow": AVERAGE}
# By the events of an update; an update with none sends nothing.
SENT = {
    "local_sgd": (local(), {"average": AVERAGE}),
    "local_sgd with error feedback": (local(codec=FLOAT16), {"average": coded(FLOAT16)}),
    "slowmo": (slow(base=local()), {"average": AVERAGE, "slow": sharded()}),
    "slowmo whole": (slow(base=local(), shard_state=False), {"average": AVERAGE, "slow": WHOLE}),
    "slowmo in 4 bits": (
        slow(base=local(), codec=js.codecs.int4()),
        {"average": AVERAGE, "slow": coded(js.codecs.int4(), PADDED) | {("all-reduce", 1, REST)}},
    ),
    "slowmo inexact": (slow(base=local(), exact_average=False), INEXACT),
    "diloco": (diloco(), {"slow": sharded()}),
    "only_finite": (js.only_finite(diloco()), {"slow": sharded(1)}),
    "noloco": (js.noloco("replica", sync_every=4), pairs(SLOW_BYTES)),
    "noloco with a pull": (js.noloco("replica", pull=0.5), pairs(2 * SLOW_BYTES, 2)),
    # Besides the mean the norms of leaves; one norm from each replica, and the sum of weights.
    "diloco rda": (diloco(aggregate="rda"), {"slow": {("all-reduce", 2, SLOW_BYTES + 4 * 5)}}),
    "diloco by norms": (
        diloco(aggregate=js.norm_weighted(damping=0.5)),
        {"slow": {("all-reduce", 2, SLOW_BYTES + 4), ("all-gather", 1, 4 * NODES)}},
    ),
    # Of every 50 elements of a leaf one, in one buffer for each dtype.
    "sparta": (js.sparta("replica", share=0.02), {"sample": {("all-reduce", 2, TWO_PERCENT)}}),
    # All nodes keep the same share, so all weights move alike, and nobody sends them.
    "sgp later": (sgp(overlap=3), rounds(1)),
    "sgp irregular": (OVER_IRREGULAR, rounds(2, True)),
    # With the sum of w, 4 bytes.
    "slow irregular": (slow(base=OVER_IRREGULAR), rounds(2, True, slow=sharded(1))),
    "slow irregular inexact": (
        slow(base=OVER_IRREGULAR, exact_average=False),
        rounds(2, True) | {"round 1+slow": permutes(2, True)},
    ),
}  # fmt: skip
BY_THE_HOST = ("slowmo", "only_finite", "slow irregular inexact")


def summed(found):
    """A collective in a conditional has a row of its own."""
    names = {name for name, _, _ in found}
    of = {name: [row[1:] for row in found if row[0] == name] for name in names}
    return {(name, *map(sum, zip(*rows, strict=True))) for name, rows in of.items()}


def check(name, mesh, mode="traced"):
    sync, sent = SENT[name]
    found = report(mesh, mode, sync=sync)
    for kind, wanted in sent.items():
        # One program for all updates has no kind of its own for two events at once.
        if mode == "host" or "+" not in kind:
            assert summed(rows(found, kind)) == wanted, kind
    if "local" in found.kinds:
        assert rows(found, "local") == set()
    if sent.get("slow") == sharded():
        assert found.bytes(kind="slow", content="padding") == 2 * (PADDED - CUT)
    assert mode == "traced" or set(found.kinds) - {"local"} == set(sent)


@pytest.mark.parametrize("name", SENT)
def test_what_one_program_for_all_updates_sends(name, mesh_of):
    check(name, mesh_of({"replica": NODES}))


@pytest.mark.parametrize("name", BY_THE_HOST)
def test_what_each_program_sends_where_the_host_schedules(name, mesh_of):
    check(name, mesh_of({"replica": NODES}), "host")


@pytest.mark.parametrize(
    ("base", "kind", "times", "weights"),
    [(local, "average", 1, 0), (functools.partial(sgp, graph=IRREGULAR), "round 1", 2, 1)],
)
def test_each_device_of_a_replica_sends_its_part(base, kind, times, weights, mesh_of):
    """The device moves whole rows of its own, and gathers those of the others."""
    options = {"local_axis_name": "device"}
    sync = slow(base=base(**options), **options)
    found = report(mesh_of({"replica": NODES, "device": 2}), sync=sync)
    ((_, count, size),) = rows(found, kind)
    part = size // times - 4 * weights
    assert count == times * (2 + weights)
    assert BYTES / 2 <= part <= BYTES / 2 + 8192
    assert ("all-gather", 2, 2 * part) in rows(found, kind, "device")
    sent = {name: size for name, _, size in rows(found, "slow")}
    assert REST / 2 <= sent.pop("all-reduce") <= REST / 2 + 4 + 4  # with a sum of weights
    assert {*sent} == {"all-gather", "reduce-scatter"}
    assert all(CUT / 2 <= size <= CUT / 2 + NODES * 8192 for size in sent.values())


def test_each_group_of_nested_ones_averages_over_its_axes(mesh_of):
    axes = ("node", "device")
    sync = js.hierarchical_local_sgd({"device": 2, axes: 6})
    found = report(mesh_of({"node": 2, "device": 2}), "host", sync=sync, axis_name=axes)
    sent = [r for r in found.select(level="emitted") if r.count]
    assert {(r.kind, r.axis, r.collective, r.count, r.bytes) for r in sent} == {
        ("average device", "device", "all-reduce", 2, BYTES),
        ("average node,device", "node,device", "all-reduce", 2, BYTES),
    }
