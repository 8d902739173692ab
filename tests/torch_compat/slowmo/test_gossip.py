"""Graphs and mixings of stochastic gradient push, in all forms, and those that cannot work."""

import numpy as np
import pytest
import torch

from jaxslowmo import topology
from torch_compat.slowmo._gossip import plan_gossip


class Edge:
    def __init__(self, dest):
        self.dest = dest


class Manager:
    """Shaped like FairScale's GraphManager: destinations are ranks of masters."""

    def __init__(self, rows, peers_per_itr=1):
        self.phone_book = [[Edge(dest) for dest in row] for row in rows]
        self.peers_per_itr = peers_per_itr

    def is_dynamic_graph(self):
        return True


class Uniform:
    def is_uniform(self):
        return True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph": topology.ring(8)}, r"`graph` must have as many nodes as there are, 4, got"),
        ({"graph": "spiral"}, r"unknown graph 'spiral'; the graphs are"),
        ({"graph": 7}, r"`graph` must be None, a jaxslowmo.topology.Graph"),
        ({"graph": Manager([[1], [1], [3], [0]])}, r"(?i)self|itself|node 1"),
        ({"graph": type("M", (), {"phone_book": [[1], [0]]})()}, r"`graph.phone_book` must hold"),
        ({"graph": "bipartite_exponential", "world": 5}, r"even"),
        ({"graph": "bipartite_linear", "world": 3}, r"even"),
        ({"mixing": 0.5}, r"`mixing` must be None or a callable"),
        ({"mixing": lambda graph, step: torch.ones(4, 4).numpy()}, r"column of P must sum to 1"),
        (
            {"mixing": topology.self_weighted([0.3, 0.5, 0.6, 0.4]), "push_sum": False},
            r"`push_sum`=False needs a doubly stochastic mixing",
        ),
    ],
)
def test_graphs_that_cannot_work_are_refused_at_once(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(slowmo_base_algorithm="sgp", **options)


def test_self_loops_of_fairscales_default_with_two_peers_are_refused(build):
    with pytest.raises(ValueError, match=r"peers_per_step"):
        build(
            world=2,
            slowmo_base_algorithm="sgp",
            graph=lambda n: topology.npeer_directed_exponential(n, peers_per_step=2),
        )


@pytest.mark.parametrize("graph", ["ring", topology.ring, topology.ring(4), None])
def test_forms_of_a_graph(graph):
    plan = plan_gossip(graph, None, 4, 1, push_sum=True)
    name = topology.npeer_directed_exponential(4) if graph is None else topology.ring(4)
    assert len(plan.rounds) == name.num_rounds
    assert not plan.weight_moves


def test_a_graph_manager_counts_masters():
    """The irregular table of the recording, with two processes in each node."""
    table = [[1, 3], [0, 2], [0, 3], [1, 0]]
    manager = Manager([[2 * dest for dest in row] for row in table])
    plan = plan_gossip(manager, Uniform(), 4, 2, push_sum=True)
    expected = topology.exchange_rounds(topology.from_phone_book(table))
    assert [r.permutations for r in plan.rounds] == [r.permutations for r in expected]
    assert plan.weight_moves


def test_weights_that_vanish_are_refused():
    """Node 3 gives all it has and gets next to nothing."""

    def starving(graph, step):
        matrix = np.diag([0.5, 0.5, 1.0, 0.0])
        matrix[1, 0] = matrix[2, 1] = 0.5
        matrix[3, 2], matrix[0, 3] = 1e-40, 1.0
        return matrix

    circle = topology.from_phone_book([[1], [2], [3], [0]])
    with pytest.raises(ValueError, match=r"stay above 1e-30; on .*\(4\) .* they fall to 1e-40"):
        plan_gossip(circle, starving, 4, 1, push_sum=True)
