"""A pipeline whose stages are programs of their own, dispatched by the host."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..._support.types import PyTree
from ...tree import Staged
from ..model import Loss
from ..plan import Pipelined, Plan
from ._execution import Execution
from ._programs import Setting
from ._results import Results
from ._submeshes import Spread, Stages


class HostPipeline(Pipelined):
    """A pipeline whose stages have programs of their own, which one process dispatches.

    Made by `js.pipelined(..., executor="host")`. Every stage of the model is compiled for itself,
    one program per operation, on the devices that the mesh has at its place of the stage axis.
    What does not depend on each other runs at the same time, and no stage waits for others at the
    end of a tick. It reads parameters, model state and batches where they lie on the whole mesh,
    and leaves gradients there, without copies.

    A step of `js.make_train_step` calls `dispatch` outside of its programs, and these take the
    results in place of the batch.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._stages = Stages(plan)
        self._executions: dict[Any, Execution] = {}

    def execute(
        self, stacked: Staged, states: PyTree, batch: PyTree, rng: Any, *, differentiates: bool
    ) -> tuple[tuple[Loss, dict[str, Any]], Staged]:
        """Dispatch the schedule, or read what was computed; see `Pipelined.execute`."""
        if isinstance(batch, Results):
            results = batch.of_this_position()
        else:
            arguments = stacked, states, batch, rng
            if any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments)):
                raise ValueError(
                    '`executor`="host" dispatches programs of its own, so the loss function of '
                    "this pipeline cannot be called inside of jax.jit, jax.vmap and the like: "
                    "call it outside, give it to js.make_train_step, or make the pipeline with "
                    '`executor`="one_program".'
                )
            keys = None if rng is None else rng[None]
            results = self._computed(
                Spread((), (), self.data_axes), stacked, batch, keys, states, 1, differentiates
            )
        none = {n: np.zeros(x.shape, jax.dtypes.float0) for n, x in stacked.items()}
        grads = self.layout.packing.staged({**none, **(results.grads or {})})
        return (results.value, results.states), grads

    def check_mesh(self, mesh: Any) -> None:
        """Raise `ValueError` unless a step is for the mesh of this pipeline."""
        if mesh != self.mesh:
            raise ValueError(
                "`mesh` must be the mesh of the pipeline that js.make_train_step was given as "
                f"`loss_fn`, {dict(self.mesh.shape)}, got {dict(mesh.shape)} or other devices."
            )

    def dispatch(
        self,
        params: Staged,
        batch: PyTree,
        *,
        rng: Any,
        model_state: PyTree,
        replicas: tuple[str, ...],
        inner_axes: tuple[str, ...],
        parts: int,
        differentiates: bool,
    ) -> Results:
        """Run the stages for all replicas, and return what the loss function takes as the batch.

        Args:
          params: stacked, leaves (replicas, *s); types where nothing is to run, here and below.
          batch: leaves (positions * rows, ...), positions over replicas and `inner_axes`.
          rng: (positions, parts) typed PRNG keys.
          model_state: leaves (positions, *s).
          replicas: the axes of the replicas.
          inner_axes: axes inside a replica between whose devices the batch is split.
          parts: into how many parts the rows of a position are cut, which go through the stages
            one after the other, and whose gradients are averaged.
          differentiates: whether gradients are wanted.

        Raises:
          ValueError: a schedule that makes no gradients, where they are wanted; see `js.pipelined`.
        """
        if differentiates:
            self.refuse_forward_only()
        data_axes = tuple(axis for axis in self.data_axes if axis not in inner_axes)
        states = {} if self.state_layout is None else model_state.buffers
        keys = rng if self.model.takes_key else None
        spread = Spread(replicas, inner_axes, data_axes)
        return self._computed(spread, params, batch, keys, states, parts, differentiates)

    def _computed(
        self,
        spread: Spread,
        stacked: Staged,
        batch: PyTree,
        keys: Any,
        states: dict[str, Any],
        parts: int,
        differentiates: bool,
    ) -> Results:
        impl = None
        if keys is not None and jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
            impl, keys = str(jax.random.key_impl(keys)), _words(keys)
        setting = Setting(self.plan, spread, parts, impl, differentiates)
        types = jax.tree.map(_type_of, (stacked.buffers, batch, keys, states))
        key = spread, parts, impl, differentiates, str(types)
        if key not in self._executions:
            self._executions[key] = Execution(setting, self._stages)
        execution = self._executions[key]
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((batch, stacked))):
            return execution.types(stacked.buffers, batch, keys, states)
        return execution.run(stacked.buffers, batch, keys, states)


def _words(keys: Any) -> Any:
    """Return the words of typed keys; of their types the type of the words."""
    if isinstance(keys, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, keys)
    return jax.random.key_data(keys)


def _type_of(x: Any) -> str:
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"
