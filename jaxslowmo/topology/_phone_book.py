"""What a phone book must be to work; every violation is a `ValueError` that says why."""

from collections.abc import Sequence


def check_phone_book(
    name: str, num_nodes: int, rows: Sequence[Sequence[int]], bipartite: bool
) -> None:
    """Raise for phone books with rows or entries that mean nothing, or send to the sender."""
    if len(rows) != num_nodes:
        raise ValueError(
            f"{name}: the phone book must have one row per node, got {len(rows)} rows for "
            f"`num_nodes`={num_nodes}."
        )
    for node, row in enumerate(rows):
        for peer in row:
            if not isinstance(peer, int) or isinstance(peer, bool):
                raise ValueError(
                    f"{name}: the phone book of node {node} names {peer!r}, and nodes are ints, 0 "
                    f"to {num_nodes - 1}."
                )
            if not 0 <= peer < num_nodes:
                raise ValueError(
                    f"{name}: the phone book of node {node} names {peer!r}, and the nodes are 0 to "
                    f"{num_nodes - 1}."
                )
            if peer == node:
                raise ValueError(
                    f"{name}({num_nodes}): node {node} would send to itself (its phone book is "
                    f"{list(row)}); the share that it keeps is the mixing's matter."
                )
            if bipartite and (peer - node) % 2 == 0:
                raise ValueError(
                    f"{name}({num_nodes}): a bipartite graph joins even with odd nodes, and node "
                    f"{node} would send to {peer}."
                )


def check_connected(name: str, num_nodes: int, rows: Sequence[Sequence[int]]) -> None:
    """Raise where what a node holds does not reach all others.

    Args:
      name: of the graph, for messages.
      num_nodes: number of nodes.
      rows: the peers of every node that get a turn.
    """
    reached = {peer for row in rows for peer in row}
    for node in range(num_nodes if num_nodes > 1 else 0):
        if not rows[node]:
            raise ValueError(
                f"{name}({num_nodes}): node {node} sends to nobody, so the others never learn what "
                "it holds."
            )
        if node not in reached:
            raise ValueError(
                f"{name}({num_nodes}): nobody sends to node {node}, so it never learns what the "
                "others hold."
            )
    backward: list[list[int]] = [[] for _ in rows]
    for source, row in enumerate(rows):
        for peer in row:
            backward[peer].append(source)
    for table, text in (
        (rows, "what node 0 holds never reaches node {}"),
        (backward, "what node {} holds never reaches node 0"),
    ):
        missing = set(range(num_nodes)) - _reachable(table)
        if missing:
            raise ValueError(
                f"{name}({num_nodes}): every node must be able to reach every other over the peers "
                f"that get a turn, and {text.format(min(missing))}."
            )


def _reachable(table: Sequence[Sequence[int]]) -> set[int]:
    """Nodes that can be reached from node 0."""
    seen, todo = {0}, [0]
    while todo:
        for peer in table[todo.pop()]:
            if peer not in seen:
                seen.add(peer)
                todo.append(peer)
    return seen
