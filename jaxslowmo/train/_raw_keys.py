"""PRNG keys that a model keeps as pairs of uint32, as Keras and `jax.random.PRNGKey` do.

In a state they are typed keys: the type tells that each replica and device must have its own, that
none is averaged, and what a checkpoint hands to other replicas.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from .._support.types import PyTree
from ..tracing import FullLoss
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
