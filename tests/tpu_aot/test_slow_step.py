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


SMALL = shapes((300, 129), (129,), (7, 11, 13), ())
MEDIUM = shapes((2053, 1024), (1024, 3072), (3001,), ())
GPT2 = shapes((50257, 768), (1024, 768), *[(768, 2304), (768, 768), (768, 6144), (768,)] * 12)

WHOLE_SLICE = ("v5e:2x4", {"replica": 8})
TWO_LEVELS = ("v5e:2x4", {"replica": 4, "device": 2})
SUBGROUP = ("v6e:4x4", {"replica": 8, "device": 2})
TORUS = ("v5e:4x4", {"row": 4, "column": 4})


def num_bytes(params) -> int:
    return sum(4 * leaf.size for leaf in jax.tree.leaves(params))


def check_true_scatter(found: js.CommReport, kind: str, params, *, share: float = 1.0) -> None:
    """One reduce-scatter and one all-gather of all bytes (or `share` of them), and nothing else."""
    rows = found.select(axis="replica", kind=kind, level="compiled")
    by_name = {row.collective: row for row in rows}
    # Where the compiler pads its own spans it adds a permute of a few rows.
    assert set(by_name) - {"collective-permute"} == {"reduce-scatter", "all-gather"}, rows
    expected = num_bytes(params) * share
    for name in ("reduce-scatter", "all-gather"):
        assert by_name[name].count == 1
        assert expected <= by_name[name].bytes <= expected * 1.02 + 8 * 8192, rows
    if "collective-permute" in by_name:
        assert by_name["collective-permute"].bytes <= 0.02 * expected


@pytest.mark.parametrize(
    ("slice_of", "params"),
    [
        (WHOLE_SLICE, SMALL),
        (WHOLE_SLICE, MEDIUM),
        pytest.param(WHOLE_SLICE, GPT2, marks=pytest.mark.exhaustive),
        (SUBGROUP, MEDIUM),
    ],
    ids=["small", "medium", "gpt2", "subgroup"],
)
def test_reduce_scatter_is_true(slice_of, params):
    sync = js.slowmo("replica", base=js.local_sgd("replica"), sync_every=6)
    found = report_of_sync(sync, params, tpu_mesh(*slice_of), ("slow",))
    check_true_scatter(found, "slow", params)


def test_two_levels_share_the_exchange():
    options = {"local_axis_name": "device"}
    base = js.local_sgd("replica", **options)
    sync = js.slowmo("replica", base=base, sync_every=6, **options)
    found = report_of_sync(sync, MEDIUM, tpu_mesh(*TWO_LEVELS), ("slow",))
    check_true_scatter(found, "slow", MEDIUM, share=1 / 2)
    average = report_of_sync(base, MEDIUM, tpu_mesh(*TWO_LEVELS), ("average",))
    assert average.count(axis="device", collective="all-gather", level="compiled") == 1
    assert average.count(axis="device", level="compiled") == 1


def test_traced_program_has_it_in_a_branch():
    sync = js.slowmo("replica", base=js.local_sgd("replica"), sync_every=6)
    found = report_of_sync(sync, MEDIUM, tpu_mesh(*WHOLE_SLICE), None)
    assert found.count(axis="replica", kind="local", level="compiled") == 0
    check_true_scatter(found, "slow", MEDIUM)


def test_torus_as_two_replica_axes():
    """One axis over all chips of a square torus becomes an all-reduce; two stages do not."""
    axes = ("row", "column")
    sync = js.slowmo(axes, base=js.local_sgd(axes), sync_every=6)
    found = report_of_sync(sync, MEDIUM, tpu_mesh(*TORUS), ("slow",))
    names = [row.collective for row in found.select(level="compiled", kind="slow")]
    assert "all-reduce" not in names
    for axis, share in (("row", 1.0), ("column", 1 / 4)):
        for name in ("reduce-scatter", "all-gather"):
            assert found.count(axis=axis, collective=name, level="compiled") == 1
            sent = found.bytes(axis=axis, collective=name, level="compiled")
            assert sent == pytest.approx(num_bytes(MEDIUM) * share, rel=0.02)
