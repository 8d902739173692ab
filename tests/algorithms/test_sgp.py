"""`js.sgp` by the number of its nodes: phases, rounds, and a node that is alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.algorithms import shares_of_gossip
from support.bad_input import PARAMS, one_update, trace
from support.executions import lift
from support.transforms import IRREGULAR

ring = js.topology.ring


def test_phases_are_the_rounds_of_the_rotation_without_what_was_skipped():
    tx = js.sgp("replica", graph=IRREGULAR)
    assert [tx.phase(t) for t in (1, 2, 3)] == [("round 0",), ("round 1",), ("round 0",)]
    assert [tx.algorithm.phase(3, skipped) for skipped in (1, 2)] == [("round 1",), ("round 0",)]
    assert tx.phases() == [("round 0",), ("round 1",)]
    assert all(tx.due(t) for t in (1, 2, 3))
    local = tx.init(PARAMS).local._replace(exchanges=np.int32(5))
    assert tx.algorithm.skip_count(local, 9) == 4


def test_a_slow_step_is_no_round():
    """An exact one takes the place of an exchange, which does not rotate the graph."""
    base = js.sgp("replica", graph=IRREGULAR)
    exact = js.slowmo("replica", base=base, sync_every=3)
    phases = [exact.phase(t) for t in range(1, 8)]
    assert phases == [(f"round {r}",) if r is not None else ("slow",) for r in
                      (0, 1, None, 0, 1, None, 0)]  # fmt: skip
    assert exact.algorithm.phase(5, 1) == ("round 0",)
    inexact = js.slowmo("replica", base=base, sync_every=3, exact_average=False)
    assert [inexact.phase(t) for t in (3, 4)] == [("round 0", "slow"), ("round 1",)]


def test_a_transform_takes_the_size_that_it_is_given():
    """The original one may be given others later; an axis that is not there waits for the trace."""
    tx = js.sgp("replica", graph=js.topology.directed_linear)
    assert [len(tx.bound({"replica": n}).phases()) for n in (3, 5)] == [2, 4]
    assert len(js.sgp(("a", "b"), graph=ring(4)).bound({"a": 2, "b": 2}).phases()) == 1
    with pytest.raises(ValueError, match=r"`axis_name`.*bound: 'replica'"):
        trace(one_update(js.sgp("node").bound({"replica": 4})), PARAMS)


def test_what_is_bound_in_two_calls_is_bound():
    base = js.sgp("replica").bound({"replica": 4})
    tx = js.slowmo("replica", base=base, sync_every=6, fragments=lambda name: int(name == "w"))
    phases = [("round 0",), ("round 1",), ("round 0", "slow 0")]
    for one in (tx.bound(params=PARAMS), tx.bound(params=PARAMS).bound({"replica": 4})):
        assert [one.phase(t) for t in (1, 2, 3)] == phases
        assert js.only_finite(one).phase(3) == ("round", "slow 0")


def test_shares_of_replicas_in_their_mean_are_their_weights():
    """And what is on its way to them."""
    tx = js.sgp("replica", graph=IRREGULAR, overlap=2)
    state = jax.vmap(tx.init, axis_name="replica")(PARAMS)
    (weight, values), (late, mean) = tx.shares(state)
    (arrival,) = state.local.in_flight
    assert (weight is state.local.weight, values) == (True, None)
    assert (late is arrival.weight, mean is arrival.mean) == (True, True)


def test_shares_in_an_optimizers_state_hold_for_all_leaves():
    """Weights of one part of the model say nothing of the others, unless all replicas are equal."""
    part = optax.masked(js.sgp("replica", graph=ring(4)), {"b": True, "w": False})
    state = jax.vmap(part.init, axis_name="replica")(PARAMS)
    both = (state.inner_state, state.inner_state)
    assert shares_of_gossip(state) is shares_of_gossip(both) is None
    local = state.inner_state.local._replace(weight=jnp.asarray([1.0, 0.5, 1.5, 1.0]))
    gossip = state.inner_state._replace(local=local)
    ((weight, values),) = shares_of_gossip({"deep": (gossip, ())})
    assert (weight is local.weight, values) == (True, None)
    for uneven in (state._replace(inner_state=gossip), (gossip, state.inner_state)):
        with pytest.raises(ValueError, match="`state`"):
            shares_of_gossip(uneven)


@pytest.mark.filterwarnings("ignore:.*has size 1")
@pytest.mark.parametrize(
    ("graph", "overlap", "execution"),
    [(None, 0, "vmap"), (ring, 1, "shard_map"), (ring(1), 3, "vmap")],
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
