"""The state of a run."""

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from .._support.checks import warn_once, warn_user
from .._support.types import AxisName, PyTree
from ..mesh import (
    AnyMesh,
    VirtualMesh,
    default_generator,
    key_bits,
    map_replicas,
    own_keys,
    replicate,
    replicate_as,
)
from ..transform import init
from ..tree import leaf_names
from ._typed_keys import is_key, is_raw_key

_warn_once = warn_once()


class StateLayout(NamedTuple):
    """The layout of a step's states: how leaves of parameters are sharded inside a replica.

    Attributes:
      mesh: the step's mesh.
      axis_name: the step's replica axis.
      axes: the axes over which some leaf is sharded; the compiler handles them.
      specs: a `PartitionSpec` per leaf over these axes; None if there are no such axes.
      key: a hashable form of `specs`; two layouts with equal keys are equal.
      inner_axes: axes inside a replica over which its batch is split.
      data_axes: all axes over which a batch is split, replica axes first.
      model: hashable types of the parameters, where the events of `sync` depend on them; else None.
      table_rows: the number of rows of each embedding table, which its array, with padding, does
        not show; None without tables.
    """

    mesh: AnyMesh
    axis_name: AxisName
    axes: frozenset[str]
    specs: PyTree | None
    key: Hashable
    inner_axes: tuple[str, ...]
    data_axes: tuple[str, ...]
    model: Hashable = None
    table_rows: Mapping[str, int] | None = None


class _Fields(NamedTuple):
    step: jax.Array
    params: PyTree
    opt_state: PyTree
    model_state: PyTree
    rng: jax.Array


class TrainState(_Fields):
    """The state of a run; every leaf has a leading axis of replicas.

    Attributes:
      step: (replicas,) int32, updates so far; equal on all replicas.
      params: leaves (replicas, *s); differ between replicas unless they were just synchronised.
      opt_state: states of gradient transform, optimizer and parameter transform, as in
        `optax.chain(gradients, optimizer, sync)`.
      model_state: what the loss function carries from step to step, such as BatchNorm statistics;
        {} without any. PRNG keys in it differ between replicas.
      rng: (replicas, words) uint32, the data of a PRNG key of jax's default implementation for each
        replica (`jax.random.wrap_key_data` makes keys of it), different on every replica. It is
        plain data, so that any library that saves trees of arrays saves a `TrainState`.
    """

    # Of the step that returned this object, which knows it by this; a copy by `_replace` lacks it.
    known_layout: StateLayout | None = None

    def __getstate__(self) -> None:
        """Return None, so that copies and pickles hold the fields alone."""
        return None

    @classmethod
    def create(
        cls,
        params: PyTree,
        tx: optax.GradientTransformation,
        *,
        mesh: AnyMesh,
        axis_name: AxisName = "replica",
        model_state: PyTree | None = None,
        seed: int = 0,
    ) -> "TrainState":
        """Start all replicas from one copy of the parameters.

        Args:
          params: one copy, leaves of shape `s`.
          tx: the whole chain, `step.tx` of a step made by `make_train_step`.
          mesh: mesh with `axis_name`, or a `VirtualMesh`.
          axis_name: the replica axis.
          model_state: one copy of the model state; None means {}. Typed PRNG keys in it, such as
            those of nnx.Dropout, are made different on every replica; replica 0 keeps the values
            passed here. Raw keys (`jax.random.PRNGKey`) cause a warning.
          seed: seed of the replicas' PRNG keys.

        Returns:
          A `TrainState` on the devices of `mesh`; none of its arrays is an alias of `params`.

        Raises:
          ValueError: as `js.replicate` and `js.init`.

        Communication: none between replicas.
        """
        stacked = replicate(params, mesh=mesh, axis_name=axis_name)
        return started(
            stacked, tx, mesh=mesh, axis_name=axis_name, model_state=model_state, seed=seed
        )


