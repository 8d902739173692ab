"""`js.sgp` by the number of its nodes: phases, rounds, and a node that is alone."""

import jax
import numpy as np
import pytest

import jaxslowmo as js
from support.bad_input import PARAMS, one_update
from support.executions import lift

ring = js.topology.ring


def test_what_is_bound_in_two_calls_is_bound():
    base = js.sgp("replica").bound({"replica": 4})
    tx = js.slowmo("replica", base=base, sync_every=6, fragments=lambda name: int(name == "w"))
    phases = [("round 0",), ("round 1",), ("round 0", "slow 0")]
    for one in (tx.bound(params=PARAMS), tx.bound(params=PARAMS).bound({"replica": 4})):
        assert [one.phase(t) for t in (1, 2, 3)] == phases
        assert js.only_finite(one).phase(3) == ("round", "slow 0")


@pytest.mark.filterwarnings("ignore:.*has size 1")
@pytest.mark.parametrize(
    ("graph", "overlap", "execution"), [(None, 0, "vmap"), (ring, 1, "shard_map")]
)
def test_a_single_node_trains_alone(graph, overlap, execution):
    tx = js.sgp("replica", graph=graph, overlap=overlap).bound({"replica": 1})
    one = jax.tree.map(lambda x: x[:1], PARAMS)
    step = lift(one_update(tx), {"replica": 1}, execution, (False,))
    program = str(jax.make_jaxpr(step)(one))
    assert "ppermute" not in program
    assert "cond[" not in program
    assert (tx.phases(), tx.due(1)) == ([()], False)
    assert jax.tree.all(jax.tree.map(np.array_equal, step(one), one))
