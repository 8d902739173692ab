"""The mean over replicas of embedding tables' gradients, sent as rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..._support.checks import check_choice, check_names, records_settings
from ..._support.scopes import ALL_REDUCE_ROWS
from ..._support.types import AxisName, PyTree
from ...collectives import all_mean, gather_slices, quotient, scale
from ...mesh import axis_names, axis_size, require_axes, sum_over
from ...transform import (
    ChainReduction,
    GradientTransform,
    Reduction,
    check_axis_argument,
    check_weight,
    gradient_state,
    increment,
    phase_scope,
    run_if,
    spec_of,
)
from ...tree import at_least_float32
from .._leaves import check_varying
from ._row_gradient import (
    RowGradient,
    Rows,
    add_in_order,
    arrays_of,
    check_row_gradient,
    checked_capacities,
    coalesce,
    distinct_rows,
    num_outside,
    row_gradient,
    split_rows,
)

OWNER = ALL_REDUCE_ROWS
Path = Literal["auto", "rows", "dense"]
Table = RowGradient | jax.Array
"""A table's gradient; an array is searched for rows that are not zero."""
DivideBy = Literal["initial", "active"]
Output = Literal["dense", "rows"]


@gradient_state
class AllReduceRowsState(NamedTuple):
    """State of `all_reduce_rows`; all fields except `dense` are equal on all replicas.

    Attributes:
      count: () int32, updates so far.
      overflows: () int32, in how many reductions of a table some replica had more distinct rows
        than `capacity`, so that a second exchange was needed.
      needed: () int32, largest number of distinct rows that a replica had of one table that is sent
        as rows, in any update: a `capacity` that would have sufficed so far.
      invalid: () int32, entries of `RowGradient`s so far, of all replicas, whose row lies outside
        of the table (padding does not count). They were left out.
      dense: state of the transform of the other leaves.
    """

    count: jax.Array
    overflows: jax.Array
    needed: jax.Array
    invalid: jax.Array
    dense: PyTree


@records_settings
def all_reduce_rows(
    axis_name: AxisName,
    *,
    tables: Sequence[str] = (),
    dense: optax.GradientTransformation | None = None,
    capacity: int | Mapping[str, int | None] | None = None,
    path: Path = "auto",
    output: Output = "dense",
    divide_by: DivideBy = "initial",
) -> GradientTransform:
    """Average the gradients of embedding tables over replicas; only touched rows are sent.

    Use it as the first transform of a chain, in place of `js.all_reduce_gradients`, which can be
    its `dense` for the other leaves. A table's gradient is a `RowGradient`, as
    `js.row_value_and_grad` makes it, or an array whose leaf is named in `tables`: then its nonzero
    rows are sent. Nothing is dropped: if a replica has more distinct rows than `capacity`, all
    replicas send that table's gradient again, all rows or the whole table; the state counts it.

    Args:
      axis_name: mapped axis to average over, or under shard_map a tuple of axes.
      tables: names of leaves, such as `"encoder/embedding"`, that are tables. Optional for
        `RowGradient`s, except with `dense`, which must not see them at its `init`.
      dense: transform that reduces all other leaves; None leaves them as they are.
      capacity: rows that each replica sends per table, an int or one per name in `tables`. None:
        the largest possible number: the entries of a `RowGradient`, all rows of an array.
      path: `"rows"`, `"dense"` (an all-reduce of the table), or `"auto"`, which takes rows where
        R * k * (4 + w) <= 2 * N * w, for R replicas, k rows sent by each, a table of N rows of w
        bytes, when the program is traced.
      output: `"dense"` returns arrays of the tables' shapes. `"rows"` returns `RowGradient`s for
        `js.sparse.apply_rows`: all replicas' rows, sorted, each once, in min(R * k, N) entries with
        k as if `capacity` were None; they always travel as rows.
      divide_by: divisor where some replicas have weight 0; see `js.all_reduce_gradients`.

    Returns:
      A transform with state `AllReduceRowsState`. `update(grads, state, params=None, weight=None)`
      returns the mean, in the gradients' dtypes (sums in at least float32), the same bits on all
      replicas. `weight`: () number, this replica's share; with 0 its gradients are ignored.

    Raises:
      ValueError: an invalid `path`, `output`, pair of both, or capacity; at trace time an unbound
        axis, tables without a leaf, `RowGradient`s that are malformed, not named but must be, or
        don't vary over the axis, a `weight` that is no scalar.

    Communication: every update, per table sent as rows, one all-gather of k + 2 int32 (k + 3 with
      `weight`) and one of k rows; both again, larger, above `capacity` (phase "overflow"). A table
      sent whole: an all-reduce of N * w bytes, an all-gather of 2 or 3 int32. Also that of `dense`.

    Source: Li et al., "PyTorch Distributed", VLDB 2020 (`sparse=True` embeddings are all-gathered).
    """
    check_axis_argument(OWNER, "axis_name", axis_name)
    names, capacities = tuple(tables), checked_capacities(OWNER, capacity)
    if isinstance(capacity, Mapping):
        check_names(f"{OWNER}: `capacity`", capacity, names, "names in `tables`")
    check_choice("path", path, Path, OWNER)
    check_choice("output", output, Output, OWNER)
    check_choice("divide_by", divide_by, DivideBy, OWNER)
    if path == "dense" and output == "rows":
        raise ValueError(f'{OWNER}: `output="rows"` needs `path="rows"` or "auto", got "dense".')
    inner = optax.with_extra_args_support(optax.identity() if dense is None else dense)
    by_initial = divide_by == "initial"
    reduction = TableReduction(axis_name, capacities, path, output == "rows", by_initial)

    def init_fn(params: PyTree) -> AllReduceRowsState:
        others, *_ = split_rows(params, names)
        zero = jnp.zeros([], jnp.int32)
        return AllReduceRowsState(zero, zero, zero, zero, inner.init(others))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, AllReduceRowsState]:
        require_axes(OWNER, "axis_name", axis_name)
        share = check_weight(OWNER, extra.get("weight"))
        others, table_grads, _, join = split_rows(updates, names)
        if dense is not None and (unnamed := [name for name in table_grads if name not in names]):
            raise ValueError(
                f"{OWNER}: with `dense`, `tables` must name each leaf with a RowGradient, and "
                f"lacks {unnamed}."
            )
        other_params = None if params is None else split_rows(params, names)[0]
        others, after = inner.update(others, state.dense, other_params, **extra)
        means: Any = {}
        _, overflows, needed, invalid, _ = state
        for name, gradient in table_grads.items():
            means[name], sent = reduction.mean(name, gradient, share)
            overflows = overflows + sent.overflow.astype(jnp.int32)
            needed = jnp.maximum(needed, sent.needed)
            invalid = invalid + sent.invalid
        count = increment(state.count)
        mean = join(dense=others, rows=means)
        return mean, AllReduceRowsState(count, overflows, needed, invalid, after)

    spec = Reduction(axes=axis_names(axis_name), takes=frozenset({"weight"}))
    if dense is not None:
        spec = _RowsAndDense.from_parts(spec, spec_of(dense))
    return GradientTransform(init_fn, update_fn, spec)


