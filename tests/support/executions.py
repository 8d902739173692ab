"""Run a chain of transforms over prescribed gradients in every way a user can.

Trees are dicts of NumPy arrays. Parameters have a leading axis of replicas, gradients of steps and
of devices (replicas times devices inside a replica, replica-major).
"""

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.promotion import apply_updates

EXECUTIONS = ("vmap", "pmap", "shard_map", "shard_map_unchecked")
SCHEDULES = ("traced", "host")


def one_step(
    tx: optax.GradientTransformationExtraArgs, phase: Any = None, communicate: bool = True
) -> Callable[..., Any]:
    """Return `(params, state, grads) -> (params, state)`, a step of one replica.

    A fourth argument, a () bool array, replaces `communicate`.
    """

    def step(params, state, grads, talk=communicate):
        updates, state = tx.update(grads, state, params, phase=phase, communicate=talk)
        return apply_updates(params, updates), state

    return step


def gossip_state(state: Any) -> js.algorithms.PushSumState:
    """Return the only `PushSumState` in the state of a chain."""
    is_gossip = lambda x: isinstance(x, js.algorithms.PushSumState)  # noqa: E731
    (gossip,) = filter(is_gossip, jax.tree.leaves(state, is_leaf=is_gossip))
    return gossip


def lift(fn: Callable[..., Any], axes: Mapping[str, int], execution: str, split: tuple[bool, ...]):
    """Return `fn` mapped over all axes.

    Arguments have axes (R, ...), or (R, D, ...) where `split` is true; results have (R, ...).
    """
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
    """Return x[0], with NaN where the devices of a replica hold different values."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x[0]
    return jnp.where(jnp.all(x == x[:1], axis=0), x[0], jnp.nan)


def run(
    tx: optax.GradientTransformationExtraArgs,
    params: dict[str, np.ndarray],
    grads: dict[str, np.ndarray],
    *,
    axes: Mapping[str, int],
    execution: str = "shard_map",
    sync: js.ParameterTransform | None = None,
    paused: Collection[int] = (),
    skipped: Collection[int] | None = None,
    pause: Literal["array", "static"] = "static",
    record: Callable[[Any, Any], Any] = lambda params, state: params,
) -> tuple[list[Any], Any]:
    """Train on `grads`; return what `record` returns after every step, and the last state.

    Args:
      tx: the chain.
      params: initial parameters, stacked over replicas.
      grads: gradients, stacked over steps and devices.
      axes: sizes of the axes by name, replicas first.
      execution: one of `EXECUTIONS`.
      sync: the transform whose phases the host schedules; None: the program decides itself.
      paused: numbers of updates with `communicate=False`; on the host their phase is `()`.
      skipped: those of `paused` in which gossip would have rotated; None: all of them.
      pause: whether `communicate` is an array in one program, or static in two.
      record: function of the stacked parameters and state; the default returns the parameters.
    """
    sizes = tuple(axes.values())
    mesh = js.make_mesh(axes)
    unturned = paused if skipped is None else skipped
    as_array = bool(paused) and sync is None and pause == "array"
    split = (False, False, True, *([False] if as_array else []))
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
            talk = t not in paused
            if sync is not None:
                phase = sync.algorithm.phase(t, sum(s < t for s in unturned)) if talk else ()
                key, static = phase, True
            else:
                phase, static = None, talk or as_array
                key = static
            if key not in programs:
                programs[key] = lift(one_step(tx, phase, static), axes, execution, split)
            g = jax.tree.map(lambda x, t=t: x[t - 1].reshape(*sizes, *x.shape[2:]), grads)
            extra = (np.full(sizes[0], talk),) if as_array else ()
            params, state = programs[key](params, state, g, *extra)
            history.append(jax.tree.map(np.asarray, record(params, state)))
    return history, state
