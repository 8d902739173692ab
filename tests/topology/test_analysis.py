"""What `analyse` says of a graph, against direct products and a simulation."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo import topology
from jaxslowmo.topology import analyse, ring, self_weighted
from topology.graphs import custom_graphs, mixings, named_graphs


def matrices_of(graph, mixing):
    return [topology.mixing_matrix(graph, mixing, step) for step in range(graph.num_rounds)]


def brute_force_errors(graph, mixing, count):
    """Errors by the definition, with everything multiplied out."""
    n = graph.num_nodes
    product, found = np.eye(n), []
    rounds = itertools.cycle(matrices_of(graph, mixing))
    for _ in range(count + 1):
        weights = product.sum(axis=1)
        found.append(np.linalg.norm(product / weights[:, None] - 1 / n, 2))
        product = next(rounds) @ product
    return np.array(found)


cases = st.tuples(named_graphs(most=9) | custom_graphs(), mixings)


@given(cases, st.sampled_from([0.5, 1e-2, 1e-3, 1e-6]))
def test_errors_and_rounds_are_those_of_the_definition(case, tolerance):
    graph, mixing = case
    found = analyse(graph, mixing, tolerance=tolerance)
    assert found.mixes
    rounds = found.rounds_to_tolerance
    assert rounds is not None
    errors = brute_force_errors(graph, mixing, rounds + 3)
    np.testing.assert_allclose(found.errors(rounds + 3), errors, rtol=1e-6, atol=1e-13)
    # By powers of the rotation, the same.
    for t in (0, 1, rounds, rounds + 3):
        assert found.error(t) == pytest.approx(errors[t], rel=1e-6, abs=1e-13)
    assert errors[rounds] <= tolerance * (1 + 1e-6)
    assert np.all(errors[:rounds] > tolerance * (1 - 1e-6))


@given(cases)
def test_facts_are_those_of_the_matrices_and_weights_those_of_a_simulation(case):
    graph, mixing = case
    found = analyse(graph, mixing, model_bytes=1000)
    matrices = matrices_of(graph, mixing)
    for step, matrix in enumerate(matrices):
        np.testing.assert_array_equal(found.matrix(step), matrix)
        np.testing.assert_array_equal(found.matrix(step + graph.num_rounds), matrix)
    rows = [np.allclose(matrix.sum(axis=1), 1) for matrix in matrices]
    assert list(found.doubly_stochastic) == rows
    assert found.weights_move is not all(rows)
    product = np.linalg.multi_dot([np.eye(graph.num_nodes)] * 2 + matrices[::-1])
    np.testing.assert_allclose(found.product, product, atol=1e-12)
    permutes = [len(graph.permutations(step)) for step in range(graph.num_rounds)]
    assert found.permutes == tuple(permutes)
    assert (found.permutes_mean, found.permutes_max) == (np.mean(permutes), max(permutes))
    for step in range(graph.num_rounds):
        assert found.messages == tuple(map(len, graph.out_peers(step)))
    size = 1004 if found.weights_move else 1000
    assert found.bytes_max == max(found.messages) * size
    assert found.bytes_mean == pytest.approx(np.mean(found.messages) * size)

    weights, seen = np.ones(graph.num_nodes), []
    for _ in range(5 * found.rounds_to_tolerance // graph.num_rounds + 5):
        seen = []
        for matrix in matrices:
            seen.append(weights)
            weights = matrix @ weights
    assert found.weight_range == pytest.approx((np.min(seen), np.max(seen)), rel=1e-6)


def test_tiny_weights_keep_their_digits():
    """The centre serves one leaf after the other, and a leaf halves until its turn comes."""
    found = analyse(topology.star(100, peers_per_step=1))
    assert found.weight_range == pytest.approx((50 / (2.0**99 - 1), 50), rel=1e-9, abs=0)
    rounds = found.rounds_to_tolerance
    assert found.error(rounds) <= 1e-3 < found.error(rounds - 1)


def keeping_nothing(graph, step):
    matrix = np.zeros((graph.num_nodes, graph.num_nodes))
    for source, peers in enumerate(graph.out_peers(step)):
        matrix[list(peers), source] = 1 / len(peers)
    return matrix


def test_nodes_that_keep_nothing_and_swap_for_ever_never_agree():
    for graph in (ring(4, peers_per_step=2), ring(7), topology.npeer_directed_exponential(8)):
        found = analyse(graph, keeping_nothing)
        assert (found.mixes, found.rounds_to_tolerance) == (False, None)
        assert found.second_eigenvalue == pytest.approx(1)
        assert found.error(10**6) == pytest.approx(1)
        assert "never" in str(found)
    assert analyse(ring(5, peers_per_step=2), keeping_nothing).mixes


def test_slow_mixing_is_counted_without_walking_there():
    """Keeping 1 - 2^-40 of everything: 3e13 rounds."""
    found = analyse(ring(2), self_weighted(1 - 2.0**-40), tolerance=1e-3)
    assert found.rounds_to_tolerance == pytest.approx(np.log(1e3) * 2.0**39, rel=1e-3)