class _RowsAndDense(ChainReduction):
    """The description of the reduction of tables, and then of the other leaves."""

    def states(self, state: PyTree) -> Sequence[PyTree]:
        return (), state.dense


def mean_rows(
    rows: Rows,
    axes: tuple[str, ...],
    weight: jax.Array | None = None,
    divide_by: DivideBy = "initial",
) -> Rows:
    """Return the mean of rows over devices that hold the same rows of the tables.

    Args:
      rows: this device's rows, by table.
      axes: mapped axes; without any the result is `rows`.
      weight: () float32, this replica's share, see `js.sparse.all_reduce_rows`; None: all are
        equal.
      divide_by: divisor where some replicas have weight 0, see `js.sparse.all_reduce_rows`.

    Communication: per table one all-gather of the row numbers and one of the rows over `axes`.
    """
    if not axes:
        return rows
    reduction = TableReduction(axes, lambda _: None, "rows", True, divide_by == "initial")
    return {name: reduction.mean(name, gradient, weight)[0] for name, gradient in rows.items()}


class GatherResult(NamedTuple):
    """The rows of all replicas, and numbers about them; equal on all replicas."""

    rows: jax.Array  # (replicas, send) int32, distinct in each replica
    values: jax.Array  # (replicas, send, *s)
    shares: jax.Array | None  # (replicas,), each one's share in the mean; None: 1 / R
    overflow: jax.Array  # () bool, some replica had more rows than the capacity
    needed: jax.Array  # () int32, most distinct rows of one replica; 0 if tables are sent whole
    invalid: jax.Array  # () int32, entries of all replicas that are outside of the table


