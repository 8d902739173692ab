"""One update of all replicas by the training step of another library, for `with_exchange`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer

from .._support.types import AxisName, Phase, PyTree, axis_names
from ..mesh import AnyMesh, MapWith, map_replicas
from ..transform import (
    ExchangeState,
    ParameterTransform,
    StackedReplicas,
    increment,
    spec_of,
    unless_idle,
    unreplicate_number,
    vmap_replicas,
)
from ..tree import not_floating
from ._train_state import ReplicaState, StepExchange
from .step._gradients import restore_statistics_if, statistics, with_statistics
from .step._optimized import Averaging, Weights, accepted_arguments, optimizer_rate


class Access(NamedTuple):
    """Functions that read a part of a library's state, and return the state with another one."""

    name: str
    get: Callable[[PyTree], PyTree]
    set: Callable[[PyTree, PyTree], PyTree]

    def check(self, state: PyTree) -> None:
        """Raise `ValueError` unless what was set is what is then read."""

        def set_and_get(part: PyTree) -> PyTree:
            found = self.get(self.set(state, part))
            is_new = all(isinstance(x, Tracer) for x in jax.tree.leaves(found))
            if not is_new or jax.tree.structure(found) != jax.tree.structure(part):
                given, read = (jax.tree.structure(x).num_leaves for x in (part, found))
                what = f"{read} arrays in another form" if is_new else "old ones"
                raise ValueError(
                    f"with_exchange: the functions for `{self.name}` must set what they get, and "
                    f"of a state in which {given} arrays were set the first returns {what}."
                )
            return found

        jax.eval_shape(set_and_get, self.get(state))


NO_ACCESS = Access("", lambda state: (), lambda state, part: state)


