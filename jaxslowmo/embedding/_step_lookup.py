"""The lookup of a training step: how embedding tables and their rows take part in it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ..gradients.sparse import Rows
from ..mesh import AnyMesh, VirtualMesh, axis_names, replicate
from ..tracing import FullLoss
from ..transform import ParameterTransform, isolated, unless_idle
from ._batch_rows import Ahead, Carry, Requested, WithVectors, ordered_after
from ._embeddings import Embeddings
from ._exchange import num_devices, patched_rows, read_rows, send_rows
from ._shards import Kinds, on_shards, place_tables, table_maker
from ._table import WithTables


@dataclass(frozen=True)
class Lookup:
    """The part of a training step that looks up rows of embedding tables for its batches.

    A step has dense parameters, which its optimizer updates, and stored parameters, the tables,
    whose rows are requested by a batch and updated on the devices that hold them. Parameters are
    `WithTables(dense, tables)`, and the states of the two optimizers are `WithTables`, too. Methods
    that take values of one device are called with `axis` bound.

    Attributes:
      embeddings: the embedding tables.
      axis: name of the mesh axis over which a replica's stored parameters are sharded; None: they
        are not sharded.
      nested: the same name if the axis is automatic in the step (left to the compiler), so that
        `on_devices` must bind it; else None.
    """

    embeddings: Embeddings
    axis: str | None = None
    nested: str | None = None

    # Trees of parameters, of their specs, or of the states of their optimizers.

    def dense(self, tree: PyTree) -> PyTree:
        """Return the part of a tree for the dense parameters; other values are returned as is."""
        return tree.dense if isinstance(tree, WithTables) else tree

    def stacked(self, params: PyTree, seed: int, *, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
        """Return the parameters of all replicas, equal on them.

        Args:
          params: parameters of one replica. Without stored parameters, these are initialized;
            otherwise they must have the names and shapes of these tables.
          seed: seed of the initialization.
          mesh: mesh of the step.
          axis_name: name of the replica axis or axes.

        Communication: none.
        """
        dense = replicate(self.dense(params), mesh=mesh, axis_name=axis_name)
        args = self.embeddings, self.nested, mesh, axis_name
        if isinstance(params, WithTables):
            return WithTables(dense, place_tables(params.tables, *args))
        bits = jax.random.key_data(jax.random.key(seed))
        return WithTables(dense, table_maker(*args)(bits))

    # The parts of a step.

    def of_sync(self, sync: ParameterTransform | None) -> ParameterTransform | None:
        """Return a parameter transform with the specs of stored parameters, also for its state."""
        if sync is None or self.nested is None or not sync.shards_whole_leaves:
            return sync
        return sync.with_specs(WithTables(P(), self.embeddings.specs), of_state=True)

    def of_loss(self, loss: FullLoss) -> FullLoss:
        """Return a loss function of the batches that `seen` returns, which passes on `embedded`."""

        def full(params: PyTree, batch: WithVectors, **context: Any) -> Any:
            return loss(params, batch.batch, embedded=batch.embedded, **context)

        return full

    def on_devices(
        self, fn: Callable[..., Any], *args: Any, kinds: tuple[Kinds, ...], out: Kinds
    ) -> Any:
        """Run `fn` on each device's parts, and return its results; see `on_shards`."""
        return on_shards(self.nested, fn, *args, kinds=kinds, out=out)

    # A batch.

    def requested(
        self,
        stored: PyTree,
        batch: PyTree,
        carry: Carry | None,
        weight: jax.Array | None,
        axes: tuple[str, ...],
    ) -> Requested:
        """Return a batch with the rows that it requests.

        Args:
          stored: this device's part of the stored parameters.
          batch: this device's part of the batch.
          carry: request that an earlier step made for the batch; None: no request yet.
          weight: () weight of the replica; with 0 the counts are zeros.
          axes: axes inside a replica over which its batch is split.

        Communication: what `Embeddings.exchange_ids` and `Embeddings.lookup` communicate, unless
          `carry` has it already; one all-reduce of the counts over `axes`.
        """
        embeddings = self.embeddings
        if carry is None:
            requests, vectors = embeddings.exchange_ids(embeddings.bags_of(batch)), None
        else:
            requests, vectors = carry
        if vectors is None:
            vectors = embeddings.lookup(stored, requests)
        counts = unless_idle(_summed(embeddings.metrics(requests), axes), weight)
        return Requested(batch, requests, vectors, counts, embeddings.num_refused(counts))

    def seen(self, requested: Requested, params: PyTree) -> PyTree:
        """Return the batch as the loss function receives it; `params` are this device's dense ones.

        Communication: none.
        """
        return _pooled(self.embeddings, requested, params)[0]

    def seen_by_loss(self, params: PyTree, share: PyTree) -> tuple[PyTree, PyTree]:
        """Return the shapes and dtypes of the parameters and the batch of the loss function.

        Args:
          params: shapes and dtypes of the parameters of one replica.
          share: shapes and dtypes of one device's part of a batch.
        """
        embeddings = self.embeddings

        def look_up(params: WithTables, batch: PyTree) -> PyTree:
            return embeddings.reference(params.tables, embeddings.bags_of(batch), params.dense)

        return params.dense, WithVectors(share, jax.eval_shape(look_up, params, share))

    def differentiated(
        self,
        requested: Requested,
        params: PyTree,
        compute: Callable[..., tuple[Any, PyTree, PyTree]],
        *operands: PyTree,
    ) -> tuple[Any, PyTree, Rows, PyTree]:
        """Return results and gradients of a batch.

        Args:
          requested: the batch with its rows.
          params: dense parameters, varying over the axes over which gradients are averaged later.
          compute: function `compute(params, batch, *operands)` that returns results, gradients of
            `params`, and gradients of the embedded vectors of the batch.
          *operands: further arguments of `compute`.

        Returns:
          The results; gradients of the dense parameters; gradients of the rows that this device
          holds; the batch that `compute` received.

        Communication: one all-to-all of the requested rows per table.
        """
        embeddings = self.embeddings

        def compute_local(
            requested: Requested, params: PyTree, *operands: PyTree
        ) -> tuple[Any, PyTree, PyTree, WithVectors]:
            batch, pull = _pooled(embeddings, requested, params)
            results, grads, of_embedded = compute(params, batch, *operands)
            of_vectors, of_dense = pull(of_embedded)
            # Position weights are dense parameters that are used before the loss.
            grads = jax.tree.map(lambda g, more: g + more, grads, of_dense)
            return results, grads, of_vectors, batch

        operand = next(iter(requested.vectors.values()))
        results, grads, of_vectors, batch = isolated(
            compute_local, operand, requested, params, *operands
        )
        devices = num_devices(embeddings.axis_name)
        # The loss of a replica is the mean of its devices' losses.
        scaled = jax.tree.map(lambda g: g / devices, of_vectors)
        return results, grads, embeddings.send_back(scaled, requested.requests), batch

    def applied(
        self, stored: PyTree, state: PyTree, rows: Rows, active: jax.Array | None, read: PyTree
    ) -> tuple[PyTree, PyTree, Any]:
        """Return stored parameters and optimizer state after an update of this device's part.

        Args:
          stored: this device's part of the stored parameters.
          state: this device's part of the row-wise optimizer's state.
          rows: gradients of rows, by stored array.
          active: () bool, whether to update; None: always.
          read: values that were read from `stored`; the update is ordered after these reads.

        Returns:
          The stored parameters, the state, and the numbers of the changed rows by stored array.
        """
        embeddings = self.embeddings
        numbers = ordered_after({name: gradient.rows for name, gradient in rows.items()}, read)
        rows = {name: replace(gradient, rows=numbers[name]) for name, gradient in rows.items()}
        with jax.named_scope("optimizer"):
            stored, state = embeddings.apply(stored, state, rows, active=active)
        return stored, state, numbers

    # The next batch.

    def following(
        self, stored: PyTree, upcoming: PyTree, ahead: Ahead, carry: Carry | None = None
    ) -> tuple[Carry | None, PyTree]:
        """Return the request of the next batch, None without one, and the rows read for it.

        Args:
          stored: this device's part of the stored parameters.
          upcoming: this device's part of the next batch; None: there is none.
          ahead: which exchanges run ahead.
          carry: earlier request of that batch, for which only rows are read again; None: there is
            none.

        Communication: what `Embeddings.exchange_ids` does; if rows are looked up ahead, also one
          all-to-all of them per table.
        """
        embeddings = self.embeddings
        if upcoming is None and carry is None:
            return None, ()
        if carry is None:
            carry = Carry(embeddings.exchange_ids(embeddings.bags_of(upcoming)), None)
        if not ahead.vectors:
            return carry, ()
        read = read_rows(stored, carry.requests.asked)
        vectors = send_rows(embeddings.layout(), read)
        return carry._replace(vectors=vectors), read

    def patched(
        self,
        stored: PyTree,
        carry: Carry,
        changed: Any,
        all_changed: bool | jax.Array,
        ahead: Ahead,
        axes: tuple[str, ...],
    ) -> tuple[Carry, dict[str, jax.Array]]:
        """Return the request of a batch, with the rows that have changed since sent again.

        Args:
          stored: stored parameters of the replica.
          carry: request of the batch.
          changed: numbers of the changed rows, by stored array.
          all_changed: whether all rows have changed.
          ahead: which exchanges run ahead.
          axes: axes inside a replica over which its batch is split.

        Returns:
          The request, and metrics of the rows that were sent again.

        Communication: that of `patched_rows`, and one all-reduce of the counts.
        """
        embeddings = self.embeddings
        if not ahead.patches:
            return carry, {}
        # A static `all_changed` stays a bool, so that the program has one branch, not a `lax.cond`.
        is_static = isinstance(all_changed, bool)

        def inside(stored: PyTree, carry: Carry, changed: PyTree, flag: Any) -> Any:
            assert carry.vectors is not None, "they were looked up ahead"
            vectors, resent = patched_rows(
                embeddings.layout(),
                stored,
                carry.requests,
                carry.vectors,
                changed,
                room=ahead.room,
                everything=all_changed if is_static else flag,
            )
            counts = {f"embeddings/{name}/resent": n for name, n in resent.items()}
            return carry._replace(vectors=vectors), _summed(counts, axes)

        return self.on_devices(
            inside,
            stored,
            carry,
            changed,
            None if is_static else all_changed,
            kinds=(self.embeddings.specs, "device", "device", "whole"),
            out=("device", "whole"),
        )

    # On the host.

    def check(self, batch: PyTree, num_parts: int) -> bool:
        """Raise `ValueError` for a host batch with ids that are not in their table or lack a slot.

        Args:
          batch: batch as the step takes it.
          num_parts: number of equal parts of the batch, one per device.

        Returns:
          Whether all ids were checked. Ids on devices are not checked, and `inputs` may return such
          ids even for NumPy arrays.
        """
        bags = self.embeddings.bags_of(batch)
        self.embeddings.check(bags, num_parts=num_parts)
        return all(isinstance(feature_bags.ids, np.ndarray) for feature_bags in bags.values())

    def refuse(self, metrics: dict[str, Any]) -> None:
        """Raise `ValueError` if metrics count ids that are not in their table or lack a slot."""
        self.embeddings.refuse(metrics)


