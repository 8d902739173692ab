"""Set learning rates and other hyperparameters of a state between steps."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._support.types import PyTree
from ..mesh import array_from_host

_State = TypeVar("_State")


def set_hyperparams(state: _State, **values: Any) -> _State:
    """Return the state with other hyperparameters, such as the learning rate.

    They apply from the next update on. They must be in the state of an
    `optax.inject_hyperparams` optimizer, one per replica:

        optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
        ...
        state = js.set_hyperparams(state, learning_rate=0.01)

    `js.slowmo(learning_rate="optimizer")` uses the new rate, too. No program is compiled again.

    Args:
      state: a `TrainState`, or the stacked state of a chain in your own loop.
      **values: the new value of each hyperparameter, by name: a number for all replicas, or an
        array (replicas,). A hyperparameter that is an array takes an array of its shape, for all
        replicas, or one with a leading axis of replicas.

    Returns:
      The state with these values, in the dtype and placement of the old ones; everything else is as
      in `state` and not copied.

    Raises:
      ValueError: no `optax.inject_hyperparams` state has the name, or several have it; it is a
        schedule, which computes the value in every update; the value is no number, or an array of
        another shape.

    Communication: none.
    """
    for name, value in values.items():
        _check(state, name, value)

    def replace_values(x: Any) -> Any:
        if not is_hyperparams_state(x):
            return x
        new_values = {
            name: broadcast_value(value, jnp.result_type(old), x.count, _shape(x, old))
            for name, value in values.items()
            if (old := x.hyperparams.get(name)) is not None
        }
        return x._replace(
            hyperparams={**x.hyperparams, **new_values}, inner_state=replace_all(x.inner_state)
        )

    def replace_all(tree: PyTree) -> Any:
        return jax.tree.map(replace_values, tree, is_leaf=is_hyperparams_state)

    return replace_all(state)


def is_hyperparams_state(x: Any) -> bool:
    """Return whether `x` is a state of `optax.inject_hyperparams`."""
    fields = getattr(type(x), "_fields", ())
    return {"count", "hyperparams", "inner_state"} <= set(fields)


_Path = tuple[Any, ...]


def _hyperparams_states(tree: PyTree) -> list[tuple[_Path, Any]]:
    """Return the path and the state of each `optax.inject_hyperparams`, nested ones included."""
    states: list[tuple[_Path, Any]] = []
    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_hyperparams_state)[0]:
        if is_hyperparams_state(x):
            inner = jax.tree_util.GetAttrKey("inner_state")
            states.append((path, x))
            states.extend(
                ((*path, inner, *more), y) for more, y in _hyperparams_states(x.inner_state)
            )
    return states


def _check(state: PyTree, name: str, value: Any) -> None:
    every = [x for _, x in _hyperparams_states(state)]
    owners = [x for x in every if name in x.hyperparams]
    if len(owners) != 1:
        names = sorted({n for x in every for n in x.hyperparams})
        has = f"they have {', '.join(names)}" if names else "there is none"
        raise ValueError(
            f"set_hyperparams: `{name}` must be in the state of one `optax.inject_hyperparams` "
            f"optimizer, found in {len(owners) or 'none'}; {has}. Of several, assign to the one "
            f'that is meant: `state.opt_state.hyperparams["{name}"] = value`.'
        )
    (owner,) = owners
    if name in getattr(owner, "hyperparams_states", {}):
        raise ValueError(
            f"set_hyperparams: `{name}` was given as a schedule, which decides in every update: "
            "make the optimizer with a number, and set it between steps."
        )
    if not isinstance(value, Tracer):
        dtype = np.asarray(value).dtype  # None has dtype object, and would become NaN
        if not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
            raise ValueError(f"set_hyperparams: `{name}` must be a number, got {value!r}.")
    whole, one = _shape(owner, owner.hyperparams[name]), np.ndim(owner.count)
    if np.shape(value) not in {(), whole, whole[one:]}:
        each = f"array {whole[one:]} for each" if whole[one:] else "number per"
        raise ValueError(
            f"set_hyperparams: `{name}` must be a number or an array {whole}, one {each} replica, "
            f"got shape {np.shape(value)}."
        )


def _shape(owner: Any, old: Any) -> tuple[int, ...]:
    """Return the stacked shape of a hyperparameter; `old` may be a number that was assigned."""
    return max(np.shape(old), np.shape(owner.count), key=len)


def broadcast_value(value: Any, dtype: Any, count: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a hyperparameter for all replicas, placed like their counters.

    Args:
      value: a number or an array, for all replicas or one for each.
      dtype: dtype of the result.
      count: the counter of the same state: () if unstacked, else (replicas,).
      shape: shape of the result; begins with that of `count`.

    Communication: none.
    """
    if isinstance(value, Tracer) or isinstance(count, Tracer):
        return jnp.broadcast_to(jnp.asarray(value, dtype), shape)
    full = np.broadcast_to(np.asarray(value, dtype), shape)
    # To jit, a committed array is another type of argument: the step would compile again.
    if not count.committed:
        return jax.device_put(full)
    # Each process makes its own part. `device_put` would compare the values between processes.
    return array_from_host(shape, count.sharding, lambda index: full[index])


HyperparamsPaths = list[tuple[_Path, dict[str, Any]]]
"""Paths of the `optax.inject_hyperparams` states, with their hyperparameters' dtypes by name."""


def hyperparams_paths(state: PyTree) -> HyperparamsPaths:
    """Return the places in a state where a user may assign plain numbers to hyperparameters.

    A step computes them once, and later looks at these places only.
    """
    return [
        (path, {name: jnp.result_type(value) for name, value in x.hyperparams.items()})
        for path, x in _hyperparams_states(state)
    ]


def replace_numbers(state: PyTree, places: HyperparamsPaths) -> None:
    """Replace plain numbers in `state` by arrays over the replicas, in place."""
    for path, dtypes in places:
        owner = _get_by_path(state, path)
        for name, value in owner.hyperparams.items():
            if np.ndim(value) < np.ndim(owner.count):
                shape = np.shape(owner.count)
                owner.hyperparams[name] = broadcast_value(value, dtypes[name], owner.count, shape)


def _get_by_path(tree: PyTree, path: _Path) -> Any:
    for key in path:
        match key:
            case jax.tree_util.SequenceKey(idx=place) | jax.tree_util.DictKey(key=place):
                tree = tree[place]
            case jax.tree_util.GetAttrKey(name=name):
                tree = getattr(tree, name)
            case jax.tree_util.FlattenedIndexKey(key=place):  # a class that names no children
                node = tree
                tree = jax.tree.leaves(node, is_leaf=lambda x, node=node: x is not node)[place]
    return tree
