"""What tied weights send on a TPU: between the stages that hold them, and nothing is gathered."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.gradients.tied import sum_over_holders
from support.described import shapes_on
from support.tpu_slices import tpu_mesh

TABLE, SCALE = 1024 * 512, 256 * 512  # elements
WHOLE = 4 * (TABLE + SCALE)
MAPPED = ("replica", "stage", "tensor")

CASES = {
    # Axes that are mapped, stages that hold both; what each device sends, and the bytes of it.
    "parts of leaves": (MAPPED[:2], (0, 3), ("collective-permute", 2, WHOLE // 2)),
    "three stages": (MAPPED, (0, 1, 3), ("collective-permute", 4, 4 * WHOLE)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_sent(name):
    manual, holders, wanted = CASES[name]
    mesh = tpu_mesh("v5e:2x4", {"replica": 1, "stage": 4, "tensor": 2})

    def of_device(*leaves):
        own = [x.reshape(x.shape[2:]) for x in leaves]
        sums = sum_over_holders(own, [holders] * 2, "stage")
        return [x.reshape(y.shape) for x, y in zip(sums, leaves, strict=True)]

    specs, is_mapped = P("replica", "stage"), "tensor" in manual
    in_and_out = {"in_specs": specs, "out_specs": specs}
    fn = jax.shard_map(
        of_device, mesh=mesh, axis_names=set(manual), check_vma=not is_mapped, **in_and_out
    )
    # Where the compiler has "tensor", leaves are in parts over it.
    inside = () if is_mapped else (None, "tensor")
    shapes = [jax.ShapeDtypeStruct((1, 4, n // 512, 512), jnp.float32) for n in (TABLE, SCALE)]
    lowered = jax.jit(fn).lower(*shapes_on(shapes, mesh, P(*specs, *inside)))
    rows = js.comm_report_of(lowered, mesh=mesh).select(level="compiled")
    assert [(r.axis, r.collective, r.count, r.bytes) for r in rows] == [("stage", *wanted)]
