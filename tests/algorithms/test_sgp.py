"""`js.sgp`: its phases once it is bound, and what is sent while updates are computed."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.bad_input import PARAMS

NODES = 4


def test_what_is_bound_in_two_calls_is_bound():
    base = js.sgp("replica").bound({"replica": NODES})
    tx = js.slowmo("replica", base=base, sync_every=6, fragments=lambda name: int(name == "w"))
    phases = [("round 0",), ("round 1",), ("round 0", "slow 0")]
    for one in (tx.bound(params=PARAMS), tx.bound(params=PARAMS).bound({"replica": NODES})):
        assert [one.phase(t) for t in (1, 2, 3)] == phases
        assert js.only_finite(one).phase(3) == ("round", "slow 0")


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
