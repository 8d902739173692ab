"""Embedding tables as what a training step looks up."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ..._typing import AxisName, PyTree
from ...mesh import AnyMesh, VirtualMesh, axis_names, replicate
from ...sparse import Rows
from ...tracing import FullLoss
from ...transform import ParameterTransform, unless_idle
from .._embeddings import Embeddings
from .._lookup import patched_rows, read_rows, send_rows, typed_as_equal
from .._requests import Requests
from .._table import WithTables
from ._asked import Ahead, Carry, Requested, WithVectors
from ._looked_up import differentiated, pooled
from ._lookup import Lookup
from ._rows import after
from ._stored import given_tables, new_tables


@dataclass(frozen=True)
class TableLookup(Lookup):
    """Embedding tables of which each batch asks for some rows; see `Lookup`.

    Parameters are `WithTables(dense, tables)`, the states of the optimizers likewise.
    """

    embeddings: Embeddings
    axis: str | None
    nested: str | None

    def dense(self, tree: WithTables) -> PyTree:
        """See `Lookup`; specs may be one for all."""
        return tree.dense if isinstance(tree, WithTables) else tree

    def stored(self, tree: WithTables) -> PyTree:
        """See `Lookup`."""
        return tree.tables

    def joined(self, dense: PyTree, stored: PyTree) -> WithTables:
        """See `Lookup`."""
        return WithTables(dense, stored)

    @property
    def specs(self) -> Any:
        """See `Lookup`."""
        return self.embeddings.specs

    @property
    def optimizer_specs(self) -> Any:
        """See `Lookup`."""
        return self.embeddings.optimizer_specs

    def init_optimizer(self, stored: PyTree) -> PyTree:
        """See `Lookup`."""
        return self.embeddings.init_optimizer(stored)

    def stacked(self, params: PyTree, seed: int, *, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
        """See `Lookup`; tables that are given must have the names and shapes of these."""
        lies: dict[str, Any] = {"mesh": mesh, "axis_name": axis_name}
        which = self.embeddings, self.nested
        if isinstance(params, WithTables):
            stored = given_tables(*which, params.tables, **lies)
            return WithTables(replicate(params.dense, **lies), stored)
        stored = new_tables(*which, jax.random.key(seed), **lies)
        return WithTables(replicate(params, **lies), stored)

    def of_sync(self, sync: ParameterTransform | None) -> ParameterTransform | None:
        """See `Lookup`."""
        if sync is None or self.nested is None or not sync.shards_whole_leaves:
            return sync
        return sync.with_specs(WithTables(P(), self.specs), of_state=True)

    def of_loss(self, loss: FullLoss) -> FullLoss:
        """See `Lookup`: it is given `embedded`."""

        def full(params: PyTree, batch: WithVectors, **context: Any) -> Any:
            return loss(params, batch.batch, embedded=batch.embedded, **context)

        return full

    def requested(
        self,
        stored: PyTree,
        batch: PyTree,
        carry: Carry | None,
        weight: jax.Array | None,
        axes: tuple[str, ...],
    ) -> Requested:
        """See `Lookup`.

        Communication: that of `Embeddings.exchange_ids` and `Embeddings.lookup`, as far as it was
          not done before; one all-reduce of the counts over `axes`.
        """
        if carry is None:
            requests, vectors = self._asked_by(batch), None
        else:
            requests, vectors = carry
            requests = requests._replace(asked=self._typed(requests.asked))
        if vectors is None:
            vectors = self.embeddings.lookup(stored, requests)
        counts = unless_idle(_summed(self.embeddings.metrics(requests), axes), weight)
        refused = self.embeddings.num_refused(counts)
        return Requested(batch, requests, vectors, counts, refused)

    def counts(self, requested: Requested) -> dict[str, jax.Array]:
        """See `Lookup`."""
        return requested.counts

    def refused(self, requested: Requested) -> jax.Array:
        """See `Lookup`."""
        return requested.refused

    def seen(self, requested: Requested, params: PyTree) -> WithVectors:
        """See `Lookup`."""
        return pooled(self.embeddings, requested, params)[0]

    def seen_by_loss(self, params: WithTables, share: PyTree) -> tuple[PyTree, WithVectors]:
        """See `Lookup`."""

        def look_up(params: WithTables, batch: PyTree) -> PyTree:
            bags = self.embeddings.bags_of(batch)
            return self.embeddings.reference(params.tables, bags, params.dense)

        return params.dense, WithVectors(share, jax.eval_shape(look_up, params, share))

    def differentiated(
        self,
        requested: Requested,
        params: PyTree,
        compute: Callable[..., tuple[Any, PyTree, PyTree]],
        *operands: PyTree,
    ) -> tuple[Any, PyTree, Rows, WithVectors]:
        """See `Lookup`.

        Communication: per table one all-to-all of the rows that were asked for.
        """
        return differentiated(self.embeddings, requested, params, compute, *operands)

    def applied(
        self,
        stored: PyTree,
        state: PyTree,
        rows: Rows,
        active: jax.Array | None,
        read: PyTree,
    ) -> tuple[PyTree, PyTree, Any]:
        """See `Lookup`: rows are changed where they stand."""
        rows = after(rows, read)
        numbers = self._typed({name: own.rows for name, own in rows.items()})
        rows = {name: replace(own, rows=numbers[name]) for name, own in rows.items()}
        with jax.named_scope("optimizer"):
            stored, state = self.embeddings.apply(stored, state, rows, active=active)
        return stored, state, numbers

    def following(
        self, stored: PyTree, upcoming: PyTree, ahead: Ahead
    ) -> tuple[Carry | None, PyTree]:
        """See `Lookup`.

        Communication: that of `Embeddings.exchange_ids`, and where rows are looked up ahead one
          all-to-all of them per table.
        """
        if upcoming is None:
            return None, ()
        requests = self._asked_by(upcoming)
        if not ahead.vectors:
            return Carry(requests, None), ()
        read = read_rows(stored, requests.asked)
        layout, axis = self.embeddings.layout(), self.embeddings.axis_name
        return Carry(requests, send_rows(layout, axis, read)), read

    def asked_anew(self, stored: PyTree, carry: Carry) -> Carry:
        """See `Lookup`.

        Communication: that of `Embeddings.lookup`.
        """
        return carry._replace(vectors=self.embeddings.lookup(stored, carry.requests))

    def patched(
        self,
        stored: PyTree,
        carry: Carry,
        changed: Any,
        moved_all: bool | jax.Array,
        ahead: Ahead,
        axes: tuple[str, ...],
    ) -> tuple[Carry, dict[str, jax.Array]]:
        """See `Lookup`.

        Communication: that of `patched_rows`, and one all-reduce of the counts.
        """
        if not ahead.patches:
            return carry, {}
        embeddings = self.embeddings
        # What is known is no array: the program then holds one of the two ways.
        known = isinstance(moved_all, bool)

        def inside(stored: PyTree, carry: Carry, changed: PyTree, due: Any) -> Any:
            assert carry.vectors is not None, "they were looked up ahead"
            vectors, resent = patched_rows(
                embeddings.layout(),
                embeddings.axis_name,
                stored,
                carry.requests,
                carry.vectors,
                changed,
                room=ahead.room,
                everything=moved_all if known else due,
            )
            counts = {f"embeddings/{name}/resent": n for name, n in resent.items()}
            return carry._replace(vectors=vectors), _summed(counts, axes)

        return self.on_devices(
            inside,
            stored,
            carry,
            changed,
            None if known else moved_all,
            kinds=(self.specs, "device", "device", "whole"),
            out=("device", "whole"),
        )

    def check(self, batch: PyTree, num_parts: int) -> bool:
        """See `Lookup`: ids of the host must be in their tables.

        Of arrays of the host `inputs` may make ids of a device, which are not looked at.
        """
        bags = self.embeddings.bags_of(batch)
        self.embeddings.check(bags, num_parts=num_parts)
        return all(isinstance(each.ids, np.ndarray) for each in bags.values())

    def refuse(self, metrics: dict[str, Any]) -> None:
        """See `Lookup`."""
        self.embeddings.refuse(metrics)

    def _typed(self, rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return typed_as_equal(self.embeddings.layout(), self.embeddings.axis_name, rows)

    def _asked_by(self, batch: PyTree) -> Requests:
        return self.embeddings.exchange_ids(self.embeddings.bags_of(batch))


def _summed(counts: dict[str, jax.Array], axes: tuple[str, ...]) -> dict[str, jax.Array]:
    """Sums of counts over the devices of a replica.

    Communication: one all-reduce of 4 bytes each over `axes`, which the compiler joins.
    """
    return lax.psum(counts, axes) if axes else counts


def lookup_of(embeddings: Embeddings | None, mesh: AnyMesh, axis_name: AxisName) -> Lookup:
    """What a step looks up, in the tables of `embeddings=`; nothing for None.

    Raises:
      ValueError: what is no `Embeddings`; an axis that the mesh lacks, or one of the replicas';
        several shards on a `VirtualMesh`.
    """
    if embeddings is None:
        return Lookup()
    if not isinstance(embeddings, Embeddings):
        raise ValueError(
            f"`embeddings` must be made by js.embeddings, got {type(embeddings).__name__}."
        )
    axis = embeddings.axis_name
    if axis is None:
        return TableLookup(embeddings, None, None)
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
    if isinstance(mesh, VirtualMesh) and mesh.shape[axis] > 1:
        raise ValueError(
            f"`embeddings` are sharded over {axis!r} of size {mesh.shape[axis]}, and virtual "
            "replicas have no devices inside: use js.make_mesh, or axis_name=None."
        )
    if isinstance(mesh, VirtualMesh):
        return TableLookup(replace(embeddings, axis_name=None), axis, None)
    return TableLookup(embeddings, axis, axis)
