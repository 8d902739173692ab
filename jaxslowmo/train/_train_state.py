"""Everything that a run is, and PRNG keys that a model keeps as pairs of uint32.

Keras and `jax.random.PRNGKey` make such pairs. In a state they are typed keys: the type tells that
each replica and device must have its own, that none is averaged, and what a checkpoint hands to
other replicas.
"""

import functools
import itertools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._support.checks import warn_user
from .._support.types import AxisName, PyTree
from ..mesh import AnyMesh, map_replicas, own_keys, replicate
from ..tracing import FullLoss
from ..transform import init
from ..tree import leaf_names

_IMPL = "threefry2x32"  # the one whose keys are two numbers, whatever the default is


def looks_like_raw_key(x: Any) -> bool:
    """Return whether `x` has the dtype and the shape, one replica's, of a key without a type."""
    return jnp.shape(x) == (2,) and jnp.result_type(x) == jnp.uint32


def typed_keys(model_state: PyTree) -> PyTree:
    """Return `model_state` with a typed key in place of every uint32 leaf of shape (2,)."""
    return jax.tree.map(lambda x: _typed(x) if looks_like_raw_key(x) else x, model_state)


def stacked_raw_keys(model_state: PyTree) -> list[str]:
    """Return the names of raw keys in a train state's model state, one for each replica."""
    is_raw = [x.shape[1:] == (2,) and x.dtype == jnp.uint32 for x in jax.tree.leaves(model_state)]
    return list(itertools.compress(leaf_names(model_state), is_raw)) if any(is_raw) else []


def refuse_raw_keys(model_state: PyTree) -> None:
    """Raise `ValueError` where a train state's stacked model state still holds a raw key."""
    if names := stacked_raw_keys(model_state):
        raise ValueError(
            "`state`: with `raw_keys`=True keys in its `model_state` must be typed, and "
            f"{names[0]} is uint32[2] for each replica, with which all replicas draw alike: make "
            "the state with step.init of this step."
        )


def with_raw_keys(loss: FullLoss) -> FullLoss:
    """Return a loss function of typed keys in its model state, from one of pairs of uint32."""

    def typed_loss(params: PyTree, batch: PyTree, *, model_state: PyTree, **extra: Any) -> Any:
        raw = jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, model_state)
        value, (metrics, new) = loss(params, batch, model_state=raw, **extra)
        if jax.tree.structure(new) == jax.tree.structure(raw):  # else the step says what is wrong
            leaves = zip(leaf_names(new), *map(jax.tree.leaves, (new, model_state)), strict=True)
            new = jax.tree.structure(new).unflatten([_as_before(*leaf) for leaf in leaves])
        return value, (metrics, new)

    return typed_loss


def _as_before(name: str, x: Any, old: Any) -> Any:
    """Return `x`, as a typed key where `old` is one; raise `ValueError` where it is none."""
    if not _is_key(old) or (isinstance(x, jax.Array) and _is_key(x)):
        return x
    if not looks_like_raw_key(x):
        shape = ",".join(map(str, jnp.shape(x)))
        raise ValueError(
            f"`loss_fn` must return a key in place of the key {name} of `model_state`, as uint32[2]"
            f" or typed, got {jnp.result_type(x)}[{shape}]."
        )
    return _typed(x)


def _typed(x: Any) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(x), impl=_IMPL)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


class StateLayout(NamedTuple):
    """How parameters lie inside a replica.

    Attributes:
      axes: those over which some leaf is sharded; the compiler handles them.
      specs: a `PartitionSpec` per leaf over these axes; None where there are none.
      key: what tells layouts apart.
      inner_axes: axes inside a replica between whose devices its batch is split.
      data_axes: all axes over which a batch is split, replicas first.
    """

    axes: frozenset[str]
    specs: PyTree | None
    key: Hashable
    inner_axes: tuple[str, ...]
    data_axes: tuple[str, ...]


class KnownLayout(NamedTuple):
    """Where the state that a step returned lies, so that the next step need not look at its leaves.

    Attributes:
      mesh: of the step.
      axis_name: of the step.
      layout: of the parameters.
      shards: a `PartitionSpec` per leaf of the parameters (or a prefix of the tree), by which
        `sync` has cut what it keeps in shards; None: it has not.
    """

    mesh: AnyMesh
    axis_name: AxisName
    layout: StateLayout
    shards: PyTree | None = None


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
      rng: (replicas,) PRNG keys, different on every replica.
    """

    # Known of this very state, of no copy with other fields: `_replace` makes one without.
    known_layout: KnownLayout | None = None
    made_by: Any = None  # a reference to the runner of the step that returned it

    def __getstate__(self) -> None:
        """Copies and pickles hold the fields alone."""
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
          model_state: one copy of the model state; None is {}. Typed PRNG keys in it, such as those
            of nnx.Dropout, become each replica's own; replica 0 keeps those given. Of keys without
            a type (`jax.random.PRNGKey`) it warns.
          seed: of the replicas' PRNG keys.

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


def started(
    stacked: PyTree,
    tx: optax.GradientTransformation,
    *,
    mesh: AnyMesh,
    axis_name: AxisName,
    model_state: PyTree | None,
    seed: int,
) -> TrainState:
    """A state before its first update, of parameters that are stacked already.

    Communication: none between replicas.
    """
    one_state = {} if model_state is None else model_state
    return TrainState(
        step=replicate(jnp.zeros([], jnp.int32), mesh=mesh, axis_name=axis_name),
        params=stacked,
        opt_state=init(tx, stacked, mesh=mesh, axis_name=axis_name),
        model_state=_with_own_keys(
            replicate(one_state, mesh=mesh, axis_name=axis_name), mesh, axis_name
        ),
        rng=_replica_keys(seed, mesh, axis_name),
    )


def _with_own_keys(stacked: PyTree, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
    """Keys in stacked model state as each replica's own: else all would drop the same units."""
    leaves, structure = jax.tree.flatten(stacked)
    # What `jax.random.PRNGKey` makes has no type that tells.
    raw = stacked_raw_keys(stacked)
    if raw and leaves[0].shape[0] > 1:
        warn_user(
            f"`model_state`: {', '.join(raw)} looks like a PRNG key without a type, and would be "
            "the same on all replicas, so that all draw alike. With "
            "js.make_train_step(raw_keys=True), or as keys of jax.random.key or "
            "jax.random.wrap_key_data, they become each replica's own. If it is none, nothing is "
            "wrong."
        )
    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    if places:
        own = map_replicas(
            lambda keys: own_keys(keys, axis_name),
            mesh=mesh,
            axis_name=axis_name,
            in_roles=("stacked",),
        )
        for i, keys in zip(places, jax.jit(own)([leaves[i] for i in places]), strict=True):
            leaves[i] = keys
    return structure.unflatten(leaves)


def _replica_keys(seed: int, mesh: AnyMesh, axis_name: AxisName) -> jax.Array:
    """A key per replica: the seed's key with the replica's index folded in."""
    bits = jax.random.key_data(jax.random.key(seed))
    return _keys_fn(mesh, axis_name)(replicate(bits, mesh=mesh, axis_name=axis_name))


@functools.lru_cache(maxsize=64)
def _keys_fn(mesh: AnyMesh, axis_name: AxisName) -> Callable[[jax.Array], jax.Array]:
    def per_replica(bits: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(bits)
        return jax.random.fold_in(key, jax.lax.axis_index(axis_name))

    return jax.jit(map_replicas(per_replica, mesh=mesh, axis_name=axis_name, in_roles=("stacked",)))
