"""Tests of push-sum: its algebra, and the invariants of gossip for any graph and mixing."""

from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, given, settings

import jaxslowmo as js
from jaxslowmo.algorithms._gossip import Arrival, divided, pulled, total_mass
from support.executions import gossip_state

ACTIVE, QUIET = 10, 30  # updates with something to add, and then without
SIZE = 3


@st.composite
def graphs(draw) -> js.topology.Graph:
    num_nodes = draw(st.integers(1, 33))
    name = draw(st.sampled_from([*js.topology.GRAPHS, "phone book", "phone book, all of it"]))
    if name in js.topology.GRAPHS:
        try:
            graph = js.topology.make_graph(name, num_nodes)
        except ValueError:  # not for every number of nodes
            assume(False)
    else:
        assume(num_nodes > 1)
        further = st.integers(1, num_nodes - 1)
        rows = [
            [
                (node + 1) % num_nodes,
                *((node + d) % num_nodes for d in draw(st.lists(further, max_size=2))),
            ]
            for node in range(num_nodes)
        ]
        graph = js.topology.from_phone_book(rows, None if "all" in name else 1)
    rounds = range(graph.num_rounds)
    # Every permutation is traced.
    assume(sum(len(graph.permutations(r)) for r in rounds) <= 40)
    return graph


@st.composite
def gossips(draw) -> tuple[js.topology.Graph, js.ParameterTransform]:
    graph = draw(graphs())
    share = st.floats(0.1, 0.9)
    keep = draw(
        st.none() | share | st.lists(share, min_size=graph.num_nodes, max_size=graph.num_nodes)
    )

    def by_step(graph, step):
        return js.topology.self_weighted(0.3 + 0.3 * (step % graph.num_rounds % 2))(graph, step)

    mixing = draw(
        st.sampled_from([None, by_step])
        if keep is None
        else st.just(js.topology.self_weighted(keep))
    )
    overlap = draw(st.integers(0, 3))
    return graph, js.sgp("replica", graph=graph, mixing=mixing, overlap=overlap)


def test_arrivals_add_their_weights_and_pull_by_their_share():
    """A node with value 3 and weight 2 receives value 6 of weight 1 and value 0 of weight 0.5."""
    arrivals = [
        Arrival(jnp.asarray([6.0]), jnp.float32(1)),
        Arrival(jnp.zeros(1), jnp.float32(0.5)),
    ]
    x, w = total_mass(jnp.asarray([3.0]), jnp.float32(2), arrivals)
    assert (x.tolist(), float(w)) == ([12], 3.5)
    assert divided(x, w).tolist() == pytest.approx([12 / 3.5])
    # What arrives has 1 of the 4 that are there afterwards: a quarter of the way from 2 to 6.
    values = pulled(jnp.asarray([0.5]), jnp.asarray([2.0]), arrivals[0], jnp.float32(0.25))
    assert values.tolist() == [0.5 + 1]


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
@settings(max_examples=12)
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


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("num_nodes", [4, 7])
def test_agreement_with_several_peers_is_kept_to_the_bit(num_nodes, overlap):
    """Shares of thirds and sixths, whose products do not add up to the value in float32."""
    sync = js.sgp(
        "replica",
        graph=js.topology.complete,
        mixing=js.topology.self_weighted(0.3),
        overlap=overlap,
    )
    x = np.random.default_rng(0).normal(size=500).astype(np.float32)
    params = {"x": np.broadcast_to(x, (num_nodes, 500))}
    updates = {"x": np.zeros((5, num_nodes, 500), np.float32)}
    seen = simulate(sync, params, updates, jnp.ones(5, bool))
    np.testing.assert_array_equal(seen.exchanges[-1], [5] * num_nodes)
    np.testing.assert_array_equal(seen.params["x"], np.broadcast_to(x, (5, num_nodes, 500)))


@pytest.mark.filterwarnings("ignore:.*has size 1")
@settings(max_examples=6)
@given(
    gossip=gossips(),
    seed=st.integers(0, 2**31),
    shard_state=st.booleans(),
    every=st.integers(1, 5),
)
def test_exact_slow_step_ends_in_agreement(gossip, seed, shard_state, every):
    graph, base = gossip
    params, updates, _ = problem(graph.num_nodes, seed)
    params["x"][:] = params["x"][:1]  # anchors start equal
    sync = js.slowmo("replica", base=base, sync_every=every, shard_state=shard_state, momentum=0.3)
    seen = simulate(
        sync, params, jax.tree.map(lambda u: u[:ACTIVE], updates), jnp.ones(ACTIVE, bool)
    )
    for t in range(every - 1, ACTIVE, every):
        now, before = seen.params["x"][t], seen.params["x"][max(t - 1, 0)]
        # params + (target - params) is target up to 1 ulp of the larger operand
        largest = np.maximum(np.abs(now), np.abs(before + updates["x"][t])).max()
        assert np.ptp(now, axis=0).max() <= 2 * np.spacing(largest)
        assert np.all(seen.weight[t] == 1)
        for leaf in jax.tree.leaves(seen.in_flight):
            assert not np.any(leaf[t])
    before_slow = [t for t in range(ACTIVE) if (t + 1) % every]
    if graph.num_nodes > 1 and before_slow:
        assert np.ptp(seen.params["x"][before_slow], axis=1).max() > 1e-3
