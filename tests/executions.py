"""Run a chain of transforms over prescribed gradients in every way a user can.

Trees are dicts of NumPy arrays. Parameters have a leading axis of replicas, gradients of steps and
of devices (replicas times devices inside a replica, replica-major).
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

EXECUTIONS = ("vmap", "pmap", "shard_map", "shard_map_unchecked")
SCHEDULES = ("traced", "host")


def one_step(tx: optax.GradientTransformationExtraArgs, phase: Any = None) -> Callable[..., Any]:
    """`(params, state, grads) -> (params, state)` of one replica."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, phase=phase)
        return optax.apply_updates(params, updates), state

    return step


def lift(fn: Callable[..., Any], axes: Mapping[str, int], execution: str, split: tuple[bool, ...]):
    """`fn` over all axes; arguments have axes (R,) or, where `split`, (R, D). Results have (R,)."""
    names, two_levels = tuple(axes), len(axes) == 2
    if execution in ("vmap", "pmap"):
        mapped = fn
        if two_levels:
            in_axes = tuple(0 if s else None for s in split)
            inner = jax.vmap(mapped, axis_name=names[1], axis_size=axes[names[1]], in_axes=in_axes)
            # Results are equal on the devices of a replica; `check` below holds them to it.
            mapped = lambda *args: jax.tree.map(_first_of_equal, inner(*args))  # noqa: E731
        if execution == "vmap":
            return jax.jit(jax.vmap(mapped, axis_name=names[0]))
        return jax.pmap(mapped, axis_name=names[0], devices=jax.devices()[: axes[names[0]]])
    specs = tuple(P(*names) if s else P(names[0]) for s in split)

    def per_device(*args):
        blocks = [
            jax.tree.map(lambda x, s=s: x[0, 0] if s and two_levels else x[0], a)
            for a, s in zip(args, split, strict=True)
        ]
        return jax.tree.map(lambda x: x[None], fn(*blocks))

    return jax.jit(
        jax.shard_map(
            per_device,
            mesh=js.make_mesh(axes),
            in_specs=specs,
            out_specs=P(names[0]),
            check_vma=execution == "shard_map",
        )
    )


def _first_of_equal(x: jax.Array) -> jax.Array:
    """x[0]; NaN where the devices of a replica hold different values."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x[0]
    return jnp.where(jnp.all(x == x[0], axis=0), x[0], jnp.nan)


def run(
    tx: optax.GradientTransformationExtraArgs,
    params: dict[str, np.ndarray],
    grads: dict[str, np.ndarray],
    *,
    axes: Mapping[str, int],
    execution: str = "shard_map",
    sync: js.ParameterTransform | None = None,
) -> tuple[list[dict[str, np.ndarray]], Any]:
    """Parameters after every step, and the last state. `sync` given: scheduled on the host."""
    sizes = tuple(axes.values())
    mesh = js.make_mesh(axes)
    with (
        warnings.catch_warnings()
    ):  # an axis of size 1 warns once; tests of warnings do not run here
        warnings.filterwarnings("ignore", message=".*has size 1")
        if execution in ("vmap", "pmap"):
            state = lift(tx.init, axes, execution, (False,))(params)
        else:
            stacked = jax.device_put(params, NamedSharding(mesh, P("replica")))
            state = js.init(tx, stacked, mesh=mesh, axis_name="replica")
        programs: dict[Any, Any] = {}
        history = []
        steps = next(iter(jax.tree.leaves(grads))).shape[0]
        for t in range(1, steps + 1):
            phase = None if sync is None else sync.phase(t)
            if phase not in programs:
                programs[phase] = lift(one_step(tx, phase), axes, execution, (False, False, True))
            g = jax.tree.map(lambda x, t=t: x[t - 1].reshape(*sizes, *x.shape[2:]), grads)
            params, state = programs[phase](params, state, g)
            history.append(jax.tree.map(np.asarray, params))
    return history, state


def num_devices(axes: Mapping[str, int]) -> int:
    return math.prod(axes.values())
