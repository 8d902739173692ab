"""Graphs and mixings to draw from, and what an exchange does, without the code under test."""

import inspect
from collections import Counter

import numpy as np
from hypothesis import strategies as st

from jaxslowmo import topology

# The six of FairScale, with their classes there.
FAIRSCALE = {
    "NPeerDynamicDirectedExponentialGraph": topology.npeer_directed_exponential,
    "DynamicDirectedExponentialGraph": topology.directed_exponential,
    "DynamicDirectedLinearGraph": topology.directed_linear,
    "DynamicBipartiteExponentialGraph": topology.bipartite_exponential,
    "DynamicBipartiteLinearGraph": topology.bipartite_linear,
    "RingGraph": topology.ring,
}
NAMED = dict(topology.GRAPHS)
# Their nodes exchange in pairs.
PAIRED = ("bipartite_exponential", "bipartite_linear", "random_matching")
POWERS = ("hypercube",)  # of 2: their numbers of nodes
# A node may have another number of peers than the next.
IRREGULAR = ("star", "grid_2d")
ALL_AT_ONCE = [
    name
    for name, make in NAMED.items()
    if inspect.signature(make).parameters["peers_per_step"].default is None
]
MOST_NODES = 33


@st.composite
def named_graphs(draw, names=tuple(NAMED), most=MOST_NODES) -> topology.Graph:
    name = draw(st.sampled_from(names))
    num_nodes = draw(st.integers(1, most))
    if name in PAIRED and num_nodes > 1:
        num_nodes -= num_nodes % 2
    if name in POWERS:
        num_nodes = 2 ** (num_nodes.bit_length() - 1)
    if name in ALL_AT_ONCE and draw(st.booleans()):
        return NAMED[name](num_nodes)
    most = min(map(len, NAMED[name](num_nodes).phone_book)) if num_nodes > 1 else 3
    peers = draw(st.integers(1, most))
    if name == "npeer_directed_exponential":  # with more, some numbers of nodes are refused
        peers = 1
    return NAMED[name](num_nodes, peers_per_step=peers)


@st.composite
def custom_graphs(draw) -> topology.Graph:
    """Rows of different lengths, in random order, some peers named twice; strongly connected."""
    num_nodes = draw(st.integers(2, 9))
    nodes = st.integers(0, num_nodes - 1)
    circle = draw(st.permutations(range(num_nodes)))
    rows = [[circle[(circle.index(node) + 1) % num_nodes]] for node in range(num_nodes)]
    for source, peer in draw(st.lists(st.tuples(nodes, nodes), max_size=2 * num_nodes)):
        # Up to 4 entries: rotations of at most 12 exchanges.
        if source != peer and len(rows[source]) < 4:
            rows[source].append(peer)
    rows = [draw(st.permutations(row)) for row in rows]
    lengths = [len(row) for row in rows]
    kind = draw(st.sampled_from(["dynamic", "all at once", "short rows whole"]))
    if kind == "all at once":
        return topology.from_phone_book(rows, None)
    if kind == "dynamic":
        return topology.from_phone_book(rows, draw(st.integers(1, min(lengths))))
    return topology.Graph(num_nodes, draw(st.integers(1, max(lengths))), rows)


any_graphs = st.one_of(named_graphs(), custom_graphs())


def random_weights(seed: int):
    """Any weights on the edges of the round."""

    def mixing(graph: topology.Graph, step: int) -> np.ndarray:
        rng = np.random.default_rng([seed, step % graph.num_rounds])
        matrix = np.diag(rng.uniform(0.1, 1, graph.num_nodes))
        for source, peers in enumerate(graph.out_peers(step)):
            for peer in peers:
                matrix[peer, source] += rng.uniform(0.1, 1)
        return matrix / matrix.sum(axis=0)

    return mixing


def random_shares(seed: int):
    """A share to keep for each node."""
    keep = np.random.default_rng(seed).uniform(0.1, 0.9, MOST_NODES)
    return lambda graph, step: topology.self_weighted(keep[: graph.num_nodes])(graph, step)


seeds = st.integers(0, 999)
mixings = st.none() | st.builds(random_shares, seeds) | st.builds(random_weights, seeds)


def edges_of(graph: topology.Graph, step: int) -> Counter:
    """How often each (source, destination) occurs in an exchange."""
    out = graph.out_peers(step)
    return Counter((source, peer) for source, peers in enumerate(out) for peer in peers)
