"""The mean over replicas of one table's gradient."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._support.types import AxisName
from ...collectives import all_mean, gather_slices, quotient, scaled
from ...mesh import axis_names, axis_size, sum_over
from ...transform import phase_scope, run_if
from ...tree import at_least_float32
from ._coalesce import add_in_order, compact, distinct_rows, nonzero_rows
from ._row_gradient import RowGradient, inside, num_outside

Path = Literal["auto", "rows", "dense"]
Table = RowGradient | jax.Array
"""A table's gradient; an array is searched for rows that are not zero."""


class Facts(NamedTuple):
    """Numbers about one table that the replicas exchanged; equal on all of them."""

    overflow: jax.Array  # () bool, some replica had more rows than the capacity
    needed: jax.Array  # () int32, most distinct rows of one replica; 0 if tables are sent whole
    invalid: jax.Array  # () int32, entries of all replicas that are outside of the table


class _Gathered(NamedTuple):
    rows: jax.Array  # (replicas, send) int32, distinct in each replica
    values: jax.Array  # (replicas, send, *s)
    shares: jax.Array | None  # (replicas,), each one's share in the mean; None: 1 / R
    facts: Facts


@dataclass(frozen=True)
class TableReduction:
    """The way in which one table is reduced; static.

    Attributes:
      axis_name: the replica axis.
      capacity: rows that a replica sends, None for the largest possible number.
      path: whether to send rows, the table, or whichever has fewer bytes.
      as_rows: whether the result is a `RowGradient`, always sent as rows.
      divide_by_initial: whether replicas of weight 0 count as if they had sent zeros.
    """

    axis_name: AxisName
    capacity: int | None
    path: Path
    as_rows: bool
    divide_by_initial: bool

    def mean(self, gradient: Table, weight: jax.Array | None) -> tuple[Table, Facts]:
        """Return the mean of `gradient`, weighted if `weight` is not None.

        Communication: as `js.all_reduce_rows` states.
        """
        most = _most_rows(gradient)
        send = most if self.capacity is None else min(self.capacity, most)
        if not self._sends_rows(gradient, send):
            numbers = self._gather(gradient, 0, weight)
            return self._mean_of_table(gradient, numbers.shares), numbers.facts
        gathered = self._gather(gradient, send, weight)
        mean = self._combine(gradient, gathered)
        if send == most:
            return mean, gathered.facts

        def again(_: Table) -> Table:
            with phase_scope("overflow"):
                if self._sends_rows(gradient, most):
                    return self._combine(gradient, self._gather(gradient, most, weight))
                return self._mean_of_table(gradient, gathered.shares)

        # All replicas take the same branch, since each has the numbers of all.
        overflow, axes = gathered.facts.overflow, axis_names(self.axis_name)
        return run_if(overflow, again, lambda m: m, mean, axes=axes), gathered.facts

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

    def _gather(self, gradient: Table, send: int, weight: jax.Array | None) -> _Gathered:
        """Return rows and values of all replicas, and the numbers that they exchange.

        The numbers are appended to the rows, so that they need no extra collective.
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
        """Return each replica's share in the mean, 0 if its weight is not positive."""
        weights = jnp.where(weights > 0, weights, jnp.zeros_like(weights))
        shares = quotient(weights, jnp.sum(weights))
        if self.divide_by_initial:
            shares = shares * jnp.mean((weights > 0).astype(weights.dtype))
        return shares

    def _all_gather(self, x: jax.Array) -> jax.Array:
        """Return the arrays of all replicas, `(replicas, *x.shape)`, typed as equal on all."""
        replicas = axis_size(self.axis_name)
        if x.size == 0:
            return jnp.zeros((replicas, *x.shape), x.dtype)
        return gather_slices(x[None], self.axis_name)

    def _combine(self, gradient: Table, gathered: _Gathered) -> Table:
        """Return the mean of gathered rows, added replica by replica: equal bits on all."""
        num_rows, replicas = gradient.shape[0], axis_size(self.axis_name)
        shares, every = gathered.shares, gathered.rows
        if shares is not None:
            # Rows that only idle replicas name are not in the mean: an optimizer may decay them.
            every = jnp.where(shares[:, None] > 0, every, num_rows)
        if self.as_rows:
            size = min(replicas * _most_rows(gradient), num_rows)  # independent of `capacity`
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
        part = scaled(dense, shares[lax.axis_index(self.axis_name)])
        return sum_over(part, self.axis_name)


def _most_rows(gradient: Table) -> int:
    """Return the largest possible number of distinct rows."""
    num_rows = gradient.shape[0]
    if isinstance(gradient, RowGradient):
        return min(gradient.rows.shape[0], num_rows)
    return num_rows


def _compact(gradient: Table, send: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return at most `send` distinct rows, their values, and the number of distinct rows."""
    if send == 0:
        values = jnp.zeros((0, *gradient.shape[1:]), gradient.dtype)
        return jnp.zeros(0, jnp.int32), values, jnp.zeros([], jnp.int32)
    if isinstance(gradient, RowGradient):
        num_rows = gradient.num_rows
        return compact(inside(gradient.rows, num_rows), gradient.values, num_rows, send)
    return nonzero_rows(gradient, send)


def _invalid(gradient: Table) -> jax.Array:
    return num_outside(gradient) if isinstance(gradient, RowGradient) else jnp.zeros([], jnp.int32)
