"""One update of one replica, from top to bottom: gradients, their reduction, optimizer, exchange.

Then what an argument of the step leaves to the others, the states, and their layout.
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

from ..._support.scopes import EVERY_PHASE, MODEL_STATE
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
from ...tracing import LossProgram
from ...transform import (
    ExchangeState,
    GradientTransform,
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
from ._averaging import (
    USE_CHAIN,
    Averaging,
    Weights,
    accepted_arguments,
    optimizer_rate,
    raising_value_fn,
)
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


class Layout(NamedTuple):
    """How the leaves of a step's parameters are sharded inside a replica.

    Attributes:
      auto_axes: the axes inside a replica that the compiler handles, and that of the tables.
      specs: a `PartitionSpec` per leaf over these axes; None if there are no such axes.
      manual_inner_axes: axes inside a replica that are mapped; a loss sees the examples of one
        device.
      batch_axes: all axes over which a batch is split on devices, replica axes first.
      num_devices: the number of devices on which the examples lie that a loss sees.
    """

    auto_axes: frozenset[str]
    specs: PyTree | None
    manual_inner_axes: tuple[str, ...]
    batch_axes: tuple[str, ...]
    num_devices: int = 1


class ReducedGradients(NamedTuple):
    """Averaged gradients, and values that were averaged in the same way.

    Attributes:
      grads: the gradients after the gradient transform.
      state: the state of the gradient transform.
      loss: () the averaged loss; None if a transform that declares nothing averaged the gradients.
      axes: the replica axes over which some update averages gradients.
      weights: the weights of this replica in what follows.
      loss_weight: () the weight of this replica in means of gradients and losses; None: all equal.
    """

    grads: PyTree
    state: PyTree
    loss: jax.Array | None
    axes: set[str]
    weights: Weights
    loss_weight: jax.Array | None


class PendingUpdate(NamedTuple):
    """An update before the exchange of parameters.

    Attributes:
      updates: the updates of the parameters.
      gradients_state: the state of the gradient transform after the update.
      optimizer_state: the state of the optimizer after the update.
      model_state: model state after the update.
      batch_weight: () the weight of this replica in its batch; None if all are equal.
      exchange_weight: () `Weights.exchange_weight` of this replica.
      is_follower: () bool, `Weights.is_follower` of this replica.
      is_active: () bool, whether this replica changes its state; None: all do.
      rate: the learning rate that the optimizer used; None if `sync` does not need it.
      step: () int32, the number of this update.
    """

    updates: PyTree
    gradients_state: PyTree
    optimizer_state: PyTree
    model_state: PyTree
    batch_weight: jax.Array | None
    exchange_weight: jax.Array | None
    is_follower: jax.Array | None
    is_active: jax.Array | None
    rate: jax.Array | None
    step: jax.Array


@dataclass(frozen=True)
class Update:
    """One update by the arguments of a step, traced for one replica or one of its inner devices.

    Attributes:
      differentiated_loss: the loss function, and how gradients of batches are taken.
      gradients: what happens to gradients before the optimizer; None: nothing.
      optimizer: the optimizer.
      sync: the exchange of parameters; None: there is none.
      axis_name: the replica axis.
      loss_program: the form in which the loss function takes parameters and batches.
      independent: whether `sync` is "none": replicas may train independently.
      policy: dtypes in which the loss function computes; None: those of its arguments.
      map_with: how the loss of one replica is mapped over replicas of several devices.
      param_specs: specs of the parameters over axes inside a replica that the compiler handles;
        None without such axes.
    """

    differentiated_loss: BatchGradients
    gradients: optax.GradientTransformationExtraArgs | None
    optimizer: optax.GradientTransformationExtraArgs
    sync: ParameterTransform | None
    axis_name: AxisName
    loss_program: LossProgram
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

        def compute(state: TrainState, *inputs: Any) -> Any:
            gradients, metrics = self.compute_gradients(with_update_key(state), StepInputs(*inputs))
            return gradients._replace(data=None), metrics  # the batches stay where they are

        def prepare(state: TrainState, computed: Any, *inputs: Any) -> Any:
            return self.prepare_update(state, StepInputs(*inputs), computed=computed, **static)

        local = state._replace(exchange=state.exchange._replace(shared=()))
        # What an algorithm keeps has its own layout, of which mapped programs would know nothing.
        training_state = without_exchange(state)
        state_roles = self.state_roles(training_state)
        mesh_kwargs: dict[str, Any] = {"mesh": mesh, "axis_name": self.axis_name}
        # One number for all replicas, by which conditionals decide.
        count = unreplicate_number(increment(state.step), **mesh_kwargs)
        computed = None
        if self.map_with == "vmap":  # the loss alone needs it
            map_compute = map_fn(compute, (state_roles, *roles), "stacked", "vmap")
            computed = map_compute(training_state, *inputs)
        map_prepare = map_fn(
            prepare, (state_roles, "stacked", *roles), (self.pending_roles, "stacked", "device")
        )
        pending, metrics, carry = map_prepare(training_state, computed, *inputs)

        def exchange(replicas: StackedReplicas, mapped: Any, shared: PyTree) -> Any:
            state, pending = mapped
            return self.exchange_params(state, shared, pending, count, phase, replicas)

        new, shared = vmap_replicas(exchange, (local, pending), shared, **mesh_kwargs)
        new = new._replace(exchange=new.exchange._replace(shared=shared))
        return new, metrics, carry

    @property
    def pending_roles(self) -> Roles:
        """The roles of the first result of `prepare_update`."""
        return "stacked"

    def compute_gradients(self, state: TrainState, inputs: StepInputs) -> tuple[Gradients, Metrics]:
        """Return the gradients of an update; see `BatchGradients.compute_gradients`."""
        return self.differentiated_loss.compute_gradients(state, inputs)

    def prepare_update(
        self, state: TrainState, inputs: StepInputs, *, like: Any = None, computed: Any = None
    ) -> tuple[PendingUpdate, Metrics, Any]:
        """Make one update of a replica up to the exchange of parameters.

        With a batch, with a window of gradients, or with both. A replica of weight 0 keeps its
        model state, and its metrics are zeros; if replicas train independently, it keeps its
        optimizer state, too. With a window the weight is that of the whole window; the metrics are
        those of the batch.

        `like`, for a window alone, is the types of one device's part of a batch; `computed` is what
        `compute_gradients` has returned, if it ran before. The third result is what is carried to
        the next step: nothing.
        """
        keyed = with_update_key(state)
        gradients, metrics = computed or self.compute_gradients(keyed, inputs)
        reduced = self.reduce_gradients(keyed, gradients, inputs.batch if like is None else like)
        pending = self.compute_update(keyed, reduced, gradients)
        scales = scale_metrics(state.opt_state, pending.optimizer_state)
        return pending, merge_metrics(metrics, scales), None

    def reduce_gradients(
        self, state: TrainState, local_gradients: Gradients, like: PyTree
    ) -> ReducedGradients:
        """Average gradients and the loss; `like` is this device's part of a batch, or its types."""
        before, specs = state.exchange.gradients, self.param_specs
        axes, order = self.unreduced_axes(before), None
        # A pipeline finishes all gradients with the last microbatch.
        if self.loss_program.param_types is None and self.map_with != "vmap":
            # Called only where the order matters, since it traces the loss once more.
            order = cache(partial(self.differentiated_loss.ready_order, state, like))
        loss: jax.Array | None = as_value(local_gradients.metrics["loss"])
        weight, loss_weight = self.gradient_weights(local_gradients, axes)
        grads, after = self.average_inner_axes(local_gradients, axes, order), before
        averaging = Averaging.from_transform(self.gradients, before, self.axis_name)
        if self.gradients is not None:
            offered = {"weight": weight, "ready_order": order, "param_specs": specs}
            arguments = accepted_arguments(spec_of(self.gradients), before, **offered)
            update_fn: Any = partial(self.gradients.update, **arguments)
            if parts_of(state.opt_state, DynamicLossScaleState):
                update_fn = guard_overflow(update_fn, {*averaging.axes, *self.inner_axes}, weight)
            grads, after = update_fn(grads, before, state.params)
        loss = None if averaging.has_unknown else averaging.mean(loss, loss_weight)
        weights = Weights.from_batch(local_gradients.weight).after_averaging(averaging)
        if local_gradients.loss_weight is None:
            loss_weight = weights.update_weight
        elif averaging.reductions:
            loss_weight = Weights.from_batch(loss_weight).after_averaging(averaging).update_weight
        return ReducedGradients(grads, after, loss, averaging.axes, weights, loss_weight)

    def compute_update(
        self,
        state: TrainState,
        reduced: ReducedGradients,
        local_gradients: Gradients,
        finite: jax.Array | None = None,
    ) -> PendingUpdate:
        """Run the optimizer. An update that a loss scale skips keeps the model's statistics.

        `finite` says whether what the optimizer is not given, rows of tables, is finite.
        """
        before = state.opt_state
        averaging = Averaging.from_transform(self.optimizer, before, self.axis_name)
        with jax.named_scope("optimizer"):
            updates, after = self._run_optimizer(
                state, reduced, local_gradients.data, averaging, finite
            )
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
        weight = weights.update_weight if alone or self.sync is not None else None
        if weight is not None:
            after = old_if_idle(weight, after, before)
        if alone:
            updates = unless_idle(updates, weight)
        model_state, skipped = local_gradients.model_state, did_skip(before, after)
        if skipped is not None:
            model_state = restore_statistics_if(skipped, model_state, state.model_state)
        return PendingUpdate(
            updates=updates,
            gradients_state=reduced.state,
            optimizer_state=after,
            model_state=model_state,
            batch_weight=local_gradients.weight,
            exchange_weight=weights.exchange_weight,
            is_follower=weights.is_follower,
            is_active=None if weight is None else weight > 0,
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
            value_fn = partial(self.differentiated_loss.loss_at, data=data)
        extra = {"grad": reduced.grads, "value_fn": value_fn}
        if value is not None:
            extra["value"] = averaging.mean(value, reduced.loss_weight)
        offered = {"unscaled": True, "param_specs": self.param_specs, "finite": finite}
        extra |= accepted_arguments(spec, before, weight=reduced.loss_weight, **offered)
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
        pending: PendingUpdate,
        count: jax.Array,
        phase: Phase | None,
        stacked: StackedReplicas,
    ) -> tuple[TrainState, PyTree]:
        """Return a replica's state, and the shared state, after the exchange of parameters."""
        averages = self.differentiated_loss.model_state_mode == "sync_mean"
        model_state, optimizer_state = pending.model_state, pending.optimizer_state
        params, updates, local = state.params, pending.updates, state.exchange.local
        if self.sync is None:
            params = apply_exactly(params, updates)
            with phase_scope(EVERY_PHASE), jax.named_scope(MODEL_STATE):
                if averages:
                    means = ReplicaGroup(self.axis_name, stacked=stacked).mean(
                        statistics(model_state), pending.batch_weight
                    )
                    model_state = with_statistics(model_state, means)
        else:
            extra = {"weight": pending.exchange_weight, "learning_rate": pending.rate}
            if pending.is_follower is not None:
                # An exchange leaves out the update of a replica without weight, so it comes before.
                params = revert_if(~pending.is_follower, apply_exactly(params, updates), params)
                updates = zero_if(pending.is_follower, updates)
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
            step=pending.step,
            params=params,
            opt_state=optimizer_state,
            model_state=model_state,
            rng=state.rng,
            exchange=StepExchange(local, (), pending.gradients_state),
        )
        return new, shared

    # The other programs of a step.

    def open_window(
        self, state: TrainState, inputs: StepInputs, *, num_batches: int
    ) -> GradientWindow:
        """Return an empty window for the next update; see `BatchGradients.open_window`."""
        state, loss = with_update_key(state), self.differentiated_loss
        return loss.open_window(state, inputs, num_batches=num_batches)

    def collect(
        self, state: TrainState, inputs: StepInputs, *, fits_window: bool
    ) -> tuple[GradientWindow, Metrics, None]:
        """Add a batch to a window; see `BatchGradients.collect`. Nothing is carried on."""
        state, loss = with_update_key(state), self.differentiated_loss
        return *loss.collect(state, inputs, fits_window=fits_window), None

    def evaluate(self, state: TrainState, inputs: StepInputs) -> Metrics:
        """Return the metrics of a forward pass; see `BatchGradients.evaluate`."""
        return self.differentiated_loss.evaluate(with_update_key(state), inputs)

    def arguments(self, state: TrainState, inputs: StepInputs, **static: Any) -> Any:
        """Return what a loss function that is dispatched receives; see `DispatchedGradients`."""
        dispatched: Any = self.differentiated_loss
        return dispatched.arguments(with_update_key(state), inputs, **static)

    # What an update asks.

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """Axes inside a replica over which the batch is split."""
        return self.differentiated_loss.inner_axes

    @property
    def mapped_axes(self) -> tuple[str, ...]:
        """The axes over which a replica may communicate."""
        return *axis_names(self.axis_name), *self.inner_axes

    def average_inner_axes(
        self, local_gradients: Gradients, axes: tuple[str, ...], order: ReadyOrder | None
    ) -> PyTree:
        """Return the gradients, averaged over axes inside a replica that `gradients` lacks."""
        grads, specs = local_gradients.grads, self.param_specs
        if specs is not None:
            grads = constrain_layout(grads, specs)
        if not axes:
            return grads
        return mean_gradients(grads, axes, order, specs, local_gradients.loss_weight)

    def gradient_weights(
        self, local_gradients: Gradients, axes: tuple[str, ...]
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Return this device's weight in `gradients`, and its replica's in means over replicas.

        They differ for losses with weights of which `gradients` itself averages those over inner
        axes; `axes` are the inner axes over which the step has averaged.

        Communication: for losses with weights one all-reduce of 4 bytes over the inner axes.
        """
        weight = local_gradients.device_weight
        if local_gradients.loss_weight is None or weight is None or not self.inner_axes:
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

    # States, and their layout.

    def init_exchange(self, stacked: PyTree, mesh: AnyMesh) -> tuple[PyTree, PyTree]:
        """Return the first local and shared state of `sync`, for stacked parameters."""
        if self.sync is None:
            return (), ()
        axes = model_axes(stacked, mesh, self.axis_name)
        specs = inner_specs(stacked, axes) if axes else None
        mesh_kwargs: dict[str, Any] = {"mesh": mesh, "axis_name": self.axis_name}
        return first_states(self.sync, stacked, param_specs=specs, **mesh_kwargs)

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
        transforms = self.gradients or optax.identity(), self.optimizer
        # Each has one state.
        both = chain(*(tx._replace(init=tx.init) for tx in transforms))
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
        self, mesh: AnyMesh, sharded_axes: frozenset[str], specs: PyTree | None, params: PyTree
    ) -> Layout:
        """Return the layout of states whose parameters have these specs over these axes."""
        replicas = axis_names(self.axis_name)
        other_axes = [a for a in mesh.axis_names if a not in {*replicas, *sharded_axes}]
        # Axes that a transform of the step names are mapped as replicas are.
        transforms = [tx for tx in (self.optimizer, self.gradients) if tx is not None]
        groups = () if self.sync is None else self.sync.algorithm.groups
        manual = {name for tx in transforms for name in spec_of(tx).axes}.union(
            *(axis_names(group.local_axis_name or ()) for group in groups)
        )
        if has_device_per_position(mesh):  # of Explicit axes a loss would have to know the layout
            types = zip(mesh.axis_names, mesh.axis_types, strict=True)
            manual |= {name for name, kind in types if kind == AxisType.Explicit}
        # XLA of jax 0.12 aborts on `table[ids]` where parameters and examples are sharded over
        # different axes that are the compiler's, inside of a map over the replicas.
        if sharded_axes or self.maps_inner_axes:
            manual |= {*other_axes}
        inner = () if self.map_with == "vmap" else tuple(a for a in other_axes if a in manual)
        auto = tuple(a for a in other_axes if a not in inner)
        if auto and specs is None and params is not None and has_device_per_position(mesh):
            specs = jax.tree.map(lambda _: P(), params)
        # Devices of an axis that is mapped have examples next to each other.
        num_devices = math.prod(mesh.shape[name] for name in auto)
        batch_axes = (*replicas, *inner, *auto)
        return Layout(sharded_axes | {*auto}, specs, inner, batch_axes, num_devices)

    @property
    def maps_inner_axes(self) -> bool:
        """Whether all axes inside a replica that shard no parameter are mapped."""
        return self.loss_program.param_types is not None

    def with_layout(self, layout: Layout) -> Self:
        """Return this update for a layout."""
        differentiated_loss = dataclasses.replace(
            self.differentiated_loss,
            inner_axes=layout.manual_inner_axes,
            num_devices=layout.num_devices,
        )
        sync, specs = self.sync, layout.specs
        if sync is not None and specs is not None:
            sync = sync.with_specs(specs)
        return dataclasses.replace(
            self, differentiated_loss=differentiated_loss, sync=sync, param_specs=specs
        )


def without_exchange(state: TrainState) -> TrainState:
    """Return `state` without what the exchange of parameters keeps, which it alone reads."""
    return state._replace(exchange=state.exchange._replace(local=(), shared=()))


def without_optimizer(state: TrainState) -> TrainState:
    """Return `state` without what an update alone needs."""
    return state._replace(opt_state=(), exchange=StepExchange())


def with_update_key(state: TrainState) -> TrainState:
    """Return `state` with the key of its next update, which only a loss that draws computes."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
    return state._replace(rng=jax.random.key_data(key))
