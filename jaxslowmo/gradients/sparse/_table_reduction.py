"""Mean over replicas of one table's gradient."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._support.types import AxisName
from ...collectives import all_mean, gather_slices, quotient, scaled
from ...mesh import axis_names, axis_size, settle, vary_over
from ...transform import phase_scope, run_if
from ...tree import at_least_float32
from ._coalesce import add_in_order, compact, distinct_places, nonzero_rows
from ._row_gradient import RowGradient, inside, num_outside

Path = Literal["auto", "rows", "dense"]
Table = RowGradient | jax.Array
"""A table's gradient; an array is searched for rows that are not zero."""


class Facts(NamedTuple):
    """What the replicas told each other about one table; equal on all of them."""

    overflow: jax.Array  # () bool, some replica had more rows than the capacity
    needed: jax.Array  # () int32, most distinct rows of one replica; 0 where tables are reduced
    invalid: jax.Array  # () int32, entries of all replicas that lie outside of the table


class _Gathered(NamedTuple):
    rows: jax.Array  # (replicas, send) int32, distinct in each replica
    values: jax.Array  # (replicas, send, *s)
    shares: jax.Array | None  # (replicas,), what each counts in the mean; None: 1 / R each
    facts: Facts


@dataclass(frozen=True)
class TableReduction:
    """How one table is reduced; static.

    Attributes:
      axis_name: the replica axis.
      capacity: rows that a replica sends, None for as many as it may have.
      path: rows, the table, or what is fewer bytes.
      as_rows: whether the result is a `RowGradient`, always sent as rows.
      divide_by_initial: whether replicas of weight 0 count as if they had sent zeros.
    """

    axis_name: AxisName
    capacity: int | None
    path: Path
    as_rows: bool
    divide_by_initial: bool

    def mean(self, gradient: Table, weight: jax.Array | None) -> tuple[Table, Facts]:
        """The mean of `gradient`, weighted where `weight` is given.

        Communication: as `js.all_reduce_rows` states.
        """
        gradient = vary_over(gradient, axis_names(self.axis_name))
        most = _most_rows(gradient)
        send = most if self.capacity is None else min(self.capacity, most)
        if not self._sends_rows(gradient, send):
            told = self._gather(gradient, 0, weight)
            return self._mean_of_table(gradient, told.shares), told.facts
        gathered = self._gather(gradient, send, weight)
        mean = self._combine(gradient, gathered)
        if send == most:
            return mean, gathered.facts

        def again(_: Table) -> Table:
            with phase_scope("overflow"):
                if self._sends_rows(gradient, most):
                    return self._combine(gradient, self._gather(gradient, most, weight))
                return self._mean_of_table(gradient, gathered.shares)

        # Equal on all replicas, since each has all their numbers.
        return run_if(gathered.facts.overflow, again, lambda m: m, mean), gathered.facts

    def _sends_rows(self, gradient: Table, num_entries: int) -> bool:
        if self.as_rows or self.path == "rows":
            return True
        table = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
        replicas = axis_size(self.axis_name)
        return self.path == "auto" and _rows_are_fewer_bytes(table, num_entries, replicas)

    def _gather(self, gradient: Table, send: int, weight: jax.Array | None) -> _Gathered:
        """Rows and values of all replicas, with what they tell each other besides.

        Numbers travel behind the rows, so that they cost no collective of their own.
        """
        rows, values, distinct = _compact(gradient, send)
        tail = [distinct, _invalid(gradient)]
        if weight is not None:
            tail.append(lax.bitcast_convert_type(weight, jnp.int32))
        head = self._all_gather(jnp.concatenate([rows, jnp.stack(tail)]))
        needed = jnp.max(head[:, send])
        shares = None
        if weight is not None:
            weights = lax.bitcast_convert_type(head[:, send + 2], jnp.float32)
            shares = self._shares(weights.astype(at_least_float32(gradient.dtype)))
        return _Gathered(
            rows=head[:, :send],
            values=self._all_gather(values),
            shares=shares,
            facts=Facts(
                overflow=(needed > send) if send else jnp.zeros([], bool),
                needed=needed,
                invalid=jnp.sum(head[:, send + 1], dtype=jnp.int32),
            ),
        )

    def _shares(self, weights: jax.Array) -> jax.Array:
        """What each replica counts in the mean; those of a weight that is not positive nothing."""
        weights = jnp.where(weights > 0, weights, jnp.zeros_like(weights))
        shares = quotient(weights, jnp.sum(weights))
        if self.divide_by_initial:
            shares = shares * jnp.mean((weights > 0).astype(weights.dtype))
        return shares

    def _all_gather(self, x: jax.Array) -> jax.Array:
        """`(replicas, *x.shape)`, typed as equal on all replicas."""
        replicas = axis_size(self.axis_name)
        if replicas == 1:
            return settle(x, self.axis_name)[None]
        if x.size == 0:
            return jnp.zeros((replicas, *x.shape), x.dtype)
        return gather_slices(x[None], self.axis_name, like=jnp.zeros([]))

    def _combine(self, gradient: Table, gathered: _Gathered) -> Table:
        """Mean of gathered rows, added up replica by replica: all replicas get the same bits."""
        num_rows, replicas = gradient.shape[0], axis_size(self.axis_name)
        if self.as_rows:
            size = min(replicas * _most_rows(gradient), num_rows)  # whatever was sent
            rows, places = distinct_places(gathered.rows, num_rows, size)
        else:
            size, rows, places = num_rows, None, gathered.rows
        shares = gathered.shares
        total = add_in_order(places, gathered.values, size, shares)
        mean = (total / replicas if shares is None else total).astype(gradient.dtype)
        return mean if rows is None else RowGradient(rows, mean, num_rows)

    def _mean_of_table(self, gradient: Table, shares: jax.Array | None) -> jax.Array:
        dense = gradient.to_dense() if isinstance(gradient, RowGradient) else gradient
        if shares is None:
            return all_mean(dense, self.axis_name)
        part = scaled(dense, shares[lax.axis_index(self.axis_name)])
        if axis_size(self.axis_name) == 1 or part.size == 0:
            return settle(part, self.axis_name)
        return lax.psum(part, self.axis_name)


