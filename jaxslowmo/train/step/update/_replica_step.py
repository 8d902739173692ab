"""One update as one replica sees it: loss, gradients, optimizer, exchange."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import optax

from ...._scopes import EVERY_PHASE
from ...._typing import AxisName, Phase, PyTree
from ....embedding import Embeddings
from ....mesh import axis_names, vary_over, varying_axes
from ....precision import loss_scale_of, unless_overflow, was_skipped
from ....reducer import mean_gradients
from ....transform import (
    ParameterTransform,
    following,
    holds_state,
    increment,
    layouts_known,
    moved_copies,
    no_exchange,
    phase_scope,
    unless_idle,
)
from ....tree import apply_exactly, leaf_names
from ..._state import TrainState
from ._differentiate import Data, Differentiation, kept_if_idle
from ._model_state import Statistics, statistics_before_if
from ._rows import Rows, all_finite, mean_rows
from ._told import Loss, TracedUpdate, as_value, optimizer_rate, update_told
from ._window import Gathered, GradientWindow, Metrics

GradientOrder = Literal["reverse", "ready"]


class Tables(NamedTuple):
    """The embedding tables of a step.

    Attributes:
      embeddings: the tables; they know no axis where there is one device along it.
      axis: over which they are sharded; None without one.
      nested: the same, where it is left to the compiler and bound around what needs it; None where
        there is nothing to bind.
    """

    embeddings: Embeddings
    axis: str | None
    nested: str | None


class Reduced(NamedTuple):
    """Gradients that were averaged, and what was averaged with them."""

    grads: PyTree
    rows: Rows
    state: PyTree  # of the gradient transform
    loss: jax.Array
    over: tuple[str, ...]  # axes, in some update


class Moved(NamedTuple):
    """An update before the exchange of parameters."""

    updates: PyTree
    rows: Rows  # gradients of rows, as the tables are to be moved by
    active: jax.Array | None  # () bool, whether they are; None: always
    gradients_state: PyTree
    optimizer_state: PyTree
    model_state: PyTree
    weight: jax.Array | None
    rate: jax.Array | None  # that the optimizer used, where `sync` wants it


@dataclass(frozen=True)
class StepParts:
    """What a step is made of; see `make_train_step`.

    One update: the batch is differentiated, alone or into a window of several; the gradients are
    reduced, the optimizer makes updates of them, and parameters are exchanged.
    """

    differentiation: Differentiation
    gradients: optax.GradientTransformationExtraArgs | None
    optimizer: optax.GradientTransformationExtraArgs
    sync: ParameterTransform | None
    apart: bool  # replicas were said to train apart
    axis_name: AxisName
    order: GradientOrder
    tables: Tables | None = None

    def chain(self) -> optax.GradientTransformationExtraArgs:
        """The whole as one optax transform."""
        first = self.gradients or optax.identity(), self.optimizer
        if self.sync is None:
            return optax.chain(*first, no_exchange())
        return following(first, of_known_layout(self.sync))

    def per_replica(
        self,
        state: TrainState,
        batch: PyTree,
        weight: jax.Array | None,
        window: GradientWindow | None,
        phase: Phase | None,
        inner_axes: tuple[str, ...],
    ) -> tuple[TrainState, Metrics]:
        """One update as one replica sees it, or one of its devices along `inner_axes`.

        A replica of weight 0 keeps its model state, its metrics are zeros, and where replicas train
        apart its optimizer state stays too. With a window it is the weight of the whole window that
        decides; the metrics are those of the batch.
        """
        rng, key = jax.random.split(state.rng)
        data, differentiation = None, self.differentiation
        if window is None:
            gathered, metrics, data = differentiation.one_batch(
                state, batch, key, weight, inner_axes
            )
        else:
            window, metrics = differentiation.collected(
                state, batch, key, weight, window, inner_axes
            )
            gathered, _ = differentiation.closed(state, window, inner_axes)
        order = self.order_of(state, batch)
        return self._updated(state, rng, gathered, data, order, phase, inner_axes), metrics

    def opened(
        self,
        state: TrainState,
        batch: PyTree,
        weight: jax.Array | None,
        inner_axes: tuple[str, ...],
    ) -> GradientWindow:
        """An empty window for the next update; see `Differentiation.opened`."""
        _, key = jax.random.split(state.rng)
        return self.differentiation.opened(state, batch, key, weight, inner_axes)

    def collected(
        self,
        state: TrainState,
        batch: PyTree,
        weight: jax.Array | None,
        window: GradientWindow,
        inner_axes: tuple[str, ...],
    ) -> tuple[GradientWindow, Metrics]:
        """The window with a batch more, and its metrics; see `Differentiation.collected`."""
        _, key = jax.random.split(state.rng)
        return self.differentiation.collected(state, batch, key, weight, window, inner_axes)

    def evaluated(
        self,
        state: TrainState,
        batch: PyTree,
        weight: jax.Array | None,
        inner_axes: tuple[str, ...],
    ) -> Metrics:
        """A forward pass alone; see `Differentiation.evaluated`."""
        _, key = jax.random.split(state.rng)
        return self.differentiation.evaluated(state, batch, key, weight, inner_axes)

    def of_window(
        self,
        state: TrainState,
        window: GradientWindow,
        like: PyTree,
        phase: Phase | None,
        inner_axes: tuple[str, ...],
    ) -> tuple[TrainState, Metrics]:
        """One update of what a window holds; the metrics are means over its batches.

        `like` are types of this device's part of a batch.
        """
        rng, _ = jax.random.split(state.rng)
        gathered, metrics = self.differentiation.closed(state, window, inner_axes)
        order = self.order_of(state, like)
        return self._updated(state, rng, gathered, None, order, phase, inner_axes), metrics

    def _updated(
        self,
        state: TrainState,
        rng: jax.Array,
        gathered: Gathered,
        data: Data | None,
        order: tuple[int, ...] | None,
        phase: Phase | None,
        inner_axes: tuple[str, ...],
    ) -> TrainState:
        """The state after: gradients reduced, optimizer, exchange."""
        return self.exchanged(
            state, rng, self.moved(state, gathered, data, order, inner_axes), phase
        )

    def moved(
        self,
        state: TrainState,
        gathered: Gathered,
        data: Data | None,
        order: tuple[int, ...] | None,
        inner_axes: tuple[str, ...],
    ) -> Moved:
        """What an update comes to before parameters are exchanged; that part of `state` is used."""
        weight = gathered.weight
        reduced = self._reduced(state, gathered, order, inner_axes)
        loss = Loss(reduced.loss, reduced.over, self.differentiation, data)
        updates, optimizer_state, rate, alone = self._optimized(
            reduced, state.opt_state[1], state.params, loss, weight, inner_axes
        )
        _check_reduced(updates, inner_axes)
        # A replica that follows the others leaves its tables to what they exchange.
        active = weight > 0 if weight is not None and (self.sync is not None or alone) else None
        skipped, model_state = (
            was_skipped(state.opt_state[1], optimizer_state),
            gathered.model_state,
        )
        if skipped is not None:
            # What the optimizer has skipped tables and model state skip, too.
            active = ~skipped if active is None else active & ~skipped
            model_state = statistics_before_if(skipped, model_state, state.model_state)
        return Moved(
            updates, reduced.rows, active, reduced.state, optimizer_state, model_state, weight, rate
        )

    def exchanged(
        self,
        state: TrainState,
        rng: jax.Array,
        moved: Moved,
        phase: Phase | None,
        dense: Callable[[PyTree], PyTree] = lambda tree: tree,
    ) -> TrainState:
        """The state after the exchange of parameters.

        `dense` takes from a tree like the parameters the part that the optimizer knows.
        """
        updates, model_state, sync_state = self._exchanged(
            moved.updates,
            moved.model_state,
            state.opt_state[-1],
            state.params,
            moved.weight,
            phase,
            moved.rate,
        )
        optimizer_state = moved.optimizer_state
        if self.sync is not None and phase != ():
            # What the exchange has moved, optimizers that remember parameters must not take back.
            own_updates = unless_idle(dense(moved.updates), moved.weight)
            optimizer_state = moved_copies(
                optimizer_state, dense(state.params), own_updates, dense(updates)
            )
        return TrainState(
            step=increment(state.step),
            params=apply_exactly(state.params, updates),
            opt_state=(moved.gradients_state, optimizer_state, sync_state),
            model_state=model_state,
            rng=rng,
        )

    def _reduced(
        self,
        state: TrainState,
        gathered: Gathered,
        order: tuple[int, ...] | None,
        inner_axes: tuple[str, ...],
    ) -> Reduced:
        """Gradients, those of rows and the loss, averaged alike."""
        grads, weight, after = gathered.grads, gathered.weight, state.opt_state[0]
        value, averaged = as_value(gathered.loss), frozenset[str]()
        # Devices along other inner axes have other examples and the same rows.
        axis, nested = (None, None) if self.tables is None else self.tables[1:]
        rows = mean_rows(gathered.rows, tuple(n for n in inner_axes if n != nested))
        if self.gradients is not None:
            known: dict[str, Any] = {} if weight is None else {"weight": weight}
            if order is not None:
                known["ready_order"] = order
            update = partial(self.gradients.update, **known)
            operands = grads, after, state.params
            reduction = TracedUpdate(update, self.axis_name, *operands, of_gradients=True)
            if axis is not None and not reduction.communicates_over(axis):
                # It knows the replicas alone: their devices' gradients are averaged before.
                operands = mean_gradients(grads, (axis,), order), after, state.params
                reduction = TracedUpdate(update, self.axis_name, *operands, of_gradients=True)
            run = reduction
            if loss_scale_of(state.opt_state) is not None:
                run = unless_overflow(reduction, {*reduction.axes, *inner_axes}, weight)
            grads, after = run(*operands)
            value, averaged = reduction.mean(value, weight, *operands), reduction.axes
            rows = reduction.rows(rows, weight, *operands)
        elif inner_axes:
            grads = mean_gradients(grads, inner_axes, order)
        # Equal gradients stay typed as varying over replicas, as optimizer state is: transforms
        # with conditionals (optax.apply_if_finite) need both alike.
        names = axis_names(self.axis_name)
        over = tuple(n for n in (*names, *inner_axes) if n in {*averaged, *inner_axes})
        return Reduced(vary_over(grads, names), rows, after, vary_over(value, names), over)

    def _optimized(
        self,
        reduced: Reduced,
        state: PyTree,
        params: PyTree,
        loss: Loss,
        weight: jax.Array | None,
        inner_axes: tuple[str, ...],
    ) -> tuple[PyTree, PyTree, jax.Array | None, bool]:
        """Updates, the optimizer's state, the rate that it used where `sync` wants it.

        And whether nothing brings replicas together.
        """
        finite = None
        if reduced.rows and loss_scale_of(state) is not None:
            finite = all_finite(reduced.rows, inner_axes)
        with jax.named_scope("optimizer"):
            updates, after = update_told(
                self.optimizer,
                reduced.grads,
                state,
                params,
                loss=loss,
                axis_name=self.axis_name,
                weight=weight,
                finite=finite,
            )
        wants_rate = self.sync is not None and self.sync.wants_learning_rate
        rate = optimizer_rate(after) if wants_rate else None
        # Whether nothing brings replicas together, so that an idle one has nobody to follow.
        alone = (
            self.sync is None
            and not set(reduced.over) & set(axis_names(self.axis_name))
            and (self.gradients is None or self.apart)
            and not holds_state(state, "gradients")
            and not holds_state(state, "parameters")
        )
        if weight is not None and (self.sync is not None or alone):
            after = kept_if_idle(weight, after, state)
        return unless_idle(updates, weight) if alone else updates, after, rate, alone

    def _exchanged(
        self,
        updates: PyTree,
        model_state: PyTree,
        state: PyTree,
        params: PyTree,
        weight: jax.Array | None,
        phase: Phase | None,
        rate: jax.Array | None,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Updates and model state after the exchange of parameters, and its state."""
        statistics = Statistics(
            model_state, averaged=self.differentiation.model_state == "sync_mean"
        )
        if self.sync is None:
            with phase_scope(EVERY_PHASE):
                return updates, statistics.averaged_over(self.axis_name, weight), state
        known = {"weight": weight, "learning_rate": rate}
        with layouts_known():
            updates, means, state = self.sync.exchange(
                updates,
                statistics.leaves,
                state,
                params,
                phase=phase,
                **{name: x for name, x in known.items() if x is not None},
            )
        return updates, statistics.replaced(means), state

    def order_of(self, state: TrainState, batch: PyTree) -> tuple[int, ...] | None:
        """In which gradients go into buckets; None leaves it to what reduces them."""
        return self.differentiation.ready_order(state, batch) if self.order == "ready" else None


def of_known_layout(sync: ParameterTransform) -> ParameterTransform:
    """`sync` for a step, which gives it the specs of the parameters once there are some."""

    def init(params: PyTree) -> PyTree:
        with layouts_known():
            return sync.init(params)

    return sync._replace(init=init, state=sync.state)


def _check_reduced(updates: PyTree, inner_axes: tuple[str, ...]) -> None:
    wrong = [
        name
        for name, u in zip(leaf_names(updates), jax.tree.leaves(updates), strict=True)
        if varying_axes(u) & set(inner_axes)
    ]
    if wrong:
        raise ValueError(
            f"`gradients` must average over the inner axes {inner_axes} of the mesh, between whose "
            f"devices the batch is split; updates still differ there: {', '.join(wrong)}. Leave "
            f"`gradients` out, or pass js.all_reduce_gradients({inner_axes!r})."
        )
