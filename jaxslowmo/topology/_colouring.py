"""Edge colouring: a round of sends as partial permutations.

In each of them a node sends at most once and receives at most once, as a collective permute asks.
Senders and receivers are the two sides of a bipartite multigraph, so as many permutations as its
largest degree suffice (König, 1916): no exchange of a round is split over more collectives than
its busiest node needs.
"""

from collections.abc import Sequence

Edge = tuple[int, int]  # (source, destination)


def colour_edges(edges: Sequence[Edge]) -> list[list[Edge]]:
    """Split `edges` into the fewest partial permutations.

    Args:
      edges: (source, destination) pairs, repetitions allowed.

    Returns:
      As many lists as the largest number of edges at one source or destination. Edges that come
      in whole permutations, one after the other, stay so.
    """
    sending: list[dict[int, int]] = []  # per colour: source -> destination
    receiving: list[dict[int, int]] = []  # and destination -> source
    for source, destination in edges:
        free = _first_free(source, sending)
        taken = _first_free(destination, receiving)
        while max(free, taken) >= len(sending):
            sending.append({})
            receiving.append({})
        if free != taken:
            _swap_path(destination, free, taken, sending, receiving)
        sending[free][source] = destination
        receiving[free][destination] = source
    return [sorted(colour.items()) for colour in sending]


def _first_free(node: int, used: list[dict[int, int]]) -> int:
    return next((c for c, colour in enumerate(used) if node not in colour), len(used))


def _swap_path(
    destination: int,
    free: int,
    taken: int,
    sending: list[dict[int, int]],
    receiving: list[dict[int, int]],
) -> None:
    """Free colour `free` at `destination`, which lacks `taken`.

    The edges of these two colours form paths and even cycles; swapping the colours along the path
    from `destination` keeps all else valid, and cannot reach the source that lacks `free`.
    """
    path: list[tuple[int, int, int, int]] = []  # source, destination, colour, colour to get
    node = destination
    while node in receiving[free]:
        source = receiving[free][node]
        path.append((source, node, free, taken))
        if source not in sending[taken]:
            break
        node = sending[taken][source]
        path.append((source, node, taken, free))
    for source, node, colour, _ in path:
        del sending[colour][source], receiving[colour][node]
    for source, node, _, colour in path:
        sending[colour][source], receiving[colour][node] = node, source