def _most_rows(gradient: Table) -> int:
    """Distinct rows that there can be."""
    num_rows = gradient.shape[0]
    if isinstance(gradient, RowGradient):
        return min(gradient.rows.shape[0], num_rows)
    return num_rows


def _compact(gradient: Table, send: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """At most `send` distinct rows, their values, and how many there are; 0 if `send` is."""
    if send == 0:
        values = jnp.zeros((0, *gradient.shape[1:]), gradient.dtype)
        return jnp.zeros(0, jnp.int32), values, jnp.zeros([], jnp.int32)
    if isinstance(gradient, RowGradient):
        num_rows = gradient.num_rows
        return compact(inside(gradient.rows, num_rows), gradient.values, num_rows, send)
    return nonzero_rows(gradient, send)


def _invalid(gradient: Table) -> jax.Array:
    return num_outside(gradient) if isinstance(gradient, RowGradient) else jnp.zeros([], jnp.int32)


def _rows_are_fewer_bytes(table: jax.ShapeDtypeStruct, num_entries: int, num_replicas: int) -> bool:
    """Whether an all-gather of rows sends no more than an all-reduce of the table.

    With w the bytes of a row, a replica sends, in rings, (R - 1) * k * (4 + w) for the rows of R
    replicas and 2 * (R - 1) / R * N * w for the table: rows win up to R * k * (4 + w) = 2 * N * w.
    """
    row_bytes = math.prod(table.shape[1:]) * table.dtype.itemsize
    return num_replicas * num_entries * (4 + row_bytes) <= 2 * table.shape[0] * row_bytes
