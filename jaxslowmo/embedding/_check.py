"""Ids of the host, looked at in NumPy before they go anywhere."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ._bags import Bags
from ._layout import Layout, Place
from ._requests import slot_plan
from ._table import OWNER


def host_checked(table: str, feature: str, num_rows: int, bags: Bags) -> Bags:
    """`bags`, whose ids are int32 if they were NumPy's: jax would cut 64 bits down to 32.

    Raises:
      ValueError: an id of the host that is not in the table.
    """
    ids = bags.ids
    if not isinstance(ids, np.ndarray | np.generic):
        return bags
    check_ids(table, feature, num_rows, ids)
    return Bags(
        np.maximum(ids, -1).astype(np.int32) if ids.dtype.kind == "i" else ids, bags.weights
    )


def check_ids(table: str, feature: str, num_rows: int, ids: Any) -> None:
    """Raise `ValueError` naming the first id of the host that is not in the table.

    Args:
      table: its name.
      feature: whose ids these are.
      num_rows: of the table.
      ids: NumPy integers, negative ones are padding.
    """
    # One pass over all ids where all is well.
    if ids.size == 0 or int(ids.max()) < num_rows:
        return
    where = np.unravel_index(int(np.argmax(ids >= num_rows)), ids.shape)
    place = f"row {where[0]}" + (f", place {where[1]}" if len(where) > 1 else "")
    count = int(np.sum(ids >= num_rows))
    raise ValueError(
        f"{OWNER}: feature {feature!r} has the id {int(ids[where])} in {place} of the batch, and "
        f"table {table!r} has {num_rows} rows, 0 to {num_rows - 1} ({count} such ids in all)."
    )


def check_capacities(
    layout: Layout,
    bags: Mapping[str, Mapping[str, Bags]],
    capacity: Mapping[str, int | None],
    num_parts: int,
) -> None:
    """Raise `ValueError` where a part of the batch has more distinct ids than slots for them.

    Args:
      layout: where the tables lie.
      bags: by table, by feature; tables of which some ids are on devices are passed over.
      capacity: by table, slots per owner; None: there are always enough.
      num_parts: equal parts of the batch, a device each.
    """
    for name, own in bags.items():
        ids = [b.ids for b in own.values()]
        if capacity[name] is None or not all(isinstance(i, np.ndarray) for i in ids):
            continue
        place = layout.places[name]
        parts = np.concatenate([_in_parts(name, i, num_parts) for i in ids], axis=1)
        slots = slot_plan(layout, {name: parts.shape[1]}, capacity).capacity[name]
        for number, part in enumerate(parts):
            most = _most_of_one_owner(place, part)
            if most > slots:
                raise ValueError(
                    f"{OWNER}: `capacity` of table {name!r} is {slots} slots for each owner, and "
                    f"part {number} of {num_parts} of the batch has {most} distinct ids of one, "
                    f'{most - slots} too many (overflow="drop" would count them as zeros).'
                )


def _in_parts(table: str, ids: np.ndarray, num_parts: int) -> np.ndarray:
    if ids.shape[0] % num_parts:
        raise ValueError(
            f"{OWNER}: the batch of table {table!r} is split into {num_parts} equal parts, a "
            f"device each, and has {ids.shape[0]} rows."
        )
    return ids.reshape(num_parts, -1).astype(np.int64)


def _most_of_one_owner(place: Place, ids: np.ndarray) -> int:
    """The most distinct ids that lie on one owner."""
    distinct = np.unique(ids[ids >= 0])
    per_owner = np.bincount(distinct % place.parts // (place.parts // place.owners), minlength=1)
    return int(per_owner.max())
