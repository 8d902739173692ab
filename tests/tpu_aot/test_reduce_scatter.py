"""What the TPU compiler makes of a reduce-scatter, compiled for a topology without a TPU."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxslowmo.reports.communication import comm_report_of
from support.tpu_slices import tpu_mesh


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1024, 1024), "reduce-scatter"), ((1024 * 1024,), "all-reduce")],
)
def test_reduce_scatter_depends_on_the_shape(shape, expected):
    mesh = tpu_mesh("v5e:2x4", {"replica": 8})

    def exchange(x):
        part = lax.psum_scatter(x, "replica", tiled=True)
        return lax.all_gather(part, "replica", tiled=True)

    spec = P("replica")
    fn = jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    whole = (8 * shape[0], *shape[1:])
    x = jax.ShapeDtypeStruct(whole, jnp.float32, sharding=NamedSharding(mesh, spec))
    report = comm_report_of(jax.jit(fn).lower(x), mesh=mesh)
    for level, first in (("emitted", "reduce-scatter"), ("compiled", expected)):
        found = [(r.collective, r.axis, r.bytes) for r in report.select(level=level)]
        nbytes = 4 * 1024 * 1024
        assert found == [(first, "replica", nbytes), ("all-gather", "replica", nbytes)]