def lookup_of(embeddings: Embeddings, mesh: AnyMesh, axis_name: AxisName) -> Lookup:
    """Return the `Lookup` of a training step for its argument `embeddings`.

    Raises:
      ValueError: an argument that is not `Embeddings`; an axis that the mesh lacks, or that is a
        replica axis; several shards on a `VirtualMesh`.
    """
    if not isinstance(embeddings, Embeddings):
        raise ValueError(
            f"`embeddings` must be made by js.embeddings, got {type(embeddings).__name__}."
        )
    axis = embeddings.axis_name
    if axis is None:
        return Lookup(embeddings)
    embeddings = embeddings.over(mesh)
    if axis in axis_names(axis_name):
        raise ValueError(
            f"`embeddings` are sharded over {axis!r}, a replica axis of this step: every replica "
            "has its own tables, sharded over an axis inside the replica."
        )
    if not isinstance(mesh, VirtualMesh):
        return Lookup(embeddings, axis, axis)
    if mesh.shape[axis] > 1:
        raise ValueError(
            f"`embeddings` are sharded over {axis!r} of size {mesh.shape[axis]}, and virtual "
            "replicas have no devices inside: use js.make_mesh, or axis_name=None."
        )
    return Lookup(replace(embeddings, axis_name=None), axis)


def _pooled(
    embeddings: Embeddings, requested: Requested, params: PyTree
) -> tuple[WithVectors, Callable[[PyTree], tuple[PyTree, PyTree]]]:
    """Return a batch with its pooled vectors, and the function that pulls back their gradients.

    That function returns the gradients of the rows and of `params`.

    Communication: none.
    """

    def pool(vectors: PyTree, params: PyTree) -> PyTree:
        return embeddings.pooled(vectors, requested.requests, params)

    embedded, pull = jax.vjp(pool, requested.vectors, params)
    return WithVectors(requested.batch, embedded), pull


def _summed(counts: dict[str, jax.Array], axes: tuple[str, ...]) -> dict[str, jax.Array]:
    """Return the sums of counts over the devices of a replica.

    Communication: one all-reduce of 4 bytes each over `axes`, which the compiler joins.
    """
    return lax.psum(counts, axes) if axes else counts
