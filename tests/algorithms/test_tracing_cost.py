"""What a leaf costs to trace, in every transform: nothing is walked again and again."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
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
