"""Gradients of dense parameters and of rows of tables, side by side."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..._support.types import PyTree
from ._all_reduce_rows import DivideBy, all_reduce_rows
from ._row_gradient import RowGradient, is_row_gradient

Rows = Mapping[str, RowGradient]
"""Gradients of rows by table."""
_Given = TypeVar("_Given")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WithRows:
    """Gradients of a model whose tables are no leaves of its parameters.

    Attributes:
      dense: a tree like the dense parameters.
      rows: of the tables, by name.
      inner_axes: axes inside a replica, over which rows are means already, or of other rows.
    """

    dense: PyTree
    rows: Rows
    inner_axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})


def mean_rows(
    rows: Rows,
    axes: tuple[str, ...],
    weight: jax.Array | None = None,
    divide_by: DivideBy = "initial",
) -> Rows:
    """The mean over devices that hold the same rows, as the gradients of dense leaves have theirs.

    Args:
      rows: of each device.
      axes: mapped; none leaves `rows` as they are.
      weight: of a replica, as `js.all_reduce_rows` takes it.
      divide_by: likewise.

    Communication: per table one all-gather of the row numbers and one of the rows over `axes`.
    """
    if not axes or not rows:
        return rows
    reduce = all_reduce_rows(axes, output="rows", divide_by=divide_by)
    share = {} if weight is None else {"weight": weight}
    gradients: Any = dict(rows)  # of optax's types none is a `RowGradient`
    means: Any
    means, _ = reduce.update(gradients, reduce.init({}), **share)
    return means


def split_rows(grads: PyTree) -> tuple[PyTree, Rows, tuple[str, ...], Callable[..., PyTree]]:
    """Gradients taken apart into dense ones and rows, wherever these stand.

    Returns:
      The dense gradients; those of rows, by table or position; axes over which rows need no mean;
      and `join(dense, rows)`, which puts both together again.
    """
    if isinstance(grads, WithRows):
        inner_axes = grads.inner_axes
        return (
            grads.dense,
            grads.rows,
            inner_axes,
            lambda dense, rows: WithRows(dense, rows, inner_axes),
        )
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_row_gradient)
    rows = {str(i): leaf for i, leaf in enumerate(leaves) if is_row_gradient(leaf)}
    if not rows:
        return grads, rows, (), lambda dense, rows: dense
    dense = treedef.unflatten([None if is_row_gradient(leaf) else leaf for leaf in leaves])

    def join(dense: PyTree, rows: Rows) -> PyTree:
        others = treedef.flatten_up_to(dense)
        return treedef.unflatten([rows.get(str(i), leaf) for i, leaf in enumerate(others)])

    return dense, rows, (), join


def with_equal_entries(
    branches: Sequence[Callable[[_Given], Any]], operand: _Given
) -> list[Callable[[_Given], Any]]:
    """Functions of `operand`, for a conditional: their gradients of rows have equal shapes."""
    if not any(map(is_row_gradient, jax.tree.leaves(operand, is_leaf=is_row_gradient))):
        return list(branches)

    def most(*results: Any) -> int:
        return max(x.rows.shape[0] for x in results) if is_row_gradient(results[0]) else 0

    shapes = [jax.eval_shape(branch, operand) for branch in branches]
    entries = jax.tree.map(most, *shapes, is_leaf=is_row_gradient)

    def padding(branch: Callable[[_Given], Any]) -> Callable[[_Given], Any]:
        return lambda x: jax.tree.map(_padded, branch(x), entries, is_leaf=is_row_gradient)

    return [padding(branch) for branch in branches]


def _padded(x: Any, num_entries: int) -> Any:
    """A gradient of rows in so many entries; other leaves as they are."""
    if not is_row_gradient(x) or x.rows.shape[0] == num_entries:
        return x
    room = num_entries - x.rows.shape[0]
    rows = jnp.pad(x.rows, (0, room), constant_values=x.num_rows)
    return RowGradient(
        rows, jnp.pad(x.values, ((0, room), *[(0, 0)] * (x.values.ndim - 1))), x.num_rows
    )
