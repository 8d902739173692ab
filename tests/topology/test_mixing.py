"""Mixing weights: by hand, and what every mixing must be."""

import math

import numpy as np
import pytest
from hypothesis import given

from jaxslowmo import topology
from topology.graphs import any_graphs, mixings, refused

RING = topology.ring(3)

STAR = [[0.25, 0.5, 0.5, 0.5], [0.25, 0.5, 0, 0], [0.25, 0, 0.5, 0], [0.25, 0, 0, 0.5]]


@pytest.mark.parametrize("mixing", [None, topology.uniform_mixing()])
def test_uniform_by_hand(mixing):
    ring = topology.mixing_matrix(topology.ring(3, peers_per_step=1), mixing, 0)
    np.testing.assert_array_equal(ring, [[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]])
    star = topology.mixing_matrix(topology.star(4), mixing, 0)
    np.testing.assert_array_equal(star, STAR)


def test_uniform_follows_the_rotation():
    graph = topology.npeer_directed_exponential(4)
    for step, distance in [(0, 1), (1, 2), (2, 1), (3, 2)]:
        expected = (np.eye(4) + np.roll(np.eye(4), distance, axis=0)) / 2
        np.testing.assert_array_equal(topology.mixing_matrix(graph, None, step), expected)


def test_a_peer_that_is_named_twice_gets_two_shares():
    graph = topology.ring(2, peers_per_step=2)
    assert graph.phone_book == ((1, 1), (0, 0))
    expected = np.array([[1, 2], [2, 1]]) / 3
    np.testing.assert_allclose(topology.mixing_matrix(graph, None, 0), expected, rtol=1e-15)


def test_self_weighted_by_hand():
    graph = topology.from_phone_book([[1, 2], [0], [1]], None)
    one = topology.mixing_matrix(graph, topology.self_weighted(0.6), 0)
    np.testing.assert_allclose(one, [[0.6, 0.4, 0], [0.2, 0.6, 0.4], [0.2, 0, 0.6]], rtol=1e-15)
    each = topology.mixing_matrix(graph, topology.self_weighted([0.5, 0.75, 0.125]), 0)
    np.testing.assert_array_equal(each, [[0.5, 0.25, 0], [0.25, 0.75, 0.875], [0.25, 0, 0.125]])


def test_shares_are_taken_when_given():
    keep = np.array([0.5, 0.5, 0.5])
    mixing = topology.self_weighted(keep)
    keep[:] = 2
    topology.mixing_matrix(topology.ring(3), mixing, 0)


@pytest.mark.parametrize("mixing", [None, topology.self_weighted(0.25)])
def test_a_single_node_keeps_all(mixing):
    assert topology.mixing_matrix(topology.ring(1), mixing, 0) == [[1.0]]


@given(any_graphs, mixings())
def test_columns_sum_to_one_on_the_edges_of_the_round(graph, mixing):
    for step in range(min(graph.num_rounds, 6)):
        matrix = topology.mixing_matrix(graph, mixing, step)
        assert matrix.dtype == np.float64
        np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=1e-14)
        edges = {(node, node) for node in range(graph.num_nodes)}
        edges |= {(k, i) for i, peers in enumerate(graph.out_peers(step)) for k in peers}
        assert {(int(k), int(i)) for k, i in np.argwhere(matrix > 0)} == edges


@given(any_graphs)
def test_uniform_weights_of_a_regular_graph_are_doubly_stochastic(graph):
    for step in range(min(graph.num_rounds, 6)):
        sums = topology.mixing_matrix(graph, None, step).sum(axis=1)
        if graph.is_regular:
            np.testing.assert_allclose(sums, 1, rtol=1e-14)


@pytest.mark.parametrize(
    "graph",
    [
        topology.symmetric_exponential(12),
        topology.torus_2d(12, rows=3),
        topology.complete(5),
        topology.random_matching(6),
    ],
    ids=lambda graph: graph.name,
)
def test_uniform_weights_of_undirected_graphs_are_symmetric(graph):
    for step in range(graph.num_rounds):
        matrix = topology.mixing_matrix(graph, None, step)
        np.testing.assert_array_equal(matrix, matrix.T)


def test_weights_may_be_of_lower_precision_and_zero():
    graph = topology.complete(3)

    def thirds(graph, step):
        return np.full((3, 3), 1 / 3, np.float32)

    assert topology.mixing_matrix(graph, thirds, 0).dtype == np.float64
    # A node may keep nothing, and not use an edge.
    shift = np.roll(np.eye(3), 1, axis=0)
    np.testing.assert_array_equal(topology.mixing_matrix(graph, lambda g, s: shift, 0), shift)


@pytest.mark.parametrize(
    "keep",
    [0, 1, 0.0, 1.0, -0.5, 1.5, math.nan, math.inf, None, [], [0.5, 1.0, 0.5], [[0.5]], True],
    ids=repr,
)
def test_shares_to_keep(keep):
    with refused("`keep` must lie strictly between 0 and 1, one share or one per node, got"):
        topology.self_weighted(keep)


@pytest.mark.parametrize("keep", ["half", {}, [0.5, [0.5]]], ids=repr)
def test_shares_that_are_no_numbers(keep):
    with refused(f"`keep` must hold real numbers, got {keep!r}."):
        topology.self_weighted(keep)


