"""`Pipelined`, the loss function that runs a pipeline, and the microbatches of a batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._support.types import PyTree
from ..mesh import mesh_text
from ..tracing import LossProgram
from ..tree import Staged, at_least_float32, leaf_names
from ._plan import Plan
from .model import LayeredModel, Loss, StageLayout
from .schedules import Schedule


class Pipelined(LossProgram):
    """A loss function that runs a model in stages; made by `js.pipelined`.

    Attributes:
      layout: the layout of its parameters, which `step.init` uses by itself; in your own training
        loop pass `layout.stack(params)` to the loss function.
      state_layout: the layout of the model state of its layers; None for models without.
      schedule: the order of the operations of each stage.
      model: the layers.
      mesh: the devices.
      data_axes: the axes over which each microbatch is split.
      remat: whether forward passes are computed again in the backward pass.
      param_specs: a `PartitionSpec` for each buffer of the parameters.
      param_types: the type of each buffer.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.layout: StageLayout = plan.layout
        self.state_layout: StageLayout | None = plan.state_layout
        self.schedule: Schedule = plan.schedule
        self.model: LayeredModel = plan.model
        self.mesh: Mesh = plan.mesh
        self.data_axes: tuple[str, ...] = plan.data_axes
        self.remat: bool = plan.remat
        self.param_specs: Staged = plan.layout.specs
        self.param_types: Staged = plan.layout.types
        self._run = jax.custom_vjp(self._primal)
        # `symbolic_zeros` tells whether a gradient of the batch is requested, which is an error.
        self._run.defvjp(self._vjp_forward, self._vjp_backward, symbolic_zeros=True)

    def __repr__(self) -> str:
        """Return a line: the axes of the mesh, the schedule and the executor's class."""
        schedule, count = self.schedule, len(self.model.layers)
        what = f"{count} layers by {schedule.name}, {schedule.num_microbatches} microbatches"
        return f"<js.pipelined over {mesh_text(self.mesh)}: {what}; {type(self).__name__}>"

    def params_form(self, params: PyTree) -> PyTree:
        """Return parameters in the form that the loss function takes.

        Args:
          params: one tree per layer, which are stacked; or a result of `layout.stack`.
        """
        return params if isinstance(params, Staged) else self.layout.stack(params)

    def model_state_form(self, model_state: PyTree) -> PyTree:
        """Return model state in the form of the loss function; one tree per layer is stacked."""
        if self.state_layout is None or not isinstance(model_state, list | tuple):
            return model_state
        self.model.checked_state(model_state)
        return self.state_layout.stack(model_state)

    def __call__(
        self, stacked: PyTree, batch: PyTree, *, rng: Any = None, model_state: PyTree = None
    ) -> Any:
        """Compute the loss of a batch; usable with `jax.grad` and `js.make_train_step`.

        Under `jax.grad` it runs the schedule once, whose backward passes compute the gradients;
        otherwise only forward passes. Gradients are accumulated in float32 and are those of the
        mean over the microbatches.

        Args:
          stacked: parameters from `layout.stack`, or one replica of those; or one tree per layer,
            which are stacked first.
          batch: arrays whose leading dimension counts the examples of the replica. Scalars, and
            arrays whose leading dimension is 1, are shared by all examples.
          rng: the PRNG key for layers that take one. Each layer of each microbatch gets the key
            `fold_in(fold_in(rng, microbatch), layer)`, forward and backward; before that the
            positions along `data_axes` are folded in. None: layers get None.
          model_state: the result of `model_state_form`, or the state that an earlier call returned;
            only for models whose layers take `state`. Each layer's state passes from microbatch to
            microbatch in the schedule's order; at the end floating leaves are averaged over
            `data_axes`.

        Returns:
          The loss, or (loss, metrics): means over the microbatches, or quotients of sums over them
          if the model's loss is a pair; metrics are float32. Metrics have no gradient, and their
          cotangents are ignored. With model state (loss, (metrics, new model state)).

        Raises:
          ValueError: see `js.pipelined`; gradients of the batch, or second derivatives of a model
            with tied leaves, are requested; with `executor="host"` a call inside of jax.jit or
            another transformation.
          TypeError: `rng` is not a PRNG key (from jax).
        """
        loss, state = self._compute_loss(stacked, batch, rng, model_state)
        return loss.to_output(state, as_quotient=False)

    def quotient_loss(
        self, stacked: PyTree, batch: PyTree, *, rng: Any = None, model_state: PyTree = None
    ) -> Any:
        """Compute the loss as the call does; a quotient of sums is a `tracing.Quotient`."""
        loss, state = self._compute_loss(stacked, batch, rng, model_state)
        return loss.to_output(state, as_quotient=True)

    def _compute_loss(
        self, stacked: PyTree, batch: PyTree, rng: Any, model_state: PyTree
    ) -> tuple[Loss, PyTree]:
        """Return the loss and the new model state; None for models without."""
        if isinstance(stacked, list | tuple):
            stacked = self.layout.stack(stacked)
        if not isinstance(stacked, Staged) or stacked.packing != self.layout.packing:
            raise ValueError(
                "`stacked` must be one tree per layer, or what `layout.stack(params)` of this "
                f"pipeline returns, got {type(stacked).__name__}."
            )
        for name, shape in self.layout.packing.shapes.items():
            if jnp.shape(stacked[name]) != shape:
                raise ValueError(
                    f"`stacked` must have {list(shape)} at {name!r}, got "
                    f"{list(jnp.shape(stacked[name]))}."
                )
        if rng is not None:
            jax.eval_shape(jax.random.fold_in, rng, 0)  # jax refuses what is no key
        states: dict[str, Any] = {}
        if self.state_layout is not None:
            state = self.model_state_form(model_state)
            if not isinstance(state, Staged) or state.packing != self.state_layout.packing:
                raise ValueError(
                    "`model_state` must be one tree per layer, or what `model_state_form(trees)` "
                    f"of this pipeline returns, got {type(state).__name__}."
                )
            states = state.buffers
        elif jax.tree.leaves(model_state):
            raise ValueError("`model_state` must be left out, since no layer takes `state`.")
        loss, after = self._run(stacked, states, batch, rng if self.model.takes_key else None)
        return loss, self.state_layout and self.state_layout.packing.wrap_buffers(after)

    def execute(
        self, stacked: Staged, states: PyTree, batch: PyTree, rng: Any, *, differentiates: bool
    ) -> tuple[tuple[Loss, dict[str, Any]], dict[str, Any]]:
        """Run the schedule.

        Args:
          stacked: the parameters.
          states: the buffers of the model state; {} without any.
          batch: the batch, in the form that `__call__` takes.
          rng: the PRNG key of the step; None if no layer takes a key.
          differentiates: whether to compute gradients.

        Returns:
          ((the loss, buffers of the new model state), buffers of the gradients of floating
          parameters); the latter are {} without gradients.
        """
        raise NotImplementedError

    def check_has_backward(self) -> None:
        """Raise `ValueError` if the schedule has no backward passes."""
        if self.schedule.forward_only:
            name = self.schedule.name
            raise ValueError(f"`schedule` must have backward passes for gradients, got {name!r}.")

    def _primal(self, *primals: PyTree) -> Any:
        return self.execute(*primals, differentiates=False)[0]

    def _vjp_forward(self, *primals: PyTree) -> tuple[Any, PyTree]:
        check_constant(primals[2])
        stacked, states, batch, rng = jax.tree.map(lambda x: x.value, primals)
        if self.plan.tied:
            stacked = forbid_second_derivative(stacked)
        self.check_has_backward()
        results, grads = self.execute(stacked, states, batch, rng, differentiates=True)
        none = {n: np.zeros(x.shape, jax.dtypes.float0) for n, x in stacked.items()}
        return results, self.layout.packing.wrap_buffers({**none, **grads})

    def _vjp_backward(self, grads: PyTree, cotangent: Any) -> tuple[PyTree, None, None, None]:
        of_loss: Any = cotangent[0].value
        if isinstance(of_loss, jax.custom_derivatives.SymbolicZero):  # only metrics were used
            of_loss = jnp.zeros((), jnp.float32)

        def scale(g: Any) -> Any:
            if g.dtype == jax.dtypes.float0:
                return g
            wide = at_least_float32(g.dtype)
            return (g.astype(wide) * of_loss.astype(wide)).astype(g.dtype)

        return jax.tree.map(scale, grads), None, None, None


def check_constant(batch: PyTree) -> None:
    """Raise `ValueError` if gradients of a batch are requested, which `custom_vjp` marks."""
    leaves = zip(leaf_names(batch), jax.tree.leaves(batch), strict=True)
    perturbed = [n for n, x in leaves if x.perturbed and jnp.issubdtype(x.value.dtype, jnp.inexact)]
    if perturbed:
        raise ValueError(
            "`batch` must not depend on what is differentiated: a pipeline has no gradients of it, "
            f"got {', '.join(perturbed)}."
        )


@jax.custom_jvp
def forbid_second_derivative(stacked: PyTree) -> PyTree:
    """Return `stacked`; raise `ValueError` if its gradients are differentiated again.

    The gradient of each copy of a tied leaf is the sum over all copies, which is computed outside
    of what is differentiated. So derivatives of that sum would be wrong.
    """
    return stacked


@forbid_second_derivative.defjvp
def _raise_second_derivative(primals: Any, tangents: Any) -> Any:
    raise ValueError(
        "`loss_fn` of a pipeline with `tied` leaves can't be differentiated twice: differentiate "
        "`model(params, batch)`."
    )
