"""Graphs of fixed neighbours: complete, star, grid and torus."""

from collections.abc import Iterable

from .._arguments import as_divisor, as_size
from .._graph import Graph, from_phone_book, unique
from ._circulant import circulant


def complete(num_nodes: int, *, peers_per_step: int | None = None) -> Graph:
    """Every node sends to every other: the mean in one exchange.

    Args:
      num_nodes: number of nodes.
      peers_per_step: peers that a node sends to per exchange, in turn; None: all, every time.

    Returns:
      A `Graph`.

    Raises:
      ValueError: sizes below 1, more peers than there are other nodes.
    """
    num_nodes = as_size("num_nodes", num_nodes)
    return circulant("complete", num_nodes, range(1, num_nodes), peers_per_step)


def star(num_nodes: int, *, peers_per_step: int | None = None) -> Graph:
    """Node 0 sends to all others, and they to it.

    Irregular: push-sum weights move. The centre receives `num_nodes` - 1 messages per exchange.

    Args:
      num_nodes: number of nodes.
      peers_per_step: None: the centre sends to all others every time; 1: to one of them in turn.

    Returns:
      A `Graph`.

    Raises:
      ValueError: sizes below 1, more than 1 peer per step (the others have only the centre).
    """
    num_nodes = as_size("num_nodes", num_nodes)
    centre = range(1, num_nodes)
    return from_phone_book([centre, *([0] for _ in centre)], peers_per_step, name="star")


def grid_2d(num_nodes: int, *, rows: int | None = None, peers_per_step: int | None = None) -> Graph:
    """Neighbours to the right, left, below and above on a rectangle.

    Nodes at the rim have fewer neighbours, so push-sum weights move.

    Args:
      num_nodes: number of nodes, numbered row by row.
      rows: rows of the rectangle, a divisor of `num_nodes`; None: the one nearest to a square.
      peers_per_step: neighbours that a node sends to per exchange, in turn; None: all, every time.

    Returns:
      A `Graph`.

    Raises:
      ValueError: `rows` that does not divide `num_nodes`, more peers than a corner has.
    """
    rows, columns = _rectangle(num_nodes, rows)

    def peers(node: int) -> Iterable[int]:
        row, column = divmod(node, columns)
        if column + 1 < columns:
            yield node + 1
        if column > 0:
            yield node - 1
        if row + 1 < rows:
            yield node + columns
        if row > 0:
            yield node - columns

    return from_phone_book(
        [tuple(peers(node)) for node in range(num_nodes)], peers_per_step, name="grid_2d"
    )


def torus_2d(
    num_nodes: int, *, rows: int | None = None, peers_per_step: int | None = None
) -> Graph:
    """A grid whose rims are joined: 4 neighbours everywhere (fewer on 1 or 2 rows or columns).

    Args:
      num_nodes: number of nodes, numbered row by row.
      rows: rows of the rectangle, a divisor of `num_nodes`; None: the one nearest to a square.
      peers_per_step: neighbours that a node sends to per exchange, in turn; None: all, every time.

    Returns:
      A `Graph`.

    Raises:
      ValueError: `rows` that does not divide `num_nodes`, more peers than there are neighbours.
    """
    rows, columns = _rectangle(num_nodes, rows)

    def peers(node: int) -> tuple[int, ...]:
        row, column = divmod(node, columns)
        steps = ((0, 1), (0, -1), (1, 0), (-1, 0))
        found = [(row + r) % rows * columns + (column + c) % columns for r, c in steps]
        return unique([peer for peer in found if peer != node])

    return from_phone_book([peers(n) for n in range(num_nodes)], peers_per_step, name="torus_2d")


def _rectangle(num_nodes: int, rows: int | None) -> tuple[int, int]:
    num_nodes = as_size("num_nodes", num_nodes)
    if rows is None:
        rows = largest_divisor_to_root(num_nodes)
    rows = as_divisor("rows", rows, num_nodes)
    return rows, num_nodes // rows


def largest_divisor_to_root(number: int) -> int:
    """The largest divisor whose square is at most `number`."""
    return max(d for d in range(1, int(number**0.5) + 2) if number % d == 0 and d * d <= number)
