"""Graphs, mixings and analyses that cannot work are refused, by the argument that is wrong."""

import math

import numpy as np

from jaxslowmo import topology
from jaxslowmo.topology import Graph, analyse, exchange_rounds, from_phone_book, make_graph
from support.refusals import Refusal, each

RING = topology.ring(3)
HALVES = np.array([[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]])


def table(rows, argument, value="", peers=1):
    return Refusal(lambda: from_phone_book(rows, peers), argument, value)


def graph(argument, value, *arguments):
    return Refusal(lambda: Graph(*arguments), argument, value)


def named(name, num_nodes, argument, value, **options):
    return Refusal(lambda: make_graph(name, num_nodes, **options), argument, value)


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
    "a node that is not there": table([[1], [2]], "node 1 names 2", "0 to 1"),
    "a node that sends to nobody": table([[1, 2], [0], []], "custom(3)", "node 2"),
    "more peers than a row": table([[1, 2], [2, 0], [0]], "`peers_per_step`", "row of node 2", 2),
    "a row too few": graph("2 rows", "`num_nodes`=3", 3, 1, [[1], [0]]),
    "an unknown graph": named("rnig", 4, "'rnig'", "ring"),
    "an option of another graph": named("ring", 4, "`rows`", "ring", rows=2),
    "NaN as a weight": entries("P[1, 0] = nan", (1, 0, math.nan)),
    # Sums of rows, not of columns: P is [destination, source].
    "two of three": analysed("of 2 rounds", "P[0, 0] = 0.7 after 0.5", TWO, varying(TWO, 3)),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()
