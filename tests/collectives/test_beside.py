"""Means by permutes, which TPUs run beside other work; elsewhere it is an all-reduce."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxslowmo.collectives import _means, async_mean


def test_the_mean_by_permutes_is_the_mean_and_equal_on_all_replicas():
    x = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    by_permutes = functools.partial(_means._by_permutes, axis_name="replica")
    result = np.asarray(jax.jit(jax.vmap(by_permutes, axis_name="replica"))(x))
    np.testing.assert_allclose(result[0], x.mean(0), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(result, np.broadcast_to(result[:1], result.shape))


@pytest.mark.parametrize(("on_tpu", "replicas"), [(0, 4), (1, 2), (1, 16), (1, 17)])
def test_up_to_16_replicas_on_tpus_send_by_permutes(on_tpu, replicas, monkeypatch):
    monkeypatch.setattr(_means, "is_on_tpu", lambda axis_name: on_tpu)
    mapped = jax.shard_map(
        lambda x: async_mean(x, "replica", None),
        mesh=AbstractMesh((replicas,), ("replica",)),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    program = str(jax.make_jaxpr(mapped)(jnp.ones(12)))
    by_permutes = on_tpu and replicas < 17
    assert program.count("ppermute[") == (2 * (replicas - 1) if by_permutes else 0)
    assert program.count("psum[") == (0 if by_permutes else 1)
