"""The lookup of a training step: how embedding tables and their rows take part in it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ..gradients.sparse import RowGradient, Rows, coalesce, no_rows
from ..mesh import (
    AnyMesh,
    array_from_host,
    axis_names,
    axis_size,
    has_a_device_each,
    key_bits,
    map_by_role,
    map_replicas,
    on_every_device,
    replica_count,
    replicate,
    roles_of_batch,
    sum_over,
)
from ..tracing import FullLoss
from ..transform import isolated, unless_idle, unseen_zero
from ..tree import Weighted, at_least_float32
from ._embeddings import Embeddings
from ._exchange import PREFIX, Requests, patched_rows, read_rows, send_rows
from ._stores import check_shapes
from ._table import WithTables


class Ahead(NamedTuple):
    """The table exchanges of the next batch that run during a step; static.

    Attributes:
      vectors: whether rows are looked up and sent, not only row numbers.
      patches: whether rows that the step changes are sent again.
      room: fraction of the slots between two devices that can be sent again, 0 to 1.
    """

    vectors: bool = False
    patches: bool = False
    room: float = 0.25


class Carry(NamedTuple):
    """The request for the rows of a batch that an earlier step made; leaves (devices, ...).

    Attributes:
      requests: the rows that each device uses, and those that others request from it.
      vectors: the requested rows as they were then; None if the batch's own step looks them up.
    """

    requests: Requests
    vectors: PyTree


class Requested(NamedTuple):
    """A device's part of a batch and the rows that it requested.

    Attributes:
      batch: the batch as the step received it.
      requests: the rows that this device uses, and those that others request from it.
      vectors: requested rows by stored array.
      counts: `Embeddings.metrics` of the requests, summed over the devices of the replica; zeros on
        a replica of weight 0, whose batch may hold anything.
    """

    batch: PyTree
    requests: Requests
    vectors: PyTree
    counts: dict[str, jax.Array]


class WithVectors(NamedTuple):
    """A batch with the vectors that were looked up for it, as the loss function receives it.

    Attributes:
      batch: the batch as the step received it.
      embedded: rows or pooled rows by feature, of shape (examples, ...).
    """

    batch: PyTree
    embedded: Any


@dataclass(frozen=True)
class Lookup:
    """The part of a training step that looks up rows of embedding tables for its batches.

    A step has dense parameters, which its optimizer updates, and stored parameters, the tables,
    whose rows are requested by a batch and updated on the devices that hold them. Parameters are
    `WithTables(dense, tables)`, and the states of the two optimizers are `WithTables`, too. Methods
    that take values of one device are called with `axis` bound.

    Attributes:
      embeddings: the embedding tables.
    """

    embeddings: Embeddings

    @property
    def axis(self) -> str | None:
        """The name of the mesh axis that shards a replica's stored parameters; None: no axis does.

        It is automatic in the step (left to the compiler), so `on_devices` must bind it.
        """
        return self.embeddings.axis_name

    # Trees of parameters, of their specs, or of the states of their optimizers.

    def stacked(self, params: PyTree, seed: int, *, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
        """Return the parameters of all replicas, equal on them.

        Args:
          params: parameters of one replica. Without stored parameters, these are initialized;
            otherwise they must have the names and shapes of these tables.
          seed: seed of the initialization.
          mesh: mesh of the step.
          axis_name: name of the replica axis or axes.

        Raises:
          ValueError: stored parameters of other names or shapes.

        Communication: none.
        """
        put = partial(replicate, mesh=mesh, axis_name=axis_name)
        if not isinstance(params, WithTables):
            bits = on_every_device(key_bits(seed), mesh)
            return WithTables(put(params), _table_maker(self, mesh, axis_name)(bits))
        (dense, stored), stores = params, self.embeddings.layout().stores
        shapes = {name: (store.num_rows, store.dim) for name, store in stores.items()}
        check_shapes("`params` must hold what step.embeddings.write returns:", shapes, stored)
        if self.axis is None:
            arrays = {name: jnp.asarray(x, stores[name].dtype) for name, x in stored.items()}
            return WithTables(put(dense), put(arrays))
        count = replica_count("init", mesh, axis_name)
        shardings = self._shardings(mesh, axis_name)

        def placed(name: str, whole: np.ndarray) -> jax.Array:
            def of_device(index: Any) -> np.ndarray:  # each device receives only its part
                return whole[index[1:]][None].astype(stores[name].dtype)

            return array_from_host((count, *whole.shape), shardings[name], of_device)

        tables = {name: placed(name, np.asarray(x)) for name, x in stored.items()}
        return WithTables(put(dense), tables)

    def _shardings(self, mesh: Any, axis_name: AxisName) -> dict[str, NamedSharding]:
        """Return the shardings of the stored tables of all replicas."""
        first, specs = axis_names(axis_name), self.embeddings.specs
        return {name: NamedSharding(mesh, P(first, *spec)) for name, spec in specs.items()}

    # The parts of a step.

    def of_loss(self, loss: FullLoss) -> FullLoss:
        """Return a loss function of the batches that `seen` returns, which passes on `embedded`."""

        def full(params: PyTree, batch: WithVectors, **context: Any) -> Any:
            return loss(params, batch.batch, embedded=batch.embedded, **context)

        return full

    def on_devices(
        self, fn: Callable[..., Any], *args: Any, roles: tuple[Any, ...], out: Any
    ) -> Any:
        """Run `fn` on each device's parts along `axis`, and return its results.

        Args:
          fn: function of each device's parts of the arguments; `axis` is bound in it. Without
            `axis` every value is this device's part.
          *args: arguments for the whole replica.
          roles: roles of the arguments, as `map_by_role` takes them, but along `axis` alone:
            `"device"` is different on each device, stacked along a leading axis outside.
          out: roles of the results.

        Communication: whatever `fn` communicates.
        """
        axis = self.axis
        if axis is None:
            return fn(*args)
        roles = tuple(
            "shared" if x is None else roles_of_batch(x) if role == "batch" else role
            for x, role in zip(args, roles, strict=True)
        )
        specs = {"device": P(axis), "batch": P(axis), "shared": P()}
        return map_by_role(fn, specs, roles, out, axis_names={axis})(*args)

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
        if carry is None or carry.vectors is None:
            carry, _ = self.following(stored, batch, Ahead(vectors=True), carry)
        assert carry is not None, "there is a batch"
        metrics = self.embeddings.metrics(carry.requests)
        counts = {name: sum_over(count, axes) for name, count in metrics.items()}
        return Requested(batch, *carry, unless_idle(counts, weight))

    def seen(self, requested: Requested, params: PyTree) -> PyTree:
        """Return the batch as the loss function receives it; `params` are this device's dense ones.

        Communication: none.
        """
        return self._pooled(requested, params)[0]

    def _pooled(
        self, requested: Requested, params: PyTree
    ) -> tuple[WithVectors, Callable[[PyTree], tuple[PyTree, PyTree]]]:
        """Return a batch with its pooled vectors, and the function that pulls back their gradients.

        That function returns the gradients of the rows and of `params`.
        """
        pool = partial(self.embeddings.pooled, requests=requested.requests)
        embedded, pull = jax.vjp(lambda x, p: pool(x, params=p), requested.vectors, params)
        return WithVectors(requested.batch, embedded), pull

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

        def compute_local(requested: Requested, params: PyTree, *operands: PyTree) -> Any:
            batch, pull = self._pooled(requested, params)
            results, grads, of_embedded = compute(params, batch, *operands)
            of_vectors, of_dense = pull(of_embedded)
            # Position weights are dense parameters that are used before the loss.
            grads = jax.tree.map(lambda g, more: g + more, grads, of_dense)
            return results, grads, of_vectors, batch

        source = next(iter(requested.vectors.values()))
        results, grads, of_vectors, batch = isolated(
            compute_local, source, requested, params, *operands
        )
        devices = axis_size(self.axis or ())
        # The loss of a replica is the mean of its devices' losses.
        scaled = jax.tree.map(lambda g: g / devices, of_vectors)
        return results, grads, embeddings.send_back(scaled, requested.requests), batch

    def applied(
        self, stored: PyTree, state: PyTree, rows: Rows, active: jax.Array, read: PyTree
    ) -> tuple[PyTree, PyTree, Any]:
        """Return stored parameters and optimizer state after an update of this device's part.

        Args:
          stored: this device's part of the stored parameters.
          state: this device's part of the row-wise optimizer's state.
          rows: gradients of rows, by stored array.
          active: () bool, whether to update.
          read: values that were read from `stored`; the update is ordered after these reads.

        Returns:
          The stored parameters, the state, and the numbers of the changed rows by stored array.
        """
        # Without a dependency XLA may order the update before the reads, and copies the whole table
        # so that they see the old values. (An optimization barrier is not enough: jax 0.10 removes
        # it before XLA decides on copies.)
        zero = sum(map(unseen_zero, jax.tree.leaves(read)), jnp.zeros([], jnp.int32))
        rows = {name: replace(g, rows=g.rows + zero) for name, g in rows.items()}
        with jax.named_scope("optimizer"):
            stored, state = self.embeddings.apply(stored, state, rows, active=active)
        return stored, state, {name: g.rows for name, g in rows.items()}

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
        flag = None if isinstance(all_changed, bool) else all_changed

        def inside(stored: PyTree, carry: Carry, changed: PyTree, flag: Any) -> Any:
            everything, layout = all_changed if flag is None else flag, embeddings.layout()
            vectors, resent = patched_rows(
                layout, stored, *carry, changed, room=ahead.room, everything=everything
            )
            counts = {f"{PREFIX}{name}/resent": sum_over(n, axes) for name, n in resent.items()}
            return carry._replace(vectors=vectors), counts

        return self.on_devices(
            inside,
            *(stored, carry, changed, flag),
            roles=(self.embeddings.specs, "device", "device", "shared"),
            out=("device", "shared"),
        )


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
    if not has_a_device_each(mesh):
        if mesh.shape[axis] > 1:
            raise ValueError(
                f"`embeddings` are sharded over {axis!r} of size {mesh.shape[axis]}, and virtual "
                "replicas have no devices inside: use js.make_mesh, or axis_name=None."
            )
        embeddings = replace(embeddings, axis_name=None)
    return Lookup(embeddings)


@lru_cache(maxsize=16)
def _table_maker(
    lookup: Lookup, mesh: AnyMesh, axis_name: AxisName
) -> Callable[[jax.Array], PyTree]:
    """Return a function from key data to new tables of all replicas, equal on them.

    Each device makes only its own part.

    Communication: none.
    """
    embeddings, axis = lookup.embeddings, lookup.axis

    def make(bits: jax.Array) -> PyTree:
        return embeddings.init_local(jax.random.wrap_key_data(bits))

    def per_replica(bits: jax.Array) -> PyTree:
        return lookup.on_devices(make, bits, roles=("shared",), out=embeddings.specs)

    mapped = map_replicas(
        per_replica,
        mesh=mesh,
        axis_name=axis_name,
        in_roles=("shared",),
        automatic=frozenset(() if axis is None else (axis,)),
    )
    if axis is None:
        return jax.jit(mapped)
    return jax.jit(mapped, out_shardings=lookup._shardings(mesh, axis_name))


def empty_rows(like: Rows, num_batches: int) -> Rows:
    """Return empty gradients with room for the rows of several batches, in at least float32.

    Args:
      like: row gradients of one batch; only shapes and dtypes are used.
      num_batches: number of batches, 0 or more.
    """
    return {
        name: no_rows(g, num_batches * g.rows.shape[0], at_least_float32(g.dtype))
        for name, g in like.items()
    }


def added_rows(before: Rows, rows: Rows, weight: jax.Array | None, place: jax.Array | None) -> Rows:
    """Return the row gradients `before` with those of another batch added.

    Args:
      before: row gradients of the batches so far.
      rows: row gradients of the other batch. They are multiplied by its weight in at least
        float32; with weight 0 they become padding, with zeros.
      weight: () weight of the other batch; None: 1.
      place: () int32, index of the room in `before` (see `empty_rows`) that they fill; None
        appends them.
    """

    def weighted(g: RowGradient) -> RowGradient:
        values = Weighted.of(g.values, weight).sum
        if weight is None:
            return replace(g, values=values)
        numbers = jnp.where(weight > 0, g.rows, jnp.full_like(g.rows, g.num_rows))
        return replace(g, rows=numbers, values=values)

    def added(room: RowGradient, gradient: RowGradient) -> RowGradient:
        if place is None:
            return room + gradient
        start = place * gradient.rows.shape[0]
        return jax.tree.map(
            lambda x, more: lax.dynamic_update_slice_in_dim(x, more, start, 0), room, gradient
        )

    return {name: added(before[name], weighted(gradient)) for name, gradient in rows.items()}


def row_means(rows: Rows, weight: jax.Array) -> Rows:
    """Return each row once, with the mean of its values; `weight` is the sum of their weights.

    Communication: none.
    """

    def one(gradient: RowGradient) -> RowGradient:
        once = coalesce(gradient).gradient
        return replace(once, values=Weighted(once.values, weight).mean)

    return {name: one(gradient) for name, gradient in rows.items()}
