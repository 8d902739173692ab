"""Graphs, mixings and analyses that cannot work are refused, by the argument that is wrong."""

import math
from functools import partial

import numpy as np
import pytest

from jaxslowmo import topology
from jaxslowmo.topology import Graph, analyse, exchange_rounds, from_phone_book, make_graph
from support.refusals import Refusal, each
from topology.graphs import NAMED, PAIRED, comes_round

RING = topology.ring(3)
HALVES = np.array([[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]])


def table(rows, argument, value="", peers=1):
    return Refusal(lambda: from_phone_book(rows, peers), argument, value)


def graph(argument, value, *arguments):
    return Refusal(lambda: Graph(*arguments), argument, value)


def named(name, num_nodes, argument, value, **options):
    return Refusal(lambda: make_graph(name, num_nodes, **options), argument, value)


def shares(keep):
    return Refusal(lambda: topology.self_weighted(keep), "`keep`", repr(keep))


def weights(matrix, argument):
    mixing = lambda graph, step: matrix  # noqa: E731
    return Refusal(lambda: exchange_rounds(RING, mixing), argument, "step 0 of ring")


def entries(argument, *changes):
    """Weights of which these are others."""
    matrix = HALVES.copy()
    for row, column, value in changes:
        matrix[row, column] = value
    return weights(matrix, argument)


def analysed(argument, value, graph=RING, mixing=None, **options):
    return Refusal(lambda: analyse(graph, mixing, **options), argument, value)


def varying(graph, period):
    """A mixing that repeats itself after so many steps."""
    return lambda _, step: topology.self_weighted(0.5 + 0.1 * (step % period))(graph, step)


TWO = topology.directed_linear(3)
ROWS = {
    "no rows": table([], "`table`", "none"),
    "a node that is not there": table([[1], [2]], "node 1 names 2", "0 to 1"),
    "a negative node": table([[1], [-1]], "node 1 names -1"),
    "a node that is no int": table([[1.0], [0]], "node 0 names 1.0"),
    "a node that sends to itself": table([[1], [0, 1]], "node 1", [0, 1]),
    "a node that sends to nobody": table([[1, 2], [0], []], "custom(3)", "node 2"),
    "a node that receives from nobody": table([[1], [0], [0]], "custom(3)", "node 2"),
    "nodes that are not reached": table([[1], [0], [3, 0], [2]], "node 0", "reaches node 2"),
    "nodes that do not reach": table([[1, 2], [0], [3], [2]], "node 2", "reaches node 0"),
    "no peers": table([[1], [0]], "`peers_per_step`", 0, 0),
    "more peers than a row": table([[1, 2], [2, 0], [0]], "`peers_per_step`", "row of node 2", 2),
    "a row too few": graph("2 rows", "`num_nodes`=3", 3, 1, [[1], [0]]),
    "more peers than any row": graph("`peers_per_step`", 2, 2, 2, [[1], [0]]),
    # Only the first peers get a turn, and over these 0 and 1 never hear of 2 and 3.
    "apart": graph("node 0", "node 2", 4, 1, [[1, 2], [0, 3], [3, 0], [2, 1]], False),
    "bipartite": graph("node 0", "to 2", 4, 1, [[1, 2], [2], [3], [0]], True, True),
    "a hypercube of 6": named("hypercube", 6, "`num_nodes`", 6),
    "rows that do not divide": named("grid_2d", 12, "`rows`", 5, rows=5),
    "groups that do not divide": named("inner_outer", 8, "`group_size`", 3, group_size=3),
    "one matching": named("random_matching", 8, "`num_rounds`", 1, num_rounds=1),
    "a negative seed": named("random_matching", 8, "`seed`", -1, seed=-1),
    "an unknown graph": named("rnig", 4, "'rnig'", "ring"),
    "an option of another graph": named("ring", 4, "`rows`", "ring", rows=2),
    "keeping nothing": shares(0),
    "keeping all": shares(1.0),
    "no shares": shares([]),
    "a text as a share": shares("half"),
    "two shares of three": analysed("`keep`", "got 2", RING, topology.self_weighted([0.5] * 2)),
    "weights in words": weights("halves", "'halves'"),
    "complex weights": weights(HALVES + 0j, "array"),
    "NaN as a weight": entries("P[1, 0] = nan", (1, 0, math.nan)),
    "a negative weight": entries("P[1, 0] = -0.5", (0, 0, 1.5), (1, 0, -0.5)),
    # Sums of rows, not of columns: P is [destination, source].
    "rows that sum to 1": entries("column 0 sums to 0.75", (1, 0, 0.25), (1, 1, 0.75)),
    "weights without an edge": weights(HALVES.T, "P[0, 1] = 0.5"),
    "an empty node": entries("node 0", (0, 0, 0), (0, 2, 0), (1, 0, 1), (2, 2, 1)),
    "a matrix as a mixing": analysed("`mixing`", "array(", RING, HALVES),
    "a factory as a mixing": analysed("`mixing`", "self_weighted", RING, topology.self_weighted),
    "one of two rounds": analysed("of 1 round", "step 1", RING, varying(RING, 2)),
    "two of three": analysed("of 2 rounds", "P[0, 0] = 0.7 after 0.5", TWO, varying(TWO, 3)),
    "another shape later": analysed(
        "step 1", "step 0", RING, lambda g, s: HALVES if s == 0 else np.eye(2)
    ),
    "no graph": analysed("`graph`", "'ring'", "ring"),
    "a tolerance of 0": analysed("`tolerance`", 0.0, tolerance=0.0),
    "a tolerance of 1": analysed("`tolerance`", 1, tolerance=1),
    "rounds below 0": Refusal(lambda: analyse(RING).error(-1), "`rounds`", -1),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()


@pytest.mark.parametrize("name", NAMED)
def test_numbers_of_nodes_and_peers_of_every_graph(name):
    make = NAMED[name]
    for size in (0, 4.0, True, "4"):
        Refusal(partial(make, size), "`num_nodes`", repr(size)).check()
    for peers in (0, 1.0, True):
        Refusal(partial(make, 8, peers_per_step=peers), "`peers_per_step`", peers).check()
    if name in PAIRED:
        Refusal(partial(make, 5), f"{name}: `num_nodes`", 5).check()
    for peers in range(1, 9):
        if name == "npeer_directed_exponential":
            fits = peers < 8 and not comes_round(8, peers)
        else:  # random matchings are as many as are asked for
            fits = name == "random_matching" or peers <= min(map(len, make(8).phone_book))
        if fits:
            make(8, peers_per_step=peers)
        else:
            Refusal(partial(make, 8, peers_per_step=peers), "`peers_per_step`", peers).check()
