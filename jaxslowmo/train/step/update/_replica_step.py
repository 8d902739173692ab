"""The work of one replica: an update, a window of gradients, an evaluation.

Everything up to the exchange of parameters runs on each device's own part of the tables. The
exchange handles tables like other leaves that are sharded inside a replica.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...._support.types import Phase, PyTree
from ....embedding import Ahead, Carry
from ....transform import (
    chain,
    increment,
    layouts_known,
    no_exchange,
    note_followed,
    run_if,
    unless_idle,
)
from ..._train_state import TrainState
from ._batch_gradients import INPUT_ROLES, GradientWindow, StepInputs
from ._metrics import Metrics, joined
from ._parts import StepParts, UpdateBeforeExchange

# Inputs stacked over the replicas are, inside of one replica, the same on all devices.
INPUT_KINDS: Any = jax.tree.map(lambda r: "whole" if r == "stacked" else r, INPUT_ROLES)
WINDOW_KINDS: Any = INPUT_KINDS.window


class Local(NamedTuple):
    """A device's part of the state, before or after its part of an update.

    Attributes:
      dense: state with the dense parameters only; after an update an `UpdateBeforeExchange`.
      stored: the stored parameters (see `Lookup`), which the update has changed already.
      stored_state: state of their optimizer; None in an evaluation.
    """

    dense: Any
    stored: PyTree
    stored_state: PyTree


@dataclass(frozen=True)
class ReplicaStep:
    """The programs of a step, for one replica or one of its devices along the inner axes.

    An update, or adding a batch to a window, also starts the lookup of `inputs.upcoming`.

    Attributes:
      parts: the parts of the step.
      ahead: how much of the next batch's lookup is done.
    """

    parts: StepParts
    ahead: Ahead

    def chain(self) -> optax.GradientTransformationExtraArgs:
        """Return the step's transforms as one, whose states a train state holds."""
        parts, lookup = self.parts, self.parts.lookup
        given = parts.gradients or optax.identity(), parts.optimizer
        # Each stays one part with one state, also if it is a `js.chain`.
        first_two = [part._replace(init=part.init) for part in given]
        last = no_exchange() if parts.sync is None else parts.sync
        if lookup.embeddings is None:
            return _with_layouts(chain(*first_two, last))
        optimizers, embeddings = chain(*first_two), lookup.embeddings

        def both(dense: PyTree, stored: PyTree) -> tuple[PyTree, PyTree]:
            states = optimizers.init(dense)
            note_followed(states)
            return states, embeddings.init_optimizer(stored)

        def init(params: PyTree) -> Any:
            # Gradient transforms may average over the axis of the tables, so it must be bound.
            (gradients_state, optimizer_state), stored_state = lookup.on_devices(
                both,
                lookup.dense(params),
                lookup.stored(params),
                kinds=("whole", lookup.specs),
                out=("whole", lookup.optimizer_specs),
            )
            return gradients_state, lookup.joined(optimizer_state, stored_state), last.init(params)

        def update(*_: Any, **__: Any) -> Any:
            raise ValueError(
                "`step.tx` of a step with `embeddings` makes states alone: gradients of rows are "
                "no tree like the parameters. Call the step."
            )

        return _with_layouts(optax.GradientTransformationExtraArgs(init, update))

    def updated(
        self, state: TrainState, inputs: StepInputs, phase: Phase | None
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """Run one update, and the lookup of the next batch.

        A replica of weight 0 keeps its model state, and its metrics are zeros; if replicas train
        independently, it keeps its optimizer state, too. With a window the weight is that of the
        whole window; the metrics are those of the batch.
        """
        now, then = keyed(state)
        lookup = self.parts.lookup

        def inside(local: Local, inputs: StepInputs) -> tuple[Local, Any, Metrics, Carry | None]:
            inputs = self._requested(local, inputs)
            following, read = lookup.following(local.stored, inputs.upcoming, self.ahead)
            gathered, metrics = self.parts.differentiation.gathered(local.dense, inputs)
            update = self.parts.update_before_exchange(local.dense, gathered, inputs.batch)
            metrics = joined(metrics, inputs.batch.counts)
            return *self._applied(local, update, read), metrics, following

        kinds = self._local_kinds, "device", "whole", "device"
        done, changed, metrics, following = self._on_devices(inside, now, inputs, kinds)
        new = self._exchanged(then, done, phase)
        if following is not None and lookup.embeddings is not None:
            following, resent = lookup.patched(
                lookup.stored(new.params),
                following,
                changed,
                self._moves_stored(state, phase),
                self.ahead,
                self.parts.inner_axes,
            )
            metrics = {**metrics, **unless_idle(resent, inputs.weight)}
        return new, metrics, following

    def opened(self, state: TrainState, inputs: StepInputs, num_batches: int) -> GradientWindow:
        """Return an empty window for the next update; see `Differentiation.opened`."""

        def inside(local: Local, inputs: StepInputs) -> GradientWindow:
            inputs = self._requested(local, inputs)
            return self.parts.differentiation.opened(local.dense, inputs, num_batches)

        return self._on_devices(inside, keyed(state)[0], inputs, WINDOW_KINDS)

    def collected(
        self, state: TrainState, inputs: StepInputs, *, fits: bool
    ) -> tuple[GradientWindow, Metrics, Carry | None]:
        """Add a batch to a window, and look up the next batch.

        No row changes, so none is sent again.
        """
        collected = self.parts.differentiation.collected

        def inside(
            local: Local, inputs: StepInputs
        ) -> tuple[GradientWindow, Metrics, Carry | None]:
            inputs = self._requested(local, inputs)
            following, _ = self.parts.lookup.following(local.stored, inputs.upcoming, self.ahead)
            window, metrics = collected(local.dense, inputs, fits=fits)
            return window, joined(metrics, inputs.batch.counts), following

        kinds = WINDOW_KINDS, "whole", "device"
        return self._on_devices(inside, keyed(state)[0], inputs, kinds)

    def of_window(
        self, state: TrainState, window: GradientWindow, like: PyTree, phase: Phase | None
    ) -> tuple[TrainState, Metrics, None]:
        """Run one update with a window; the metrics are means over its batches.

        `like` holds the types of this device's part of a batch.
        """
        now, then = keyed(state)

        def inside(local: Local, inputs: Any) -> tuple[Local, Metrics]:
            gathered = self.parts.differentiation.closed(local.dense, inputs.window)
            seen = jax.eval_shape(self._requested, local, StepInputs(like)).batch
            update = self.parts.update_before_exchange(local.dense, gathered, seen)
            return self._applied(local, update, ())[0], gathered.metrics

        kinds = self._local_kinds, "whole"
        done, metrics = self._on_devices(inside, now, StepInputs(window=window), kinds)
        return self._exchanged(then, done, phase), metrics, None

    def evaluated(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a forward pass; see `Differentiation.evaluated`."""

        def inside(local: Local, inputs: StepInputs) -> Metrics:
            inputs = self._requested(local, inputs)
            metrics = self.parts.differentiation.evaluated(keyed(local.dense)[0], inputs)
            return joined(metrics, inputs.batch.counts)

        return self._on_devices(inside, state, inputs, "whole")

    def arguments(self, state: TrainState, inputs: StepInputs, **how: Any) -> Any:
        """Return the arguments of a dispatched loss; see `Differentiation.arguments`."""
        return self.parts.differentiation.arguments(keyed(state)[0], inputs, **how)

    def lookup_ahead(self, state: TrainState, inputs: StepInputs) -> Carry:
        """Start the lookup of a batch without a step; of a carry, read its rows in this state."""

        def inside(local: Local, inputs: StepInputs) -> Carry | None:
            following = self.parts.lookup.following
            return following(local.stored, inputs.batch, self.ahead, inputs.carry)[0]

        return self._on_devices(inside, state, inputs, "device")

    @property
    def _local_kinds(self) -> Local:
        lookup = self.parts.lookup
        return Local("whole", lookup.specs, lookup.optimizer_specs)

    def _on_devices(
        self,
        fn: Callable[[Local, StepInputs], Any],
        state: TrainState,
        inputs: StepInputs,
        out: Any,
    ) -> Any:
        """Run `fn` on each device's own part of the state and the inputs."""
        lookup, stored_state = self.parts.lookup, None
        if lookup.embeddings is None:
            return fn(Local(state, None, None), inputs)
        dense = state._replace(params=lookup.dense(state.params))
        if state.opt_state:  # an evaluation has none
            gradients_state, optimizer_state, *_ = state.opt_state
            dense = dense._replace(opt_state=(gradients_state, lookup.dense(optimizer_state)))
            stored_state = lookup.stored(optimizer_state)
        local = Local(dense, lookup.stored(state.params), stored_state)

        def inside(*parts: Any) -> Any:
            return fn(Local(*parts[:3]), StepInputs(*parts[3:]))

        kinds = *self._local_kinds, *INPUT_KINDS
        return lookup.on_devices(inside, *local, *inputs, kinds=kinds, out=out)

    def _requested(self, local: Local, inputs: StepInputs) -> StepInputs:
        """Return the inputs with the batch's requests in `batch`."""
        axes = self.parts.inner_axes
        batch, carry, weight = inputs.batch, inputs.carry, inputs.weight
        requested = self.parts.lookup.requested(local.stored, batch, carry, weight, axes)
        return inputs._replace(batch=requested)

    def _applied(
        self, local: Local, update: UpdateBeforeExchange, read: PyTree
    ) -> tuple[Local, Any]:
        """Update the stored parameters; return them with the update, and which rows changed."""
        lookup = self.parts.lookup
        if lookup.embeddings is None:
            return Local(update, None, None), {}
        stored, stored_state, changed = lookup.applied(
            local.stored, local.stored_state, update.rows, update.active, read
        )
        return Local(update._replace(rows={}, active=None), stored, stored_state), changed

    def _exchanged(self, state: TrainState, done: Local, phase: Phase | None) -> TrainState:
        """Return the state after the exchange.

        If the program decides what is due, all of the exchange of stored parameters is in one
        branch of a conditional. The other branch leaves them in place, so that the cost of local
        steps does not grow with their number.
        """
        if self.parts.lookup.embeddings is None:
            return self.parts.exchanged(state, done.dense, phase)
        exchanged = partial(self._exchanged_in, phase=phase)
        alone = partial(self._exchanged_in, phase=())
        due, sync = self._moves_stored(state, phase), self.parts.sync
        axes = () if sync is None else sync.bound_axes
        return run_if(due, exchanged, alone, (state, done), axes=axes)

    def _exchanged_in(self, both: tuple[TrainState, Local], phase: Phase | None) -> TrainState:
        """Return the state after an exchange; the updates of stored parameters in it are zeros."""
        (state, done), lookup = both, self.parts.lookup
        still = jax.tree.map(jnp.zeros_like, done.stored)
        whole = state._replace(params=lookup.joined(lookup.dense(state.params), done.stored))
        update = done.dense._replace(updates=lookup.joined(done.dense.updates, still))
        new = self.parts.exchanged(whole, update, phase)
        gradients_state, optimizer_state, sync_state = new.opt_state
        if self.parts.sync is None or phase == ():
            # No exchange has changed them. Reusing the arrays writes nothing of their size.
            new = new._replace(params=lookup.joined(lookup.dense(new.params), done.stored))
        both = lookup.joined(optimizer_state, done.stored_state)
        return new._replace(opt_state=(gradients_state, both, sync_state))

    def _moves_stored(self, state: TrainState, phase: Phase | None) -> bool | jax.Array:
        """Return whether the exchange after `state` changes all stored parameters.

        It is an array if the program decides.
        """
        sync = self.parts.sync
        if sync is None or phase is not None:
            return sync is not None and phase != ()
        return sync.due(increment(state.opt_state[-1].count))


def keyed(state: TrainState) -> tuple[TrainState, TrainState]:
    """Return `state` with the key of its update, and with the key for the state after it."""
    rng, key = jax.random.key_data(jax.random.split(jax.random.wrap_key_data(state.rng)))
    return state._replace(rng=key), state._replace(rng=rng)


def _with_layouts(transform: Any) -> Any:
    """Return the transform with an `init` that warns of no unknown layouts: a step knows them."""

    def init(params: PyTree) -> PyTree:
        with layouts_known():
            return transform.init(params)

    return transform._replace(init=init)
