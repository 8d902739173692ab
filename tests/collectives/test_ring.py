"""The reduce-scatter of processes on CPU; `tests/cluster` runs it between real ones."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxslowmo.collectives._ring import prefers_ring, ring_scatter_sum


@pytest.mark.parametrize("replicas", [2, 5])
def test_every_replica_gets_its_part_of_the_sum(mesh_of, replicas):
    x = np.random.default_rng(0).normal(size=(replicas, replicas, 3, 2)).astype(np.float32)

    def per_replica(own):
        return ring_scatter_sum(own[0], "replica")[None]

    fn = jax.jit(
        jax.shard_map(
            per_replica,
            mesh=mesh_of({"replica": replicas}),
            in_specs=P("replica"),
            out_specs=P("replica"),
        )
    )
    np.testing.assert_allclose(fn(x), x.sum(0), rtol=1e-5, atol=1e-6)
    text = fn.lower(x).as_text()
    assert text.count("stablehlo.collective_permute") == replicas - 1
    assert "reduce_scatter" not in text
    assert "all_reduce" not in text


def test_one_process_keeps_the_reduce_scatter_of_the_compiler(mesh_of, monkeypatch):
    chosen = []

    def per_replica(own):
        chosen.append(prefers_ring("replica"))
        return own

    def trace():
        fn = jax.shard_map(
            per_replica, mesh=mesh_of({"replica": 2}), in_specs=P("replica"), out_specs=P("replica")
        )
        jax.jit(lambda x: fn(x)).trace(np.ones(2, np.float32))

    trace()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    trace()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    trace()
    assert chosen == [False, True, False]
