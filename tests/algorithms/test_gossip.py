"""Gossip: weights that are too small, what overlaps, and invariants of push-sum."""

from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given, settings
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.executions import gossip_state
from topology.graphs import any_graphs

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

ACTIVE, QUIET = 10, 30  # updates with something to add, and then without
SIZE = 3


@st.composite
def gossips(draw) -> tuple[js.topology.Graph, js.ParameterTransform]:
    graph = draw(any_graphs)
    # Every permutation is traced.
    assume(sum(len(graph.permutations(r)) for r in range(graph.num_rounds)) <= 40)
    share, nodes = st.floats(0.1, 0.9), graph.num_nodes
    keep = draw(st.none() | share | st.lists(share, min_size=nodes, max_size=nodes))

    def by_step(graph, step):
        return js.topology.self_weighted(0.3 + 0.3 * (step % graph.num_rounds % 2))(graph, step)

    uneven = st.sampled_from([None, by_step])
    mixing = draw(uneven) if keep is None else js.topology.self_weighted(keep)
    overlap = draw(st.integers(0, 3))
    return graph, js.sgp("replica", graph=graph, mixing=mixing, overlap=overlap)


class History(NamedTuple):
    """The state after every update, in arrays `[steps, nodes, ...]`."""

    params: dict[str, np.ndarray]
    weight: np.ndarray
    exchanges: np.ndarray
    in_flight: tuple

    def masses(self) -> tuple[np.ndarray, np.ndarray]:
        """Return weights and values at nodes and in flight, `[steps, nodes and arrivals, ...]`."""
        parts = [(self.weight, self.params["x"])]
        parts += [(a.weight, a.mean["x"]) for a in self.in_flight]
        weights, values = (
            np.concatenate(p, axis=1).astype(np.float64) for p in zip(*parts, strict=True)
        )
        return weights[..., None], values


def simulate(sync, params, updates, talk) -> History:
    def one(carry, inputs):
        p, s = carry
        update, talk = inputs
        u, s = sync.update(update, s, p, communicate=talk)
        p = optax.apply_updates(p, u)
        gossip = gossip_state(s)
        return (p, s), History(p, gossip.weight, gossip.exchanges, gossip.in_flight)

    def run(p, us, talk):
        return jax.lax.scan(one, (p, sync.init(p)), (us, talk))[1]

    mapped = jax.jit(jax.vmap(run, axis_name="replica", in_axes=(0, 1, None), out_axes=1))
    return jax.tree.map(np.asarray, mapped(params, updates, talk))


def problem(num_nodes: int, seed: int):
    """Return parameters, random ones and equal ones, their updates, and which steps exchange."""
    rng = np.random.default_rng(seed)
    steps = ACTIVE + QUIET
    same = np.broadcast_to(rng.normal(size=SIZE), (num_nodes, SIZE))
    params = {"x": rng.normal(size=(num_nodes, SIZE)), "same": same}
    updates = {
        "x": rng.normal(size=(steps, num_nodes, SIZE)),
        "same": np.zeros((steps, num_nodes, SIZE)),
    }
    updates["x"][ACTIVE:] = 0
    talk = np.ones(steps, bool)
    talk[:ACTIVE] = rng.random(ACTIVE) < 0.7
    return *jax.tree.map(lambda x: x.astype(np.float32), (params, updates)), talk


@pytest.mark.filterwarnings("ignore:.*has size 1")
@settings(max_examples=4)
@given(gossip=gossips(), seed=st.integers(0, 2**31))
def test_gossip_keeps_the_sums_and_approaches_the_mean(gossip, seed):
    graph, sync = gossip
    nodes = graph.num_nodes
    params, updates, talk = problem(nodes, seed)
    seen = simulate(sync, params, updates, jnp.asarray(talk))
    weights, values = seen.masses()

    # The sums over nodes and messages on their way.
    np.testing.assert_allclose(weights.sum(1), nodes, rtol=3e-6)
    assert np.all(seen.weight > 0)
    x = params["x"].astype(np.float64).sum(0) + np.cumsum(updates["x"].astype(np.float64).sum(1), 0)
    np.testing.assert_allclose((weights * values).sum(1), x, rtol=0, atol=3e-5 * nodes)

    # Without exchange nothing moves but by u / w, and the graph does not rotate.
    rotates = talk & (nodes > 1)
    np.testing.assert_array_equal(seen.exchanges, np.cumsum(rotates)[:, None].repeat(nodes, 1))
    before = History(*(jax.tree.map(lambda a: a[:-1], part) for part in seen))
    after = History(*(jax.tree.map(lambda a: a[1:], part) for part in seen))
    for t in np.flatnonzero(~talk[1:]):
        unmoved = (before.weight, before.in_flight), (after.weight, after.in_flight)
        for a, b in zip(*map(jax.tree.leaves, unmoved), strict=True):
            np.testing.assert_array_equal(a[t], b[t])
        expected = before.params["x"][t] + updates["x"][t + 1] / before.weight[t][:, None]
        np.testing.assert_allclose(after.params["x"][t], expected, rtol=1e-6, atol=1e-6)

    # Merging masses shrinks their spread around the mean, once updates are 0.
    quiet = slice(ACTIVE - 1, None)
    mean = (weights * values).sum(1, keepdims=True) / weights.sum(1, keepdims=True)
    spread = (weights * (values - mean) ** 2).sum((1, 2))[quiet]
    assert np.all(np.diff(spread) <= 1e-5 * spread[0] + 1e-9)
    assert spread[-1] <= 0.9 * spread[0] + 1e-9

    # Nodes that agree keep their value; to the bit where all weights are 1.
    start = np.broadcast_to(params["same"], seen.params["same"].shape)
    if np.all(seen.weight == 1):
        np.testing.assert_array_equal(seen.params["same"], start)
    else:
        np.testing.assert_allclose(seen.params["same"], start, rtol=1e-5, atol=1e-6)
