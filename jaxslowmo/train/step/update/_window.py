"""Gradients of several batches that become one update."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...._support.types import PyTree
from ....embedding import Carry, added_rows, empty_rows, summed
from ....gradients.sparse import Rows
from ....mesh import match_varying
from ....tree import added, at_least_float32, by_dtype, cast, kept_if, zeros_like

Metrics = dict[str, jax.Array]


class GradientWindow(NamedTuple):
    """What the batches of one update have given so far; `step.collect` makes it and adds to it.

    Devices are counted over the replica axis and the axes inside a replica over which the batch is
    split: between these nothing is reduced before the update.

    Attributes:
      totals: leaves (devices, *s), in at least float32: weighted sums of gradients.
      metrics: leaves (replicas, ...), in at least float32: weighted sums, "loss" among them.
      model_state: leaves (devices, ...), as the last batch left it.
      weight: (replicas,) float32, sum of the weights; None where batches have none.
      count: (replicas,) int32, batches so far; equal on all replicas.
      rows: by table, (devices, k) and (devices, k, *s): weighted gradients of the rows that a
        device holds: first the room that the window was opened with, in which batches of one shape
        stand one after the other, then those of batches for which there was none; {} without
        tables.
      refused: (replicas,) int32: ids so far that are in no table, or have no slot; where it is not
        0 the update will be skipped. None without tables.
      num_placed: (replicas,) int32: batches in the room; None without tables.
    """

    totals: PyTree
    metrics: Metrics
    model_state: PyTree
    weight: jax.Array | None
    count: jax.Array
    rows: Rows
    refused: jax.Array | None = None
    num_placed: jax.Array | None = None


# How each part relates to the replicas, as `map_replicas` wants to know.
ROLES = GradientWindow._make(
    ("device", "stacked", "device", "stacked", "stacked", "device", "stacked", "stacked")
)


class Given(NamedTuple):
    """What a program is given beside the state; in it the replica's, or a device's part of it.

    Attributes:
      batch: None for an update of a window alone.
      weight: () the replica's share in averages; None where all are alike.
      window: the batches of the same update so far; None where there are none.
      carry: what was asked for the batch beside an earlier one; None for nothing.
      upcoming: the batch that comes next; None where nothing is to be done for it.
    """

    batch: PyTree = None
    weight: jax.Array | None = None
    window: GradientWindow | None = None
    carry: Carry | None = None
    upcoming: PyTree = None


# How each part relates to the replicas, as `map_replicas` wants to know.
GIVEN_ROLES: Any = Given._make(("batch", "stacked", ROLES, "device", "batch"))


class LossData(NamedTuple):
    """What the loss function is given beside the parameters.

    Attributes:
      batch: of this device.
      key: its own.
      model_state: before the batch.
    """

    batch: PyTree
    key: jax.Array
    model_state: PyTree


class Gradients(NamedTuple):
    """What one batch gives, or a window of several; an update starts from it.

    Attributes:
      grads: means over the examples of this device.
      metrics: of the replica, means over all of its examples, "loss" among them.
      model_state: of this device, after the batch.
      rows: by table, mean gradients of the rows that it holds; {} without tables.
      refused: () int32, ids of the replica because of which the update must not be made; None
        without tables.
      weight: () this replica's share in averages over replicas; None where all are alike.
      data: what the loss saw; None for a window, whose batches are gone.
    """

    grads: PyTree
    metrics: Metrics
    model_state: PyTree
    rows: Rows
    refused: jax.Array | None
    weight: jax.Array | None
    data: LossData | None


def empty_window(found: Gradients, num_batches: int) -> GradientWindow:
    """A window before its first batch.

    Args:
      found: of one batch, with the model state before it; of the rest shapes, dtypes and varying
        axes are all that is looked at.
      num_batches: for the rows of so many batches there is room; others make the window larger.
    """
    count = jnp.zeros([], jnp.int32)
    return GradientWindow(
        jax.tree.map(wide_zeros, found.grads),
        jax.tree.map(wide_zeros, found.metrics),
        found.model_state,
        None if found.weight is None else jnp.zeros_like(found.weight),
        count,
        empty_rows(found.rows, num_batches),
        jax.tree.map(lambda x: match_varying(zeros_like(x), x), found.refused),
        count if found.rows else None,
    )


def added_to(window: GradientWindow, found: Gradients, *, fits: bool) -> GradientWindow:
    """The window with one batch more, of whose rows is known whether they fit into its room."""
    weight, place = found.weight, window.num_placed if fits else None
    return GradientWindow(
        jax.tree.map(added, window.totals, _weighted(found.grads, weight)),
        jax.tree.map(added, window.metrics, _weighted(found.metrics, weight)),
        found.model_state,
        None if window.weight is None or weight is None else window.weight + weight,
        window.count + 1,
        added_rows(window.rows, found.rows, weight, place),
        jax.tree.map(jnp.add, window.refused, found.refused),
        window.num_placed if place is None else place + 1,
    )


def means_of(window: GradientWindow) -> Gradients:
    """What the batches of a window give: means of gradients and metrics, in at least float32.

    They are zeros on a replica that was idle.
    """
    if window.weight is None:
        divisor = by_dtype(window.count)
    else:
        # Over infinity everything is zero, without a choice for every leaf.
        divisor = by_dtype(jnp.where(window.weight > 0, window.weight, jnp.inf))
    sums = window.totals, window.metrics
    totals, metrics = jax.tree.map(lambda x: x / divisor(x.dtype), sums)
    rows, model_state = summed(window.rows, divisor), window.model_state
    return Gradients(totals, metrics, model_state, rows, window.refused, window.weight, None)


def _weighted(tree: PyTree, weight: jax.Array | None) -> PyTree:
    """In at least float32, times the weight; zeros for weight 0, whatever stands there."""
    wide = jax.tree.map(lambda x: cast(x, at_least_float32(x.dtype)), tree)
    if weight is None:
        return wide
    counts, factor = weight > 0, by_dtype(weight)
    return jax.tree.map(lambda x: kept_if(counts, x * factor(x.dtype)), wide)


def wide_zeros(kind: Any) -> jax.Array:
    """Zeros to add values of a type to: at least float32, varying and laid out as it is."""
    wide = kind.update(dtype=at_least_float32(kind.dtype))
    return match_varying(zeros_like(wide), kind)
