"""A graph: which entries of its phone book have their turn, and phone books that cannot work."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given

from jaxslowmo import topology
from topology.graphs import any_graphs, edges_of, refused

TABLE = topology.from_phone_book


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


def test_tables_may_hold_numpy_integers_and_graphs_are_hashable():
    graph = topology.from_phone_book(np.array([[1, 2], [2, 0], [0, 1]]))
    same = topology.Graph(3, 1, [[1, 2], [2, 0], [0, 1]])
    assert graph == same
    assert hash(graph) == hash(same)
    assert all(type(peer) is int for row in same.phone_book for peer in row)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "`table` must have one row per node, got none."),
        (None, "`table` must hold one sequence of peers per node, got None."),
        ([1, 0], "`table` must hold one sequence of peers per node, got [1, 0]."),
        ({0: [1], 1: [0]}, "`table` must hold one sequence of peers per node, got {0: [1], 1: [0]"),
        ([[1], [2]], "custom: the phone book of node 1 names 2, and the nodes are 0 to 1."),
        ([[1], [-1]], "the phone book of node 1 names -1, and the nodes are 0 to 1."),
        ([[1.0], [0]], "the phone book of node 0 names 1.0, and nodes are ints, 0 to 1."),
        ([[np.float64(1)], [0]], "the phone book of node 0 names np.float64(1.0), and"),
        ([[True], [0]], "the phone book of node 0 names True, and"),
        ([[np.True_], [0]], "the phone book of node 0 names np.True_, and"),
        (["1", "0"], "the phone book of node 0 names '1', and"),
        ([[1], [0, 1]], "custom(2): node 1 would send to itself (its phone book is [0, 1])"),
        ([[0]], "custom(1): node 0 would send to itself"),
        ([[], []], "custom(2): node 0 sends to nobody"),
        ([[1, 2], [0], []], "custom(3): node 2 sends to nobody"),
        ([[1], [0], [0]], "custom(3): nobody sends to node 2"),
        ([[1], [0], [3], [2]], "what node 0 holds never reaches node 2."),
        ([[1], [0], [3, 0], [2]], "what node 0 holds never reaches node 2."),
        ([[1, 2], [0], [3], [2]], "what node 2 holds never reaches node 0."),
    ],
)
@pytest.mark.parametrize("peers", [1, None])
def test_tables(table, message, peers):
    with refused(message):
        TABLE(table, peers_per_step=peers)


@pytest.mark.parametrize(
    ("peers", "message"),
    [
        (0, "`peers_per_step` must be an int >= 1, got 0."),
        (2.0, "`peers_per_step` must be an int >= 1, got 2.0."),
        (2, "must be at most 1, the length of the phone book row of node 2 in mine(3), got 2."),
    ],
)
def test_peers_per_step_of_tables(peers, message):
    with refused(message):
        TABLE([[1, 2], [2, 0], [0]], peers_per_step=peers, name="mine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 1, None), "`phone_book` must hold one sequence of peers per node, got None."),
        ((3, 1, [[1], [0]]), "custom: the phone book must have one row per node, got 2 rows for"),
        ((2, 2, [[1], [0]]), "`peers_per_step` must be at most 1, the peers in the phone book of"),
        # Only the first peers get a turn, and over these 0 and 1 never hear of 2 and 3.
        ((4, 1, [[1, 2], [0, 3], [3, 0], [2, 1]], False), "node 0 holds never reaches node 2."),
        ((3, 1, [[1, 2], [0], [0]], False), "nobody sends to node 2"),
        (
            (4, 1, [[1, 2], [2], [3], [0]], True, True),
            "custom(4): a bipartite graph joins even with odd nodes, and node 0 would send to 2.",
        ),
    ],
)
def test_graphs_made_directly(arguments, message):
    with refused(message):
        topology.Graph(*arguments)


def test_rotations_without_an_end():
    rows = [[(i + d) % 20 for d in range(1, 2 + i % 17)] for i in range(20)]
    with refused("custom(20): a rotation must have at most 10000 exchanges, and rows of lengths"):
        TABLE(rows)
    with refused(f"take {math.lcm(*range(1, 18))} until all start over together"):
        TABLE(rows)
    assert TABLE(rows, None).num_rounds == 1
