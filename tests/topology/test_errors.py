"""What cannot work is refused when it is built, and the message says why."""

import math
import re

import numpy as np
import pytest

from jaxslowmo import topology
from topology.graphs import NAMED, PAIRED

TABLE = topology.from_phone_book
RING = topology.ring(3)


def refused(message: str):
    return pytest.raises(ValueError, match=re.escape(message))


@pytest.mark.parametrize("make", NAMED.values(), ids=list(NAMED))
def test_sizes(make):
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
def test_peers_per_step(make):
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
def test_more_peers_than_the_phone_book_has(name, entries):
    NAMED[name](8, peers_per_step=entries)
    with refused(f"`peers_per_step` must be at most {entries}, ") as caught:
        NAMED[name](8, peers_per_step=entries + 1)
    assert str(caught.value).endswith(f"{name}(8), got {entries + 1}.")


def test_more_peers_than_there_are_matchings():
    with refused("`peers_per_step` must be at most 3, the length of the phone book row of node 0"):
        topology.random_matching(8, num_rounds=3, peers_per_step=4)


@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("num_nodes", [3, 5, 33])
def test_odd_numbers_of_nodes_in_pairs(name, num_nodes):
    with refused(f"{name}: `num_nodes` must be even, since") as caught:
        NAMED[name](num_nodes)
    assert str(caught.value).endswith(f"got {num_nodes}.")


@pytest.mark.parametrize(("num_nodes", "loop"), [(2, 2), (6, 6)])
def test_distances_that_come_round(num_nodes, loop):
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
def test_arguments_of_single_graphs(make, message):
    with refused(message):
        make()


def test_matchings_that_are_unlikely_to_connect(monkeypatch):
    monkeypatch.setattr(topology._varied, "_DRAWS", 0)
    with refused("2 matchings did not connect 8 nodes in 0 draws; give a larger `num_rounds`."):
        topology.random_matching(8, num_rounds=2)


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
