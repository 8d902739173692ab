"""Graphs that FairScale lacks worked by hand, and what graphs of a kind have in common."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo import topology
from topology.graphs import ALL_AT_ONCE, IRREGULAR, NAMED, named_graphs

# Peers of node 0, in the order of their turns.
BY_HAND = {
    # 28 is one more than a power of 3.
    "npeer, 28 nodes": (
        topology.npeer_directed_exponential(28, peers_per_step=2),
        [1, 2, 3, 6, 9, 18, 27, 26],
    ),
    "symmetric_exponential": (topology.symmetric_exponential(16), [1, 15, 2, 14, 4, 12, 8]),
    "symmetric_exponential, odd": (topology.symmetric_exponential(7), [1, 6, 2, 5]),
    "complete": (topology.complete(5), [1, 2, 3, 4]),
}


@pytest.mark.parametrize(("graph", "row"), BY_HAND.values(), ids=list(BY_HAND))
def test_circulant_graphs_have_the_same_distances_from_every_node(graph, row):
    size = graph.num_nodes
    expected = tuple(tuple((node + peer) % size for peer in row) for node in range(size))
    assert graph.phone_book == expected


def test_a_grid_connects_each_node_to_its_neighbours():
    #  0  1  2  3
    #  4  5  6  7
    #  8  9 10 11
    graph = topology.grid_2d(12)
    corner_to_corner = ((1, 4), (2, 0, 5), (3, 1, 6), (2, 7))
    middle = ((5, 8, 0), (6, 4, 9, 1), (7, 5, 10, 2), (6, 11, 3))
    assert graph.phone_book == (*corner_to_corner, *middle, (9, 4), (10, 8, 5), (11, 9, 6), (10, 7))
    assert (graph.is_dynamic, graph.is_regular, len(graph.permutations(0))) == (False, False, 4)
    assert topology.grid_2d(12, rows=1).phone_book[:2] == ((1,), (2, 0))
    assert topology.grid_2d(12, rows=4).phone_book[4] == (5, 3, 7, 1)


def test_a_torus_wraps_around_both_sides():
    graph = topology.torus_2d(12)
    assert graph.phone_book[0] == (1, 3, 4, 8)
    assert (graph.is_dynamic, graph.is_regular, len(graph.permutations(0))) == (False, True, 4)
    # Both ways around are the same neighbour on two rows; one row has none above.
    assert topology.torus_2d(8, rows=2).phone_book[0] == (1, 3, 4)
    assert topology.torus_2d(36).phone_book[7] == (8, 6, 13, 1)


def test_a_star_connects_the_first_node_to_all_others():
    graph = topology.star(4)
    assert graph.phone_book == ((1, 2, 3), (0,), (0,), (0,))
    in_turn = topology.star(4, peers_per_step=1)
    assert [in_turn.out_peers(step)[0] for step in range(4)] == [(1,), (2,), (3,), (1,)]
    assert (graph.is_regular, in_turn.is_regular, topology.star(2).is_regular) == (0, 0, 1)


@pytest.mark.parametrize(("groups", "size"), [(4, 4), (5, 3), (1, 4)])
def test_inner_outer_leaves_a_group_in_every_sweep_once(groups, size):
    graph = topology.inner_outer(groups * size, group_size=size)
    sweep, outer = (size - 1).bit_length(), (groups - 1).bit_length()
    assert graph.num_rounds == ((sweep + 1) * outer or sweep)
    for step in range(graph.num_rounds):
        turn, place = divmod(step, sweep + 1)
        for node, (peer,) in enumerate(graph.out_peers(step)):
            if place < sweep:
                assert peer // size == node // size
                assert (peer - node) % size == 2**place
            else:
                assert peer % size == node % size
                assert (peer // size - node // size) % groups == 2**turn


@given(st.integers(1, 16).map(lambda n: 2 * n), st.integers(0, 99), st.integers(1, 3))
def test_matchings_pair_all_nodes_and_depend_on_the_seed_alone(num_nodes, seed, peers):
    graph = topology.random_matching(num_nodes, seed=seed, peers_per_step=peers)
    assert graph == topology.random_matching(num_nodes, seed=seed, peers_per_step=peers)
    rows = np.array(graph.phone_book)
    assert rows.shape == (num_nodes, max(2 * (num_nodes - 1).bit_length(), peers))
    for partner in rows.T:
        assert np.array_equal(partner[partner], np.arange(num_nodes))
        assert np.all(partner != np.arange(num_nodes))


@pytest.mark.parametrize("name", NAMED)
@given(st.data())
def test_named_graphs_have_the_properties_of_their_names(name, data):
    graph = data.draw(named_graphs([name]))
    assert graph.name == name
    assert graph.is_bipartite == name.startswith("bipartite")
    if graph.is_bipartite:
        assert all((p - n) % 2 for n, row in enumerate(graph.phone_book) for p in row)
    assert graph.is_regular or name in IRREGULAR
    assert not (graph.is_dynamic and name == "ring")
    if name in ALL_AT_ONCE:
        whole = NAMED[name](graph.num_nodes)
        assert whole.out_peers(0) == whole.phone_book
        assert (whole.is_dynamic, whole.num_rounds) == (False, 1)
    alone = NAMED[name](1)
    assert (alone.phone_book, alone.num_rounds, alone.is_regular) == (((),), 1, True)
    made = NAMED[name](np.int64(4), peers_per_step=np.uint8(1))
    assert made == NAMED[name](4, peers_per_step=1)
    assert (type(made.num_nodes), type(made.peers_per_step)) == (int, int)
