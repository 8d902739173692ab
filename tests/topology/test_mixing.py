"""Mixing weights: by hand, and what every mixing must be; rounds amount to their matrices."""

import numpy as np
from hypothesis import given

from jaxslowmo import topology
from topology.graphs import any_graphs, mixings


def test_a_peer_that_is_named_twice_gets_two_shares_one_per_permutation():
    graph = topology.ring(2, peers_per_step=2)
    expected = np.array([[1, 2], [2, 1]]) / 3
    np.testing.assert_allclose(topology.mixing_matrix(graph, None, 0), expected, rtol=1e-15)
    (found,) = topology.exchange_rounds(graph)
    assert found.permutations == (((0, 1), (1, 0)),) * 2
    np.testing.assert_allclose(found.received, np.full((2, 2), 1 / 3), rtol=1e-15)


def test_self_weighted_by_hand():
    graph = topology.from_phone_book([[1, 2], [0], [1]], None)
    one = topology.mixing_matrix(graph, topology.self_weighted(0.6), 0)
    np.testing.assert_allclose(one, [[0.6, 0.4, 0], [0.2, 0.6, 0.4], [0.2, 0, 0.6]], rtol=1e-15)
    keep = np.array([0.5, 0.75, 0.125])
    mixing = topology.self_weighted(keep)
    keep[:] = 2  # the shares are taken when they are given
    each = topology.mixing_matrix(graph, mixing, 0)
    np.testing.assert_array_equal(each, [[0.5, 0.25, 0], [0.25, 0.75, 0.875], [0.25, 0, 0.125]])


@given(any_graphs, mixings)
def test_rounds_are_the_mixing_matrices_whose_columns_sum_to_one(graph, mixing):
    rounds = topology.exchange_rounds(graph, mixing)
    assert len(rounds) == graph.num_rounds
    for step, found in enumerate(rounds[:12]):
        matrix = topology.mixing_matrix(graph, mixing, step)
        assert matrix.dtype == np.float64
        np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=1e-14)
        edges = {(node, node) for node in range(graph.num_nodes)}
        edges |= {(k, i) for i, peers in enumerate(graph.out_peers(step)) for k in peers}
        assert {(int(k), int(i)) for k, i in np.argwhere(matrix > 0)} == edges

        assert found.permutations == graph.permutations(step)
        assert found.received.shape == (len(found.permutations), graph.num_nodes)
        rebuilt = np.diag(found.kept)
        for permutation, weights in zip(found.permutations, found.received, strict=True):
            for source, destination in permutation:
                rebuilt[destination, source] += weights[destination]
            silent = set(range(graph.num_nodes)) - {destination for _, destination in permutation}
            assert np.all(weights[list(silent)] == 0)
        np.testing.assert_allclose(rebuilt, matrix, rtol=1e-14)
        ones = bool(np.all(np.abs(matrix.sum(axis=1) - 1) < 1e-9))
        assert found.is_doubly_stochastic is ones
        assert ones or not (graph.is_regular and mixing is None)
