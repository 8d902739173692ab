"""What a leaf costs to trace, in every transform: nothing is walked again and again."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.mesh._collective_axes import _parts
from support.counts import calls_per_leaf

LOCAL_SGD = js.local_sgd("replica", sync_every=2)
UNSHARDED = {"sync_every": 4, "shard_state": False}
# In calls of a traced `lax.add`. Measured with jax 0.10: 5, 20, 14, 29, 50, 90. They were 10, 33,
# 25, 55, 87, 131 with operators of jax.numpy, branches run twice and types asked for every leaf.
MOST = {
    "all_reduce_gradients": (js.all_reduce_gradients("replica"), 7),
    "local_sgd": (LOCAL_SGD, 25),
    "sgp": (js.sgp("replica"), 19),
    "diloco": (js.diloco("replica", sync_every=4), 40),
    "slowmo": (js.slowmo("replica", base=LOCAL_SGD, sync_every=4), 65),
    "slowmo unsharded": (js.slowmo("replica", base=LOCAL_SGD, **UNSHARDED), 110),
}


@pytest.mark.parametrize("name", MOST)
def test_a_leaf_costs_a_few_primitives(name, mesh_of):
    tx, most = MOST[name]

    def per_device(params):
        params = jax.lax.pcast(params, "replica", to="varying")
        tx.update(params, tx.init(params), params)
        return jax.lax.axis_index("replica")[None]

    mesh = mesh_of({"replica": 4})
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=P(), out_specs=P("replica"))
    assert calls_per_leaf(mapped) < most


def nested(jaxpr):
    """How many conditionals stand one in another, at most."""
    found = [nested(x) + (e.primitive.name == "cond") for e in jaxpr.eqns for x in _parts(e.params)]
    return max(found, default=0)


@pytest.mark.parametrize("name", ["diloco", "slowmo", "slowmo unsharded"])
def test_conditionals_stand_beside_each_other(name, mesh_of):
    # XLA's partitioner takes the square of the arrays that a conditional is given, for each level.
    tx, _ = MOST[name]

    def per_device(params):
        params = jax.lax.pcast(params, "replica", to="varying")
        updates, _ = tx.update(params, tx.init(params), params)
        return updates

    mesh = mesh_of({"replica": 4})
    mapped = jax.shard_map(per_device, mesh=mesh, in_specs=P(), out_specs=P("replica"))
    assert nested(jax.make_jaxpr(mapped)({"w": jax.numpy.ones(4)}).jaxpr) == 1
