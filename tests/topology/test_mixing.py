"""Mixing weights: by hand, and what every mixing must be."""

import numpy as np
import pytest
from hypothesis import given

from jaxslowmo import topology
from topology.graphs import any_graphs, mixings

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
