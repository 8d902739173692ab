"""The parts of a step: what they are, what each leaves to the others, their states and layouts."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Self

import jax
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ..._support.types import AxisName, PyTree
from ...gradients.precision import Policy
from ...gradients.reducer import ReadyOrder, mean_gradients
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
    GradientTransform,
    LossProgram,
    ParameterTransform,
    chain,
    first_states,
    holds_state,
    init,
    spec_of,
)
from .._train_state import TrainState
from ._gradients import BatchGradients, Gradients


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


@dataclass(frozen=True)
class Parts:
    """The parts of a step; see `make_train_step`.

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

    def ready_order_fn(self, state: TrainState, like: PyTree) -> ReadyOrder | None:
        """Return a function for the order in which gradients are ready, for a batch like `like`.

        It is called only where the order matters, since it traces the loss once more. None is the
        order of leaves: a pipeline finishes all gradients with the last microbatch.
        """
        find = cache(partial(self.batches.ready_order, state, like))
        return find if self.program.param_types is None and self.map_with != "vmap" else None

    def never_syncs(self, averaged: set[str], optimizer_state: PyTree) -> bool:
        """Return whether nothing makes replicas agree; `averaged` are axes of `gradients`."""
        return (
            self.sync is None
            and not averaged
            and (self.gradients is None or self.independent)
            and not holds_state(optimizer_state, "gradients")
            and not holds_state(optimizer_state, "parameters")
        )

    def reduction_axes(self, averaged: set[str]) -> tuple[str, ...]:
        """Return these replica axes and the inner ones, in the order of `mapped_axes`."""
        return tuple(n for n in self.mapped_axes if n in {*averaged, *self.inner_axes})

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
        mapped = self.named_axes
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

    @property
    def named_axes(self) -> set[str]:
        """Axes inside a replica that a part of the step names, which are mapped as replicas are."""
        parts = [spec_of(self.optimizer)]
        if self.gradients is not None:
            parts.append(spec_of(self.gradients))
        named = {name for part in parts for name in part.axes}
        groups = () if self.sync is None else self.sync.algorithm.groups
        return named.union(*(axis_names(group.local_axis_name or ()) for group in groups))

    def with_layout(self, layout: Layout) -> Self:
        """Return this update for a layout."""
        batches = dataclasses.replace(
            self.batches, inner_axes=layout.inner_axes, num_devices=layout.num_devices
        )
        sync, specs = self.sync, layout.specs
        if sync is not None and specs is not None:
            sync = sync.with_specs(specs)
        return dataclasses.replace(self, batches=batches, sync=sync, param_specs=specs)
