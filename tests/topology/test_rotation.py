"""Which entries of the phone book have their turn, and when it starts over."""

import math
from collections import Counter

from hypothesis import given

from jaxslowmo import topology
from topology.graphs import any_graphs, edges_of


@given(any_graphs)
def test_every_node_walks_through_its_row(graph):
    """A pointer per node, moved on by what it sent, as FairScale does it."""
    pointers = [0] * graph.num_nodes
    for step in range(min(graph.num_rounds, 40) + 1):
        for node, row in enumerate(graph.phone_book):
            sends = min(graph.peers_per_step, len(row))
            expected = tuple(row[(pointers[node] + i) % len(row)] for i in range(sends))
            assert graph.out_peers(step)[node] == expected
            if graph.is_dynamic and row:
                pointers[node] = (pointers[node] + sends) % len(row)
        # All start over together after `num_rounds` exchanges, and not before.
        assert all(p == 0 for p in pointers) == ((step + 1) % graph.num_rounds == 0)


@given(any_graphs)
def test_every_entry_has_as_many_turns_as_the_others(graph):
    if not graph.is_dynamic or graph.num_rounds > 40:
        return
    turns = sum((edges_of(graph, step) for step in range(graph.num_rounds)), Counter())
    for node, row in enumerate(graph.phone_book):
        sends = min(graph.peers_per_step, len(row))
        for peer, times in Counter(row).items():
            assert turns[node, peer] * len(row) == times * sends * graph.num_rounds


@given(any_graphs)
def test_in_peers_are_out_peers_seen_from_the_other_side(graph):
    for step in range(min(graph.num_rounds, 12)):
        received = Counter(
            (source, node)
            for node, sources in enumerate(graph.in_peers(step))
            for source in sources
        )
        assert received == edges_of(graph, step)


@given(any_graphs)
def test_regular_is_as_many_sends_and_receipts_everywhere(graph):
    if graph.num_rounds > 40:
        return
    counts = [
        {len(peers) for peers in (*graph.out_peers(step), *graph.in_peers(step))}
        for step in range(graph.num_rounds)
    ]
    assert graph.is_regular == all(len(count) == 1 for count in counts)


def test_rows_of_different_length_by_hand():
    graph = topology.from_phone_book([[1, 2, 1], [2, 0], [0]])
    assert graph.num_rounds == math.lcm(3, 2, 1)
    assert [graph.out_peers(step) for step in range(6)] == [
        ((1,), (2,), (0,)),
        ((2,), (0,), (0,)),
        ((1,), (2,), (0,)),
        ((1,), (0,), (0,)),
        ((2,), (2,), (0,)),
        ((1,), (0,), (0,)),
    ]
    assert graph.in_peers(1) == ((1, 2), (), (0,))
    assert not graph.is_regular


def test_in_peers_come_by_place_then_by_sender():
    graph = topology.from_phone_book([[1, 2], [2, 0], [1, 0]], peers_per_step=2)
    assert graph.in_peers(0) == ((1, 2), (0, 2), (1, 0))


def test_a_row_shorter_than_the_step_is_used_whole():
    graph = topology.Graph(3, 2, ((1, 2, 1), (0,), (0, 1)))
    assert [graph.out_peers(step) for step in range(3)] == [
        ((1, 2), (0,), (0, 1)),
        ((1, 1), (0,), (0, 1)),
        ((2, 1), (0,), (0, 1)),
    ]
    assert graph.num_rounds == 3


def test_a_static_graph_stays_at_the_first_entries():
    graph = topology.ring(5)
    assert graph.phone_book[0] == (1, 4)
    assert graph.num_rounds == 1
    assert graph.out_peers(7) == graph.out_peers(0) == ((1,), (2,), (3,), (4,), (0,))


def test_a_round_is_coloured_without_all_the_others():
    rows = [[(i + d) % 10 for d in range(1, 1 + (5, 7, 8, 9)[i % 4])] for i in range(10)]
    graph = topology.from_phone_book(rows)
    assert graph.num_rounds == 2520
    graph.permutations(3)
    assert len(graph._coloured) == 1
