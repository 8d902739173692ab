"""The function `js.embeddings`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from .._support.checks import as_int, check_choice
from ._embeddings import Embeddings, Overflow
from ._optimizers import RowwiseOptimizer
from ._table import MAKERS, OWNER, Table, check_tables


def embeddings(
    tables: Mapping[str, Table],
    *,
    axis_name: str | None,
    optimizer: RowwiseOptimizer | None = None,
    capacity: Literal["auto"] | int | Mapping[str, int] = "auto",
    inputs: Callable[[Any], Mapping[str, Any]] | None = None,
    overflow: Overflow = "error",
) -> Embeddings:
    """Make embedding tables that the devices of a replica share, with bags and row-wise updates.

    The devices exchange only ids, the rows of these ids, and the gradients of these rows. The
    gradient of a table never exists as a whole, and an update touches only rows that were looked
    up.

    Args:
      tables: maps names to `js.Table`.
      axis_name: mesh axis whose devices share the tables, over which a replica's batch is split;
        None: each replica has its tables on one device.
      optimizer: `js.rowwise_adagrad(...)`, `js.rowwise_sgd(...)` or `js.rowwise_adam(...)` for the
        tables that have none of their own (`js.Table(optimizer=...)`).
      capacity: number of slots for the distinct ids that a device requests from one owner (a device
        that holds rows), for every table or by name. "auto": as many as there can be, so that no id
        is left out. All slots are sent, used or not. A device needs about its number of distinct
        ids divided by the number of devices, and some more because ids spread unevenly.
      inputs: function `inputs(batch)` that returns ids or `js.Bags` by feature and depends on the
        batch alone. None: `batch[feature]`.
      overflow: what to do with ids beyond the capacity. `"error"`: for NumPy batches the training
        step raises before it runs; for batches on devices it skips the update, and its second call
        after that raises. `"drop"`: their vectors are 0, and the metrics count them.

    Returns:
      `Embeddings`, for `js.make_train_step(embeddings=...)`, or for your own training loop.

    Raises:
      ValueError: values that are not `js.Table`, or two tables with a feature of one name; a
        capacity below 1 or for an unknown table; another `overflow` or optimizer; a table without
        an optimizer (named). If the size of the axis is known: columns that the devices cannot
        share evenly.

    Communication: none here; see the methods of `Embeddings`.

    Source: torchrec's sharded embedding bags (sharded by rows, columns or whole tables).
    """
    checked = check_tables(tables)
    if axis_name is not None and not isinstance(axis_name, str):
        raise ValueError(f"{OWNER}: `axis_name` must be one name or None, got {axis_name!r}.")
    if not isinstance(optimizer, RowwiseOptimizer | None):
        raise ValueError(f"{OWNER}: `optimizer` must be made by {MAKERS}, got {optimizer!r}.")
    for name, table in checked.items():
        if table.optimizer is None and optimizer is None:
            raise ValueError(
                f"{OWNER}: table {name!r} has no optimizer: pass one to its js.Table, or one for "
                "all such tables as `optimizer` of js.embeddings."
            )
        checked[name] = replace(table, optimizer=table.optimizer or optimizer)
    if inputs is not None and not callable(inputs):
        raise ValueError(f"{OWNER}: `inputs` must be a function of the batch, got {inputs!r}.")
    check_choice("overflow", overflow, Overflow, OWNER)
    slots = _capacities(capacity, checked)
    result = Embeddings(checked, axis_name, slots, inputs, overflow)
    if not any(table.shard == "table" for table in checked.values()):
        result.layout()
    return result


def _capacities(capacity: Any, tables: Mapping[str, Table]) -> dict[str, int | None]:
    """Return the slots per owner of each table; None for as many as there can be."""
    if isinstance(capacity, Mapping):
        unknown = [name for name in capacity if name not in tables]
        if unknown:
            raise ValueError(
                f"{OWNER}: `capacity` names {', '.join(map(repr, unknown))}, but the tables are "
                f"{', '.join(map(repr, tables))}."
            )
        requested = {name: capacity.get(name, "auto") for name in tables}
    else:
        requested = dict.fromkeys(tables, capacity)
    slots: dict[str, int | None] = {}
    for name, value in requested.items():
        is_auto = isinstance(value, str) and value == "auto"
        slots[name] = None if is_auto else as_int(value, 1)
        if slots[name] is None and not is_auto:
            raise ValueError(
                f'{OWNER}: `capacity` of table {name!r} must be "auto" or an int >= 1, '
                f"got {value!r}."
            )
    return slots
