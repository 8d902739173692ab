"""Gossip: weights that are too small, what overlaps, and invariants of push-sum."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

NODES = 4


# The program of one update


@pytest.mark.parametrize(("overlap", "sent"), [(0, True), (1, False)])
def test_with_overlap_what_is_sent_does_not_depend_on_the_updates(overlap, sent):
    sync = js.sgp("replica", graph=js.topology.star(NODES), overlap=overlap)

    def step(params, updates):
        return sync.update(updates, sync.init(params), params, phase=sync.phase(1))

    flat = jax.ShapeDtypeStruct((5,), jnp.float32)
    mesh = AbstractMesh((NODES,), ("replica",))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    (mapped_step,) = jax.make_jaxpr(mapped)(flat, flat).jaxpr.eqns
    jaxpr = mapped_step.params["jaxpr"]
    reached, permuted = {jaxpr.invars[-1]}, []  # constants come first
    for eqn in jaxpr.eqns:
        operands = [v for v in eqn.invars if not hasattr(v, "val")]
        if reached.intersection(operands):
            reached.update(eqn.outvars)
        permuted += operands if eqn.primitive.name == "ppermute" else []
    assert permuted
    assert bool(reached.intersection(permuted)) == sent


# Push-sum: invariants for any graph and mixing
