"""One update of one replica, from top to bottom: gradients, their reduction, optimizer, exchange.

Then what a part of the step leaves to the others, and the states of its parts and their layout.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Self

import jax
import optax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from ..._support.scopes import EVERY_PHASE
from ..._support.types import AxisName, Phase, PyTree
from ...gradients import ReadyOrder, mean_gradients
from ...gradients.precision import (
    DynamicLossScaleState,
    Policy,
    did_skip,
    guard_overflow,
    revert_if,
    scale_metrics,
    zero_if,
)
from ...mesh import (
    AnyMesh,
    MapWith,
    Roles,
    axis_names,
    constrain_layout,
    has_device_per_position,
    inner_specs,
    model_axes,
    replicate,
    sum_over,
)
from ...transform import (
    ExchangeState,
    GradientTransform,
    LossProgram,
    ParameterTransform,
    ReplicaGroup,
    StackedReplicas,
    chain,
    first_states,
    holds_state,
    increment,
    init,
    phase_scope,
    spec_of,
    takes_extra,
    unless_idle,
    unreplicate_number,
    vmap_replicas,
)
from ...tree import apply_exactly, parts_of
from .._train_state import StepExchange, TrainState
from ._gradients import (
    BatchGradients,
    Gradients,
    GradientWindow,
    LossData,
    Metrics,
    StepInputs,
    as_value,
    merge_metrics,
    old_if_idle,
    restore_statistics_if,
    statistics,
    with_statistics,
)
from ._optimized import (
    USE_CHAIN,
    Averaging,
    Weights,
    accepted_arguments,
    optimizer_rate,
    raising_value_fn,
)


class Layout(NamedTuple):
    """How the leaves of a step's parameters are sharded inside a replica.

    Attributes:
      axes: the axes inside a replica that the compiler handles.
      specs: a `PartitionSpec` per leaf over these axes; None if there are no such axes.
      inner_axes: axes inside a replica that are mapped; a loss sees the examples of one device.
      data_axes: all axes over which a batch is split on devices, replica axes first.
      num_devices: the number of devices on which the examples lie that a loss sees.
    """

    axes: frozenset[str]
    specs: PyTree | None
    inner_axes: tuple[str, ...]
    data_axes: tuple[str, ...]
    num_devices: int = 1


class ReducedGradients(NamedTuple):
    """Averaged gradients, and values that were averaged in the same way."""

    grads: PyTree
    state: PyTree  # state of the gradient transform
    loss: jax.Array | None  # None if an unknown transform averaged the gradients
    axes: set[str]  # replica axes over which some update averages
    weights: Weights  # this replica's in what follows
    loss_weight: jax.Array | None  # and in means of gradients and losses


class PendingUpdate(NamedTuple):
    """An update before the exchange of parameters."""

    updates: PyTree
    gradients_state: PyTree
    optimizer_state: PyTree
    model_state: PyTree
    weight: jax.Array | None  # this replica's weight in its batch
    weights: Weights  # and in what follows
    is_follower: jax.Array | None  # `Weights.is_follower`, computed on the same devices
    is_active: jax.Array | None  # () bool, whether this replica changes its state; None: yes
    rate: jax.Array | None  # learning rate that the optimizer used, if `sync` needs it
    step: jax.Array  # number of this update


@dataclass(frozen=True)
class Update:
    """One update by the parts of a step, traced for one replica or one of its inner devices.

    The parts are the arguments of `make_train_step`.

    Attributes:
      batches: the loss function, and how gradients of batches are taken.
      gradients: what happens to gradients before the optimizer; None: nothing.
      optimizer: the optimizer.
      sync: the exchange of parameters; None: there is none.
      axis_name: the replica axis.
      program: the form in which the loss function takes parameters and batches.
      independent: whether `sync` is "none": replicas may train independently.
      policy: dtypes in which the loss function computes; None: those of its arguments.
      map_with: how the loss of one replica is mapped over replicas of several devices.
      param_specs: specs of the parameters over axes inside a replica that the compiler handles;
        None without such axes.
    """

    batches: BatchGradients
    gradients: optax.GradientTransformationExtraArgs | None
    optimizer: optax.GradientTransformationExtraArgs
    sync: ParameterTransform | None
    axis_name: AxisName
    program: LossProgram
    independent: bool = False
    policy: Policy | None = None
    map_with: MapWith = "shard_map"
    param_specs: PyTree | None = None

    # One update, from top to bottom.

    def update_replicas(
        self,
        map_fn: Callable[..., Callable[..., Any]],
        mesh: AnyMesh | AbstractMesh,
        state: TrainState,
        inputs: StepInputs,
        roles: StepInputs,
        *,
        phase: Phase | None = None,
        **static: Any,
    ) -> tuple[TrainState, Metrics, Any]:
        """Run one update of all replicas: `prepare_update`, then `exchange_params`.

        Args:
          map_fn: `map_fn(fn, in_roles, out_roles)` maps a function of one replica over them.
          mesh: the mesh of the step.
          state: the state.
          inputs: the inputs.
          roles: their roles.
          phase: what to exchange; with None the counter in the state decides.
          **static: further arguments of `prepare_update`.

        Returns:
          The new state, metrics, and what is carried to the next step.
        """
        shared = state.exchange.shared

        def gather(state: TrainState, *inputs: Any) -> Any:
            gradients, metrics = self.compute_gradients(with_update_key(state), StepInputs(*inputs))
            return gradients._replace(data=None), metrics  # the batches stay where they are

        def prepare(state: TrainState, gathered: Any, *inputs: Any) -> Any:
            return self.prepare_update(state, StepInputs(*inputs), gathered=gathered, **static)

        local = state._replace(exchange=state.exchange._replace(shared=()))
        # What an algorithm keeps has its own layout, of which mapped programs would know nothing.
        seen = without_exchange(state)
        own = self.state_roles(seen)
        where: dict[str, Any] = {"mesh": mesh, "axis_name": self.axis_name}
        # One number for all replicas, by which conditionals decide.
        count = unreplicate_number(increment(state.step), **where)
        gathered = None
        if self.map_with == "vmap":  # the loss alone needs it
            gathered = map_fn(gather, (own, *roles), "stacked", "vmap")(seen, *inputs)
        prepared = map_fn(
            prepare, (own, "stacked", *roles), (self.pending_roles, "stacked", "device")
        )
        pending, metrics, carry = prepared(seen, gathered, *inputs)

        def exchange(replicas: StackedReplicas, own: Any, shared: PyTree) -> Any:
            state, pending = own
            return self.exchange_params(state, shared, pending, count, phase, replicas)

        new, shared = vmap_replicas(exchange, (local, pending), shared, **where)
        new = new._replace(exchange=new.exchange._replace(shared=shared))
        return new, metrics, carry

    @property
    def pending_roles(self) -> Roles:
        """The roles of the first result of `prepare_update`."""
        return "stacked"

    def compute_gradients(self, state: TrainState, inputs: StepInputs) -> tuple[Gradients, Metrics]:
        """Return the gradients of an update; see `BatchGradients.compute_gradients`."""
        return self.batches.compute_gradients(state, inputs)

    def prepare_update(
        self, state: TrainState, inputs: StepInputs, *, like: Any = None, gathered: Any = None
    ) -> tuple[PendingUpdate, Metrics, Any]:
        """Make one update of a replica up to the exchange of parameters.

        With a batch, with a window of gradients, or with both. A replica of weight 0 keeps its
        model state, and its metrics are zeros; if replicas train independently, it keeps its
        optimizer state, too. With a window the weight is that of the whole window; the metrics are
        those of the batch.

        `like`, for a window alone, is the types of one device's part of a batch; `gathered` is what
        `compute_gradients` has returned, if it ran before. The third result is what is carried to
        the next step: nothing.
        """
        keyed = with_update_key(state)
        gradients, metrics = gathered or self.compute_gradients(keyed, inputs)
        reduced = self.reduce_gradients(keyed, gradients, inputs.batch if like is None else like)
        pending = self.compute_update(keyed, reduced, gradients)
        scales = scale_metrics(state.opt_state, pending.optimizer_state)
        return pending, merge_metrics(metrics, scales), None

    def reduce_gradients(
        self, state: TrainState, gathered: Gradients, like: PyTree
    ) -> ReducedGradients:
        """Average gradients and the loss; `like` is this device's part of a batch, or its types."""
        before, specs = state.exchange.gradients, self.param_specs
        axes, order = self.unreduced_axes(before), None
        # A pipeline finishes all gradients with the last microbatch.
        if self.program.param_types is None and self.map_with != "vmap":
            # Called only where the order matters, since it traces the loss once more.
            order = cache(partial(self.batches.ready_order, state, like))
        loss: jax.Array | None = as_value(gathered.metrics["loss"])
        weight, loss_weight = self.gradient_weights(gathered, axes)
        grads, after = self.average_inner_axes(gathered, axes, order), before
        averaging = Averaging.from_transform(self.gradients, before, self.axis_name)
        if self.gradients is not None:
            given = {"weight": weight, "ready_order": order, "param_specs": specs}
            arguments = accepted_arguments(spec_of(self.gradients), before, **given)
            update: Any = partial(self.gradients.update, **arguments)
            if parts_of(state.opt_state, DynamicLossScaleState):
                update = guard_overflow(update, {*averaging.axes, *self.inner_axes}, weight)
            grads, after = update(grads, before, state.params)
        loss = None if averaging.has_unknown else averaging.mean(loss, loss_weight)
        weights = Weights(gathered.weight, gathered.weight).after_averaging(averaging)
        if gathered.loss_weight is None:
            loss_weight = weights.update
        elif averaging.reductions:
            loss_weight = Weights(loss_weight, loss_weight).after_averaging(averaging).update
        return ReducedGradients(grads, after, loss, averaging.axes, weights, loss_weight)

    def compute_update(
        self,
        state: TrainState,
        reduced: ReducedGradients,
        gathered: Gradients,
        finite: jax.Array | None = None,
    ) -> PendingUpdate:
        """Run the optimizer. An update that a loss scale skips keeps the model's statistics.

        `finite` says whether what the optimizer is not given, rows of tables, is finite.
        """
        before = state.opt_state
        averaging = Averaging.from_transform(self.optimizer, before, self.axis_name)
        with jax.named_scope("optimizer"):
            updates, after = self._run_optimizer(state, reduced, gathered.data, averaging, finite)
        wants_rate = self.sync is not None and self.sync.algorithm.needs_rate
        rate = optimizer_rate(after) if wants_rate else None
        weights = reduced.weights.after_averaging(averaging)
        # Where nothing makes replicas agree, an idle one cannot follow others.
        alone = (
            self.sync is None
            and not reduced.axes
            and (self.gradients is None or self.independent)
            and not holds_state(before, "gradients")
            and not holds_state(before, "parameters")
        )
        own_weight = weights.update if alone or self.sync is not None else None
        if own_weight is not None:
            after = old_if_idle(own_weight, after, before)
        if alone:
            updates = unless_idle(updates, own_weight)
        model_state, skipped = gathered.model_state, did_skip(before, after)
        if skipped is not None:
            model_state = restore_statistics_if(skipped, model_state, state.model_state)
        return PendingUpdate(
            updates=updates,
            gradients_state=reduced.state,
            optimizer_state=after,
            model_state=model_state,
            weight=gathered.weight,
            weights=weights,
            is_follower=weights.is_follower,
            is_active=None if own_weight is None else own_weight > 0,
            rate=rate,
            step=increment(state.step),
        )

    def _run_optimizer(
        self,
        state: TrainState,
        reduced: ReducedGradients,
        data: LossData | None,
        averaging: Averaging,
        finite: jax.Array | None,
    ) -> tuple[PyTree, PyTree]:
        """Call the optimizer with what its spec and its state say that it takes.

        `value` is the loss, averaged as gradients are; there is none if transforms average them
        that declare nothing. `value_fn` is the replica's own loss at other parameters, which raises
        where gradients are averaged, or the batches are gone.

        Communication: the optimizer's.
        """
        before, spec = state.opt_state, spec_of(self.optimizer)
        averaged, value = averaging.axes | reduced.axes, reduced.loss
        if averaging.has_unknown and not averaged.isdisjoint(axis_names(self.axis_name)):
            value = None
        axes = tuple(n for n in self.mapped_axes if n in {*averaged, *self.inner_axes})
        value_fn = raising_value_fn(axes)
        if data is not None and not axes:
            value_fn = partial(self.batches.loss_at, data=data)
        extra = {"grad": reduced.grads, "value_fn": value_fn}
        if value is not None:
            extra["value"] = averaging.mean(value, reduced.loss_weight)
        given = {"unscaled": True, "param_specs": self.param_specs, "finite": finite}
        extra |= accepted_arguments(spec, before, weight=reduced.loss_weight, **given)
        if not takes_extra(before):
            extra = {name: x for name, x in extra.items() if name in spec.takes - {"weight"}}
        try:
            return self.optimizer.update(reduced.grads, before, state.params, **extra)
        except Exception as error:
            if value is None:
                error.add_note(
                    "If `optimizer` asks for `value`: the step passes none where transforms that "
                    f"it does not see average gradients. {USE_CHAIN}"
                )
            raise

    def exchange_params(
        self,
        state: TrainState,
        shared: PyTree,
        update: PendingUpdate,
        count: jax.Array,
        phase: Phase | None,
        stacked: StackedReplicas,
    ) -> tuple[TrainState, PyTree]:
        """Return a replica's state, and the shared state, after the exchange of parameters."""
        averages = self.batches.model_state == "sync_mean"
        model_state, optimizer_state = update.model_state, update.optimizer_state
        params, updates, local = state.params, update.updates, state.exchange.local
        if self.sync is None:
            params = apply_exactly(params, updates)
            with phase_scope(EVERY_PHASE):
                if averages:
                    means = ReplicaGroup(self.axis_name, stacked=stacked).mean(
                        statistics(model_state), update.weight
                    )
                    model_state = with_statistics(model_state, means)
        else:
            extra = {"weight": update.weights.exchange, "learning_rate": update.rate}
            if update.is_follower is not None:
                # An exchange leaves out the update of a replica without weight, so it comes before.
                params = revert_if(~update.is_follower, apply_exactly(params, updates), params)
                updates = zero_if(update.is_follower, updates)
            params, means, after, optimizer_state = self.sync.exchange(
                updates,
                statistics(model_state) if averages else [],
                ExchangeState(count - 1, local, shared),
                params,
                sets_params=True,
                moments=optimizer_state,
                init=self.optimizer.init,
                part=self.dense,
                phase=phase,
                stacked=stacked,
                **{name: x for name, x in extra.items() if x is not None},
            )
            local, shared = after.local, after.shared
            if averages:
                model_state = with_statistics(model_state, means)
        new = TrainState(
            step=update.step,
            params=params,
            opt_state=optimizer_state,
            model_state=model_state,
            rng=state.rng,
            exchange=StepExchange(local, (), update.gradients_state),
        )
        return new, shared

    # The other programs of a step.

    def open_window(
        self, state: TrainState, inputs: StepInputs, *, num_batches: int
    ) -> GradientWindow:
        """Return an empty window for the next update; see `BatchGradients.open_window`."""
        return self.batches.open_window(with_update_key(state), inputs, num_batches=num_batches)

    def collect(
        self, state: TrainState, inputs: StepInputs, *, fits: bool
    ) -> tuple[GradientWindow, Metrics, None]:
        """Add a batch to a window; see `BatchGradients.collect`. Nothing is carried on."""
        return *self.batches.collect(with_update_key(state), inputs, fits=fits), None

    def evaluate(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a forward pass; see `BatchGradients.evaluate`."""
        return self.batches.evaluate(with_update_key(state), inputs)

    def arguments(self, state: TrainState, inputs: StepInputs, **static: Any) -> Any:
        """Return what a loss function that is dispatched receives; see `DispatchedGradients`."""
        batches: Any = self.batches
        return batches.arguments(with_update_key(state), inputs, **static)

    # What an update asks.

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """Axes inside a replica over which the batch is split."""
        return self.batches.inner_axes

    @property
    def mapped_axes(self) -> tuple[str, ...]:
        """The axes over which a replica may communicate."""
        return *axis_names(self.axis_name), *self.inner_axes

    def average_inner_axes(
        self, gathered: Gradients, axes: tuple[str, ...], order: ReadyOrder | None
    ) -> PyTree:
        """Return the gradients, averaged over axes inside a replica that `gradients` lacks."""
        grads, specs = gathered.grads, self.param_specs
        if specs is not None:
            grads = constrain_layout(grads, specs)
        return mean_gradients(grads, axes, order, specs, gathered.loss_weight) if axes else grads

    def gradient_weights(
        self, gathered: Gradients, axes: tuple[str, ...]
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Return this device's weight in `gradients`, and its replica's in means over replicas.

        They differ for losses with weights of which `gradients` itself averages those over inner
        axes; `axes` are the inner axes over which the step has averaged.

        Communication: for losses with weights one all-reduce of 4 bytes over the inner axes.
        """
        weight = gathered.device_weight
        if gathered.loss_weight is None or weight is None or not self.inner_axes:
            return weight, weight
        replica_weight = sum_over(weight, self.inner_axes)
        return replica_weight if axes == self.inner_axes else weight, replica_weight

    def unreduced_axes(
        self, state: PyTree, inner_axes: tuple[str, ...] | None = None
    ) -> tuple[str, ...]:
        """Return the inner axes over which the step must average, since `gradients` does not.

        `state` is that of `gradients`; `inner_axes` are those between which the batch is split.
        """
        inner_axes = self.inner_axes if inner_axes is None else inner_axes
        if self.gradients is None:
            return inner_axes
        spec = spec_of(self.gradients)
        is_known = isinstance(self.gradients, GradientTransform) and not spec.axes
        is_known = is_known and not holds_state(spec.unknown(state), "gradients")
        return inner_axes if is_known else ()

    # The states of its parts, and their layout.

    def init_exchange(self, stacked: PyTree, mesh: AnyMesh) -> tuple[PyTree, PyTree]:
        """Return the first local and shared state of `sync`, for stacked parameters."""
        if self.sync is None:
            return (), ()
        axes = model_axes(stacked, mesh, self.axis_name)
        specs = inner_specs(stacked, axes) if axes else None
        where: dict[str, Any] = {"mesh": mesh, "axis_name": self.axis_name, "param_specs": specs}
        return first_states(self.sync, stacked, **where)

    def dense(self, tree: PyTree) -> PyTree:
        """Return the part of a tree like the parameters that `optimizer` updates: all of it."""
        return tree

    def check_optimizer(self, state: PyTree, unknown: list[PyTree]) -> None:
        """Raise `ValueError` for an optimizer of this state that does what others would need, too.

        `unknown` are states of transforms in it that declare nothing.
        """

    def state_roles(self, state: TrainState) -> Roles:
        """Return the roles of a state as an argument of `map_replicas`."""
        del state
        return "stacked"

    def init_optimizers(self, stacked: PyTree, mesh: AnyMesh) -> tuple[PyTree, PyTree]:
        """Return the first states of gradient transform and optimizer, for stacked parameters."""
        given = self.gradients or optax.identity(), self.optimizer
        # Each has one state.
        both = chain(*(part._replace(init=part.init) for part in given))
        gradients, optimizer = init(both, stacked, mesh=mesh, axis_name=self.axis_name)
        return gradients, optimizer

    def loss_input_types(self, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Return the types of parameters and batch that the loss function of a device receives.

        Args:
          params: the types of the parameters of one replica.
          batch: the types of a device's part of a batch.
        """
        return params, batch

    def replicate_params(self, params: PyTree, seed: int, mesh: AnyMesh) -> PyTree:
        """Return the parameters of all replicas, equal on them, from those of one."""
        del seed  # draws tables
        return replicate(params, mesh=mesh, axis_name=self.axis_name)

    def layout(
        self, mesh: AnyMesh, axes: frozenset[str], specs: PyTree | None, params: PyTree
    ) -> Layout:
        """Return the layout of states whose parameters have these specs over these axes."""
        replicas = axis_names(self.axis_name)
        free = [a for a in mesh.axis_names if a not in {*replicas, *axes}]
        # Axes that a part of the step names are mapped as replicas are.
        parts = [tx for tx in (self.optimizer, self.gradients) if tx is not None]
        groups = () if self.sync is None else self.sync.algorithm.groups
        mapped = {name for tx in parts for name in spec_of(tx).axes}.union(
            *(axis_names(group.local_axis_name or ()) for group in groups)
        )
        if has_device_per_position(mesh):  # of Explicit axes a loss would have to know the layout
            types = zip(mesh.axis_names, mesh.axis_types, strict=True)
            mapped |= {name for name, kind in types if kind == AxisType.Explicit}
        # XLA of jax 0.12 aborts on `table[ids]` where parameters and examples are sharded over
        # different axes that are the compiler's, inside of a map over the replicas.
        if axes or self.maps_inner_axes:
            mapped |= {*free}
        inner = () if self.map_with == "vmap" else tuple(a for a in free if a in mapped)
        free = tuple(a for a in free if a not in inner)
        if free and specs is None and params is not None and has_device_per_position(mesh):
            specs = jax.tree.map(lambda _: P(), params)
        # Devices of an axis that is mapped have examples next to each other.
        num_devices = math.prod(mesh.shape[name] for name in free)
        return Layout(axes | {*free}, specs, inner, (*replicas, *inner, *free), num_devices)

    @property
    def maps_inner_axes(self) -> bool:
        """Whether all axes inside a replica that shard no parameter are mapped."""
        return self.program.param_types is not None

    def with_layout(self, layout: Layout) -> Self:
        """Return this update for a layout."""
        batches = dataclasses.replace(
            self.batches, inner_axes=layout.inner_axes, num_devices=layout.num_devices
        )
        sync, specs = self.sync, layout.specs
        if sync is not None and specs is not None:
            sync = sync.with_specs(specs)
        return dataclasses.replace(self, batches=batches, sync=sync, param_specs=specs)


def without_exchange(state: TrainState) -> TrainState:
    """Return `state` without what the exchange of parameters keeps, which it alone reads."""
    return state._replace(exchange=state.exchange._replace(local=(), shared=()))


def with_update_key(state: TrainState) -> TrainState:
    """Return `state` with the key of its next update, which only a loss that draws computes."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    return state._replace(rng=jax.random.key_data(key))
