"""A graph: which entries of its phone book have their turn, and the permutations of a round.

König's theorem: a round needs as many permutations as its busiest node has messages.
"""

from collections import Counter

from hypothesis import given

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


@given(any_graphs)
def test_the_permutations_of_every_round(graph):
    for step in range(min(graph.num_rounds, 12)):
        found, edges = graph.permutations(step), edges_of(graph, step)
        for permutation in found:
            assert permutation, "an empty permutation would be a collective for nothing"
            sources, destinations = zip(*permutation, strict=True)
            assert len(set(sources)) == len(sources)
            assert len(set(destinations)) == len(destinations)
            assert list(permutation) == sorted(permutation)  # equal rounds make equal programs
        assert Counter(edge for permutation in found for edge in permutation) == edges
        ends = [Counter(edge[side] for edge in edges.elements()) for side in (0, 1)]
        assert len(found) == max([0, *ends[0].values(), *ends[1].values()])
        assert found is graph.permutations(step + graph.num_rounds)
