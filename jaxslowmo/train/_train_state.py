"""The state of a run: its first values, and its hyperparameters, set between steps."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._support.checks import warn_once, warn_user
from .._support.types import AxisName, PyTree
from ..mesh import (
    AnyMesh,
    array_from_host,
    default_generator,
    has_device_per_position,
    key_bits,
    map_replicas,
    per_replica_keys,
    replicate_argument,
)
from ..tree import leaf_names

_warn_once = warn_once()
_RAW_KEYS = [(2,), (4,)]  # shapes of keys in uint32: of threefry, and of the two generators of rbg


class StepExchange(NamedTuple):
    """What a step remembers of its exchanges.

    Attributes:
      local: what each replica has for itself, stacked over the replicas.
      shared: what all replicas have together, such as an anchor: trees of the parameters' shapes,
        sharded over the replicas along a dimension that their number divides.
      gradients: what the reduction of gradients remembers, stacked over the replicas.
    """

    local: PyTree = ()
    shared: PyTree = ()
    gradients: PyTree = ()


class TrainState(NamedTuple):
    """The state of a run; every leaf but those of `exchange.shared` has an axis of replicas.

    Attributes:
      step: (replicas,) int32, updates so far; equal on all replicas.
      params: leaves (replicas, *s); differ between replicas unless they were just synchronised.
      opt_state: the state of the optimizer.
      model_state: what the loss function carries from step to step, such as BatchNorm statistics;
        {} without any. PRNG keys in it differ between replicas.
      rng: (replicas, words) uint32, the data of a PRNG key of jax's default implementation for each
        replica (`jax.random.wrap_key_data` makes keys of it), different on every replica; no
        update changes it, and that of an update is this key with `step` folded in. It is plain
        data, so that any library that saves trees of arrays saves a `TrainState`.
      exchange: what the exchanges of gradients and parameters remember.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: jax.Array
    exchange: StepExchange = StepExchange()


class ReplicaState(NamedTuple):
    """The states of all replicas of a step of another library; made by `init`.

    Attributes:
      step: (replicas,) int32, updates so far; equal on all replicas.
      state: the library's state, stacked over the replicas.
      exchange: what the exchanges remember.
    """

    step: jax.Array
    state: PyTree
    exchange: StepExchange = StepExchange()


def update_count(state: Any) -> int:
    """Return the updates that a step's state counts, which waits for it; 0 for other states."""
    if not isinstance(state, TrainState | ReplicaState):
        return 0
    count = state.step
    local = count.addressable_data(0) if isinstance(count, jax.Array) else count
    return int(np.ravel(jax.device_get(local))[0])


def with_own_keys(name: str, stacked: PyTree, *, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
    """Return the argument `name`, stacked, with different keys per replica.

    With equal keys all replicas would drop the same units.
    """
    leaves, structure = jax.tree.flatten(stacked)
    places = [i for i, x in enumerate(leaves) if _is_key(x)]
    # A raw key of `jax.random.PRNGKey` cannot be distinguished from other uint32 data: warn only,
    # and not of a library that has typed keys, beside which such data are counters.
    raw = [] if places else _stacked_raw_keys(stacked)
    if raw and leaves[0].shape[0] > 1:
        warn_user(
            f"`{name}`: {', '.join(raw)} looks like a PRNG key without a type, and would be the "
            "same on all replicas; keys of jax.random.key or jax.random.wrap_key_data become each "
            "replica's own. If it is no key, nothing is wrong."
        )
    if places:
        split_keys = map_replicas(
            lambda keys: per_replica_keys(keys, axis_name),
            mesh=mesh,
            axis_name=axis_name,
            in_roles=("stacked",),
        )
        for i, keys in zip(places, jax.jit(split_keys)([leaves[i] for i in places]), strict=True):
            leaves[i] = keys
    return structure.unflatten(leaves)


def warn_of_rbg(model_state: PyTree, mesh: AnyMesh) -> None:
    """Warn where replicas under `vmap` draw other numbers than on devices of their own."""
    if has_device_per_position(mesh):
        return
    keys = [x for x in jax.tree.leaves(model_state) if _is_key(x)]
    impls = {str(jax.random.key_impl(x)) for x in keys} | {default_generator()}
    if others := sorted(impls - {"threefry2x32"}):
        _warn_once(
            f"jax's generator {others[0]!r} draws other numbers on a virtual mesh than on devices, "
            'so dropout differs; "threefry2x32", jax\'s default, draws the same.'
        )


def _is_key(x: Any) -> bool:
    """Return whether an array holds typed PRNG keys."""
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def _stacked_raw_keys(model_state: PyTree) -> list[str]:
    """Return the names of raw keys in a train state's model state, one for each replica."""
    is_raw = [
        jnp.shape(x)[1:] in _RAW_KEYS and jnp.result_type(x) == jnp.uint32
        for x in jax.tree.leaves(model_state)
    ]
    return list(itertools.compress(leaf_names(model_state), is_raw)) if any(is_raw) else []


def replica_keys(seed: int, mesh: AnyMesh, axis_name: AxisName) -> jax.Array:
    """Return the data of a key per replica: the seed's key with the replica's index folded in."""
    bits = replicate_argument("seed", key_bits(seed), mesh=mesh, axis_name=axis_name)
    return _keys_fn(mesh, axis_name)(bits)


@functools.lru_cache(maxsize=64)
def _keys_fn(mesh: AnyMesh, axis_name: AxisName) -> Callable[[jax.Array], jax.Array]:
    def per_replica(bits: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(bits)
        return jax.random.key_data(jax.random.fold_in(key, jax.lax.axis_index(axis_name)))

    return jax.jit(map_replicas(per_replica, mesh=mesh, axis_name=axis_name, in_roles=("stacked",)))


# Hyperparameters.

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
        raise ValueError(
            f"set_hyperparams: `{name}` must be in one `optax.inject_hyperparams` state, found in "
            f"{len(owners)}; they have {names}. Of several assign to `.hyperparams` of one."
        )
    (owner,) = owners
    if name in getattr(owner, "hyperparams_states", {}):
        raise ValueError(
            f"set_hyperparams: `{name}` is a schedule: make the optimizer with a number."
        )
    if not isinstance(value, Tracer):
        dtype = np.asarray(value).dtype  # None has dtype object, and would become NaN
        if not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
            raise ValueError(f"set_hyperparams: `{name}` must be a number, got {value!r}.")
    whole = _shape(owner, owner.hyperparams[name])
    shapes = sorted({(), whole, whole[np.ndim(owner.count) :]}, key=len)
    if np.shape(value) not in shapes:
        raise ValueError(
            f"set_hyperparams: `{name}` must have a shape of {shapes}, got {np.shape(value)}."
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
