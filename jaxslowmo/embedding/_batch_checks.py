"""Checks of the ids of host batches, in NumPy: wrong ids, and more of them than slots."""

import numpy as np

from .._support.checks import checked_int
from ..mesh import is_shared
from ._bags import Bags
from ._requests import BagsByTable
from ._stores import TableLayout, TablePlace
from ._table import OWNER, Capacity


def host_checked(table: str, feature: str, num_rows: int, bags: Bags) -> Bags:
    """Return `bags` with NumPy ids as int32: jax would truncate 64 bits to 32, and -2**63 to 0.

    Raises:
      ValueError: a NumPy id that is not in the table, or padding below int32.
    """
    ids, least = bags.ids, np.iinfo(np.int32).min
    if not isinstance(ids, np.ndarray) or not ids.size:
        return bags
    if int(ids.min()) < least:
        raise ValueError(
            f"{OWNER}: feature {feature!r} has the id {int(ids.min())}, and padding must be a "
            f"negative number that devices can hold, at least {least}: use -1."
        )
    if int(ids.max()) < num_rows:
        return bags._replace(ids=ids.astype(np.int32))
    index = np.unravel_index(int(np.argmax(ids >= num_rows)), ids.shape)
    place = f"row {index[0]}" + (f", place {index[1]}" if len(index) > 1 else "")
    count = int(np.sum(ids >= num_rows))
    raise ValueError(
        f"{OWNER}: feature {feature!r} has the id {int(ids[index])} in {place} of the batch, and "
        f"table {table!r} has {num_rows} rows, 0 to {num_rows - 1} ({count} such ids in all)."
    )


def slots_needed(layout: TableLayout, bags: BagsByTable, num_parts: int) -> dict[str, list[int]]:
    """Return the largest number of distinct ids of one owner, for each table and part of a batch.

    An owner is a device that holds rows of a table.

    Args:
      layout: placement of the tables on devices.
      bags: maps a table to its bags by feature; a table with some ids on devices is left out.
      num_parts: number of equal parts of the batch, one per device.
    """
    needed = {}
    for name, by_feature in bags.items():
        ids = [b.ids for b in by_feature.values()]
        if all(isinstance(i, np.ndarray) for i in ids):
            parts = np.concatenate([_in_parts(name, i, num_parts) for i in ids], axis=1)
            needed[name] = [_most_of_one_owner(layout.places[name], part) for part in parts]
    return needed


def check_capacities(
    layout: TableLayout, bags: BagsByTable, capacity: Capacity, num_parts: int
) -> None:
    """Raise `ValueError` if a part of the batch has more distinct ids of an owner than slots."""
    limited = {name: by_feature for name, by_feature in bags.items() if capacity[name] is not None}
    for name, needed in slots_needed(layout, limited, num_parts).items():
        for number, most in enumerate(needed):
            slots = capacity[name] or 0
            if most > slots:
                raise ValueError(
                    f"{OWNER}: `capacity` of table {name!r} is {slots} slots for each owner, and "
                    f"part {number} of {num_parts} of the batch has {most} distinct ids of one, "
                    f'{most - slots} too many (overflow="drop" would count them as zeros).'
                )


def _in_parts(table: str, ids: np.ndarray, num_parts: int) -> np.ndarray:
    number = checked_int(f"{OWNER}: `num_parts`", num_parts, 1)
    if is_shared(ids):
        ids = np.repeat(ids, number, axis=0)
    if ids.shape[0] % number:
        raise ValueError(
            f"{OWNER}: the batch of table {table!r} is split into {number} equal parts, a "
            f"device each, and has {ids.shape[0]} rows."
        )
    return ids.reshape(number, -1).astype(np.int64)


def _most_of_one_owner(place: TablePlace, ids: np.ndarray) -> int:
    """Return the largest number of distinct ids of one owner; at least 1, the minimum capacity."""
    distinct = np.unique(ids[ids >= 0])
    return max(1, int(np.bincount(place.owners_of(distinct), minlength=1).max()))
