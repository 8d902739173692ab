"""The TPU compiler keeps the sharded slow step a true reduce-scatter and all-gather.

The rule for the buffer's shape stands in `jaxslowmo/collectives/_scatter.py`.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxslowmo as js
from support.described import report_of_sync
from support.tpu_slices import tpu_mesh


def shapes(*leaves: tuple[int, ...]):
    return {f"p{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(leaves)}


# The blocks of the second leaf are whole tiles: it is large enough to be sent as it lies.
MEDIUM = shapes((2053, 1024), (1024, 3072), (3001,), ())
WHOLE_SLICE = ("v5e:2x4", {"replica": 8})
TWO_LEVELS = ("v5e:2x4", {"replica": 4, "device": 2})
TORUS = ("v5e:4x4", {"row": 4, "column": 4})


def num_bytes(params, replicas) -> tuple[int, int]:
    """Return the bytes of the leaves that are cut into blocks, and of those that stay whole."""
    sizes = [
        (4 * leaf.size, any(size % replicas == 0 for size in leaf.shape))
        for leaf in jax.tree.leaves(params)
    ]
    return tuple(sum(size for size, cut in sizes if cut is wanted) for wanted in (True, False))


# What is compiled: the phase, or None for a program that decides. With two levels each device
# exchanges its half.
@pytest.mark.parametrize(
    ("slice_of", "phase", "local"),
    [
        (TWO_LEVELS, ("slow",), {"local_axis_name": "device"}),
        (WHOLE_SLICE, None, {}),
    ],
    ids=["two levels", "traced"],
)
def test_reduce_scatter_is_true(slice_of, phase, local):
    """As many reduce-scatters as all-gathers of blocks; one all-reduce of what stays whole.

    That is one, and one for a large leaf, unless devices of a replica share the work.
    """
    sync = js.slowmo("replica", base=js.local_sgd("replica", **local), sync_every=6, **local)
    found = report_of_sync(sync, MEDIUM, tpu_mesh(*slice_of), phase)
    if phase is None:
        assert found.count(axis="replica", kind="local", level="compiled") == 0
    rows = found.select(axis="replica", kind="slow", level="compiled")
    by_name = {row.collective: row for row in rows}
    # Where the compiler pads its own spans it adds a permute of a few rows.
    names = {"reduce-scatter", "all-gather", "all-reduce"}
    assert set(by_name) - {"collective-permute"} == names, rows
    cut, whole = (size / (2 if local else 1) for size in num_bytes(MEDIUM, slice_of[1]["replica"]))
    assert by_name["all-reduce"].bytes <= whole + 16, rows
    expected = cut
    for name in ("reduce-scatter", "all-gather"):
        assert by_name[name].count == (1 if local else 2)
        assert expected <= by_name[name].bytes <= expected * 1.02 + 8 * 8192, rows
    if "collective-permute" in by_name:
        assert by_name["collective-permute"].bytes <= 0.02 * expected


def test_torus_as_two_replica_axes():
    """One axis over all chips of a square torus becomes an all-reduce; two stages do not."""
    axes = ("row", "column")
    sync = js.slowmo(axes, base=js.local_sgd(axes), sync_every=6)
    found = report_of_sync(sync, MEDIUM, tpu_mesh(*TORUS), ("slow",))
    names = [row.collective for row in found.select(level="compiled", kind="slow")]
    cut, whole = num_bytes(MEDIUM, 16)
    assert found.bytes(collective="all-reduce", level="compiled", kind="slow") <= 2 * whole
    assert names.count("all-reduce") <= 2
    for axis, share in (("row", 1.0), ("column", 1 / 4)):
        for name in ("reduce-scatter", "all-gather"):
            assert found.count(axis=axis, collective=name, level="compiled") == 2
            sent = found.bytes(axis=axis, collective=name, level="compiled")
            assert sent == pytest.approx(cut * share, rel=0.02)
