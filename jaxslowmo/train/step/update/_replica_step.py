"""What one replica does: an update, a window of gradients, an evaluation.

Everything up to the exchange of parameters runs on each device's own part of what is looked up; the
exchange takes that as it takes other leaves that are sharded inside a replica.
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
from ....transform import chain, increment, no_exchange, note_followed, run_if, unless_idle
from ..._train_state import TrainState
from ._batch_gradients import GIVEN_ROLES, Given, GradientWindow, Metrics
from ._parts import Moved, StepParts, of_known_layout

# What is stacked over the replicas is, inside of one, the same on all devices.
GIVEN_KINDS: Any = jax.tree.map(lambda r: "whole" if r == "stacked" else r, GIVEN_ROLES)
WINDOW_KINDS: Any = GIVEN_KINDS.window


class Local(NamedTuple):
    """The state as a device has it, or what its part of an update has made of it.

    Attributes:
      dense: that of the dense parameters, or their update before they are exchanged.
      stored: the stored parameters; see `Lookup`. An update has moved them already.
      stored_state: of their optimizer; None in an evaluation.
    """

    dense: Any
    stored: PyTree
    stored_state: PyTree


@dataclass(frozen=True)
class ReplicaStep:
    """A step as one replica sees it, or one of its devices along the inner axes.

    Beside an update, or a batch that goes into a window, `given.upcoming` is asked for.

    Attributes:
      parts: of the step.
      ahead: how much is done for the next batch.
    """

    parts: StepParts
    ahead: Ahead

    def chain(self) -> optax.GradientTransformationExtraArgs:
        """The transforms of the step as one, of whose states it keeps."""
        lookup, sync = self.parts.lookup, self.parts.sync
        last = no_exchange() if sync is None else of_known_layout(sync)
        if lookup.embeddings is None:
            return chain(*self.parts.first_two(), last)
        optimizers, embeddings = chain(*self.parts.first_two()), lookup.embeddings

        def both(dense: PyTree, stored: PyTree) -> tuple[PyTree, PyTree]:
            states = optimizers.init(dense)
            note_followed(states)
            return states, embeddings.init_optimizer(stored)

        def init(params: PyTree) -> Any:
            # The axis is bound for gradient transforms that average over it, too.
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

        return optax.GradientTransformationExtraArgs(init, update)

    def updated(
        self, state: TrainState, given: Given, phase: Phase | None
    ) -> tuple[TrainState, Metrics, Carry | None]:
        """One update, and beside it what the batch after it asks for.

        A replica of weight 0 keeps its model state, its metrics are zeros, and where replicas train
        apart its optimizer state stays too. With a window it is the weight of the whole window that
        decides; the metrics are those of the batch.
        """
        now, then = keyed(state)
        lookup = self.parts.lookup

        def inside(local: Local, given: Given) -> tuple[Local, Any, Metrics, Carry | None]:
            given = self._requested(local, given)
            following, read = lookup.following(local.stored, given.upcoming, self.ahead)
            gathered, metrics = self.parts.differentiation.gathered(local.dense, given)
            moved = self.parts.moved(local.dense, gathered, given.batch)
            metrics = {**metrics, **given.batch.counts}
            return *self._applied(local, moved, read), metrics, following

        kinds = self._local_kinds, "device", "whole", "device"
        done, changed, metrics, following = self._on_devices(inside, now, given, kinds)
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
            metrics = {**metrics, **unless_idle(resent, given.weight)}
        return new, metrics, following

    def opened(self, state: TrainState, given: Given, num_batches: int) -> GradientWindow:
        """An empty window for the next update; see `Differentiation.opened`."""

        def inside(local: Local, given: Given) -> GradientWindow:
            given = self._requested(local, given)
            return self.parts.differentiation.opened(local.dense, given, num_batches)

        return self._on_devices(inside, keyed(state)[0], given, WINDOW_KINDS)

    def collected(
        self, state: TrainState, given: Given, *, fits: bool
    ) -> tuple[GradientWindow, Metrics, Carry | None]:
        """The window with a batch more, and beside it what the next one asks for.

        Nothing that was looked up is changed by it, so there is nothing to send again.
        """
        collected = self.parts.differentiation.collected

        def inside(local: Local, given: Given) -> tuple[GradientWindow, Metrics, Carry | None]:
            given = self._requested(local, given)
            following, _ = self.parts.lookup.following(local.stored, given.upcoming, self.ahead)
            window, metrics = collected(local.dense, given, fits=fits)
            return window, {**metrics, **given.batch.counts}, following

        kinds = WINDOW_KINDS, "whole", "device"
        return self._on_devices(inside, keyed(state)[0], given, kinds)

    def of_window(
        self, state: TrainState, window: GradientWindow, like: PyTree, phase: Phase | None
    ) -> tuple[TrainState, Metrics, None]:
        """One update of what a window holds; the metrics are means over its batches.

        `like` are types of this device's part of a batch.
        """
        now, then = keyed(state)

        def inside(local: Local, given: Any) -> tuple[Local, Metrics]:
            gathered = self.parts.differentiation.closed(local.dense, given.window)
            seen = jax.eval_shape(self._requested, local, Given(like)).batch
            moved = self.parts.moved(local.dense, gathered, seen)
            return self._applied(local, moved, ())[0], gathered.metrics

        kinds = self._local_kinds, "whole"
        done, metrics = self._on_devices(inside, now, Given(window=window), kinds)
        return self._exchanged(then, done, phase), metrics, None

    def evaluated(self, state: TrainState, given: Given) -> Metrics:
        """Metrics of a forward pass alone; see `Differentiation.evaluated`."""

        def inside(local: Local, given: Given) -> Metrics:
            given = self._requested(local, given)
            metrics = self.parts.differentiation.evaluated(keyed(local.dense)[0], given)
            return {**metrics, **given.batch.counts}

        return self._on_devices(inside, state, given, "whole")

    def arguments(self, state: TrainState, given: Given, **how: Any) -> Any:
        """What a dispatched loss function is given; see `Differentiation.arguments`."""
        return self.parts.differentiation.arguments(keyed(state)[0], given, **how)

    def asked(self, state: TrainState, given: Given) -> Carry:
        """What a batch asks for, before any step; of a carry rows alone, as this state has them."""

        def inside(local: Local, given: Given) -> Carry | None:
            following = self.parts.lookup.following
            return following(local.stored, given.batch, self.ahead, given.carry)[0]

        return self._on_devices(inside, state, given, "device")

    @property
    def _local_kinds(self) -> Local:
        lookup = self.parts.lookup
        return Local("whole", lookup.specs, lookup.optimizer_specs)

    def _on_devices(
        self, fn: Callable[[Local, Given], Any], state: TrainState, given: Given, out: Any
    ) -> Any:
        """`fn` of each device's own part of a state and of what is given."""
        lookup, stored_state = self.parts.lookup, None
        if lookup.embeddings is None:
            return fn(Local(state, None, None), given)
        dense = state._replace(params=lookup.dense(state.params))
        if state.opt_state:  # an evaluation has none
            gradients_state, optimizer_state, *_ = state.opt_state
            dense = dense._replace(opt_state=(gradients_state, lookup.dense(optimizer_state)))
            stored_state = lookup.stored(optimizer_state)
        local = Local(dense, lookup.stored(state.params), stored_state)

        def inside(*parts: Any) -> Any:
            return fn(Local(*parts[:3]), Given(*parts[3:]))

        kinds = *self._local_kinds, *GIVEN_KINDS
        return lookup.on_devices(inside, *local, *given, kinds=kinds, out=out)

    def _requested(self, local: Local, given: Given) -> Given:
        """What is given, with the batch and what it asked for."""
        axes = self.parts.inner_axes
        batch, carry, weight = given.batch, given.carry, given.weight
        asked = self.parts.lookup.requested(local.stored, batch, carry, weight, axes)
        return given._replace(batch=asked)

    def _applied(self, local: Local, moved: Moved, read: PyTree) -> tuple[Local, Any]:
        """The stored parameters after an update, too, and which of them have changed."""
        lookup = self.parts.lookup
        if lookup.embeddings is None:
            return Local(moved, None, None), {}
        stored, stored_state, changed = lookup.applied(
            local.stored, local.stored_state, moved.rows, moved.active, read
        )
        return Local(moved._replace(rows={}, active=None), stored, stored_state), changed

    def _exchanged(self, state: TrainState, done: Local, phase: Phase | None) -> TrainState:
        """The state after the exchange.

        Where the program decides what is due, all of the exchange of stored parameters stands in
        one branch of a conditional and the other leaves them where they are, so that local steps
        cost nothing that grows with their number.
        """
        if self.parts.lookup.embeddings is None:
            return self.parts.exchanged(state, done.dense, phase)
        exchanged = partial(self._exchanged_in, phase=phase)
        alone = partial(self._exchanged_in, phase=())
        return run_if(self._moves_stored(state, phase), exchanged, alone, (state, done))

    def _exchanged_in(self, both: tuple[TrainState, Local], phase: Phase | None) -> TrainState:
        """The state after an exchange, for which stored parameters have no update left."""
        (state, done), lookup = both, self.parts.lookup
        still = jax.tree.map(jnp.zeros_like, done.stored)
        whole = state._replace(params=lookup.joined(lookup.dense(state.params), done.stored))
        moved = done.dense._replace(updates=lookup.joined(done.dense.updates, still))
        new = self.parts.exchanged(whole, moved, phase)
        gradients_state, optimizer_state, sync_state = new.opt_state
        if self.parts.sync is None or phase == ():
            # Nothing has moved them since, and nothing of their size is written.
            new = new._replace(params=lookup.joined(lookup.dense(new.params), done.stored))
        both = lookup.joined(optimizer_state, done.stored_state)
        return new._replace(opt_state=(gradients_state, both, sync_state))

    def _moves_stored(self, state: TrainState, phase: Phase | None) -> bool | jax.Array:
        """Whether the exchange after `state` moves all stored parameters.

        An array where the program decides.
        """
        sync = self.parts.sync
        if sync is None or phase is not None:
            return sync is not None and phase != ()
        return sync.due(increment(state.opt_state[-1].count))


def keyed(state: TrainState) -> tuple[TrainState, TrainState]:
    """A state with the key of its update, and one with that of the state after it."""
    rng, key = jax.random.split(state.rng)
    return state._replace(rng=key), state._replace(rng=rng)