def test_number_of_shares():
    with refused("`keep` must be one share, or one per node of ring(3), got 2."):
        topology.mixing_matrix(RING, topology.self_weighted([0.5, 0.5]), 0)


HALVES = np.array([[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]])


def changed(*entries):
    matrix = HALVES.copy()
    for row, column, value in entries:
        matrix[row, column] = value
    return matrix


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (HALVES[:2], "P must have shape (3, 3), got (2, 3)."),
        (np.eye(4), "P must have shape (3, 3), got (4, 4)."),
        (None, "P must have shape (3, 3), got ()."),
        ("halves", "must hold real numbers, got 'halves'."),
        (HALVES + 0j, "must hold real numbers, got array(["),
        ([[1, 2j], [1, 0]], "must hold real numbers, got [[1, 2j]"),
        ([[1], [1, 2]], "must hold real numbers, got [[1], [1, 2]]."),
        (changed((1, 0, math.nan)), "must be finite and >= 0, got P[1, 0] = nan."),
        (changed((1, 0, math.inf)), "must be finite and >= 0, got P[1, 0] = inf."),
        (changed((0, 0, 1.5), (1, 0, -0.5)), "must be finite and >= 0, got P[1, 0] = -0.5."),
        (changed((2, 2, 0.6)), "column 2 sums to 1.1."),
        (changed((2, 2, 0.5 - 2e-6)), "every column of P must sum to 1"),
        (HALVES * np.array([[1, 1, 0]]), "column 2 sums to 0."),
        # Sums of rows, not of columns: P is [destination, source].
        (np.array([[0.5, 0, 0.5], [0.25, 0.75, 0], [0, 0.5, 0.5]]), "column 0 sums to 0.75."),
        (
            HALVES.T,
            "P[0, 1] = 0.5, but node 1 does not send to node 0 in that step.",
        ),
        (
            np.array([[0, 0, 0], [1, 0.5, 0], [0, 0.5, 1]]),
            "node 0 keeps nothing and receives nothing, so its push-sum weight would become 0.",
        ),
    ],
)
def test_matrices_that_are_no_mixing(matrix, message):
    for use in (lambda g, m: topology.mixing_matrix(g, m, 0), topology.exchange_rounds):
        with refused(message) as caught:
            use(RING, lambda graph, step: matrix)
        assert "`mixing` at step 0 of ring(3)" in str(caught.value)


def test_a_mixing_that_fits_another_step_only():
    graph = topology.npeer_directed_exponential(4)
    first = topology.mixing_matrix(graph, None, 0)
    with refused("`mixing` at step 1 of npeer_directed_exponential(4): P[0, 3] = 0.5, but node 3"):
        topology.exchange_rounds(graph, lambda graph, step: first)


def test_a_mixing_is_called():
    wanted = "`mixing` must be a callable (graph, step) -> matrix P[destination, source], got "
    for mixing, got in (
        (HALVES, "array("),
        (topology.uniform_mixing, "uniform_mixing, which takes (); did you mean uniform_mixing()?"),
        (topology.self_weighted, "self_weighted, which takes (keep); did you mean self_weighted("),
        (topology.ring, "ring, which takes (num_nodes, peers_per_step, dedupe)."),
    ):
        for use in (topology.exchange_rounds, topology.analyse):
            with refused(wanted + got):
                use(RING, mixing)


TWO_ROUNDS = topology.directed_linear(3)


@pytest.mark.parametrize(
    ("graph", "period", "message"),
    [
        (RING, 2, "of 1 round, since programs hold one rotation; on ring(3) step 1 differs from"),
        (TWO_ROUNDS, 4, "of 2 rounds, since programs hold one rotation; on directed_linear(3) "),
        (TWO_ROUNDS, 4, "step 2 differs from step 0: P[0, 0] = 0.7 after 0.5."),
        (TWO_ROUNDS, 3, "step 2 differs from step 0: P[0, 0] = 0.7 after 0.5."),
    ],
)
def test_a_mixing_that_does_not_repeat_with_the_rotation(graph, period, message):
    def mixing(graph, step):
        return topology.self_weighted(0.5 + 0.1 * (step % period))(graph, step)

    for use in (topology.exchange_rounds, topology.analyse):
        with refused("`mixing` must repeat with the graph's rotation ") as caught:
            use(graph, mixing)
        assert message in str(caught.value)
    topology.mixing_matrix(graph, mixing, 1)


def test_a_mixing_of_another_shape_later():
    with refused("step 1 differs from step 0."):
        topology.exchange_rounds(RING, lambda graph, step: HALVES if step == 0 else np.eye(2))


def test_a_mixing_may_round_otherwise_in_the_next_rotation():
    def mixing(graph, step):
        return topology.self_weighted(0.5 + 1e-9 * step)(graph, step)

    assert np.any(mixing(TWO_ROUNDS, 2) != mixing(TWO_ROUNDS, 0))
    assert len(topology.exchange_rounds(TWO_ROUNDS, mixing)) == 2


def test_columns_may_be_of_float32():
    nearly = changed((2, 2, 0.5 + 5e-7))
    np.testing.assert_array_equal(topology.mixing_matrix(RING, lambda g, s: nearly, 0), nearly)