def updates_of(state: Any) -> int:
    """Return the updates that a state counts, which waits for it; 0 if it is no `TrainState`."""
    if not isinstance(state, TrainState):
        return 0
    count = state.step
    local = count.addressable_data(0) if isinstance(count, jax.Array) else count
    return int(np.ravel(jax.device_get(local))[0])


def started(
    stacked: PyTree,
    tx: optax.GradientTransformation,
    *,
    mesh: AnyMesh,
    axis_name: AxisName,
    model_state: PyTree | None,
    seed: int,
) -> TrainState:
    """Return a state before its first update, from parameters that are stacked already.

    Communication: none between replicas.
    """
    one_state = {} if model_state is None else model_state
    if isinstance(mesh, VirtualMesh):
        _warn_of_rbg(one_state)
    return TrainState(
        step=replicate(jax.device_put(np.int32(0)), mesh=mesh, axis_name=axis_name),
        params=stacked,
        opt_state=init(tx, stacked, mesh=mesh, axis_name=axis_name),
        model_state=_with_own_keys(
            replicate_as("model_state", one_state, mesh=mesh, axis_name=axis_name), mesh, axis_name
        ),
        rng=_replica_keys(seed, mesh, axis_name),
    )


def _with_own_keys(stacked: PyTree, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
    """Return stacked model state with different keys per replica, else all drop the same units."""
    leaves, structure = jax.tree.flatten(stacked)
    # A raw key of `jax.random.PRNGKey` cannot be distinguished from other uint32 data: warn only.
    raw = _stacked_raw_keys(stacked)
    if raw and leaves[0].shape[0] > 1:
        warn_user(
            f"`model_state`: {', '.join(raw)} looks like a PRNG key without a type, and would be "
            "the same on all replicas, so that all draw the same. With js.typed_keys(loss_fn), or "
            "as keys of jax.random.key or jax.random.wrap_key_data, they become each replica's "
            "own. If it is none, nothing is wrong."
        )
    places = [i for i, x in enumerate(leaves) if is_key(x)]
    if places:
        split_keys = map_replicas(
            lambda keys: own_keys(keys, axis_name),
            mesh=mesh,
            axis_name=axis_name,
            in_roles=("stacked",),
        )
        for i, keys in zip(places, jax.jit(split_keys)([leaves[i] for i in places]), strict=True):
            leaves[i] = keys
    return structure.unflatten(leaves)


def _warn_of_rbg(model_state: PyTree) -> None:
    """Warn where replicas under `vmap` draw other numbers than on devices of their own."""
    keys = [x for x in jax.tree.leaves(model_state) if is_key(x)]
    impls = {str(jax.random.key_impl(x)) for x in keys} | {default_generator()}
    if found := sorted(impls - {"threefry2x32"}):
        _warn_once(
            f"jax's generator {found[0]!r} draws other numbers under `vmap`, in which a virtual "
            "mesh runs its replicas, than on devices, so dropout differs from that of a "
            'js.make_mesh. With "threefry2x32", jax\'s default, both are equal.'
        )


def _stacked_raw_keys(model_state: PyTree) -> list[str]:
    """Return the names of raw keys in a train state's model state, one for each replica."""
    is_raw = [is_raw_key(x, stacked=True) for x in jax.tree.leaves(model_state)]
    return list(itertools.compress(leaf_names(model_state), is_raw)) if any(is_raw) else []


def _replica_keys(seed: int, mesh: AnyMesh, axis_name: AxisName) -> jax.Array:
    """Return the data of a key per replica: the seed's key with the replica's index folded in."""
    bits = replicate_as("seed", key_bits(seed), mesh=mesh, axis_name=axis_name)
    return _keys_fn(mesh, axis_name)(bits)


@functools.lru_cache(maxsize=64)
def _keys_fn(mesh: AnyMesh, axis_name: AxisName) -> Callable[[jax.Array], jax.Array]:
    def per_replica(bits: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(bits)
        return jax.random.key_data(jax.random.fold_in(key, jax.lax.axis_index(axis_name)))

    return jax.jit(map_replicas(per_replica, mesh=mesh, axis_name=axis_name, in_roles=("stacked",)))
