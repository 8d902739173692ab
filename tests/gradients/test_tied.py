"""Sums over the stages that hold an array: equal to the bit there, and nothing elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

HOLDERS = [(0, 3), (0, 3), (3, 0), (3, 1, 0), (0, 1, 2, 3), (1, 2)]
KINDS = [((2, 3), "f4"), ((5,), "f4"), ((4,), "bfloat16"), ((3,), "f4"), ((), "f4"), ((2,), "f4")]


def stacked():
    rng = np.random.default_rng(0)
    leaves = [rng.normal(size=(4, *shape)).astype(jnp.dtype(kind)) for shape, kind in KINDS]
    # What does not take part may hold anything.
    leaves[0][1], leaves[3][2], leaves[5][0], leaves[5][3] = np.nan, np.inf, -0.0, np.nan
    return leaves


GROUPS = [{stage: str(i) for stage in holders} for i, holders in enumerate(HOLDERS)]
SUM = js.pipeline.sum_tied_gradients("stage", GROUPS)


def tied(*leaves):
    grads = {str(i): leaf for i, leaf in enumerate(leaves)}
    return [*SUM.update(grads, SUM.init(grads))[0].values()]


def on_devices():
    def of_device(*leaves):
        return [x[None] for x in tied(*(x[0] for x in leaves))]

    mesh, own = js.make_mesh({"stage": 4}), P("stage")
    return jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=own, out_specs=own))


@pytest.mark.parametrize("execution", ["vmap", "checked"])
def test_holders_have_the_sum_and_others_what_they_had(execution):
    leaves = stacked()
    run = on_devices() if execution == "checked" else jax.jit(jax.vmap(tied, axis_name="stage"))
    for before, after, holders in zip(leaves, run(*leaves), HOLDERS, strict=True):
        assert after.dtype == before.dtype
        bits = np.asarray(after).view(f"u{before.dtype.itemsize}")
        others = sorted(set(range(4)) - set(holders))
        np.testing.assert_array_equal(bits[others], before[others].view(bits.dtype))
        first = holders[0]
        assert all((bits[h] == bits[first]).all() for h in holders)
        total = before[list(holders)].astype(np.float64).sum(axis=0)
        tolerance = 1e-2 if before.dtype.itemsize == 2 else 1e-6
        np.testing.assert_allclose(np.float64(after[first]), total, rtol=tolerance, atol=tolerance)


def test_one_exchange_for_each_set_of_holders_and_dtype():
    report = js.comm_report_of(on_devices().lower(*stacked()), compile=False)
    sent: dict[str, tuple[int, int]] = {}
    for row in report.rows:
        assert row.axis == "stage"
        count, size = sent.get(row.collective, (0, 0))
        sent[row.collective] = count + row.count, size + row.bytes
    # Two holders: 11 float32 in one buffer, 4 bfloat16, 2 float32; three of a chain: 4 times 12.
    assert sent == {"collective-permute": (3 + 4, 44 + 8 + 8 + 4 * 12), "all-reduce": (1, 4)}
