"""What 8-bit hooks send where a TPU compiler made the program: bytes, not widened."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from tpu_slices import on, tpu_mesh

pytestmark = pytest.mark.tpu_aot

SIZE, REPLICAS = 1_000_000, 8


@pytest.mark.parametrize("name", ["int8", "fp8", "top_k"])
def test_bytes_stay_bytes(name):
    """In tiles of whole rows too, so that no padding travels besides."""
    hook = {
        "int8": js.hooks.int8(),
        "fp8": js.hooks.fp8(),
        "top_k": js.hooks.top_k(0.01),
    }[name]
    tx = js.all_reduce_gradients("replica", hook=hook, bucket_bytes=10**9)

    def per_device(grads):
        means, state = tx.update(grads[0], tx.init(grads[0]))
        return means[None], jax.tree.map(lambda x: x[None], state.hook)

    mesh = tpu_mesh("v5e:2x4", {"replica": REPLICAS})
    spec = P("replica")
    step = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec))
    lowered = step.lower(on(jax.ShapeDtypeStruct((REPLICAS, SIZE), jnp.float32), mesh, spec))
    report = js.comm_report_of(lowered, mesh=mesh)
    emitted, compiled = (
        [(row.collective, row.count, row.bytes, row.dtypes) for row in report.select(level=level)]
        for level in ("emitted", "compiled")
    )
    assert compiled == emitted
    assert all(row[3] == ("uint8",) for row in compiled)
    plain = 2 * 4 * SIZE * (REPLICAS - 1) // REPLICAS  # an all-reduce of float32
    assert report.wire_bytes(level="compiled") <= {"top_k": 0.081}.get(name, 0.255) * plain
    text = lowered.compile().as_text()
    shapes = [
        line for line in text.splitlines() if " all-gather(" in line or " all-to-all(" in line
    ]
    assert len(shapes) == len(compiled)
    assert all("T(8,128)(4,1)" in line for line in shapes)
