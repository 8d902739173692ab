"""Counts and bytes of real programs, emitted and compiled on eight CPU devices."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxslowmo.reports._comm_report import CommReport, CommRow, comm_report

ROWS = jax.ShapeDtypeStruct((64, 16), jnp.float32)
BLOCK = 8 * 16 * 4  # bytes of one device's share of ROWS


def mapped(fn, mesh, *, inputs=1):
    spec = P(mesh.axis_names)
    return jax.shard_map(fn, mesh=mesh, in_specs=(spec,) * inputs, out_specs=spec, check_vma=False)


BOTH = ("replica", "device")
CASES = {
    "all-reduce": (lambda x, a: lax.psum(x, a), BOTH, BLOCK, 2),
    "reduce-scatter": (lambda x, a: lax.psum_scatter(x, a, tiled=True), "device", BLOCK, 1),
    "all-gather": (lambda x, a: lax.all_gather(x, a, tiled=True), BOTH, None, 1),
    "all-to-all": (lambda x, a: lax.all_to_all(x, a, 0, 1, tiled=True), "replica", BLOCK, 1),
}
LEVELS = ("emitted", "compiled")


@pytest.mark.parametrize("name", CASES)
def test_collectives_over_axes_of_a_mesh(mesh_of, name):
    mesh = mesh_of({"replica": 2, "device": 4})
    collective, axes, nbytes, ring = CASES[name]
    size = {"replica": 2, "device": 4}.get(axes, 8)
    nbytes = nbytes or BLOCK * size  # the whole result of a gather
    report = comm_report(mapped(lambda x: collective(x, axes), mesh), ROWS)
    expected = axes if isinstance(axes, str) else ",".join(axes)
    assert report.axes[:2] == ("replica", "device")
    for level in LEVELS:
        (row,) = report.select(level=level)
        assert row == CommRow(
            *("every", expected, name, level, 1, nbytes, ring * nbytes * (size - 1) // size, size),
            ("float32",),
        )


def test_collectives_of_automatic_axes_are_only_compiled(mesh_of):
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    specs = {"in_specs": P("replica"), "out_specs": P(), "axis_names": {"replica"}}

    def step(w):
        means = jax.shard_map(lambda w: lax.pmean(w, "replica"), mesh=mesh, **specs)(w)
        return jnp.sum(means)

    place = NamedSharding(mesh, P("replica", "fsdp"))
    w = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=place)
    report = comm_report(jax.jit(step), w)
    assert report.bytes(axis="replica") == 32 * 32 * 4  # the block of a replica
    assert report.bytes(axis="replica", level="compiled") == 32 * 8 * 4  # of a device
    assert report.count(axis="fsdp") == 0
    assert report.bytes(axis="fsdp", level="compiled") == 4


def test_loops_multiply_and_those_of_unknown_length_count_once(mesh_of):
    shift = [(i, (i + 1) % 8) for i in range(8)]

    def step(x):
        def inner(c, _):
            return lax.ppermute(jnp.sin(c), "replica", shift), None

        x = lax.fori_loop(2, 7, lambda _, x: lax.scan(inner, x, None, length=3)[0], x)
        return lax.while_loop(lambda x: x.sum() > 1, lambda x: lax.psum(x, "replica") / 9, x)

    report = comm_report(mapped(step, mesh_of({"replica": 8})), ROWS)
    for level in LEVELS:
        found = {
            r.collective: (r.count, r.bytes, r.in_loop, r.trip_count)
            for r in report.select(level=level)
        }
        assert found == {
            "collective-permute": (15, 15 * BLOCK, True, 15),
            "all-reduce": (1, BLOCK, True, None),
        }
    assert "unknown length" in str(report)


# A report as a table


def row(kind, axis, collective, level, count, nbytes, **more):
    wire = more.pop("wire", nbytes)
    return CommRow(kind, axis, collective, level, count, nbytes, wire, 4, ("float32",), **more)


GRADIENTS = {"content": "gradients"}
REPORT = CommReport(
    rows=(
        row("local", "device", "all-reduce", "emitted", 6, 4_000_000, wire=6_000_000, **GRADIENTS),
        row("local", "device", "all-reduce", "emitted", 0, 8, wire=12, content="padding"),
        row("local", "device", "all-reduce", "compiled", 1, 4_000_008, wire=6_000_012),
        row("slow", "device", "all-reduce", "emitted", 6, 4_000_000),
        row("slow", "replica", "reduce-scatter", "emitted", 1, 1000, conditional=True),
        row("slow", "replica,device", "all-gather", "emitted", 3, 10, in_loop=True, trip_count=3),
    ),
    kinds=("local", "slow", "idle"),
    axes=("replica", "device", "replica,device"),
)


def test_table():
    """Compiled amounts stand in the first line of their axis and collective."""
    assert [" ".join(line.split()) for line in str(REPORT).splitlines()] == [
        "kind axis collective content emitted bytes sent compiled bytes sent notes",
        "local device all-reduce gradients 6 4,000,000 6,000,000 1 4,000,008 6,000,012",
        "local device all-reduce padding 0 8 12",
        "slow device all-reduce 6 4,000,000 4,000,000 0 0 0",
        "slow replica reduce-scatter 1 1,000 1,000 0 0 0 conditional",
        "slow replica,device all-gather 3 10 10 0 0 0 loop",
        "idle - (no communication) 0 0 0 0 0 0",
    ]


def test_an_axis_covers_collectives_that_cross_it_among_others_and_json_has_all():
    assert REPORT.count(kind="slow", axis="replica") == 4
    assert REPORT.count(kind="slow", axis="device") == 9
    for both in ("device,replica", ("replica", "device")):
        assert REPORT.count(kind="slow", axis=both) == 3
    assert REPORT.wire_bytes(kind="local", content="gradients") == 6_000_000
    read = json.loads(REPORT.to_json())
    assert set(read) == {"rows", "kinds", "axes", "levels", "state"}
    assert read["rows"][0]["wire_bytes"] == 6_000_000
