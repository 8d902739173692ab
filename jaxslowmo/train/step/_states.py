"""The layouts of a step's states, and the checks of states and windows that a step receives."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer

from ..._support.types import AxisName, PyTree
from ...gradients.precision import loss_scale_of
from ...mesh import AnyMesh, model_axes, replica_count
from ...tracing import state_types
from ...transform import ParameterTransform, holds_state, instants, known_states, replica_types
from ...tree import leaf_names, not_floating
from .._train_state import StepExchange, TrainState
from ._gradients import GradientWindow
from ._parts import Parts
from ._transforms import check_transforms

Expected = Callable[[PyTree], PyTree]


def check_state(
    state: TrainState,
    parts: Parts,
    mesh: AnyMesh,
    mode: str,
    warn: Callable[[str], None],
    *,
    is_first: bool,
) -> bool:
    """Check a step's transforms with its state: raise `ValueError`, or warn.

    Return whether an update is known to change the structure of the optimizer's state.

    Args:
      state: a state of the step.
      parts: the parts of the step.
      mesh: the step's mesh.
      mode: the step's mode, `"traced"` or `"host"`.
      warn: a function that issues each message once.
      is_first: whether this is the first state of the step; checks of its types are done only then.

    Communication: none.
    """
    sync = parts.sync
    check_trainable(parts.dense(state.params))
    changes = check_transforms(state, parts, mesh, mode, is_first=is_first)
    computes = None if parts.policy is None else parts.policy.compute
    if computes == "float16" and loss_scale_of(state.opt_state) is None:
        warn(
            '`policy` is Policy("float16"), and `optimizer` has no loss scale, so that '
            "gradients below 6e-8 become 0: put js.dynamic_loss_scale(...) around `optimizer`, "
            'or use Policy("bfloat16"). If the loss function scales its loss by itself, '
            "nothing is wrong."
        )
    if sync is not None and is_first:
        exchanges = [t for t in instants(sync.algorithm.schedules) if sync.phase(t)]
        for _, known in known_states(parts.dense(state.opt_state)):
            # Its period is not known, but only 1 divides them all.
            if known.between and math.gcd(*exchanges) == 1:
                warn(
                    f"`optimizer` holds {known.name}, which updates in some of its calls only, and "
                    f"`sync` also exchanges in between, where {known.between}. Make `sync_every` a "
                    f"multiple of its period, or {known.instead}."
                )
    return changes


def scalar_counter(x: Any) -> Any:
    """Return a counter, equal on all replicas, as a NumPy scalar; other leaves unchanged."""
    if np.ndim(x) != 1 or not np.issubdtype(x.dtype, np.integer):
        return x
    local = x.addressable_data(0) if isinstance(x, jax.Array) else x
    return np.asarray(jax.device_get(local))[0]


def without_optimizer(state: TrainState) -> TrainState:
    """Return the state without what an update alone needs."""
    return state._replace(opt_state=(), exchange=StepExchange())


def check_is_state(state: TrainState) -> None:
    """Raise `ValueError` unless `state` has the fields of a `TrainState`."""
    if not all(hasattr(state, name) for name in TrainState._fields):
        raise ValueError(
            "`state` must be a js.TrainState, as `step.init(params)` makes it and the step returns "
            f"it, got {type(state).__name__}."
        )


def check_donation(state: TrainState) -> None:
    """Raise `ValueError` for a state whose buffers were donated, with which jax 0.10 may crash.

    Only the first array of parameters and of optimizer state is checked: all are donated together.
    """
    for x in (state.step, state.rng, first_array(state.params), first_array(state.opt_state)):
        if is_deleted(x):
            raise ValueError(
                "`state` was given to a step before, which reuses its buffers (donate=True): go on "
                "with the state that this step returned, or make the step with donate=False."
            )


def check_trainable(params: PyTree) -> None:
    """Raise `ValueError` unless all parameters are real floating-point arrays.

    jax does not differentiate integers. Its gradients of complex numbers are conjugated, and
    optimizers would step in the wrong direction.
    """
    if wrong := not_floating(params):
        raise ValueError(
            "`params`: a training step differentiates real floating-point leaves only, got "
            f"{', '.join(wrong)}. Pass other leaves to `step.init` as `model_state`, which the "
            "loss function is given and returns, or let it close over them. Instead of a complex "
            "leaf that shall be trained give real and imaginary part, and join them in the loss "
            "function by `jax.lax.complex`."
        )


def check_exchange_state(state: TrainState, parts: Parts, expected_of: Expected) -> None:
    """Raise `ValueError` if the state belongs to a step with another `sync`, or no `gradients`.

    Args:
      state: the state.
      parts: the parts of the step.
      expected_of: `expected_of(params)`: the types of local and shared state that `sync` makes.
    """
    held = state.exchange
    if parts.gradients is None and not isinstance(held.gradients, optax.EmptyState):
        raise ValueError(
            "`state` must come from a step with the same `gradients`: this step has none, and "
            f"`state.exchange.gradients` has {type(held.gradients).__name__}. Make the state by "
            "this step's `init`; `state.params` go over by `js.consensus`."
        )
    expected = ((), ()) if parts.sync is None else expected_of(state.params)
    needs, has = (
        leaf_names({"local": local, "shared": shared})
        for local, shared in (expected, (held.local, held.shared))
    )
    if needs != has:
        lacking, beyond = (
            [n for n in a if n not in b][:6] for a, b in ((needs, has), (has, needs))
        )
        raise ValueError(
            f"`state` must come from a step with the same `sync`: of the state of {parts.sync!r} "
            f"`state.exchange` lacks {lacking}, and beyond that it has {beyond}. Make the state by "
            "this step's `init`; `state.params` go over by `js.consensus`."
        )


def exchange_state_types(
    sync: ParameterTransform, params: PyTree, mesh: AnyMesh
) -> tuple[PyTree, PyTree]:
    """Return the types of local and shared state that a transform makes of stacked parameters."""
    one = replica_types(params)
    algorithm = sync.bound(dict(mesh.shape), one).algorithm
    return jax.eval_shape(lambda params: (algorithm.local(params), algorithm.shared(params)), one)


def check_num_replicas(state: TrainState, parts: Parts, mesh: AnyMesh) -> None:
    """Raise `ValueError` for a state of another number of replicas than the step's."""
    count = replica_count("step", mesh, parts.axis_name)
    if np.shape(state.step) != (count,):
        raise ValueError(
            f"`state` must be of the {count} replicas of this step, along {parts.axis_name!r}, got "
            f"one whose `step` has shape {np.shape(state.step)}. Other replicas go on from "
            "`js.consensus` of its parameters, or from a checkpoint of jaxslowmo.checkpoint."
        )


