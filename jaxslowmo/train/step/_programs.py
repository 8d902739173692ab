"""The programs of a step: one jitted function for each task, phase and layout of the state."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from ..._support.types import CompilerOptions, PyTree
from ...mesh import (
    AnyMesh,
    MapWith,
    Roles,
    axis_names,
    batch_roles,
    constrain_layout,
    map_replicas,
    placement,
)
from ...tree import WeightedSum
from .._train_state import TrainState
from ._gradients import INPUT_ROLES, WINDOW_ROLES, GradientWindow, Metrics, StepInputs
from ._parts import Layout
from ._update import Update, without_exchange

ShardTypes = tuple[jax.tree_util.PyTreeDef, tuple[jax.ShapeDtypeStruct, ...]]
"""Structure and types of one device's part of a batch: a key, which a tree of types is not."""


class Task(NamedTuple):
    """The work of a program, whose arguments are a state and the fields of `StepInputs` by name.

    Attributes:
      method: the method of `Update` that a replica runs.
      results: name of the result: "state", "metrics", "carry", "window", "arguments", or a tuple.
      donated: the argument whose buffers the program may reuse, if the step donates.
      static: keyword arguments of the method, by name, on which the program depends.
    """

    method: str
    results: Any
    donated: str | None = None
    static: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def create(cls, method: str, results: Any, donated: str | None = None, **static: Any) -> Self:
        """Return a task; a keyword argument of None is left out."""
        given = tuple((name, value) for name, value in static.items() if value is not None)
        return cls(method, results, donated, given)


EVALUATE = Task("evaluate", "metrics")
"""The task of computing the metrics of a batch."""


def build(
    task: Task,
    update: Update,
    layout: Layout,
    mesh: AnyMesh | AbstractMesh,
    *,
    donates: bool,
    compiler_options: CompilerOptions,
    out_shardings: Any = None,
) -> Any:
    """Build `program(state, *inputs)`, where `inputs` is a `StepInputs`."""
    static = dict(task.static)
    if "like" in static:
        static["like"] = jax.tree.unflatten(*static["like"])

    def map_fn(
        fn: Callable[..., Any],
        in_roles: tuple[Roles, ...],
        out_roles: Roles,
        map_with: MapWith = "shard_map",
    ) -> Callable[..., Any]:
        def per_replica(state: Any, *inputs: Any) -> Any:
            if layout.specs is not None and isinstance(state, TrainState):
                state = state._replace(params=constrain_layout(state.params, layout.specs))
            return fn(state, *inputs)

        return map_replicas(
            per_replica,
            mesh=mesh,
            axis_name=update.axis_name,
            in_roles=in_roles,
            out_roles=out_roles,
            automatic=layout.axes.difference(layout.inner_axes),
            map_with=map_with,
        )

    def per_replica(state: TrainState, *inputs: Any) -> Any:
        return getattr(update, task.method)(state, StepInputs(*inputs), **static)

    def program(
        state: TrainState,
        batch: Any = None,
        weight: Any = None,
        window: Any = None,
        carry: Any = None,
        upcoming: Any = None,
    ) -> Any:
        given = StepInputs(batch, weight, window, carry, upcoming)
        of_batch = batch_roles(batch)
        roles = INPUT_ROLES._replace(batch=of_batch, upcoming=batch_roles(upcoming))
        if window is None:
            roles = roles._replace(window="shared")
        if task.method in ("update", "scan"):
            return update.update_replicas(map_fn, mesh, state, given, roles, **static)
        # The batch of a dispatched loss function is a result only if it is cast.
        seen = of_batch if update.policy is not None else "batch"
        results = {
            "metrics": "stacked",
            "carry": "device",
            "window": WINDOW_ROLES,
            "arguments": ("stacked", seen, "device", "device"),
        }
        state = without_exchange(state)
        out = jax.tree.map(results.__getitem__, task.results)
        of_all = (update.state_roles(state), *roles)
        return map_fn(per_replica, of_all, out, update.map_with)(state, *given)

    def scan_program(state: TrainState, batch: PyTree, weight: Any = None, *_: Any) -> Any:
        def one(state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
            return program(state, batch, weight)[:2]

        return lax.scan(one, state, batch)

    return jax.jit(
        scan_program if task.method == "scan" else program,
        donate_argnames=task.donated if donates and task.donated else (),
        out_shardings=out_shardings,
        compiler_options=dict(compiler_options),
    )


def result_shardings(
    task: Task,
    update: Update,
    layout: Layout,
    mesh: AnyMesh,
    state: TrainState,
    inputs: StepInputs,
) -> Any:
    """Return the shardings of the results of a task, with None where the compiler may choose.

    If the compiler chose the placement of the new state, it might differ from the old one, and the
    next step would compile again. `state` has the shardings of the step's states.
    """
    first = *axis_names(update.axis_name), *layout.inner_axes
    each = placement(mesh, P(first))

    def window_shardings() -> Any:
        if inputs.window is not None:
            return jax.tree.map(lambda x: x.sharding, inputs.window)
        dense = update.dense(state.params)
        specs = update.dense(layout.specs)
        if specs is None:
            specs = jax.tree.map(lambda _: P(), dense)
        totals = jax.tree.map(lambda _, spec: placement(mesh, P(first, *spec)), dense, specs)
        none: Any = GradientWindow._make([None] * len(GradientWindow._fields))
        return none._replace(grads=WeightedSum(totals, each), rows=each)

    shardings: dict[str, Callable[[], Any]] = {
        "state": lambda: state,
        "metrics": lambda: None,
        "carry": lambda: each,
        "arguments": lambda: None,
        "window": window_shardings,
    }
    return jax.tree.map(lambda result: shardings[result](), task.results)
