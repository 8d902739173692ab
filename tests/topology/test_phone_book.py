"""A graph: which entries of its phone book have their turn, and the permutations of a round.

König's theorem: a round needs as many permutations as its busiest node has messages.
"""

from collections import Counter

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from jaxslowmo.topology._phone_book import colour_edges
from topology.graphs import any_graphs, edges_of


@given(any_graphs)
def test_every_node_walks_through_its_row(graph):
    """A pointer per node, moved on by what it sent, as FairScale does it."""
    pointers, regular = [0] * graph.num_nodes, True
    for step in range(min(graph.num_rounds, 40) + 1):
        for node, row in enumerate(graph.phone_book):
            sends = min(graph.peers_per_step, len(row))
            expected = tuple(row[(pointers[node] + i) % len(row)] for i in range(sends))
            assert graph.out_peers(step)[node] == expected
            if graph.is_dynamic and row:
                pointers[node] = (pointers[node] + sends) % len(row)
        # All start over together after `num_rounds` exchanges, and not before.
        assert all(p == 0 for p in pointers) == ((step + 1) % graph.num_rounds == 0)
        sources = graph.in_peers(step)
        received = Counter((peer, node) for node, peers in enumerate(sources) for peer in peers)
        assert received == edges_of(graph, step)
        regular &= len({len(peers) for peers in (*graph.out_peers(step), *sources)}) == 1
    if graph.num_rounds <= 40:
        assert graph.is_regular == regular


def largest_degree(edges) -> int:
    sent, got = Counter(a for a, _ in edges), Counter(b for _, b in edges)
    return max([0, *sent.values(), *got.values()])


def check_permutations(permutations, edges) -> None:
    for permutation in permutations:
        assert permutation, "an empty permutation would be a collective for nothing"
        sources, destinations = zip(*permutation, strict=True)
        assert len(set(sources)) == len(sources)
        assert len(set(destinations)) == len(destinations)
        assert list(permutation) == sorted(permutation)  # equal rounds make equal programs
    assert Counter(edge for permutation in permutations for edge in permutation) == edges
    assert len(permutations) == largest_degree(list(edges.elements()))


# Pairs of nodes on the two sides of a multigraph.
edge_lists = st.integers(1, 8).flatmap(
    lambda size: st.lists(st.tuples(*[st.integers(0, size - 1)] * 2), max_size=6 * size)
)
LARGE = [tuple(edge) for edge in np.random.default_rng(0).integers(0, 40, (400, 2)).tolist()]


# The last edge finds colour 0 taken at its source and 1 at its destination: one has to be swapped,
# then along a path of four edges, then along many long ones.
@example([(1, 0), (1, 2), (0, 3), (0, 2)])
@example([(1, 0), (1, 2), (3, 4), (3, 0), (0, 5), (0, 2)])
@example(LARGE)
@given(edge_lists)
def test_any_multigraph_needs_as_many_permutations_as_its_largest_degree(edges):
    check_permutations(colour_edges(edges), Counter(edges))


@given(any_graphs)
def test_the_permutations_of_every_round(graph):
    for step in range(min(graph.num_rounds, 12)):
        found = graph.permutations(step)
        check_permutations(found, edges_of(graph, step))
        assert found is graph.permutations(step + graph.num_rounds)
