"""Tests of each graph, worked by hand, and of properties of all graphs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo import topology
from topology.graphs import (
    ALL_AT_ONCE,
    FAIRSCALE,
    IRREGULAR,
    MOST_NODES,
    NAMED,
    PAIRED,
    comes_round,
    named_graphs,
    refused,
)

TABLE = topology.from_phone_book
RING = topology.ring(3)

# Peers of node 0, in the order of their turns.
BY_HAND = {
    "npeer_directed_exponential": (topology.npeer_directed_exponential(10), [1, 2, 4, 8]),
    "npeer, 3 peers": (
        topology.npeer_directed_exponential(17, peers_per_step=3),
        [1, 2, 3, 4, 8, 12, 16, 15, 14],
    ),
    "directed_exponential": (topology.directed_exponential(10), [1, 9, 2, 8, 4, 6, 8, 2]),
    "bipartite_exponential": (topology.bipartite_exponential(10), [1, 9, 3, 7, 5, 5, 9, 1]),
    "directed_linear": (topology.directed_linear(7), [1, 6, 3, 4, 5, 2]),
    "bipartite_linear": (topology.bipartite_linear(6), [1, 5, 3, 3, 5, 1]),
    "ring": (topology.ring(10), [1, 9]),
    "symmetric_exponential": (topology.symmetric_exponential(16), [1, 15, 2, 14, 4, 12, 8]),
    "symmetric_exponential, odd": (topology.symmetric_exponential(7), [1, 6, 2, 5]),
    "complete": (topology.complete(5), [1, 2, 3, 4]),
}


@pytest.mark.parametrize(("graph", "row"), BY_HAND.values(), ids=list(BY_HAND))
def test_vertex_transitive_graphs_have_the_same_distances_from_every_node(graph, row):
    size = graph.num_nodes
    expected = tuple(tuple((node + peer) % size for peer in row) for node in range(size))
    assert graph.phone_book == expected


def test_a_grid_connects_each_node_to_its_neighbours():
    #  0  1  2  3
    #  4  5  6  7
    #  8  9 10 11
    graph = topology.grid_2d(12)
    assert graph.phone_book == (
        (1, 4),
        (2, 0, 5),
        (3, 1, 6),
        (2, 7),
        (5, 8, 0),
        (6, 4, 9, 1),
        (7, 5, 10, 2),
        (6, 11, 3),
        (9, 4),
        (10, 8, 5),
        (11, 9, 6),
        (10, 7),
    )
    assert graph.out_peers(5) == graph.phone_book
    assert (graph.is_dynamic, graph.is_regular, len(graph.permutations(0))) == (False, False, 4)


def test_a_torus_wraps_around_both_sides():
    graph = topology.torus_2d(12)
    assert graph.phone_book == (
        (1, 3, 4, 8),
        (2, 0, 5, 9),
        (3, 1, 6, 10),
        (0, 2, 7, 11),
        (5, 7, 8, 0),
        (6, 4, 9, 1),
        (7, 5, 10, 2),
        (4, 6, 11, 3),
        (9, 11, 0, 4),
        (10, 8, 1, 5),
        (11, 9, 2, 6),
        (8, 10, 3, 7),
    )
    assert (graph.is_dynamic, graph.is_regular, len(graph.permutations(0))) == (False, True, 4)


def test_rows_set_the_shape_of_grids_and_tori():
    assert topology.grid_2d(12, rows=1).phone_book[:2] == ((1,), (2, 0))
    assert topology.grid_2d(12, rows=4).phone_book[4] == (5, 3, 7, 1)
    # Both ways around are the same neighbour on two rows; one row has none above.
    assert topology.torus_2d(8, rows=2).phone_book[0] == (1, 3, 4)
    assert topology.torus_2d(5).phone_book[0] == (1, 4)
    assert topology.torus_2d(36).phone_book[7] == (8, 6, 13, 1)


def test_a_star_connects_the_first_node_to_all_others():
    graph = topology.star(4)
    assert graph.phone_book == ((1, 2, 3), (0,), (0,), (0,))
    assert (graph.is_regular, len(graph.permutations(0)), graph.num_rounds) == (False, 3, 1)
    in_turn = topology.star(4, peers_per_step=1)
    assert [in_turn.out_peers(step)[0] for step in range(4)] == [(1,), (2,), (3,), (1,)]
    assert not in_turn.is_regular
    assert topology.star(2).is_regular


def test_levels_are_counted_in_integers():
    """The logarithm of 243 to base 3 is less than 5 in floating point."""
    assert topology.npeer_directed_exponential(244, peers_per_step=2).phone_book[0] == tuple(
        j * 3**i % 244 for i in range(6) for j in (1, 2)
    )
    assert topology.npeer_directed_exponential(243, peers_per_step=2).num_rounds == 5


@pytest.mark.parametrize(("groups", "size"), [(2, 4), (3, 4), (4, 4), (5, 3), (3, 1)])
def test_inner_outer_leaves_a_group_in_every_sweep_once(groups, size):
    graph = topology.inner_outer(groups * size, group_size=size)
    sweep, outer = (size - 1).bit_length(), (groups - 1).bit_length()
    assert graph.num_rounds == (sweep + 1) * outer
    for step in range(graph.num_rounds):
        turn, place = divmod(step, sweep + 1)
        for node, (peer,) in enumerate(graph.out_peers(step)):
            if place < sweep:
                assert peer // size == node // size
                assert (peer - node) % size == 2**place
            else:
                assert peer % size == node % size
                assert (peer // size - node // size) % groups == 2**turn


def test_inner_outer_takes_one_group_and_a_default_size():
    assert topology.inner_outer(4, group_size=4).phone_book[1] == (2, 3)
    by_default = topology.inner_outer(12)  # groups of 3
    assert by_default.phone_book[4] == (5, 3, 7, 5, 3, 10)


@given(st.integers(1, 16).map(lambda n: 2 * n), st.integers(0, 99), st.integers(1, 3))
def test_matchings_pair_all_nodes_and_depend_on_the_seed_alone(num_nodes, seed, peers):
    graph = topology.random_matching(num_nodes, seed=seed, peers_per_step=peers)
    assert graph == topology.random_matching(num_nodes, seed=seed, peers_per_step=peers)
    rows = np.array(graph.phone_book)
    assert rows.shape == (num_nodes, max(2 * (num_nodes - 1).bit_length(), peers))
    for partner in rows.T:
        assert np.array_equal(partner[partner], np.arange(num_nodes))
        assert np.all(partner != np.arange(num_nodes))


def test_seeds_and_rounds_change_the_matchings():
    assert len({topology.random_matching(16, seed=seed) for seed in range(5)}) == 5
    assert len(topology.random_matching(16, num_rounds=3).phone_book[0]) == 3
    assert topology.random_matching(2, peers_per_step=3).phone_book == ((1, 1, 1), (0, 0, 0))


def test_two_matchings_are_drawn_until_they_connect():
    # The union of two matchings is rarely one circle.
    assert topology.random_matching(64, num_rounds=2).num_rounds == 2


@pytest.mark.parametrize("make", FAIRSCALE.values(), ids=lambda make: make.__name__)
def test_dedupe_keeps_the_first_of_equal_peers(make):
    sizes = range(2, MOST_NODES + 1, 2 if make.__name__ in PAIRED else 1)
    for num_nodes in sizes:
        all_peers, kept = make(num_nodes).phone_book, make(num_nodes, dedupe=True).phone_book
        for row, short in zip(all_peers, kept, strict=True):
            assert list(short) == [peer for i, peer in enumerate(row) if peer not in row[:i]]


def test_dedupe_with_several_peers_fills_the_rounds_anew():
    make = topology.npeer_directed_exponential
    both = [make(5, peers_per_step=2, dedupe=dedupe) for dedupe in (False, True)]
    assert [graph.phone_book[0] for graph in both] == [(1, 2, 3, 1), (1, 2, 3)]
    assert [graph.num_rounds for graph in both] == [2, 3]


@pytest.mark.parametrize("name", NAMED)
@given(st.data())
def test_named_graphs_have_the_properties_of_their_names(name, data):
    graph = data.draw(named_graphs([name]))
    assert graph.name == name
    assert graph.is_bipartite == graph.name.startswith("bipartite")
    if graph.is_bipartite:
        assert all((p - n) % 2 for n, row in enumerate(graph.phone_book) for p in row)
    if graph.name not in IRREGULAR:
        assert graph.is_regular
    if graph.name == "ring":
        assert not graph.is_dynamic


@given(st.sampled_from(ALL_AT_ONCE), st.integers(1, 33))
def test_all_peers_are_the_default_of_some_graphs(name, num_nodes):
    graph = NAMED[name](num_nodes)
    assert graph.out_peers(0) == graph.phone_book
    assert (graph.is_dynamic, graph.num_rounds) == (False, 1)


@pytest.mark.parametrize("make", NAMED.values(), ids=list(NAMED))
def test_a_single_node_has_nobody_to_send_to(make):
    for options in ({}, {"peers_per_step": 1}, {"peers_per_step": 2}):
        if make is topology.star and options.get("peers_per_step") == 2:
            continue
        graph = make(1, **options)
        assert (graph.phone_book, graph.num_rounds, graph.is_regular) == (((),), 1, True)


@pytest.mark.parametrize("peers", range(1, 8))
def test_npeer_is_refused_exactly_where_a_distance_comes_round(peers):
    for num_nodes in range(2, 20):
        if comes_round(num_nodes, peers):
            with pytest.raises(ValueError, match="would send to themselves"):
                topology.npeer_directed_exponential(num_nodes, peers_per_step=peers)
        else:
            graph = topology.npeer_directed_exponential(num_nodes, peers_per_step=peers)
            assert len(graph.permutations(0)) == peers


@pytest.mark.parametrize("dimensions", range(6))
def test_hypercube_partners_differ_in_one_bit_and_swap(dimensions):
    graph = topology.hypercube(2**dimensions)
    assert graph.num_rounds == max(1, dimensions)
    assert graph.is_regular
    for step in range(dimensions):
        out = graph.out_peers(step)
        assert [peer for (peer,) in out] == [node ^ (1 << step) for node in range(2**dimensions)]
        assert out == graph.in_peers(step)
    product = np.eye(2**dimensions)
    for step in range(dimensions):
        product = topology.mixing_matrix(graph, None, step) @ product
    np.testing.assert_allclose(product, np.full_like(product, 2.0**-dimensions))


def test_a_hypercube_takes_two_peers_per_step_in_turn():
    graph = topology.hypercube(8, peers_per_step=2)
    assert [graph.out_peers(step)[0] for step in range(3)] == [(1, 2), (4, 1), (2, 4)]


@pytest.mark.parametrize("size", [3, 6, 12])
def test_hypercubes_of_other_sizes_are_refused(size):
    message = f"hypercube: `num_nodes` must be a power of 2.*got {size}"
    with pytest.raises(ValueError, match=message):
        topology.hypercube(size)


@pytest.mark.parametrize("make", NAMED.values(), ids=list(NAMED))
def test_sizes_that_are_no_counts_are_refused(make):
    sizes = [0, -4, 4.0, math.inf, math.nan, True, "4", None, np.True_, np.float32(4)]
    for size in sizes:
        with refused(f"`num_nodes` must be an int >= 1, got {size!r}."):
            make(size)


@pytest.mark.parametrize("make", NAMED.values(), ids=list(NAMED))
def test_sizes_may_be_integers_of_numpy(make):
    graph = make(np.int64(4), peers_per_step=np.uint8(1))
    assert graph == make(4, peers_per_step=1)
    assert (type(graph.num_nodes), type(graph.peers_per_step)) == (int, int)


def test_other_arguments_may_be_integers_of_numpy():
    four = np.int32(4)
    assert topology.grid_2d(8, rows=four) == topology.grid_2d(8, rows=4)
    assert topology.inner_outer(8, group_size=four) == topology.inner_outer(8, group_size=4)
    assert topology.random_matching(8, seed=four, num_rounds=four) == topology.random_matching(
        8, seed=4, num_rounds=4
    )
    assert TABLE([[1], [0]], np.int64(1)) == TABLE([[1], [0]])
    assert topology.Graph(np.int64(2), np.int64(1), ((1,), (0,))) == TABLE([[1], [0]])
    assert topology.analyse(RING).error(four) == topology.analyse(RING).error(4)


@pytest.mark.parametrize("make", NAMED.values(), ids=list(NAMED))
def test_peers_per_step_that_are_no_counts_are_refused(make):
    for num_nodes in (1, 8):
        for peers in (0, -1, 1.0, True, "1"):
            with refused(f"`peers_per_step` must be an int >= 1, got {peers!r}."):
                make(num_nodes, peers_per_step=peers)


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("directed_exponential", 6),
        ("bipartite_exponential", 6),
        ("directed_linear", 8),
        ("bipartite_linear", 8),
        ("ring", 2),
        ("symmetric_exponential", 5),
        ("complete", 7),
        ("inner_outer", 4),
        ("torus_2d", 3),
        ("grid_2d", 2),
        ("star", 1),
    ],
)
def test_more_peers_than_the_phone_book_has_are_refused(name, entries):
    NAMED[name](8, peers_per_step=entries)
    with refused(f"`peers_per_step` must be at most {entries}, ") as caught:
        NAMED[name](8, peers_per_step=entries + 1)
    assert str(caught.value).endswith(f"{name}(8), got {entries + 1}.")


def test_more_peers_than_there_are_matchings_are_refused():
    with refused("`peers_per_step` must be at most 3, the length of the phone book row of node 0"):
        topology.random_matching(8, num_rounds=3, peers_per_step=4)


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("num_nodes", [3, 5, 33])
def test_odd_numbers_of_nodes_are_refused_in_pairs(name, num_nodes):
    with refused(f"{name}: `num_nodes` must be even, since") as caught:
        NAMED[name](num_nodes)
    assert str(caught.value).endswith(f"got {num_nodes}.")


@pytest.mark.parametrize(("num_nodes", "loop"), [(2, 2), (6, 6)])
def test_distances_that_come_round_are_refused(num_nodes, loop):
    with refused(f"multiple of `num_nodes`={num_nodes}, where nodes would send to themselves"):
        topology.npeer_directed_exponential(num_nodes, peers_per_step=2)
    with refused(f"`peers_per_step`=2 gives {loop}."):
        topology.npeer_directed_exponential(num_nodes, peers_per_step=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: topology.grid_2d(12, rows=5), "`rows` must divide `num_nodes`=12, got 5."),
        (lambda: topology.torus_2d(12, rows=24), "`rows` must divide `num_nodes`=12, got 24."),
        (lambda: topology.torus_2d(12, rows=0), "`rows` must be an int >= 1, got 0."),
        (lambda: topology.grid_2d(12, rows=3.0), "`rows` must be an int >= 1, got 3.0."),
        (
            lambda: topology.inner_outer(8, group_size=3),
            "`group_size` must divide `num_nodes`=8, got 3.",
        ),
        (
            lambda: topology.inner_outer(8, group_size=-2),
            "`group_size` must be an int >= 1, got -2.",
        ),
        (
            lambda: topology.random_matching(8, num_rounds=0),
            "`num_rounds` must be an int >= 1, got 0.",
        ),
        (
            lambda: topology.random_matching(8, num_rounds=1),
            "`num_rounds` must be at least 2 to connect 8 nodes, got 1.",
        ),
        (
            lambda: topology.random_matching(1, num_rounds=2.5),
            "`num_rounds` must be an int >= 1, got 2.5.",
        ),
        (lambda: topology.random_matching(8, seed=-1), "`seed` must be an int >= 0, got -1."),
        (lambda: topology.random_matching(8, seed=None), "`seed` must be an int >= 0, got None."),
    ],
)
def test_bad_arguments_of_single_graphs_are_refused(make, message):
    with refused(message):
        make()


def test_matchings_that_never_connect_are_refused(monkeypatch):
    monkeypatch.setattr(topology.graphs._from_rows, "_DRAWS", 0)
    with refused("2 matchings did not connect 8 nodes in 0 draws; give a larger `num_rounds`."):
        topology.random_matching(8, num_rounds=2)