@dataclass(frozen=True)
class LibraryUpdate:
    """The parts of a step of all replicas, which programs run.

    Attributes:
      train_step, in_axes, mesh, axis_name, map_with: the arguments of `with_exchange`.
      params, moments, statistics: access to the parts of a library's state.
      gradients: the reduction of gradients; None without one.
    """

    train_step: Callable[..., Any]
    in_axes: Any
    mesh: AnyMesh
    axis_name: AxisName
    map_with: MapWith
    params: Access
    moments: Access
    statistics: Access
    gradients: optax.GradientTransformationExtraArgs | None

    def check(self, state: PyTree) -> None:
        """Raise `ValueError` unless the functions get and set parts of a state of one replica."""
        if wrong := not_floating(self.params.get(state)):
            raise ValueError(
                "with_exchange: `get_params` must return real floating-point arrays alone, and "
                f"there are {', '.join(wrong)}."
            )
        for access in (self.params, self.moments, self.statistics):
            access.check(state)

    def roles(self, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Return the role of each leaf of the arguments: "batch" where it is split."""
        axes = self.in_axes if isinstance(self.in_axes, tuple) else (self.in_axes,) * len(args)
        if len(axes) != len(args):
            raise ValueError(
                f"with_exchange: `in_axes` must be 0, None or a tuple with an entry for each of "
                f"the step's {len(args)} further arguments, got {self.in_axes!r}."
            )
        named = jax.tree.map(
            lambda axis: "shared" if axis is None else "batch", axes, is_leaf=lambda x: x is None
        )
        return tuple(map(jax.tree.broadcast, named, args))

    def split(
        self, args: tuple[PyTree, ...]
    ) -> tuple[list[Any], Callable[[list[Any]], tuple[PyTree, ...]]]:
        """Return the leaves that are split over replicas, and a function that replaces them."""
        leaves, treedef = jax.tree.flatten(args)
        places = [i for i, r in enumerate(jax.tree.leaves(self.roles(args))) if r == "batch"]

        def join(split: list[Any]) -> tuple[PyTree, ...]:
            new = dict(zip(places, split, strict=True))
            return treedef.unflatten([new.get(i, x) for i, x in enumerate(leaves)])

        return [leaves[i] for i in places], join

    def scan(
        self,
        state: ReplicaState,
        batches: tuple[PyTree, ...],
        weight: jax.Array | None,
        communicate: jax.Array | None,
        **fixed: Any,
    ) -> tuple[ReplicaState, PyTree]:
        """Run an update for each of several batches."""
        split, join = self.split(batches)

        def one(state: ReplicaState, split: list[Any]) -> tuple[ReplicaState, PyTree]:
            return self.update(state, join(split), weight, communicate, **fixed)

        return lax.scan(one, state, split)

    def update(
        self,
        state: ReplicaState,
        args: tuple[PyTree, ...],
        weight: jax.Array | None,
        communicate: jax.Array | None,
        *,
        fixed: bool,
        phase: Phase | None,
        sync: ParameterTransform,
    ) -> tuple[ReplicaState, PyTree]:
        """Run one update of all replicas; `fixed` is a `communicate` that is known when traced."""
        roles = self.roles(args)
        where: dict[str, Any] = {"mesh": self.mesh, "axis_name": self.axis_name}
        shared, local = state.exchange.shared, state.exchange._replace(shared=())

        def one(state: PyTree, memory: PyTree, weight: Any, *args: PyTree) -> Any:
            return self._step_replica(state, memory, weight, args, sync.param_specs)

        step = increment(state.step)
        count = unreplicate_number(step, **where)
        mapped = map_replicas(
            one,
            **where,
            in_roles=("stacked",) * 3 + roles,
            out_roles=("stacked",) * 4,
            automatic=frozenset(self.mesh.axis_names) - {*axis_names(self.axis_name)},
            map_with=self.map_with,
        )
        new, memory, weight, results = mapped(state.state, local.gradients, weight, *args)

        def exchange(replicas: StackedReplicas, own: Any, shared: PyTree) -> Any:
            old, new, local, weight = own
            before, after = self.params.get(old), self.params.get(new)
            moments, means = self.moments.get(new), self.statistics.get(new)
            extra: dict[str, Any] = {}
            if sync.algorithm.needs_rate:
                extra["learning_rate"] = optimizer_rate(moments)
            params, averaged, done, moments = sync.exchange(
                None,
                statistics(means),
                ExchangeState(count - 1, local, shared),
                before,
                after=after,
                moments=moments,
                init=lambda params: jax.tree.map(jnp.zeros_like, moments),
                communicate=fixed if communicate is None else communicate,
                phase=phase,
                weight=weight,
                stacked=replicas,
                **extra,
            )
            new = self.params.set(new, params)
            new = self.moments.set(new, moments)
            new = self.statistics.set(new, with_statistics(means, averaged))
            return (new, done.local), done.shared

        own = state.state, new, local.local, weight
        (new, local_state), shared = vmap_replicas(exchange, own, shared, **where)
        return ReplicaState(step, new, StepExchange(local_state, shared, memory)), results

    def _step_replica(
        self,
        state: PyTree,
        memory: PyTree,
        weight: jax.Array | None,
        args: tuple[PyTree, ...],
        specs: PyTree | None,
    ) -> tuple[PyTree, PyTree, jax.Array | None, PyTree]:
        """Return what the library's step of one replica makes.

        That is its state, the memory of reductions, its weight in the exchange, and its results.
        """
        params, weights = self.params.get(state), Weights(weight, weight)
        if self.gradients is None:
            returned = self.train_step(state, *args)
        else:
            reduction, held = self.gradients, [memory]

            def reduce_gradients(grads: PyTree) -> PyTree:
                """Return the gradients reduced over the replicas."""
                is_alike = jax.tree.structure(grads) == jax.tree.structure(params)
                given = {"weight": weight, "param_specs": specs if is_alike else None}
                given = accepted_arguments(spec_of(reduction), held[0], **given)
                grads, held[0] = reduction.update(grads, held[0], params, **given)
                return grads

            weights = weights.after_averaging(
                Averaging.from_transform(reduction, memory, self.axis_name)
            )
            returned = self.train_step(state, *args, reduce_gradients=reduce_gradients)
            (memory,) = held
        new, results = _check_results(returned, state)
        if weight is not None:  # the batch of a replica without data counts nowhere
            results = unless_idle(results, weight)
            means = restore_statistics_if(weight <= 0, *map(self.statistics.get, (new, state)))
            new = self.statistics.set(new, means)
        if weights.update is not None:
            new = _select(weights.update > 0, new, state)
        return new, memory, weights.exchange, results


def _check_results(returned: Any, state: PyTree) -> tuple[PyTree, PyTree]:
    """Return what `train_step` returned; raise `ValueError` unless it begins with a state."""
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    before, after = (jax.tree.structure(x) for x in (state, returned[0] if is_pair else returned))
    if is_pair and before == after:
        return returned
    what = type(returned).__name__
    if is_pair:
        what = f"a pair that begins with {type(returned[0]).__name__} of {after.num_leaves} arrays"
    raise ValueError(
        "with_exchange: `train_step` must return (state, metrics) with a state like its own, "
        f"which is {type(state).__name__} of {before.num_leaves} arrays, got {what}."
    )


def _select(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
