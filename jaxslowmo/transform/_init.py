"""Stacked states of transforms."""

from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from .._support.types import AxisName, PyTree
from .._support.warnings import warn_user
from ..mesh import (
    AnyMesh,
    Layouts,
    axis_names,
    check_same_tree,
    check_stacked,
    kept_with,
    layouts_of,
    map_replicas,
    model_axes,
    on_mesh,
    sharded_like,
    varying_axes,
)
from ..tree import leaf_names
from ._copies import moving_states, noting_followed
from ._registry import check_order, holds_state


def init(
    tx: optax.GradientTransformation,
    stacked_params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
) -> PyTree:
    """The state of `tx` for stacked parameters, made inside the mapped axes.

    Transforms that shard their state over replicas cannot be initialised outside of the axis;
    here they can.

    Args:
      tx: any optax transform or chain.
      stacked_params: tree of `(replicas, *s)`, as `js.replicate` returns it.
      mesh: mesh with `axis_name`, or a `VirtualMesh`; its other axes are bound too.
      axis_name: the replica axis, or several.

    Returns:
      The state with a leading replica axis on every leaf; copies, so the parameters can be donated.

    Raises:
      ValueError: leaves without the leading axis, trees that differ between processes (every
        difference listed with the process that has it), state that differs between the devices of
        a replica, or a chain in which something follows a parameter transform.
      UserWarning: an optimizer that remembers parameters, in a chain that `js.chain` did not make.

    Communication: none over devices; with several processes one exchange of the trees' names,
      shapes and dtypes (a few KiB) through the host.
    """
    check_stacked("init", stacked_params, mesh, axis_name)
    check_same_tree(stacked_params)

    placed = on_mesh(stacked_params, mesh, axis_name)
    automatic = model_axes(placed, mesh, axis_name)
    over = (mesh, axis_name, automatic, layouts_of(placed) if automatic else ())
    tx_init = tx.init  # held while it runs: a bound method, as of optax.MultiSteps, is made anew
    return kept_with(tx_init, over, lambda tx_init: _init_fn(tx_init, *over))(placed)


def _warn_of_copies(state: PyTree, followed: Counter[str]) -> None:
    """Warn of optimizers that take back what a parameter transform behind them does."""
    found = sorted(Counter(moving_states(state)) - followed)
    if found and holds_state(state, "parameters"):
        warn_user(
            f"init: `tx` holds an optimizer that remembers parameters ({', '.join(found)}) and a "
            "parameter transform: it takes back what that moves. Make the chain by js.chain, whose "
            "copies move along, or pass the two as `optimizer` and `sync` of js.make_train_step."
        )


def _init_fn(
    tx_init: Callable[[PyTree], PyTree],
    mesh: AnyMesh,
    axis_name: AxisName,
    automatic: frozenset[str],
    layouts: Layouts,
) -> Callable[[PyTree], PyTree]:
    def per_replica(params: PyTree) -> PyTree:
        with noting_followed() as followed:
            state = jax.tree.map(jnp.copy, tx_init(params))
        check_order("init", state)
        _warn_of_copies(state, followed)
        _check_equal_inside(state, {*axis_names(axis_name), *automatic})
        return sharded_like(state, layouts)

    return jax.jit(
        map_replicas(
            per_replica,
            mesh=mesh,
            axis_name=axis_name,
            in_roles=("stacked",),
            automatic=automatic,
        )
    )


def _check_equal_inside(state: PyTree, allowed: set[str]) -> None:
    """State is stacked over replicas: one copy for all devices of a replica."""
    wrong = {
        name: axes
        for name, leaf in zip(leaf_names(state), jax.tree.leaves(state), strict=True)
        if (axes := sorted(varying_axes(leaf) - allowed))
    }
    if wrong:
        listed = ", ".join(f"{name} (over {axes})" for name, axes in wrong.items())
        raise ValueError(
            "init: `tx` keeps state that differs between the devices of a replica, and the state "
            f"is stacked over replicas only: {listed}. A hook with error feedback that reduces "
            "over inner axes needs them all in `axis_name`."
        )
