"""What tied weights send on a TPU: between the stages that hold them, and nothing is gathered."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.gradients.tied import sum_over_holders
from support.described import shapes_on
from support.exhaustive import sweep
from support.tpu_slices import tpu_mesh

AXES = {"replica": 1, "stage": 4, "tensor": 2}
TABLE, SCALE = 1024 * 512, 256 * 512  # elements
WHOLE = 4 * (TABLE + SCALE)

CASES = {
    # Axes that are mapped, stages that hold both; what each device sends, and the bytes of it.
    "two stages": (("replica", "stage", "tensor"), (0, 3), ("collective-permute", 1, WHOLE)),
    "and parts of leaves": (("replica", "stage"), (0, 3), ("collective-permute", 2, WHOLE // 2)),
    "three stages": (
        ("replica", "stage", "tensor"),
        (0, 1, 3),
        ("collective-permute", 4, 4 * WHOLE),
    ),
    "all stages": (("replica", "stage", "tensor"), (0, 1, 2, 3), ("all-reduce", 1, WHOLE)),
}


@pytest.mark.parametrize("name", sweep(CASES, lambda name: "leaves" in name))
def test_what_is_sent(name):
    manual, holders, wanted = CASES[name]
    mesh = tpu_mesh("v5e:2x4", AXES)

    def of_device(*leaves):
        own = [x.reshape(x.shape[2:]) for x in leaves]
        sums = sum_over_holders(own, [holders] * 2, "stage")
        return [x.reshape(y.shape) for x, y in zip(sums, leaves, strict=True)]

    specs = P("replica", "stage")
    fn = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=specs,
        out_specs=specs,
        axis_names=set(manual),
        check_vma="tensor" not in manual,
    )
    # Where the compiler has "tensor", leaves are in parts over it.
    inside = () if "tensor" in manual else (None, "tensor")
    shapes = [jax.ShapeDtypeStruct((1, 4, n // 512, 512), jnp.float32) for n in (TABLE, SCALE)]
    lowered = jax.jit(fn).lower(*shapes_on(shapes, mesh, P(*specs, *inside)))
    rows = js.comm_report_of(lowered, mesh=mesh).select(level="compiled")
    assert [(r.collective, r.count, r.bytes) for r in rows] == [wanted]
    assert {r.axis for r in rows} == {"stage"}
