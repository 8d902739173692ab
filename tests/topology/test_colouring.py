"""König's theorem: a round needs as many permutations as its busiest node has messages."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxslowmo import topology
from jaxslowmo.topology._phone_book import colour_edges
from topology.graphs import any_graphs, edges_of

# Nodes of the two sides of a multigraph.
edge_lists = st.integers(1, 8).flatmap(
    lambda size: st.lists(st.tuples(*[st.integers(0, size - 1)] * 2), max_size=6 * size)
)
# The last edge finds colour 0 taken at its source and 1 at its destination: one has to be swapped.
NEEDS_A_SWAP = [(1, 0), (1, 2), (0, 3), (0, 2)]
# And here the path to swap has four edges.
NEEDS_A_LONG_SWAP = [(1, 0), (1, 2), (3, 4), (3, 0), (0, 5), (0, 2)]


def largest_degree(edges) -> int:
    sent, got = Counter(a for a, _ in edges), Counter(b for _, b in edges)
    return max([0, *sent.values(), *got.values()])


def check_partial_permutations(permutations) -> None:
    for permutation in permutations:
        assert permutation, "an empty permutation would be a collective for nothing"
        sources, destinations = zip(*permutation, strict=True)
        assert len(set(sources)) == len(sources)
        assert len(set(destinations)) == len(destinations)
        assert list(permutation) == sorted(permutation)  # equal rounds make equal programs


@given(edge_lists)
@example(NEEDS_A_SWAP)
@example(NEEDS_A_LONG_SWAP)
def test_any_multigraph(edges):
    found = colour_edges(edges)
    check_partial_permutations(found)
    assert Counter(edge for colour in found for edge in colour) == Counter(edges)
    assert len(found) == largest_degree(edges)


@pytest.mark.parametrize("edges", [NEEDS_A_SWAP, NEEDS_A_LONG_SWAP])
def test_the_examples_cannot_be_coloured_first_come_first_served(edges):
    colours: list[list] = []
    for edge in edges:
        for colour in colours:
            if all(edge[0] != a and edge[1] != b for a, b in colour):
                colour.append(edge)
                break
        else:
            colours.append([edge])
    assert len(colours) == largest_degree(edges) + 1


@given(any_graphs)
def test_the_permutations_of_every_round(graph):
    for step in range(min(graph.num_rounds, 12)):
        found = graph.permutations(step)
        edges = edges_of(graph, step)
        check_partial_permutations(found)
        assert Counter(edge for permutation in found for edge in permutation) == edges
        assert len(found) == largest_degree(list(edges.elements()))
        assert found is graph.permutations(step + graph.num_rounds)
        if graph.is_regular:
            assert all(len(permutation) == graph.num_nodes for permutation in found)
            assert len(found) == len(graph.out_peers(step)[0])


@pytest.mark.parametrize("num_nodes", [4, 5, 8])
def test_whole_permutations_stay_so(num_nodes):
    graph = topology.directed_linear(num_nodes, peers_per_step=2)
    for step in range(graph.num_rounds):
        out = graph.out_peers(step)
        for place, permutation in enumerate(graph.permutations(step)):
            assert permutation == tuple((node, peers[place]) for node, peers in enumerate(out))


@pytest.mark.parametrize("seed", range(10))
def test_large_multigraphs(seed):
    """Many edges per node make for long paths to swap."""
    edges = np.random.default_rng(seed).integers(0, 40, (400, 2)).tolist()
    found = colour_edges([(a, b) for a, b in edges])
    check_partial_permutations(found)
    assert Counter(edge for colour in found for edge in colour) == Counter(map(tuple, edges))
    assert len(found) == largest_degree(edges)


def test_many_nodes():
    graph = topology.complete(128)
    assert len(graph.permutations(0)) == 127
    assert sum(map(len, graph.permutations(0))) == 128 * 127


def test_a_single_node_sends_nothing():
    assert topology.ring(1, peers_per_step=2).permutations(0) == ()
