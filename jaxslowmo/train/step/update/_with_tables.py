"""One update of a model with embedding tables, as one replica sees it.

Everything up to the exchange of parameters runs on each device's own part of the tables; the
exchange takes them as it takes other leaves that are sharded inside a replica.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...._typing import Phase, PyTree
from ....embedding import (
    Embeddings,
    Requests,
    WithTables,
    read_rows,
    send_rows,
    typed_as_equal,
)
from ....transform import increment
from ..._state import TrainState
from ._ahead import Ahead, Carry, patched, sums_over
from ._differentiate import Differentiation
from ._looked_up import Requested
from ._replica_step import Moved, StepParts, Tables
from ._rows import after
from ._shards import on_shards
from ._window import GradientWindow, Metrics

WINDOW_KINDS: Any = GradientWindow._make(("device", "whole", "device", "whole", "whole", "device"))


class Inside(NamedTuple):
    """What a device has when its part of an update is done, and the parameters are to be exchanged.

    Attributes:
      moved: the dense part.
      tables: as the update has left them.
      row_state: of the row-wise optimizer.
      changed: by table, numbers of the rows that the update has changed; {} where nobody asks.
    """

    moved: Moved
    tables: PyTree
    row_state: PyTree
    changed: Any


@dataclass(frozen=True)
class TableParts:
    """A step whose parts have tables: `StepParts` for the rest of it.

    In its methods `carry` is what was asked for a batch beside an earlier one, None for nothing;
    `upcoming` the batch that comes next, None where nothing is to be done for it; and `ahead` how
    much of that is done.

    Attributes:
      parts: of the step; alone they know dense parameters.
      tables: of the step.
    """

    parts: StepParts
    tables: Tables

    @property
    def embeddings(self) -> Embeddings:
        """The tables."""
        return self.tables.embeddings

    def per_replica(
        self,
        state: TrainState,
        batch: PyTree,
        weight: jax.Array | None,
        window: GradientWindow | None,
        phase: Phase | None,
        inner_axes: tuple[str, ...],
    ) -> tuple[TrainState, Metrics]:
        """One update; see `StepParts.per_replica`."""
        state, metrics, _ = self.updated(
            state, batch, weight, window, None, None, Ahead(), phase, inner_axes
        )
        return state, metrics

    def updated(
        self,
        state: TrainState,
        batch: PyTree,
        weight: jax.Array | None,
        window: GradientWindow | None,
        carry: Carry | None,
        upcoming: PyTree,
        ahead: Ahead,
        phase: Phase | None,
        inner_axes: tuple[str, ...],
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """One update, and beside it what is asked of the tables for the batch after it."""
        rng, key = jax.random.split(state.rng)

        def inside(dense, tables, row_state, batch, weight, window, carry, upcoming):
            own = self._requested(tables, batch, carry)
            following, read = self._following(tables, upcoming, ahead)
            told = dense, own, dense.rng, weight
            if window is None:
                gathered, metrics, data = self._differentiation.one_batch(*told, inner_axes)
            else:
                window, metrics = self._differentiation.collected(*told, window, inner_axes)
                (gathered, _), data = self._differentiation.closed(dense, window, inner_axes), None
            order = self.parts.order_of(dense, own)
            metrics = {**metrics, **self._counts(own, inner_axes)}
            moved = self.parts.moved(dense, gathered, data, order, inner_axes)
            return self._moved(tables, row_state, moved, read), metrics, following

        done, metrics, following = on_shards(
            self.tables.nested,
            inside,
            *self._split(state, key),
            batch,
            weight,
            window,
            carry,
            upcoming,
            kinds=(*self._kinds, "batch", "whole", WINDOW_KINDS, "device", "batch"),
            out=(self._inside_kinds, "whole", "device"),
        )
        new = self._exchanged(state, rng, done, phase)
        if ahead.patches and following is not None:
            following, resent = self._patched(state, new, done, following, ahead, phase, inner_axes)
            metrics = {**metrics, **resent}
        return new, metrics, following

    def opened(
        self,
        state: TrainState,
        batch: PyTree,
        weight: jax.Array | None,
        inner_axes: tuple[str, ...],
    ) -> GradientWindow:
        """An empty window for the next update; see `Differentiation.opened`."""
        _, key = jax.random.split(state.rng)

        def inside(dense, tables, row_state, batch, weight):
            own = self._requested(tables, batch, None)
            return self._differentiation.opened(dense, own, dense.rng, weight, inner_axes)

        return on_shards(
            self.tables.nested,
            inside,
            *self._split(state, key),
            batch,
            weight,
            kinds=(*self._kinds, "batch", "whole"),
            out=WINDOW_KINDS,
        )

    def collected(
        self,
        state: TrainState,
        batch: PyTree,
        weight: jax.Array | None,
        window: GradientWindow,
        inner_axes: tuple[str, ...],
    ) -> tuple[GradientWindow, Metrics]:
        """The window with a batch more, and its metrics; see `StepParts.collected`."""
        told = state, batch, weight, window
        window, metrics, _ = self.gathered(*told, None, None, Ahead(), inner_axes)
        return window, metrics

    def gathered(
        self,
        state: TrainState,
        batch: PyTree,
        weight: jax.Array | None,
        window: GradientWindow,
        carry: Carry | None,
        upcoming: PyTree,
        ahead: Ahead,
        inner_axes: tuple[str, ...],
    ) -> tuple[GradientWindow, Metrics, Carry | None]:
        """The window with a batch more, and beside it what is asked for the next one.

        No row is changed by it, so there is nothing to send again.
        """
        _, key = jax.random.split(state.rng)

        def inside(dense, tables, row_state, batch, weight, window, carry, upcoming):
            own = self._requested(tables, batch, carry)
            following, _ = self._following(tables, upcoming, ahead)
            window, metrics = self._differentiation.collected(
                dense, own, dense.rng, weight, window, inner_axes
            )
            return window, {**metrics, **self._counts(own, inner_axes)}, following

        return on_shards(
            self.tables.nested,
            inside,
            *self._split(state, key),
            batch,
            weight,
            window,
            carry,
            upcoming,
            kinds=(*self._kinds, "batch", "whole", WINDOW_KINDS, "device", "batch"),
            out=(WINDOW_KINDS, "whole", "device"),
        )

    def of_window(
        self,
        state: TrainState,
        window: GradientWindow,
        like: PyTree,
        phase: Phase | None,
        inner_axes: tuple[str, ...],
    ) -> tuple[TrainState, Metrics]:
        """One update of what a window holds; see `StepParts.of_window`."""
        rng, key = jax.random.split(state.rng)

        def inside(dense, tables, row_state, window):
            gathered, metrics = self._differentiation.closed(dense, window, inner_axes)
            own = jax.eval_shape(lambda batch: self._requested(tables, batch, None), like)
            order = self.parts.order_of(dense, own)
            moved = self.parts.moved(dense, gathered, None, order, inner_axes)
            return self._moved(tables, row_state, moved, ()), metrics

        done, metrics = on_shards(
            self.tables.nested,
            inside,
            *self._split(state, key),
            window,
            kinds=(*self._kinds, WINDOW_KINDS),
            out=(self._inside_kinds, "whole"),
        )
        return self._exchanged(state, rng, done, phase), metrics

    def evaluated(
        self,
        state: TrainState,
        batch: PyTree,
        weight: jax.Array | None,
        inner_axes: tuple[str, ...],
    ) -> Metrics:
        """Metrics of a forward pass alone; see `StepParts.evaluated`."""

        def inside(dense, tables, batch, weight):
            own = self._requested(tables, batch, None)
            metrics = self.parts.evaluated(dense, own, weight, inner_axes)
            return {**metrics, **self._counts(own, inner_axes)}

        whole, specs, _ = self._kinds
        return on_shards(
            self.tables.nested,
            inside,
            state._replace(params=state.params.dense),
            state.params.tables,
            batch,
            weight,
            kinds=(whole, specs, "batch", "whole"),
            out="whole",
        )

    def asked(self, state: TrainState, batch: PyTree, ahead: Ahead) -> Carry:
        """What is asked of the tables for a batch, before any step."""

        def inside(tables, batch):
            return self._following(tables, batch, ahead)[0]

        kinds, own = (self.embeddings.specs, "batch"), (state.params.tables, batch)
        return on_shards(self.tables.nested, inside, *own, kinds=kinds, out="device")

    def asked_anew(self, state: TrainState, carry: Carry) -> Carry:
        """What was asked for a batch, with rows as these tables have them."""

        def inside(tables, carry):
            return carry._replace(vectors=self.embeddings.lookup(tables, carry.requests))

        kinds, own = (self.embeddings.specs, "device"), (state.params.tables, carry)
        return on_shards(self.tables.nested, inside, *own, kinds=kinds, out="device")

    @property
    def _differentiation(self) -> Differentiation:
        return self.parts.differentiation

    @property
    def _kinds(self) -> tuple[Any, ...]:
        """Of what `_split` gives."""
        return "whole", self.embeddings.specs, self.embeddings.optimizer_specs

    @property
    def _inside_kinds(self) -> Any:
        _, tables, row_state = self._kinds
        # Gradients of rows have become changes.
        return Inside._make(("whole", tables, row_state, "device"))

    def _split(self, state: TrainState, key: jax.Array) -> tuple[TrainState, PyTree, PyTree]:
        """The state of the dense part, with the key of the update; the tables; their optimizer."""
        gradients_state, optimizer_state, *_ = state.opt_state
        dense = state._replace(
            params=state.params.dense,
            opt_state=(gradients_state, optimizer_state.dense),
            rng=key,
        )
        return dense, state.params.tables, optimizer_state.tables

    def _requested(self, tables: PyTree, batch: PyTree, carry: Carry | None) -> Requested:
        if carry is None:
            requests, vectors = self._asked_by(batch), None
        else:
            requests, vectors = carry
            requests = requests._replace(asked=self._typed(requests.asked))
        if vectors is None:
            vectors = self.embeddings.lookup(tables, requests)
        return Requested(batch, requests, vectors)

    def _following(
        self, tables: PyTree, upcoming: PyTree, ahead: Ahead
    ) -> tuple[Carry | None, PyTree]:
        """What is asked for the next batch, and what was read of the tables for it."""
        if upcoming is None:
            return None, ()
        requests = self._asked_by(upcoming)
        if not ahead.vectors:
            return Carry(requests, None), ()
        read = read_rows(tables, requests.asked)
        axis = self.embeddings.axis_name
        return Carry(requests, send_rows(self.embeddings.layout(), axis, read)), read

    def _typed(self, rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
        embeddings = self.embeddings
        return typed_as_equal(embeddings.layout(), embeddings.axis_name, rows)

    def _asked_by(self, batch: PyTree) -> Requests:
        return self.embeddings.exchange_ids(self.embeddings.bags_of(batch))

    def _counts(self, own: Requested, inner_axes: tuple[str, ...]) -> Metrics:
        """What the requests of a batch tell: sums over the devices of the replica."""
        return sums_over(self.embeddings.metrics(own.requests), inner_axes)

    def _moved(self, tables: PyTree, row_state: PyTree, moved: Moved, read: PyTree) -> Inside:
        """The tables after an update, their rows changed where they stand."""
        rows = after(moved.rows, read)
        numbers = self._typed({name: own.rows for name, own in rows.items()})
        rows = {name: replace(own, rows=numbers[name]) for name, own in rows.items()}
        with jax.named_scope("optimizer"):
            tables, row_state = self.embeddings.apply(tables, row_state, rows, active=moved.active)
        changed = {name: own.rows for name, own in rows.items()}
        return Inside(moved._replace(rows={}, active=None), tables, row_state, changed)

    def _exchanged(
        self, state: TrainState, rng: jax.Array, done: Inside, phase: Phase | None
    ) -> TrainState:
        """The state after the exchange, for which tables are leaves that have no update left."""
        moved = done.moved
        still = jax.tree.map(jnp.zeros_like, done.tables)
        whole = state._replace(params=WithTables(state.params.dense, done.tables))
        new = self.parts.exchanged(
            whole,
            rng,
            moved._replace(updates=WithTables(moved.updates, still)),
            phase,
            dense=lambda tree: tree.dense,
        )
        gradients_state, optimizer_state, sync_state = new.opt_state
        if self.parts.sync is None or phase == ():
            # Nothing has moved them since, and nothing of their size is written.
            new = new._replace(params=WithTables(new.params.dense, done.tables))
        own = WithTables(optimizer_state, done.row_state)
        return new._replace(opt_state=(gradients_state, own, sync_state))

    def _patched(
        self,
        state: TrainState,
        new: TrainState,
        done: Inside,
        following: Carry,
        ahead: Ahead,
        phase: Phase | None,
        inner_axes: tuple[str, ...],
    ) -> tuple[Carry, Metrics]:
        """The rows that were sent ahead, those that have changed since sent again."""
        sync, moved_all = self.parts.sync, False
        if sync is not None and phase is None:
            moved_all = sync.due(increment(state.opt_state[-1].count))
        elif sync is not None:
            moved_all = phase != ()

        return patched(
            self.tables, new.params.tables, following, done.changed, moved_all, ahead, inner_axes
        )
