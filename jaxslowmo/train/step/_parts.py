"""The parts of a step: what they are, what each leaves to the others, their states and layouts."""

import dataclasses
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import jax
import optax

from ..._support.types import AxisName, PyTree
from ...gradients.precision import Policy
from ...gradients.reducer import ReadyOrder, mean_gradients
from ...mesh import AnyMesh, axis_names, laid_out, replicate, specs_key
from ...transform import (
    GradientTransform,
    LossProgram,
    ParameterTransform,
    chain,
    holds_state,
    layouts_known,
    no_exchange,
    spec_of,
)
from .._train_state import StateLayout, TrainState
from ._gradients import BatchGradients, Gradients, summed_over


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
      cuts: number of parts of a batch for which a loss function is dispatched one after the other.
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
    cuts: int = 1
    param_specs: PyTree | None = None

    # What an update asks.

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """Axes inside a replica over which the batch is split."""
        return self.batches.inner_axes

    def means_inside(
        self, gathered: Gradients, axes: tuple[str, ...], order: ReadyOrder | None
    ) -> PyTree:
        """Return the gradients, averaged over axes inside a replica that `gradients` lacks."""
        grads, specs = gathered.grads, self.param_specs
        if specs is not None:
            grads = laid_out(grads, specs)
        return mean_gradients(grads, axes, order, specs, gathered.loss_weight) if axes else grads

    def shares(
        self, gathered: Gradients, axes: tuple[str, ...]
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Return this device's weight in `gradients`, and its replica's in means over replicas.

        They differ for losses with weights of which `gradients` itself averages those over inner
        axes; `axes` are the inner axes over which the step has averaged.

        Communication: for losses with weights one all-reduce of 4 bytes over the inner axes.
        """
        share = gathered.share
        if gathered.loss_weight is None or share is None or not self.inner_axes:
            return share, share
        of_replica = summed_over(share, self.inner_axes)
        return of_replica if axes == self.inner_axes else share, of_replica

    def lacking(self, state: PyTree, inner_axes: tuple[str, ...] | None = None) -> tuple[str, ...]:
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

    def order(self, state: TrainState, like: PyTree) -> ReadyOrder | None:
        """Return a function for the order in which gradients are ready, for a batch like `like`.

        It is called only where the order matters, since it traces the loss once more. None is the
        order of leaves: a pipeline finishes all gradients with the last microbatch.
        """
        find = cache(partial(self.batches.ready_order, state, like))
        return find if self.program.param_types is None else None

    def never_meets(self, averaged: set[str], optimizer_state: PyTree) -> bool:
        """Return whether nothing makes replicas agree; `averaged` are axes of `gradients`."""
        return (
            self.sync is None
            and not averaged
            and (self.gradients is None or self.independent)
            and not holds_state(optimizer_state, "gradients")
            and not holds_state(optimizer_state, "parameters")
        )

    def over(self, averaged: set[str]) -> tuple[str, ...]:
        """Return these replica axes and the inner ones, in order."""
        names = (*axis_names(self.axis_name), *self.inner_axes)
        return tuple(n for n in names if n in {*averaged, *self.inner_axes})

    # The states of its parts, and their layout.

    def chain(self) -> optax.GradientTransformationExtraArgs:
        """Return the transforms as one, whose states a train state holds."""
        last = no_exchange() if self.sync is None else self.sync
        return with_layouts(chain(*self.before_sync(), last))

    def before_sync(self) -> list[optax.GradientTransformation]:
        """Return gradient transform and optimizer, each with one state also if it is a chain."""
        given = self.gradients or optax.identity(), self.optimizer
        return [part._replace(init=part.init) for part in given]

    def dense(self, tree: PyTree) -> PyTree:
        """Return the part of a tree like the parameters that `optimizer` updates: all of it."""
        return tree

    def check_optimizer(self, state: PyTree, unknown: list[PyTree]) -> None:
        """Raise `ValueError` for an optimizer of this state that does what others would need, too.

        `unknown` are states of transforms in it that declare nothing.
        """

    def roles(self, roles: Any) -> Any:
        """Return the roles of arguments or results for `map_replicas`."""
        return roles

    def stacked(self, params: PyTree, seed: int, mesh: AnyMesh) -> PyTree:
        """Return the parameters of all replicas, equal on them, from those of one."""
        del seed  # draws tables
        return replicate(params, mesh=mesh, axis_name=self.axis_name)

    def layout(
        self, mesh: AnyMesh, axes: frozenset[str], specs: PyTree | None, params: PyTree
    ) -> StateLayout:
        """Return the layout of states whose parameters have these specs over these axes."""
        del params  # None before the first state
        replicas = axis_names(self.axis_name)
        inner = tuple(a for a in mesh.axis_names if a not in {*replicas, *axes})
        key = None if specs is None else specs_key(specs)
        return StateLayout(mesh, self.axis_name, axes, specs, key, inner, (*replicas, *inner))

    def laid_out(self, layout: StateLayout) -> Self:
        """Return this update for a layout."""
        batches = dataclasses.replace(self.batches, inner_axes=layout.inner_axes)
        sync, specs = self.sync, layout.specs
        if sync is not None and specs is not None:
            sync = sync.with_specs(specs)
        return dataclasses.replace(self, batches=batches, sync=sync, param_specs=specs)


def with_layouts(transform: Any) -> Any:
    """Return the transform with an `init` that warns of no unknown layouts: a step knows them."""

    def init(params: PyTree) -> PyTree:
        with layouts_known():
            return transform.init(params)

    return transform._replace(init=init)
