"""Collectives in the form that CPU processes need; `tests/cluster` runs them between real ones."""

import functools

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxslowmo.collectives import permute
from jaxslowmo.collectives._scatter import ring_scatter_sum
from jaxslowmo.mesh import is_between_cpu_processes


def over_replicas(fn, mesh):
    spec = P("replica")
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec))


def test_every_replica_gets_its_part_of_the_sum_by_a_ring(mesh_of):
    x = np.random.default_rng(0).normal(size=(5, 5, 3, 2)).astype(np.float32)
    fn = over_replicas(
        lambda own: ring_scatter_sum(own[0], "replica")[None], mesh_of({"replica": 5})
    )
    lowered = fn.lower(x)
    np.testing.assert_allclose(lowered.compile()(x), x.sum(0), rtol=1e-5, atol=1e-6)
    text = lowered.as_text()
    sent = [text.count(f"stablehlo.{name}") for name in ("collective_permute", "reduce_scatter")]
    assert sent == [4, 0]
    assert "all_reduce" not in text


def test_one_process_keeps_the_reduce_scatter_of_the_compiler(mesh_of, monkeypatch):
    def chosen(mapped):
        found = []
        mapped(lambda own: (found.append(is_between_cpu_processes("replica")), own)[1])(np.ones(2))
        return found[0]

    devices = functools.partial(over_replicas, mesh=mesh_of({"replica": 2}))
    assert chosen(devices) is False
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert chosen(devices) is True
    assert chosen(lambda fn: jax.vmap(fn, axis_name="replica")) is False
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert chosen(lambda fn: functools.partial(jax.eval_shape, devices(fn))) is False


def test_large_messages_between_processes_travel_in_pieces(mesh_of, monkeypatch):
    """Pieces of 256 KiB; the rest, if there is one, as one more."""
    for processes, elements, sends in (
        (1, 2**17, 1),
        (2, 2**16, 1),
        (2, 2**17, 1),  # in a loop
        (2, 2**17 + 3, 2),
    ):
        x = np.arange(2 * elements, dtype=np.float32).reshape(2, 1, elements)
        monkeypatch.setattr(jax, "process_count", lambda n=processes: n)
        fn = over_replicas(
            lambda own: permute(own, "replica", [(0, 1), (1, 0)]), mesh_of({"replica": 2})
        )
        lowered = fn.lower(x)
        text = lowered.as_text()
        assert ("stablehlo.while" in text) == (processes > 1 and elements > 2**16)
        assert text.count("stablehlo.collective_permute") == sends
        assert ("tensor<65536xf32>" in text) == ("stablehlo.while" in text)
        np.testing.assert_array_equal(lowered.compile()(x), x[::-1])
