"""Gradients of a loss function whose programs the host starts before those of the step.

Such is a pipeline with `executor="host"`. A program of the step says what the loss function
receives, the host starts the loss function's programs, and their results stand in the place of the
batch in the program of the update.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
from jax.core import Tracer

from ..._support.types import CompilerOptions, PyTree
from ...gradients.precision import Policy, apply_policy
from ...mesh import axis_names
from ...tracing import FullLoss
from .._train_state import TrainState
from ._gradients import BatchGradients, LossData, StepInputs, split_batch
from ._programs import EVALUATE, Task


class WithResults(NamedTuple):
    """A batch, and the results of a dispatched loss function for it.

    Attributes:
      batch: the batch itself.
      results: what the loss function takes in place of the batch, inside of a program; leaves have
        a leading dimension over the positions over which the batch is split.
    """

    batch: PyTree
    results: PyTree


@dataclass(frozen=True, kw_only=True)
class DispatchedGradients(BatchGradients):
    """Gradients of a loss function that the host dispatches.

    Attributes:
      dispatch: function that runs the loss function's programs; see `HostPipeline.dispatch`.
      num_microbatches: number of microbatches that are dispatched one after the other; their means
        are the results, so there are none inside of a program.
      policy: dtypes in which the loss function computes; None: those of its arguments.
    """

    dispatch: Callable[..., Any]
    num_microbatches: int = 1
    policy: Policy | None = None

    @classmethod
    def from_loss(
        cls,
        dispatch: Callable[..., Any],
        loss: FullLoss,
        policy: Policy | None,
        num_microbatches: int,
        **options: Any,
    ) -> Self:
        """Return the gradients of a loss function, with these other fields."""

        def loss_of_results(params: PyTree, batch: WithResults, **context: Any) -> Any:
            def loss_of_batch(params: PyTree, _: PyTree, **context: Any) -> Any:
                return loss(params, batch.results, **context)

            cast_loss = loss_of_batch if policy is None else apply_policy(policy, loss_of_batch)
            return cast_loss(params, batch.batch, **context)

        return cls(
            loss=loss_of_results,
            accumulate=1,
            dispatch=dispatch,
            num_microbatches=num_microbatches,
            policy=policy,
            **options,
        )

    # On the host.

    def task(self, task: Task, inputs: StepInputs) -> Task:
        """Return the task of the program that says what the loss function receives for a task."""
        collects = inputs.window is not None or task.method in ("open_window", "collect")
        return Task.create(
            *("arguments", "arguments"),
            collects=collects,
            num_microbatches=1 if task is EVALUATE else self.num_microbatches,
            differentiates=task is not EVALUATE,
        )

    def dispatch_loss(
        self,
        task: Task,
        state: TrainState,
        inputs: StepInputs,
        arguments: Any,
        *,
        compiler_options: CompilerOptions,
        is_executed: bool,
    ) -> StepInputs:
        """Return the inputs with the loss function's results in place of the batch.

        Args:
          task: the task of the program that has returned `arguments`.
          state: the state at which the loss function is computed.
          inputs: inputs with a placed batch.
          arguments: the results of `arguments` on all positions.
          compiler_options: options for the compiler of the loss function's programs.
          is_executed: whether to compute the results; False returns their types.
        """
        if isinstance(state.step, Tracer):
            raise ValueError(
                'A step of a pipeline with `executor`="host" cannot be called inside of jax.jit or '
                'lax.scan: call it outside, or use `executor`="one_program".'
            )
        params, batch, keys, model_state = arguments
        static = dict(task.static)
        results = self.dispatch(
            state.params if params is None else params,
            inputs.batch if batch is None else batch,
            rng=keys,
            model_state=model_state,
            replicas=axis_names(self.axis_name),
            inner_axes=self.inner_axes,
            parts=static["num_microbatches"],
            differentiates=static["differentiates"],
            compiler_options=compiler_options,
            runs=is_executed,
        )
        return inputs._replace(batch=WithResults(inputs.batch, results))

    # In the step's programs.

    def arguments(
        self,
        state: TrainState,
        inputs: StepInputs,
        *,
        collects: bool,
        num_microbatches: int,
        **_: Any,
    ) -> tuple[PyTree, PyTree, jax.Array, PyTree]:
        """Return parameters, batch, keys and model state that the loss function receives.

        Parameters and batch are None if they need no cast: the caller uses its own arrays, so the
        program need not copy them.

        Args:
          state: the state of the replica.
          inputs: the batch, and the window of earlier batches of the same update, if any.
          collects: whether the batch is one of a window; without one in `inputs` it is the first.
          num_microbatches: number of microbatches; a key for each is returned.

        Communication: with `model_state="broadcast"` that of `from_first_replica`.
        """
        key, model_state = self.device_key(state), self.model_states(state)[1]
        if collects:
            window = inputs.window
            key = jax.random.fold_in(key, 0 if window is None else window.count)
            model_state = model_state if window is None else window.model_state
        keys = key[None]
        if num_microbatches > 1:
            split_batch(inputs.batch, num_microbatches, self.num_devices)  # for its error
            keys = jax.random.split(key, num_microbatches)
        if self.policy is None:
            return None, None, keys, model_state
        return self.policy.cast(state.params), self.policy.cast(inputs.batch), keys, model_state

    def loss_at(self, params: PyTree, weight: Any = None, *, data: LossData) -> jax.Array:
        """Raise `ValueError`: the loss at other parameters is not computed inside of a program."""
        raise ValueError(
            "`optimizer` asks for `value_fn`, as a line search does, which a pipeline with "
            '`executor`="host" has not: use `executor`="one_program", or an optimizer without.'
        )
