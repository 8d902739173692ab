"""Which leaf comes when."""

from collections.abc import Sequence
from typing import Literal

Order = Literal["reverse", "forward"] | Sequence[int | str]


def leaf_positions(
    argument: str, leaves: Sequence[int | str], names: Sequence[str], *, whole: bool = False
) -> list[int]:
    """Leaves given by position or name, as positions.

    Args:
      argument: for messages.
      leaves: positions in flattening order, or names such as `"dense/kernel"`.
      names: of all leaves.
      whole: every leaf must be there, once.

    Raises:
      ValueError: a name or position that the tree does not have; with `whole`, leaves that are
        missing or named twice.
    """
    position = {name: i for i, name in enumerate(names)}
    found = []
    for leaf in leaves:
        i = position.get(leaf) if isinstance(leaf, str) else int(leaf)
        if i is None or not 0 <= i < len(names):
            raise ValueError(
                f"`{argument}` names leaf {leaf!r}, which the gradients do not have "
                f"({len(names)} leaves: {', '.join(names)})."
            )
        found.append(i)
    if whole and sorted(found) != list(range(len(names))):
        missing = [name for i, name in enumerate(names) if i not in found]
        twice = [name for i, name in enumerate(names) if found.count(i) > 1]
        raise ValueError(
            f"`{argument}` must name every gradient once: missing {missing}, more than once "
            f"{twice}."
        )
    return found


def check_order(owner: str, order: object) -> None:
    """At construction: `ValueError` unless it can be an order."""
    if isinstance(order, str):
        if order == "ready":
            raise ValueError(
                f'{owner}: `order`="ready" is known once the step is traced: use '
                'js.make_train_step(order="ready"), or pass order=js.ready_order(loss_fn, params, '
                "batch)."
            )
        if order not in ("reverse", "forward"):
            raise ValueError(
                f'{owner}: `order` must be "reverse", "forward" or a sequence of leaves, got '
                f"{order!r}."
            )
    elif not isinstance(order, Sequence):
        raise ValueError(
            f'{owner}: `order` must be "reverse", "forward" or a sequence of leaf positions or '
            f"names, got {type(order).__name__}."
        )
