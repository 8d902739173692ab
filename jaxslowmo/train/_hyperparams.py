"""Rates and other hyperparameters that are changed from outside, between steps."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._support.types import PyTree

_State = TypeVar("_State")


def set_hyperparams(state: _State, **values: Any) -> _State:
    """A state with other hyperparameters, such as the learning rate, from the next update on.

    They stand in the state of an `optax.inject_hyperparams` optimizer, one per replica:

        optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
        ...
        state = js.set_hyperparams(state, learning_rate=0.01)

    `js.slowmo(learning_rate="optimizer")` follows. No program is compiled again.

    Args:
      state: a `TrainState`, or the stacked state of a chain in a loop of one's own.
      **values: by name: a number, for all replicas, or an array (replicas,). For a hyperparameter
        that is an array, one of its shape, for all or with a leading axis of replicas.

    Returns:
      The state with these values, in the dtype that they had and where they were; all else is as in
      `state`, not copied.

    Raises:
      ValueError: a name that no `optax.inject_hyperparams` state has, or several; one that was
        given as a schedule, which decides in every update; no number, or an array of another shape.

    Communication: none.
    """
    for name, value in values.items():
        _check(state, name, value)

    def changed(x: Any) -> Any:
        if not is_injected(x):
            return x
        given = {
            name: spread(value, jnp.result_type(old), x.count, _shape(x, old))
            for name, value in values.items()
            if (old := x.hyperparams.get(name)) is not None
        }
        return x._replace(
            hyperparams={**x.hyperparams, **given}, inner_state=everywhere(x.inner_state)
        )

    def everywhere(tree: PyTree) -> Any:
        return jax.tree.map(changed, tree, is_leaf=is_injected)

    return everywhere(state)


def is_injected(x: Any) -> bool:
    """Whether this is a state of `optax.inject_hyperparams`."""
    fields = getattr(type(x), "_fields", ())
    return {"count", "hyperparams", "inner_state"} <= set(fields)


_Path = tuple[Any, ...]


def _places(tree: PyTree) -> list[tuple[_Path, Any]]:
    """All such states with the keys that lead to them, those inside of others too."""
    found: list[tuple[_Path, Any]] = []
    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_injected)[0]:
        if is_injected(x):
            inner = jax.tree_util.GetAttrKey("inner_state")
            found.append((path, x))
            found.extend(((*path, inner, *more), y) for more, y in _places(x.inner_state))
    return found


def _check(state: PyTree, name: str, value: Any) -> None:
    every = [x for _, x in _places(state)]
    owners = [x for x in every if name in x.hyperparams]
    if len(owners) != 1:
        known = sorted({n for x in every for n in x.hyperparams})
        has = f"they have {', '.join(known)}" if known else "there is none"
        raise ValueError(
            f"set_hyperparams: `{name}` must stand in the state of one `optax.inject_hyperparams` "
            f"optimizer, found in {len(owners) or 'none'}; {has}. Of several, assign to the one "
            f'that is meant: `state.opt_state[...].hyperparams["{name}"] = value`.'
        )
    (owner,) = owners
    if name in getattr(owner, "hyperparams_states", {}):
        raise ValueError(
            f"set_hyperparams: `{name}` was given as a schedule, which decides in every update: "
            "make the optimizer with a number, and set it between steps."
        )
    if not isinstance(value, Tracer):
        given = np.asarray(value).dtype  # of None it is object, which would become NaN
        if not (jnp.issubdtype(given, jnp.number) or given == np.bool_):
            raise ValueError(f"set_hyperparams: `{name}` must be a number, got {value!r}.")
    whole, one = _shape(owner, owner.hyperparams[name]), np.ndim(owner.count)
    if np.shape(value) not in {(), whole, whole[one:]}:
        each = f"array {whole[one:]} for each" if whole[one:] else "number per"
        raise ValueError(
            f"set_hyperparams: `{name}` must be a number or an array {whole}, one {each} replica, "
            f"got shape {np.shape(value)}."
        )


def _shape(owner: Any, old: Any) -> tuple[int, ...]:
    """Of a hyperparameter of all replicas; `old` may be a number that was assigned."""
    return max(np.shape(old), np.shape(owner.count), key=len)


def spread(value: Any, dtype: Any, count: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A hyperparameter of all replicas, placed like their counters.

    Args:
      value: a number or an array, for all replicas or one for each.
      dtype: of the result.
      count: () in an unstacked state, or (replicas,).
      shape: of the result, that of `count` and more.

    Communication: none.
    """
    if isinstance(value, Tracer) or isinstance(count, Tracer):
        return jnp.broadcast_to(jnp.asarray(value, dtype), shape)
    full = np.broadcast_to(np.asarray(value, dtype), shape)
    if not count.committed:  # what is would be another type of argument to the step
        return jax.device_put(full)
    # Each process makes its own part: others are not asked whether theirs is equal.
    return jax.make_array_from_callback(shape, count.sharding, lambda index: full[index])


NumberPlaces = list[tuple[_Path, dict[str, Any]]]
"""Where hyperparameters stand in a state, with their dtypes by name."""


def number_places(state: PyTree) -> NumberPlaces:
    """Return where someone may assign plain numbers to hyperparameters of a state.

    A step notes that once, and then looks at these places alone.
    """
    return [
        (path, {name: jnp.result_type(value) for name, value in x.hyperparams.items()})
        for path, x in _places(state)
    ]


def replace_numbers(state: PyTree, places: NumberPlaces) -> None:
    """Spread plain numbers in `state` over the replicas, where they stand."""
    for path, dtypes in places:
        owner = _at(state, path)
        for name, value in owner.hyperparams.items():
            if np.ndim(value) < np.ndim(owner.count):
                shape = np.shape(owner.count)
                owner.hyperparams[name] = spread(value, dtypes[name], owner.count, shape)


def _at(tree: PyTree, path: _Path) -> Any:
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