def check_optimizer_state(state: TrainState, parts: Parts, mesh: AnyMesh) -> None:
    """Raise `ValueError` if the optimizer's state has other leaves than the step's own makes.

    An optimizer that holds a transform of this package, whose buffers depend on more than the
    parameters, is not compared.
    """
    params, held = parts.dense(state.params), parts.dense(state.opt_state)
    if holds_state(held, "parameters") or holds_state(held, "gradients"):
        return
    types = state_types(parts.optimizer, params, mesh=mesh, axis_name=parts.axis_name)
    needs, has = (set(leaf_names(x)) for x in (types, held))
    for names, text in ((needs - has, "needs"), (has - needs, "has no use for")):
        if names:
            raise ValueError(
                f"`state` must come from a step with the same `optimizer`: this one {text} "
                f"{min(names)!r} of its state. Make the state by this step's `init`; "
                "`state.params` go over by `js.consensus`."
            )


def check_same_model(params: PyTree, names: Sequence[str]) -> None:
    """Raise `ValueError` for parameters with other names than the first ones of the step."""
    found = leaf_names(params)
    if found != names:
        others = sorted({*found} ^ {*names})[:6]
        raise ValueError(
            "`state` must be of one model with the first state of this step, got other "
            f"parameters: only one of the two has {others}. Make a step for each model."
        )


def check_window(window: Any, state: TrainState, weight: Any = ...) -> None:
    """Raise `ValueError` unless `window` is None or an unused window of the parameters in `state`.

    Also raise it if only one of `weight` and the window has weights; `...` skips that check.
    """
    if window is None:
        return
    if is_deleted(first_array(window.grads.sum)):
        raise ValueError(
            "`window` was given to a step before, which reuses its buffers (donate=True): go on "
            "with the window that `step.collect` returned last, or begin another with None."
        )
    _check_window_shapes(window, state)
    if weight is not ... and (weight is None) != (window.weight is None):
        has = "none" if window.weight is None else "some"
        raise ValueError(
            f"`weight` must be given for all batches of a window or for none: those before had "
            f"{has}, and this one has {'none' if weight is None else 'one'}."
        )


def _check_window_shapes(window: GradientWindow, state: TrainState) -> None:
    """Raise `ValueError` if the window's sums do not have the shapes of the parameters."""
    if state.step.shape != window.count.shape:
        raise ValueError(
            f"`window` must be of the replicas of `state`, {state.step.shape}, got one of "
            f"{window.count.shape}."
        )
    has, holds = (
        {name: x.shape[1:] for name, x in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)}
        for tree in (state.params, window.grads.sum)
    )
    for name in {**has, **holds}:
        if has.get(name) != holds.get(name):
            raise ValueError(
                "`window` must hold gradients of the parameters in `state`, of which it was "
                f"collected: of leaf {name!r} `state` has shape {has.get(name, 'none')}, and the "
                f"window {holds.get(name, 'none')}."
            )


def delete_gradients(window: GradientWindow) -> None:
    """Delete the gradients of a window that an update has used.

    They cannot be donated, since no result of the update has their shapes. Their memory is freed
    when the update has run.
    """
    for x in jax.tree.leaves(window.grads.sum):
        if not isinstance(x, Tracer):
            x.delete()


def is_deleted(x: Any) -> bool:
    """Return whether the buffer of an array was donated."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted()


def first_array(tree: PyTree) -> Any:
    """Return the first leaf of `tree` without flattening it; None if it has no leaf."""
    # Every step calls this. isinstance is ten times faster for built-in than for abstract types.
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return tree if isinstance(tree, jax.Array) else next(iter(jax.tree.leaves(tree)), None)
    for child in tree:
        if (array := first_array(child)) is not None:
            return array
    return None


def check_state_sharding(
    axes: frozenset[str], state: TrainState, mesh: AnyMesh, axis_name: AxisName
) -> None:
    """Raise `ValueError` if state is sharded over axes inside a replica that are mapped.

    There each device has all of it. `axes` are those that the compiler handles.
    """
    for part in ("opt_state", "model_state"):
        tree = getattr(state, part)
        if not (beyond := sorted(model_axes(tree, mesh, axis_name) - axes)):
            continue
        name, leaf = next(
            (name, leaf)
            for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
            if model_axes(leaf, mesh, axis_name) - axes
        )
        raise ValueError(
            f"`state`: `{part}` must not be sharded over axes inside a replica that `gradients` "
            f"or a `local_axis_name` maps, got {name!r} as {leaf.sharding.spec}: over {beyond} a "
            "step makes it whole on every device. Name other axes there, or leave it whole. "
            "js.slowmo and js.diloco shard what they keep by themselves."
        )
