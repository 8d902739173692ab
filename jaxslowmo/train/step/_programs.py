"""The programs of a step: one jitted function for each task, phase and layout of the state."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._support.types import CompilerOptions, PyTree
from ...mesh import AnyMesh, VirtualMesh, laid_out, map_replicas, roles_of_batch
from .._train_state import StateLayout, TrainState
from ._gradients import INPUT_ROLES, WINDOW_ROLES, GradientWindow, StepInputs
from ._update import Update

Share = tuple[jax.tree_util.PyTreeDef, tuple[jax.ShapeDtypeStruct, ...]]
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
    def of(cls, method: str, results: Any, donated: str | None = None, **static: Any) -> Self:
        """Return a task; a keyword argument of None is left out."""
        given = tuple((name, value) for name, value in static.items() if value is not None)
        return cls(method, results, donated, given)


EVALUATE = Task("evaluated", "metrics")
"""The task of computing the metrics of a batch."""


def build(
    task: Task,
    update: Update,
    layout: StateLayout,
    mesh: AnyMesh | AbstractMesh,
    *,
    donates: bool,
    compiler_options: CompilerOptions,
    out_shardings: Any = None,
) -> Any:
    """Build `program(state=, batch=, ...)`, which takes the fields of `StepInputs` by name."""
    static = dict(task.static)
    if "like" in static:
        static["like"] = jax.tree.unflatten(*static["like"])

    def per_replica(state: TrainState, *inputs: Any) -> Any:
        if layout.specs is not None:
            state = state._replace(params=laid_out(state.params, layout.specs))
        return getattr(update, task.method)(state, StepInputs(*inputs), **static)

    def program(*, state: TrainState, **inputs: Any) -> Any:
        given = StepInputs(**inputs)
        batch, upcoming = roles_of_batch(given.batch), roles_of_batch(given.upcoming)
        roles = INPUT_ROLES._replace(batch=batch, upcoming=upcoming)
        if given.window is None:
            roles = roles._replace(window="shared")
        # The batch of a dispatched loss function is a result only if it is cast.
        seen = batch if update.policy is not None else "batch"
        results = {
            "state": "stacked",
            "metrics": "stacked",
            "carry": "device",
            "window": WINDOW_ROLES,
            "arguments": ("stacked", seen, "device", "device"),
        }
        mapped = map_replicas(
            per_replica,
            mesh=mesh,
            axis_name=update.axis_name,
            in_roles=update.roles(("stacked", *roles)),
            out_roles=update.roles(jax.tree.map(results.__getitem__, task.results)),
            automatic=layout.axes,
        )
        return mapped(state, *given)

    return jax.jit(
        program,
        donate_argnames=task.donated if donates and task.donated else (),
        out_shardings=out_shardings,
        compiler_options=dict(compiler_options),
    )


def pinned(
    task: Task,
    update: Update,
    layout: StateLayout,
    mesh: AnyMesh,
    state: TrainState,
    inputs: StepInputs,
) -> Any:
    """Return the shardings of the results of a task, with None where the compiler may choose.

    If the compiler chose the placement of the new state, it might differ from the old one, and the
    next step would compile again.
    """
    first = layout.data_axes
    assert not isinstance(mesh, VirtualMesh), "leaves are sharded on devices alone"
    each = NamedSharding(mesh, P(first))

    def places(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.sharding, tree)

    def of_window() -> Any:
        if inputs.window is not None:
            return places(inputs.window)
        totals = jax.tree.map(
            lambda _, spec: NamedSharding(mesh, P(first, *spec)),
            *(update.dense(state.params), update.dense(layout.specs)),
        )
        none: Any = GradientWindow._make([None] * len(GradientWindow._fields))
        return none._replace(totals=totals, rows=each)

    shardings: dict[str, Callable[[], Any]] = {
        "state": lambda: places(state),
        "metrics": lambda: None,
        "carry": lambda: each,
        "arguments": lambda: None,
        "window": of_window,
    }
    return jax.tree.map(lambda result: shardings[result](), task.results)


def abstract(mesh: VirtualMesh) -> AbstractMesh:
    """Return a mesh with the same axes, for programs that are lowered but not run."""
    return AbstractMesh(
        tuple(mesh.shape.values()), mesh.axis_names, (AxisType.Auto,) * len(mesh.axis_names)
    )


def has_auto(mesh: AnyMesh, axes: frozenset[str]) -> bool:
    """Return whether one of the axes is Auto; shardings over Explicit axes are in the types."""
    if isinstance(mesh, VirtualMesh):
        return False
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return any(types[axis] == AxisType.Auto for axis in axes)
