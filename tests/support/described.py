"""Programs compiled for devices that are only described: TPU slices and GPU hosts."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js


def shapes_on(tree: Any, mesh: Mesh, spec: P) -> Any:
    """Return the shapes of `tree`, placed on `mesh`."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree
    )


def lowered_update(transform: Any, params: Any, mesh: Mesh, **options: Any) -> jax.stages.Lowered:
    """Return the program of one update of a transform alone.

    Args:
      transform: a parameter or gradient transform.
      params: shapes of one copy of the parameters.
      mesh: a mesh of described devices; "device" is the axis inside a replica, all others are
        replica axes.
      **options: further arguments of the update, such as `phase`.
    """
    replicas = P(tuple(a for a in mesh.axis_names if a != "device"))

    def lifted(fn):
        def per_device(*args):
            out = fn(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: x[None], out)

        return jax.shard_map(per_device, mesh=mesh, in_specs=replicas, out_specs=replicas)

    count = np.prod([size for name, size in mesh.shape.items() if name != "device"])
    stacked = shapes_on(
        jax.tree.map(lambda s: jax.ShapeDtypeStruct((count, *s.shape), s.dtype), params),
        mesh,
        replicas,
    )
    state = shapes_on(jax.eval_shape(lifted(transform.init), stacked), mesh, replicas)
    update = jax.jit(lifted(lambda u, s, p: transform.update(u, s, p, **options)))
    return update.lower(stacked, state, stacked)


def report_of_sync(
    sync: js.ParameterTransform, params: Any, mesh: Mesh, phase: tuple[str, ...] | None
) -> js.reports.CommReport:
    """Return the `comm_report` of one update of `sync` alone, compiled for `mesh`.

    Args:
      sync: the transform.
      params: shapes of one copy of the parameters.
      mesh: as for `lowered_update`.
      phase: static phase, or None to decide inside the program.
    """
    return js.comm_report_of(lowered_update(sync, params, mesh, phase=phase), mesh=mesh)


def lowered_step(
    loss: Callable[..., Any],
    sync: js.ParameterTransform | None,
    params: Any,
    batch: Any,
    mesh: Mesh,
    *,
    gradients: optax.GradientTransformation | None = None,
    mode: Literal["host", "traced"] = "host",
    compiler_options: Mapping[str, Any] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    policy: js.gradients.Policy | None = None,
) -> dict[str, jax.stages.Lowered]:
    """Return the programs of a step by phase; the key is "all" for a traced step.

    A host-scheduled step without `sync` has the one phase "every".

    Args:
      loss: `loss(params, batch)`.
      sync: the parameter transform, or None.
      params: shapes of one copy of the parameters.
      batch: shapes of the batch of all devices.
      mesh: a mesh of described devices with an axis "replica".
      gradients: the gradient transform, or None.
      mode: `mode` of `js.make_train_step`.
      compiler_options: `compiler_options` of `js.make_train_step`.
      optimizer: the optimizer; None is SGD.
      policy: `policy` of `js.make_train_step`.
    """
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer

    def step_on(where: Any, **more: Any) -> js.train.TrainStep:
        return js.make_train_step(
            loss,
            optimizer,
            sync=sync,
            gradients=gradients,
            mesh=where,
            mode=mode,
            policy=policy,
            **more,
        )

    # The state's shapes do not depend on where it lies, and no array can be placed on this mesh.
    # The step says where types without a place shall lie.
    state = jax.eval_shape(step_on(js.virtual_mesh(dict(mesh.shape))).init, params)
    programs = step_on(mesh, compiler_options=compiler_options).traced_by_phase(state, batch)
    return {name or "all": traced.lower() for name, traced in programs.items()}


class _Compiled:
    """A lowered program that was compiled before, for `js.comm_report_of`."""

    def __init__(self, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> None:
        self.compiler_ir = lowered.compiler_ir
        self._compiled = compiled

    def compile(self) -> jax.stages.Compiled:
        return self._compiled


def compiled_rows(
    kind: str, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, mesh: Mesh
) -> tuple[js.reports.CommRow, ...]:
    """Return the collectives of a compiled program of `kind`, all of which have known axes."""
    program: Any = _Compiled(lowered, compiled)
    rows = js.comm_report_of({kind: program}, mesh=mesh).select(level="compiled")
    assert all("?" not in row.axis for row in rows), rows
    return rows
