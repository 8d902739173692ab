"""The training step: loss, gradients, optimizer, exchange, on every replica."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .._typing import AxisName, Phase, PyTree
from ..algorithms import (
    AllReduceGradientsState,
    ParameterTransform,
    all_reduce_gradients,
    increment,
    phase_name,
    run_if,
)
from ..mesh import (
    AnyMesh,
    VirtualMesh,
    axis_names,
    map_replicas,
    match_varying,
    model_axes,
    vary_over,
    varying_axes,
)
from ..tree import apply_exactly, leaf_names
from ._loss import FullLoss, value_and_gradients
from ._model_state import ModelStateMode, from_first_replica, mean_over, vary_statistics
from ._state import TrainState

Metrics = dict[str, jax.Array]
Mode = Literal["traced", "host"]


@dataclass(frozen=True)
class StepParts:
    """What a step is made of; see `make_train_step`."""

    loss: FullLoss
    gradients: optax.GradientTransformationExtraArgs | None
    optimizer: optax.GradientTransformationExtraArgs
    sync: ParameterTransform | None
    axis_name: AxisName
    accumulate: int
    model_state: ModelStateMode

    def chain(self) -> optax.GradientTransformationExtraArgs:
        """The whole as one optax transform."""
        identity = optax.identity()
        return optax.chain(self.gradients or identity, self.optimizer, self.sync or identity)

    def per_replica(
        self, state: TrainState, batch: PyTree, phase: Phase | None, inner_axes: tuple[str, ...]
    ) -> tuple[TrainState, Metrics]:
        """One update as one replica sees it, or one of its devices along `inner_axes`."""
        rng, key = jax.random.split(state.rng)
        for name in inner_axes:
            key = jax.random.fold_in(key, jax.lax.axis_index(name))
        before = state.model_state
        if self.model_state == "broadcast":
            with jax.named_scope("model_state/broadcast"):
                before = match_varying(from_first_replica(before, self.axis_name), before)
        # Gradients of parameters that are equal over an axis are summed over it by shard_map; made
        # varying they stay local, and the gradient transform reduces them in buckets.
        axes = (*axis_names(self.axis_name), *inner_axes)
        metrics, model_state, grads = value_and_gradients(
            self.loss,
            vary_over(state.params, axes),
            batch,
            rng=key,
            model_state=vary_statistics(before, axes),
            accumulate=self.accumulate,
        )
        if inner_axes:
            metrics = mean_over(metrics, inner_axes)
            model_state = mean_over(model_state, inner_axes)
        gradients_state, optimizer_state, sync_state = state.opt_state
        if self.gradients is not None:
            grads, gradients_state = self.gradients.update(grads, gradients_state, state.params)
        elif inner_axes:
            grads, _ = all_reduce_gradients(inner_axes).update(grads, AllReduceGradientsState())
        updates, optimizer_state = self.optimizer.update(grads, optimizer_state, state.params)
        _check_reduced(updates, inner_axes)
        model_state = self._synchronised(model_state, sync_state, phase)
        if self.sync is not None:
            updates, sync_state = self.sync.update(updates, sync_state, state.params, phase=phase)
        new = TrainState(
            step=increment(state.step),
            params=apply_exactly(state.params, updates),
            opt_state=(gradients_state, optimizer_state, sync_state),
            model_state=model_state,
            rng=rng,
        )
        return new, metrics

    def _synchronised(self, model_state: PyTree, sync_state: PyTree, phase: Phase | None):
        """Model state averaged over replicas in updates that synchronise the parameters too."""
        if self.model_state != "sync_mean" or not jax.tree.leaves(model_state):
            return model_state
        if self.sync is None:
            due = True
        elif phase is None:
            due = self.sync.due(increment(sync_state.count))
        else:
            due = bool(phase)

        def average(tree: PyTree) -> PyTree:
            with jax.named_scope("phase:*"):  # part of whichever exchange is due
                return mean_over(tree, self.axis_name)

        return run_if(due, average, lambda tree: tree, model_state)


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


class TrainStep:
    """A training step: `step(state, batch) -> (state, metrics)`. Made by `make_train_step`.

    Attributes:
      tx: the whole chain, for `TrainState.create`; `init` does that.
      mesh: the mesh it runs on.
      axis_name: the replica axis.
      mode: `"traced"` or `"host"`.
    """

    def __init__(self, parts: StepParts, mesh: AnyMesh, mode: Mode, donate: bool) -> None:
        self._parts = parts
        self.mesh, self.axis_name, self.mode = mesh, parts.axis_name, mode
        self._donate = donate
        self.tx = parts.chain()
        self._programs: dict[Any, Any] = {}
        self._counted: tuple[object, int] = (None, 0)

    def init(
        self, params: PyTree, *, model_state: PyTree | None = None, seed: int = 0
    ) -> TrainState:
        """`TrainState.create` with this step's chain, mesh and axis."""
        return TrainState.create(
            params,
            self.tx,
            mesh=self.mesh,
            axis_name=self.axis_name,
            model_state=model_state,
            seed=seed,
        )

    def phase(self, t: int) -> Phase:
        """What update t = 1, 2, ... exchanges beside gradients; `()` without a sync."""
        return () if self._parts.sync is None else self._parts.sync.phase(t)

    def next_phase(self, state: TrainState) -> Phase:
        """The phase of the update that `step(state, batch)` will do, known on the host."""
        return self.phase(self._updates_so_far(state) + 1)

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """One update on every replica.

        Args:
          state: a `TrainState`; its buffers are donated where the step was made so.
          batch: leaves with leading dimension replicas * local batch, replica-major.

        Returns:
          `(state, metrics)`: metrics are stacked per replica, (replicas,), "loss" among them.

        Raises:
          ValueError: a batch that does not split evenly.
        """
        automatic = model_axes(state.params, self.mesh, self.axis_name)
        batch = self._placed(batch, automatic)
        so_far = self._updates_so_far(state)
        phase = self.phase(so_far + 1) if self.mode == "host" else None
        new_state, metrics = self._program(phase, automatic, self.mesh)(state, batch)
        self._counted = (_counter(new_state, self._parts.sync), so_far + 1)
        return new_state, metrics

    def traced_by_phase(
        self, state: TrainState, batch: PyTree
    ) -> dict[str | None, jax.stages.Traced]:
        """The step's programs, traced: by phase name when host-scheduled, else one under None.

        On a `VirtualMesh` they are traced for as many devices as it has replicas: what would be
        sent. Arguments may be `ShapeDtypeStruct`s; nothing runs.
        """
        automatic = model_axes(state.params, self.mesh, self.axis_name)
        mesh = _abstract(self.mesh) if isinstance(self.mesh, VirtualMesh) else self.mesh
        batch = self._placed(batch, automatic)

        def trace(phase: Phase | None) -> jax.stages.Traced:
            return self._program(phase, automatic, mesh).trace(state, batch)

        sync = self._parts.sync
        if self.mode == "traced":
            return {None: trace(None)}
        if sync is None:
            return {"every": trace(())}
        return {phase_name(p): trace(p) for p in sync.phases()}

    def _updates_so_far(self, state: TrainState) -> int:
        """The counter of the parameter transform (else the step), read once and then counted on.

        Reading it from the device at every step would wait for the step before.
        """
        array = _counter(state, self._parts.sync)
        if array is self._counted[0]:
            return self._counted[1]
        return int(np.asarray(array.addressable_data(0)).reshape(-1)[0])

    def _inner_axes(self, automatic: frozenset[str]) -> tuple[str, ...]:
        """Axes inside a replica between whose devices the batch is split."""
        skip = {*axis_names(self.axis_name), *automatic}
        return tuple(a for a in self.mesh.axis_names if a not in skip)

    def _program(
        self, phase: Phase | None, automatic: frozenset[str], mesh: AnyMesh | AbstractMesh
    ) -> Any:
        key = (phase, automatic, mesh)
        if key not in self._programs:
            inner = self._inner_axes(automatic)
            mapped = map_replicas(
                lambda state, batch: self._parts.per_replica(state, batch, phase, inner),
                mesh=mesh,
                axis_name=self.axis_name,
                in_roles=("stacked", "batch"),
                out_roles=("stacked", "stacked"),
                automatic=automatic,
            )
            self._programs[key] = jax.jit(mapped, donate_argnums=(0,) if self._donate else ())
        return self._programs[key]

    def _placed(self, batch: PyTree, automatic: frozenset[str]) -> PyTree:
        axes = (*axis_names(self.axis_name), *self._inner_axes(automatic))
        parts = math.prod(self.mesh.shape[name] for name in axes)
        for name, leaf in zip(leaf_names(batch), jax.tree.leaves(batch), strict=True):
            if len(leaf.shape) < 1 or leaf.shape[0] % parts or not leaf.shape[0]:
                raise ValueError(
                    f"batch leaf {name} has shape {tuple(leaf.shape)}; its leading dimension must "
                    f"be a positive multiple of {parts}, the size of axes {axes} together."
                )
        if isinstance(self.mesh, VirtualMesh):
            return batch
        sharding = NamedSharding(self.mesh, P(axes))

        def place(x: Any) -> Any:
            if getattr(x, "sharding", None) == sharding:
                return x
            if isinstance(x, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            return jax.device_put(x, sharding)

        return jax.tree.map(place, batch)


def _counter(state: TrainState, sync: ParameterTransform | None) -> jax.Array:
    return state.step if sync is None else state.opt_state[-1].count


def _abstract(mesh: VirtualMesh) -> AbstractMesh:
    """Axes of the same names and sizes for programs that are lowered but not run."""
    return AbstractMesh(
        tuple(mesh.shape.values()), mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names)
    )
