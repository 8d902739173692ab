"""Collectives in the form that CPU processes need; `tests/cluster` runs them between real ones."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxslowmo.collectives import permute
from jaxslowmo.collectives._scatter import ring_scatter_sum
from jaxslowmo.mesh import between_cpu_processes


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
        chosen.append(between_cpu_processes("replica"))
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


@pytest.mark.parametrize("elements", [2**16 - 1, 2**16, 2**17, 2**17 + 3])
def test_large_messages_between_processes_travel_in_pieces(mesh_of, monkeypatch, elements):
    x = np.arange(2 * elements, dtype=np.float32).reshape(2, 1, elements)
    found = {}
    for processes in (1, 2):
        monkeypatch.setattr(jax, "process_count", lambda n=processes: n)
        fn = jax.jit(
            jax.shard_map(
                lambda own: permute(own, "replica", [(0, 1), (1, 0)]),
                mesh=mesh_of({"replica": 2}),
                in_specs=P("replica"),
                out_specs=P("replica"),
            )
        )
        assert ("stablehlo.while" in fn.lower(x).as_text()) == (processes > 1 and elements > 2**16)
        found[processes] = np.asarray(fn(x))
    np.testing.assert_array_equal(found[1], x[::-1])
    np.testing.assert_array_equal(found[2], x[::-1])
