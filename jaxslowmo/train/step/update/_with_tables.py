"""One update of a model with embedding tables, as one replica sees it.

Everything up to the exchange of parameters runs on each device's own part of the tables; the
exchange takes them as it takes other leaves that are sharded inside a replica.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...._typing import Phase, PyTree
from ....embedding import (
    Embeddings,
    Requests,
    WithTables,
    patched_rows,
    read_rows,
    send_rows,
    typed_as_equal,
)
from ....transform import increment, run_if, unless_idle
from ..._state import TrainState
from ._differentiate import Differentiation
from ._given import GIVEN_ROLES, Ahead, Carry, Given
from ._looked_up import Requested
from ._replica_step import Moved, StepParts, keyed
from ._rows import after
from ._shards import Tables, on_shards
from ._window import GradientWindow, Metrics

# What is stacked over the replicas is, inside of one, the same on all devices.
GIVEN_KINDS: Any = jax.tree.map(lambda r: "whole" if r == "stacked" else r, GIVEN_ROLES)
WINDOW_KINDS: Any = GIVEN_KINDS.window


class Local(NamedTuple):
    """The state as a device has it.

    Attributes:
      dense: that of the dense part.
      tables: its part of them.
      row_state: of the row-wise optimizer; None in an evaluation.
    """

    dense: TrainState
    tables: PyTree
    row_state: PyTree


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
    """A step whose parts have tables: its methods are those of `StepParts`.

    Beside an update, or a batch that goes into a window, `given.upcoming` is asked for.

    Attributes:
      parts: of the step; alone they know dense parameters.
      tables: of the step.
      ahead: how much is done for the next batch.
    """

    parts: StepParts
    tables: Tables
    ahead: Ahead

    @property
    def embeddings(self) -> Embeddings:
        """The tables."""
        return self.tables.embeddings

    def updated(
        self, state: TrainState, given: Given, phase: Phase | None
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """One update, and beside it what is asked of the tables for the batch after it."""
        now, then = keyed(state)

        def inside(local: Local, given: Given) -> tuple[Inside, Metrics, Carry | None]:
            own = self._requested(local.tables, given)
            following, read = self._following(local.tables, given.upcoming)
            gathered, metrics = self._differentiation.gathered(local.dense, own)
            metrics = {**metrics, **own.batch.counts}
            moved = self.parts.moved(local.dense, gathered, own.batch)
            return self._moved(local, moved, read), metrics, following

        out = self._inside_kinds, "whole", "device"
        done, metrics, following = self._on_shards(inside, now, given, out)
        new = self._exchanged(then, done, phase)
        if self.ahead.patches and following is not None:
            moved_all = self._moves_all(state, phase)
            following, resent = self._patched(new, following, done.changed, moved_all)
            metrics = {**metrics, **unless_idle(resent, given.weight)}
        return new, metrics, following

    def opened(self, state: TrainState, given: Given, num_batches: int) -> GradientWindow:
        """An empty window for the next update; see `Differentiation.opened`."""

        def inside(local: Local, given: Given) -> GradientWindow:
            own = self._requested(local.tables, given)
            return self._differentiation.opened(local.dense, own, num_batches)

        return self._on_shards(inside, keyed(state)[0], given, WINDOW_KINDS)

    def collected(
        self, state: TrainState, given: Given, *, fits: bool
    ) -> tuple[GradientWindow, Metrics, Carry | None]:
        """The window with a batch more, and beside it what is asked for the next one.

        No row is changed by it, so there is nothing to send again.
        """

        def inside(local: Local, given: Given) -> tuple[GradientWindow, Metrics, Carry | None]:
            own = self._requested(local.tables, given)
            following, _ = self._following(local.tables, given.upcoming)
            window, metrics = self._differentiation.collected(local.dense, own, fits=fits)
            return window, {**metrics, **own.batch.counts}, following

        out = WINDOW_KINDS, "whole", "device"
        return self._on_shards(inside, keyed(state)[0], given, out)

    def of_window(
        self, state: TrainState, window: GradientWindow, like: PyTree, phase: Phase | None
    ) -> tuple[TrainState, Metrics, None]:
        """One update of what a window holds; see `StepParts.of_window`."""
        now, then = keyed(state)

        def inside(local: Local, given: Any) -> tuple[Inside, Metrics]:
            gathered, metrics = self._differentiation.closed(local.dense, given.window)
            own = jax.eval_shape(self._requested, local.tables, Given(like))
            moved = self.parts.moved(local.dense, gathered, own.batch)
            return self._moved(local, moved, ()), metrics

        done, metrics = self._on_shards(
            inside, now, Given(window=window), (self._inside_kinds, "whole")
        )
        return self._exchanged(then, done, phase), metrics, None

    def evaluated(self, state: TrainState, given: Given) -> Metrics:
        """Metrics of a forward pass alone; see `StepParts.evaluated`."""

        def inside(local: Local, given: Given) -> Metrics:
            own = self._requested(local.tables, given)
            return {**self.parts.evaluated(local.dense, own), **own.batch.counts}

        return self._on_shards(inside, state, given, "whole")

    def asked(self, state: TrainState, batch: PyTree) -> Carry:
        """What is asked of the tables for a batch, before any step."""
        return self._on_tables(
            lambda tables, batch: self._following(tables, batch)[0], state, batch, "batch"
        )

    def asked_anew(self, state: TrainState, carry: Carry) -> Carry:
        """What was asked for a batch, with rows as these tables have them."""

        def inside(tables: PyTree, carry: Carry) -> Carry:
            return carry._replace(vectors=self.embeddings.lookup(tables, carry.requests))

        return self._on_tables(inside, state, carry, "device")

    @property
    def _differentiation(self) -> Differentiation:
        return self.parts.differentiation

    @property
    def _inside_kinds(self) -> Any:
        tables, row_state = self.embeddings.specs, self.embeddings.optimizer_specs
        # Gradients of rows have become changes.
        return Inside._make(("whole", tables, row_state, "device"))

    def _on_shards(
        self, fn: Callable[[Local, Given], Any], state: TrainState, given: Given, out: Any
    ) -> Any:
        """`fn` of each device's own part of a state and of what is given."""

        def inside(*parts: Any) -> Any:
            return fn(Local(*parts[:3]), Given(*parts[3:]))

        specs, row_specs = self.embeddings.specs, self.embeddings.optimizer_specs
        return on_shards(
            self.tables.nested,
            inside,
            *_split(state),
            *given,
            kinds=("whole", specs, row_specs, *GIVEN_KINDS),
            out=out,
        )

    def _on_tables(self, fn: Callable[..., Any], state: TrainState, x: PyTree, kind: str) -> Any:
        """`fn(tables, x)` of each device's own part, stacked."""
        kinds = self.embeddings.specs, kind
        return on_shards(self.tables.nested, fn, state.params.tables, x, kinds=kinds, out="device")

    def _requested(self, tables: PyTree, given: Given) -> Given:
        """What is given, with the batch `Requested`."""
        if given.carry is None:
            requests, vectors = self._asked_by(given.batch), None
        else:
            requests, vectors = given.carry
            requests = requests._replace(asked=self._typed(requests.asked))
        if vectors is None:
            vectors = self.embeddings.lookup(tables, requests)
        counts = unless_idle(self._summed(self.embeddings.metrics(requests)), given.weight)
        refused = self.embeddings.num_refused(counts)
        return given._replace(batch=Requested(given.batch, requests, vectors, counts, refused))

    def _following(self, tables: PyTree, upcoming: PyTree) -> tuple[Any, PyTree]:
        """The `Carry` of the next batch, None without one, and what was read for it."""
        if upcoming is None:
            return None, ()
        requests = self._asked_by(upcoming)
        if not self.ahead.vectors:
            return Carry(requests, None), ()
        read = read_rows(tables, requests.asked)
        axis = self.embeddings.axis_name
        return Carry(requests, send_rows(self.embeddings.layout(), axis, read)), read

    def _typed(self, rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
        embeddings = self.embeddings
        return typed_as_equal(embeddings.layout(), embeddings.axis_name, rows)

    def _asked_by(self, batch: PyTree) -> Requests:
        return self.embeddings.exchange_ids(self.embeddings.bags_of(batch))

    def _summed(self, counts: Metrics) -> Metrics:
        """Sums of counts over the devices of a replica.

        Communication: one all-reduce of 4 bytes each over `inner_axes`, which the compiler joins.
        """
        axes = self.parts.inner_axes
        return lax.psum(counts, axes) if axes else counts

    def _moved(self, local: Local, moved: Moved, read: PyTree) -> Inside:
        """The tables after an update, their rows changed where they stand."""
        rows = after(moved.rows, read)
        numbers = self._typed({name: own.rows for name, own in rows.items()})
        rows = {name: replace(own, rows=numbers[name]) for name, own in rows.items()}
        with jax.named_scope("optimizer"):
            tables, row_state = self.embeddings.apply(
                local.tables, local.row_state, rows, active=moved.active
            )
        changed = {name: own.rows for name, own in rows.items()}
        return Inside(moved._replace(rows={}, active=None), tables, row_state, changed)

    def _exchanged(self, state: TrainState, done: Inside, phase: Phase | None) -> TrainState:
        """The state after the exchange.

        Where the program decides what is due, all of the exchange stands in one branch of a
        conditional and the other leaves the tables where they are, so that local steps cost nothing
        that grows with the number of rows.
        """
        due = self._moves_all(state, phase)

        def exchanged(operand: tuple[TrainState, Inside]) -> TrainState:
            return self._exchanged_in(*operand, phase)

        def alone(operand: tuple[TrainState, Inside]) -> TrainState:
            return self._exchanged_in(*operand, ())

        return run_if(due, exchanged, alone, (state, done))

    def _exchanged_in(self, state: TrainState, done: Inside, phase: Phase | None) -> TrainState:
        """The state after an exchange, for which tables are leaves that have no update left."""
        still = jax.tree.map(jnp.zeros_like, done.tables)
        updates = WithTables(done.moved.updates, still)
        whole = state._replace(params=WithTables(state.params.dense, done.tables))
        moved = done.moved._replace(updates=updates)
        new = self.parts.exchanged(whole, moved, phase, dense=lambda tree: tree.dense)
        gradients_state, optimizer_state, sync_state = new.opt_state
        if self.parts.sync is None or phase == ():
            # Nothing has moved them since, and nothing of their size is written.
            new = new._replace(params=WithTables(new.params.dense, done.tables))
        own = WithTables(optimizer_state, done.row_state)
        return new._replace(opt_state=(gradients_state, own, sync_state))

    def _moves_all(self, state: TrainState, phase: Phase | None) -> bool | jax.Array:
        """Whether the exchange after `state` moves all rows; an array where the program decides."""
        sync = self.parts.sync
        if sync is None or phase is not None:
            return sync is not None and phase != ()
        return sync.due(increment(state.opt_state[-1].count))

    def _patched(
        self, new: TrainState, carry: Carry, changed: PyTree, moved_all: bool | jax.Array
    ) -> tuple[Carry, Metrics]:
        """The rows that were sent ahead, those that have changed since sent again.

        Communication: that of `patched_rows`, and one all-reduce of the counts.
        """
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
                room=self.ahead.room,
                everything=moved_all if known else due,
            )
            counts = {f"embeddings/{name}/resent": n for name, n in resent.items()}
            return carry._replace(vectors=vectors), self._summed(counts)

        return on_shards(
            self.tables.nested,
            inside,
            new.params.tables,
            carry,
            changed,
            None if known else moved_all,
            kinds=(embeddings.specs, "device", "device", "whole"),
            out=("device", "whole"),
        )


def _split(state: TrainState) -> Local:
    """The parts of a state, which in an evaluation has none of the optimizers."""
    dense, row_state = state._replace(params=state.params.dense), None
    if state.opt_state:
        gradients_state, optimizer_state, *_ = state.opt_state
        dense = dense._replace(opt_state=(gradients_state, optimizer_state.dense))
        row_state = optimizer_state.tables
    return Local(dense, state.params.tables, row_state)
