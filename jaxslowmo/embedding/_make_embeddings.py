"""`js.embeddings`, and what a step that is given its `Embeddings` looks up in them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from .._support.checks import as_int
from .._support.types import AxisName
from ..mesh import AnyMesh, VirtualMesh, axis_names
from ._embeddings import Embeddings
from ._optimizers import RowwiseOptimizer
from ._step_lookup import Lookup
from ._table import OWNER, Table, check_tables


def embeddings(
    tables: Mapping[str, Table],
    *,
    axis_name: str | None,
    optimizer: RowwiseOptimizer,
    capacity: Literal["auto"] | int | Mapping[str, int] = "auto",
    inputs: Callable[[Any], Mapping[str, Any]] | None = None,
    overflow: Literal["error", "drop"] = "error",
) -> Embeddings:
    """Embedding tables that the devices of a replica share, with bags of ids and row-wise updates.

    Only ids, the rows they ask for, and the gradients of these rows travel. No gradient of a table
    ever exists as a whole, and an update touches the rows that were looked up.

    Args:
      tables: a `js.Table` by name.
      axis_name: axis of the mesh whose devices share the tables, over which a replica's batch is
        split; None: each replica has its tables on one device.
      optimizer: `js.rowwise_adagrad(...)` or `js.rowwise_sgd(...)`.
      capacity: slots that each device has for the distinct ids it asks one owner for, of every
        table or by name. "auto": as many as there can be, so that none is ever left out. What
        travels is all slots, used or not: a device needs about its distinct ids divided by the
        number of devices, and some more for chance.
      inputs: `inputs(batch)` returns ids or `js.Bags` by feature; a function of the batch alone.
        None: `batch[feature]`.
      overflow: for ids beyond the capacity. `"error"`: the training step raises, before it for
        batches of the host; else it skips the update, and its second call after that raises.
        `"drop"`: their vectors are 0, and the metrics count them.

    Returns:
      `Embeddings`, for `js.make_train_step(embeddings=...)`, or for a loop of your own.

    Raises:
      ValueError: tables that are none, or that two features share a name in; a capacity below 1 or
        for a table that is not there; another `overflow` or optimizer. Where the size of the axis
        is known: columns that the devices cannot share evenly.

    Communication: none here; see the methods of `Embeddings`.

    Source: torchrec's sharded embedding bags, of which this is rows, columns or whole tables.
    """
    known = check_tables(tables)
    if axis_name is not None and not isinstance(axis_name, str):
        raise ValueError(f"{OWNER}: `axis_name` must be one name or None, got {axis_name!r}.")
    if not isinstance(optimizer, RowwiseOptimizer):
        raise ValueError(
            f"{OWNER}: `optimizer` must be js.rowwise_adagrad(...) or js.rowwise_sgd(...), got "
            f"{optimizer!r}."
        )
    if inputs is not None and not callable(inputs):
        raise ValueError(f"{OWNER}: `inputs` must be a function of the batch, got {inputs!r}.")
    if overflow not in ("error", "drop"):
        raise ValueError(f'{OWNER}: `overflow` must be "error" or "drop", got {overflow!r}.')
    slots = _capacities(capacity, known)
    made = Embeddings(known, axis_name, slots, optimizer, inputs, overflow)
    if not any(table.shard == "table" for table in known.values()):
        made.layout()
    return made


def _capacities(capacity: Any, tables: Mapping[str, Table]) -> dict[str, int | None]:
    """The slots of each table per owner; None is as many as there can be."""
    if isinstance(capacity, Mapping):
        unknown = [name for name in capacity if name not in tables]
        if unknown:
            raise ValueError(
                f"{OWNER}: `capacity` names {', '.join(map(repr, unknown))}, but the tables are "
                f"{', '.join(map(repr, tables))}."
            )
        given = {name: capacity.get(name, "auto") for name in tables}
    else:
        given = dict.fromkeys(tables, capacity)
    slots: dict[str, int | None] = {}
    for name, own in given.items():
        is_auto = isinstance(own, str) and own == "auto"
        slots[name] = None if is_auto else as_int(own, 1)
        if slots[name] is None and not is_auto:
            raise ValueError(
                f'{OWNER}: `capacity` of table {name!r} must be "auto" or an int >= 1, got {own!r}.'
            )
    return slots


def lookup_of(embeddings: Embeddings, mesh: AnyMesh, axis_name: AxisName) -> Lookup:
    """What a step looks up, in the tables of `embeddings=`.

    Raises:
      ValueError: what is no `Embeddings`; an axis that the mesh lacks, or one of the replicas';
        several shards on a `VirtualMesh`.
    """
    if not isinstance(embeddings, Embeddings):
        raise ValueError(
            f"`embeddings` must be made by js.embeddings, got {type(embeddings).__name__}."
        )
    axis = embeddings.axis_name
    if axis is None:
        return Lookup(embeddings)
    if axis not in mesh.shape:
        raise ValueError(
            f"`embeddings` are sharded over {axis!r}, and `mesh` has the axes "
            f"{list(mesh.axis_names)}: name one of these as `axis_name` of js.embeddings, or None "
            "for tables that each device holds whole."
        )
    embeddings = embeddings.over(mesh)
    if axis in axis_names(axis_name):
        raise ValueError(
            f"`embeddings` are sharded over {axis!r}, along which the replicas of this step lie: "
            "every replica has tables of its own, sharded over an axis inside of it."
        )
    if not isinstance(mesh, VirtualMesh):
        return Lookup(embeddings, axis, axis)
    if mesh.shape[axis] > 1:
        raise ValueError(
            f"`embeddings` are sharded over {axis!r} of size {mesh.shape[axis]}, and virtual "
            "replicas have no devices inside: use js.make_mesh, or axis_name=None."
        )
    return Lookup(replace(embeddings, axis_name=None), axis)
