"""What `sgp` reads off a graph and a mixing before anything runs."""

import numpy as np
import pytest

import jaxslowmo as js
from jaxslowmo.algorithms._gossip import gossip_plan


def plan(graph, mixing=None, overlap=0, push_sum=True):
    return gossip_plan("sgp", graph, mixing, push_sum=push_sum, overlap=overlap)


def keep_more_at_node_0(graph, step):
    """Doubly stochastic, though node 0 keeps more: a swap of little between 0 and 1."""
    matrix = js.topology.mixing_matrix(graph, None, step)
    matrix[:2, :2] = [[0.9, 0.1], [0.1, 0.9]]
    return matrix


@pytest.mark.parametrize(
    ("graph", "mixing", "overlap", "moves", "differs"),
    [
        (js.topology.ring(4), None, 0, False, False),
        (js.topology.ring(4), None, 1, False, False),
        (js.topology.ring(4), None, 2, True, False),  # what is in flight is missing everywhere
        (js.topology.ring(4), js.topology.self_weighted(0.7), 0, False, False),
        (js.topology.ring(4), js.topology.self_weighted([0.7, 0.5, 0.5, 0.5]), 0, True, True),
        (js.topology.star(4), None, 0, True, True),
        (js.topology.star(2), None, 0, False, False),
        (js.topology.random_matching(4), None, 2, True, False),
        (js.topology.ring(1), None, 3, False, False),
    ],
)
def test_weights_move_and_travel_only_where_they_can(graph, mixing, overlap, moves, differs):
    found = plan(graph, mixing, overlap)
    assert (found.weight_moves, found.weight_differs) == (moves, differs)
    assert len(found.rounds) == (0 if graph.num_nodes == 1 else graph.num_rounds)


def test_uneven_keeping_makes_weights_differ_only_where_arrivals_are_late():
    graph = js.topology.from_phone_book([[1], [0]], 1)
    assert not plan(graph, keep_more_at_node_0).weight_moves
    uneven = js.topology.from_phone_book([[1, 2], [0, 2], [0, 1]], None)

    def metropolis(graph, step):
        return np.array([[0.5, 0.25, 0.25], [0.25, 0.4, 0.35], [0.25, 0.35, 0.4]])

    assert not plan(uneven, metropolis).weight_moves
    assert not plan(uneven, metropolis, overlap=1).weight_moves
    assert plan(uneven, metropolis, overlap=2).weight_differs


def test_weights_that_float32_cannot_hold_are_refused():
    with pytest.raises(ValueError, match=r"weights must stay above 1e-30.*star\(128\).* 1e-38"):
        plan(js.topology.star(128, peers_per_step=1))
    smallest = js.topology.analyse(js.topology.star(64, peers_per_step=1)).weight_range
    assert smallest is not None
    assert 1e-30 < smallest[0] < 1e-15
    plan(js.topology.star(64, peers_per_step=1))
