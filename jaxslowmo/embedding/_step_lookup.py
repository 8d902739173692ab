"""The protocol by which parameters that a batch looks up enter a training step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ..gradients.sparse import Rows
from ..mesh import AnyMesh, replicate
from ..tracing import FullLoss
from ..transform import ParameterTransform, isolated, unless_idle
from ._batch_rows import Ahead, Carry, Requested, WithVectors, after
from ._embeddings import Embeddings
from ._requests import num_devices
from ._shards import Kinds, given_tables, on_shards, table_maker
from ._table import WithTables
from ._vectors import patched_rows, read_rows, send_rows, typed_as_equal


@dataclass(frozen=True)
class Lookup:
    """A lookup gives a step the rows of embedding tables that its batches ask for.

    Parameters of a step are dense ones, which its optimizer knows, and stored ones, the tables, of
    which a batch asks for some rows and which are updated where they lie: `WithTables(dense,
    tables)`, and the states of the optimizers likewise. A step without tables has `NoTables` in the
    place of a lookup, with the same methods. Methods that take values of one device are called
    where `axis` is bound.

    Attributes:
      embeddings: the tables.
      axis: name of an axis of the mesh, between whose devices a replica's stored parameters are
        sharded; None: they are not.
      nested: the same where the compiler has it, and it is bound around what needs it.
    """

    embeddings: Embeddings
    axis: str | None = None
    nested: str | None = None

    # Trees of parameters, of their specs, or of the states of their optimizers.

    def dense(self, tree: PyTree) -> PyTree:
        """The part of the dense parameters; specs may be one for all."""
        return tree.dense if isinstance(tree, WithTables) else tree

    def stored(self, tree: PyTree) -> PyTree:
        """The part of the stored parameters."""
        return tree.tables

    def joined(self, dense: PyTree, stored: PyTree) -> PyTree:
        """Both parts as one tree."""
        return WithTables(dense, stored)

    @property
    def specs(self) -> Any:
        """The kinds of the stored parameters; see `on_shards`."""
        return self.embeddings.specs

    @property
    def optimizer_specs(self) -> Any:
        """The kinds of the state of their optimizer."""
        return self.embeddings.optimizer_specs

    def stacked(self, params: PyTree, seed: int, *, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
        """Parameters of all replicas, equal on them.

        Args:
          params: of one; stored ones that are missing are made, others must have the names and
            shapes of these tables.
          seed: of those that are made.
          mesh: of the step.
          axis_name: of its replicas.

        Communication: none.
        """
        dense = replicate(self.dense(params), mesh=mesh, axis_name=axis_name)
        where = self.embeddings, self.nested, mesh, axis_name
        if isinstance(params, WithTables):
            return WithTables(dense, given_tables(params.tables, *where))
        bits = jax.random.key_data(jax.random.key(seed))
        return WithTables(dense, table_maker(*where)(bits))

    # The parts of a step.

    def of_sync(self, sync: ParameterTransform | None) -> ParameterTransform | None:
        """A parameter transform that knows how stored parameters lie, for its state too."""
        if sync is None or self.nested is None or not sync.shards_whole_leaves:
            return sync
        return sync.with_specs(WithTables(P(), self.specs), of_state=True)

    def of_loss(self, loss: FullLoss) -> FullLoss:
        """A loss function of batches as `seen` makes them; it is given `embedded`."""

        def full(params: PyTree, batch: WithVectors, **context: Any) -> Any:
            return loss(params, batch.batch, embedded=batch.embedded, **context)

        return full

    def on_devices(
        self, fn: Callable[..., Any], *args: Any, kinds: tuple[Kinds, ...], out: Kinds
    ) -> Any:
        """`fn` of each device's own parts; see `on_shards`."""
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
        """A batch, and what it asked for.

        Args:
          stored: of this device.
          batch: its part of one.
          carry: what was asked for it before; None: nothing.
          weight: () the replica's share; metrics are zeros for 0.
          axes: inside a replica, over which its batch is split.

        Communication: that of `Embeddings.exchange_ids` and `Embeddings.lookup`, as far as it was
          not done before; one all-reduce of the counts over `axes`.
        """
        embeddings = self.embeddings
        if carry is None:
            requests, vectors = embeddings.exchange_ids(embeddings.bags_of(batch)), None
        else:
            requests, vectors = carry
            typed = typed_as_equal(embeddings.layout(), requests.asked)
            requests = requests._replace(asked=typed)
        if vectors is None:
            vectors = embeddings.lookup(stored, requests)
        counts = unless_idle(_summed(embeddings.metrics(requests), axes), weight)
        return Requested(batch, requests, vectors, counts, embeddings.num_refused(counts))

    def seen(self, requested: Requested, params: PyTree) -> PyTree:
        """The batch as the loss function sees it, with the dense parameters of this device.

        Communication: none.
        """
        return _pooled(self.embeddings, requested, params)[0]

    def seen_by_loss(self, params: PyTree, share: PyTree) -> tuple[PyTree, PyTree]:
        """Types of the parameters and the batch that a loss function is given.

        Args:
          params: types of those of one replica.
          share: types of what one device has of a batch.
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
        """What a batch gives.

        Args:
          requested: the batch.
          params: the dense parameters; varying over the axes over which gradients are averaged
            later.
          compute: `compute(params, batch, *operands)`: results, gradients, and those of what was
            looked up.
          *operands: of `compute`.

        Returns:
          The results; gradients of the dense parameters, and of the rows that this device holds;
          the batch as it was given to `compute`.

        Communication: per table one all-to-all of the rows that were asked for.
        """
        embeddings = self.embeddings

        def own(
            requested: Requested, params: PyTree, *operands: PyTree
        ) -> tuple[Any, PyTree, PyTree, WithVectors]:
            batch, pull = _pooled(embeddings, requested, params)
            results, grads, of_found = compute(params, batch, *operands)
            of_vectors, of_dense = pull(of_found)
            # Weights by position are parameters, too, and are used before the loss.
            grads = jax.tree.map(lambda g, more: g + more, grads, of_dense)
            return results, grads, of_vectors, batch

        some = next(iter(requested.vectors.values()))
        results, grads, of_vectors, batch = isolated(own, some, requested, params, *operands)
        devices = num_devices(embeddings.axis_name)
        # The loss of a replica is the mean of its devices' losses.
        scaled = jax.tree.map(lambda g: g / devices, of_vectors)
        return results, grads, embeddings.send_back(scaled, requested.requests), batch

    def applied(
        self, stored: PyTree, state: PyTree, rows: Rows, active: jax.Array | None, read: PyTree
    ) -> tuple[PyTree, PyTree, Any]:
        """Stored parameters and the state of their optimizer after an update, where they stand.

        Args:
          stored: of this device.
          state: of their optimizer.
          rows: gradients of rows.
          active: () bool, whether there is an update; None: always.
          read: what was read of them, and must be so before they change.

        Returns:
          Both, and the numbers of the rows that have changed, by table.
        """
        embeddings = self.embeddings
        numbers = after({name: own.rows for name, own in rows.items()}, read)
        numbers = typed_as_equal(embeddings.layout(), numbers)
        rows = {name: replace(own, rows=numbers[name]) for name, own in rows.items()}
        with jax.named_scope("optimizer"):
            stored, state = embeddings.apply(stored, state, rows, active=active)
        return stored, state, numbers

    # The batch after.

    def following(
        self, stored: PyTree, upcoming: PyTree, ahead: Ahead, carry: Carry | None = None
    ) -> tuple[Carry | None, PyTree]:
        """What a batch to come asks for, None without one, and what was read for it.

        Args:
          stored: of this device.
          upcoming: its part of the batch; None: there is none.
          ahead: how much is done ahead.
          carry: what was asked for the batch before, of which rows alone are read anew.

        Communication: that of `Embeddings.exchange_ids`, and where rows are looked up ahead one
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
        moved_all: bool | jax.Array,
        ahead: Ahead,
        axes: tuple[str, ...],
    ) -> tuple[Carry, dict[str, jax.Array]]:
        """What was asked for a batch, with the rows that have changed since sent again.

        Args:
          stored: of the replica.
          carry: what was asked for the batch.
          changed: numbers of the rows that have changed, by table.
          moved_all: whether all have.
          ahead: how much is done ahead.
          axes: inside a replica, over which its batch is split.

        Returns:
          That, and metrics of what was sent again.

        Communication: that of `patched_rows`, and one all-reduce of the counts.
        """
        embeddings = self.embeddings
        if not ahead.patches:
            return carry, {}
        # What is known is no array: the program then holds one of the two ways.
        known = isinstance(moved_all, bool)

        def inside(stored: PyTree, carry: Carry, changed: PyTree, due: Any) -> Any:
            assert carry.vectors is not None, "they were looked up ahead"
            vectors, resent = patched_rows(
                embeddings.layout(),
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

    # On the host.

    def check(self, batch: PyTree, num_parts: int) -> bool:
        """Raise `ValueError` for a batch of the host that asks for what there is not.

        Args:
          batch: as a step takes it.
          num_parts: equal parts that it is split into, a device each.

        Returns:
          Whether all that it asks for could be looked at: of arrays of the host `inputs` may make
          ids of a device, which are not.
        """
        bags = self.embeddings.bags_of(batch)
        self.embeddings.check(bags, num_parts=num_parts)
        return all(isinstance(each.ids, np.ndarray) for each in bags.values())

    def refuse(self, metrics: dict[str, Any]) -> None:
        """Raise `ValueError` where metrics tell of what was asked for, and there is not."""
        self.embeddings.refuse(metrics)


def _pooled(
    embeddings: Embeddings, requested: Requested, params: PyTree
) -> tuple[WithVectors, Callable[[PyTree], tuple[PyTree, PyTree]]]:
    """A batch with what it looks up, from the rows that it asked for, and the way back.

    That leads from gradients of what was looked up to those of the rows and of `params`.

    Communication: none.
    """

    def of(vectors: PyTree, params: PyTree) -> PyTree:
        return embeddings.pooled(vectors, requested.requests, params)

    embedded, pull = jax.vjp(of, requested.vectors, params)
    return WithVectors(requested.batch, embedded), pull


def _summed(counts: dict[str, jax.Array], axes: tuple[str, ...]) -> dict[str, jax.Array]:
    """Sums of counts over the devices of a replica.

    Communication: one all-reduce of 4 bytes each over `axes`, which the compiler joins.
    """
    return lax.psum(counts, axes) if axes else counts
