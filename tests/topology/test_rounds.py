"""Rounds amount to the mixing matrix, keep sums, and lead all nodes to the mean."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo import topology
from topology.graphs import any_graphs, exchange, mixings


@given(any_graphs, mixings())
def test_kept_and_received_are_the_mixing_matrix(graph, mixing):
    rounds = topology.exchange_rounds(graph, mixing)
    assert len(rounds) == graph.num_rounds
    for step, found in enumerate(rounds[:12]):
        assert found.permutations == graph.permutations(step)
        assert found.received.shape == (len(found.permutations), graph.num_nodes)
        rebuilt = np.diag(found.kept)
        for permutation, weights in zip(found.permutations, found.received, strict=True):
            for source, destination in permutation:
                rebuilt[destination, source] += weights[destination]
            silent = set(range(graph.num_nodes)) - {destination for _, destination in permutation}
            assert np.all(weights[list(silent)] == 0)
        matrix = topology.mixing_matrix(graph, mixing, step)
        np.testing.assert_allclose(rebuilt, matrix, rtol=1e-14)
        ones = bool(np.all(np.abs(matrix.sum(axis=1) - 1) < 1e-9))
        assert found.is_doubly_stochastic is ones


@given(any_graphs, mixings(), st.integers(0, 999))
def test_sums_are_kept_and_weights_stay_positive(graph, mixing, seed):
    x = np.random.default_rng(seed).normal(size=graph.num_nodes)
    w = np.ones(graph.num_nodes)
    total = x.sum()
    for found in topology.exchange_rounds(graph, mixing)[:40]:
        before = w
        x, w = exchange(found, x), exchange(found, w)
        assert abs(x.sum() - total) < 1e-12
        assert abs(w.sum() - graph.num_nodes) < 1e-12
        assert np.all(w > 0)
        if found.is_doubly_stochastic and np.all(before == 1):
            np.testing.assert_allclose(w, 1, rtol=1e-14)


@given(any_graphs, mixings(), st.integers(0, 999))
def test_the_debiased_values_approach_the_mean(graph, mixing, seed):
    x = np.random.default_rng(seed).normal(size=graph.num_nodes)
    state = np.stack([x, np.ones(graph.num_nodes)], axis=1)
    rotation = np.eye(graph.num_nodes)
    for step in range(graph.num_rounds):
        rotation = topology.mixing_matrix(graph, mixing, step) @ rotation
    for _ in range(14):  # 2**14 rotations
        rotation = rotation @ rotation
        rotation /= rotation.sum(axis=0)  # of rounding errors
    after = rotation @ state
    np.testing.assert_allclose(after[:, 0] / after[:, 1], x.mean(), atol=1e-9)


@pytest.mark.parametrize("mixing", [None, topology.self_weighted(0.7)])
def test_exchanges_one_by_one_approach_the_mean(mixing):
    graph = topology.from_phone_book([[1, 2, 3], [2, 2], [0], [1, 0]])
    x, w = np.array([3.0, -1, 4, 10]), np.ones(4)
    moved = 0.0
    rounds = topology.exchange_rounds(graph, mixing)
    for step in range(300):
        x, w = exchange(rounds[step % len(rounds)], x), exchange(rounds[step % len(rounds)], w)
        moved = max(moved, np.abs(w - 1).max())
    assert moved > 0.3  # in-degrees differ, so only de-biased values agree
    np.testing.assert_allclose(x / w, 4, rtol=1e-12)


@pytest.mark.parametrize("peers", [1, 2, 3])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_npeer_reaches_the_exact_mean_in_its_levels(peers, levels):
    graph = topology.npeer_directed_exponential((peers + 1) ** levels, peers_per_step=peers)
    assert graph.num_rounds == levels
    np.testing.assert_allclose(error_after(graph, levels), 0, atol=1e-15)
    if levels > 1:
        assert error_after(graph, levels - 1) > 0.1


@pytest.mark.parametrize("num_nodes", [2, 3, 7, 16])
def test_complete_reaches_the_exact_mean_at_once(num_nodes):
    np.testing.assert_allclose(error_after(topology.complete(num_nodes), 1), 0, atol=1e-15)


def error_after(graph: topology.Graph, exchanges: int) -> float:
    values = np.random.default_rng(0).normal(size=graph.num_nodes)
    mean = values.mean()
    for found in topology.exchange_rounds(graph)[:exchanges]:
        values = exchange(found, values)
    return float(np.abs(values - mean).max())


def test_weights_of_an_edge_that_occurs_twice_are_split():
    found = topology.exchange_rounds(topology.ring(2, peers_per_step=2))[0]
    assert found.permutations == (((0, 1), (1, 0)),) * 2
    np.testing.assert_allclose(found.received, np.full((2, 2), 1 / 3), rtol=1e-15)
    np.testing.assert_allclose(found.kept, [1 / 3, 1 / 3], rtol=1e-15)
    assert found.is_doubly_stochastic


def test_a_star_by_hand():
    (found,) = topology.exchange_rounds(topology.star(3))
    assert len(found.permutations) == 2
    np.testing.assert_allclose(found.kept, [1 / 3, 1 / 2, 1 / 2])
    assert not found.is_doubly_stochastic
    x, w = exchange(found, np.array([3.0, 0, 6])), exchange(found, np.ones(3))
    np.testing.assert_allclose(x, [1 + 0 + 3, 1 + 0, 1 + 3])
    np.testing.assert_allclose(w, [1 / 3 + 1, 1 / 3 + 1 / 2, 1 / 3 + 1 / 2])


def test_a_mixing_is_asked_for_two_rotations_side_by_side():
    asked = []

    def mixing(graph, step):
        asked.append(step)
        return topology.uniform_mixing()(graph, step)

    topology.exchange_rounds(topology.directed_exponential(8), mixing)
    assert asked == [0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]


def test_a_mixing_may_be_a_table_of_one_rotation():
    graph = topology.directed_exponential(4)
    table = [topology.self_weighted(keep) for keep in (0.2, 0.3, 0.4, 0.5)]
    rounds = topology.exchange_rounds(graph, lambda graph, step: table[step](graph, step))
    assert [r.kept[0] for r in rounds] == [0.2, 0.3, 0.4, 0.5]


def test_a_single_node_has_a_round_without_permutations():
    (found,) = topology.exchange_rounds(topology.npeer_directed_exponential(1))
    assert (found.permutations, found.received.shape, found.kept) == ((), (0, 1), [1.0])


def test_rounds_are_told_apart_by_identity():
    one, other = (topology.exchange_rounds(topology.ring(3))[0] for _ in range(2))
    assert one != other
    assert len({one, other}) == 2