@dataclass(frozen=True)
class TableReduction:
    """The way in which tables are reduced; static.

    Attributes:
      axis_name: the replica axis.
      capacity: function from a table's name to the rows that a replica sends of it, None for the
        largest possible number.
      path: whether to send rows, the table, or whichever has fewer bytes.
      as_rows: whether the result is a `RowGradient`, always sent as rows.
      divide_by_initial: whether replicas of weight 0 count as if they had sent zeros.
    """

    axis_name: AxisName
    capacity: Callable[[str], int | None]
    path: Path
    as_rows: bool
    divide_by_initial: bool

    @jax.named_scope(OWNER)
    def mean(
        self, name: str, gradient: Table, weight: jax.Array | None
    ) -> tuple[Any, GatherResult]:
        """Return the mean of a gradient, weighted if `weight` is not None, and what was exchanged.

        Raises:
          ValueError: a gradient that is malformed, or does not vary over the axis, with its `name`.

        Communication: as `js.sparse.all_reduce_rows` states.
        """
        if isinstance(gradient, RowGradient):
            check_row_gradient(OWNER, repr(name), gradient)
        check_varying(OWNER, {name: arrays_of(gradient)}, self.axis_name)
        most = _max_rows(gradient)
        send = min(self.capacity(name) or most, most)
        if not self._sends_rows(gradient, send):
            numbers = self._gather(gradient, 0, weight)
            return self._mean_of_table(gradient, numbers.shares), numbers
        gathered = self._gather(gradient, send, weight)
        mean = self._combine(gradient, gathered)
        if send == most:
            return mean, gathered

        def resend(_: Table) -> Table:
            with phase_scope("overflow"):
                if self._sends_rows(gradient, most):
                    return self._combine(gradient, self._gather(gradient, most, weight))
                return self._mean_of_table(gradient, gathered.shares)

        # All replicas take the same branch, since each has the numbers of all.
        axes = axis_names(self.axis_name)
        return run_if(gathered.overflow, resend, lambda m: m, mean, axes=axes), gathered

    def _sends_rows(self, gradient: Table, num_entries: int) -> bool:
        """Return whether to send `num_entries` rows; "auto" sends whichever has fewer bytes.

        With w the bytes of a row, a replica sends, in rings, (R - 1) * k * (4 + w) for k rows of R
        replicas and 2 * (R - 1) / R * N * w for the table: rows win up to
        R * k * (4 + w) = 2 * N * w.
        """
        row_bytes = math.prod(gradient.shape[1:]) * gradient.dtype.itemsize
        of_rows = axis_size(self.axis_name) * num_entries * (4 + row_bytes)
        has_fewer = of_rows <= 2 * gradient.shape[0] * row_bytes
        return self.as_rows or self.path == "rows" or (self.path == "auto" and has_fewer)

    def _gather(self, gradient: Table, send: int, weight: jax.Array | None) -> GatherResult:
        """Return rows and values of all replicas, and the numbers that they exchange.

        The numbers are appended to the rows, so that they need no extra collective.
        """
        rows, distinct = jnp.zeros(0, jnp.int32), jnp.zeros([], jnp.int32)
        outside = num_outside(gradient) if isinstance(gradient, RowGradient) else distinct
        values = jnp.zeros((0, *gradient.shape[1:]), gradient.dtype)
        if send:
            sparse: Any = coalesce if isinstance(gradient, RowGradient) else row_gradient
            # Values of an overflow are NaN, and the second exchange replaces them.
            gradient_of_rows, distinct, _ = sparse(gradient, capacity=send)
            rows, values = gradient_of_rows.rows, gradient_of_rows.values
        tail, shares = [distinct, outside], None
        if weight is not None:
            tail.append(lax.bitcast_convert_type(weight, jnp.int32))
        head = self._all_gather(jnp.concatenate([rows, jnp.stack(tail)]))
        if weight is not None:
            weights = lax.bitcast_convert_type(head[:, send + 2], jnp.float32)
            weights = weights.astype(at_least_float32(gradient.dtype))
            weights = jnp.where(weights > 0, weights, jnp.zeros_like(weights))
            shares = quotient(weights, jnp.sum(weights))
            if self.divide_by_initial:
                shares = shares * jnp.mean((weights > 0).astype(weights.dtype))
        needed = jnp.max(head[:, send])
        invalid = jnp.sum(head[:, send + 1], dtype=jnp.int32)
        values = self._all_gather(values)
        return GatherResult(head[:, :send], values, shares, needed > send, needed, invalid)

    def _all_gather(self, x: jax.Array) -> jax.Array:
        """Return the arrays of all replicas, `(replicas, *x.shape)`, typed as equal on all."""
        replicas = axis_size(self.axis_name)
        if x.size == 0:
            return jnp.zeros((replicas, *x.shape), x.dtype)
        return gather_slices(x[None], self.axis_name)

    def _combine(self, gradient: Table, gathered: GatherResult) -> Table:
        """Return the mean of gathered rows, added replica by replica: equal bits on all."""
        num_rows, replicas = gradient.shape[0], axis_size(self.axis_name)
        shares, every = gathered.shares, gathered.rows
        if shares is not None:
            # Rows that only idle replicas name are not in the mean: an optimizer may decay them.
            every = jnp.where(shares[:, None] > 0, every, num_rows)
        if self.as_rows:
            size = min(replicas * _max_rows(gradient), num_rows)  # independent of `capacity`
            rows, places, _ = distinct_rows(every, num_rows, size)
        else:
            size, rows, places = num_rows, None, every
        total = add_in_order(places, gathered.values, size, shares)
        mean = (total / replicas if shares is None else total).astype(gradient.dtype)
        return mean if rows is None else RowGradient(rows, mean, num_rows)

    def _mean_of_table(self, gradient: Table, shares: jax.Array | None) -> jax.Array:
        dense = gradient.to_dense() if isinstance(gradient, RowGradient) else gradient
        if shares is None:
            return all_mean(dense, self.axis_name)
        part = scale(dense, shares[lax.axis_index(self.axis_name)])
        return sum_over(part, self.axis_name)


def _max_rows(gradient: Table) -> int:
    """Return the largest possible number of distinct rows."""
    return min(arrays_of(gradient).shape[0], gradient.shape[0])
