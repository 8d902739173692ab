"""Means by permutes, which TPUs run beside other work; elsewhere it is an all-reduce."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxslowmo.collectives import _beside, mean_beside


@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_mean_by_permutes_is_the_mean_and_equal_on_all_replicas(replicas, size):
    x = np.random.default_rng(0).normal(size=(replicas, size)).astype(np.float32)
    by_permutes = functools.partial(_beside._by_permutes, axis_name="replica")
    result = np.asarray(jax.vmap(by_permutes, axis_name="replica")(jnp.asarray(x)))
    np.testing.assert_allclose(result[0], x.mean(0), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(result, np.broadcast_to(result[:1], result.shape))


def test_on_a_cpu_it_is_one_all_reduce():
    def mean(x):
        return mean_beside(x, "replica", None)

    mesh = jax.make_mesh((4,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("replica")
    mapped = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=spec, out_specs=spec))
    lowered = mapped.lower(jnp.ones(12))
    assert lowered.as_text().count("stablehlo.all_reduce") == 1
    assert "collective_permute" not in lowered.as_text()
