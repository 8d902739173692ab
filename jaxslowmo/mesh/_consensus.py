"""From stacked replicas to one copy: their mean."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._support.types import AxisName, PyTree
from ..tree import at_least_float32, in_model_form
from ._axes import axis_names, from_first
from ._meshes import AnyMesh, map_replicas, model_axes
from ._replicas import check_stacked, on_mesh

Shares = Sequence[tuple[Any, PyTree | None]]
"""Weights (replicas,) and stacked parameters, None for the replicas' own; see `consensus`."""


def consensus(
    params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
    shares: Shares | None = None,
    whole: bool = True,
) -> PyTree:
    """The mean over replicas as one exact copy: the model to evaluate, export or save.

    Of a training step's state take `step.consensus(state)`, which knows how replicas count: gossip
    (`js.sgp`) tends to a weighted mean in which what is on its way counts, too. In a loop of your
    own its state tells the weights, `shares=sync.shares(sync_state)`; other transforms say there
    that all replicas count alike.

    Args:
      params: stacked tree, leaves `(replicas, *s)`.
      mesh: mesh with `axis_name`, or a `VirtualMesh`.
      axis_name: the replica axis, or several.
      shares: what the mean consists of: pairs (w, x) of weights (replicas,), or one number for all,
        and a stacked tree like `params`, or None for `params`. None: all replicas alike.
      whole: give parameters that lie in the stages of a pipeline back as the model's own tree,
        whole on every stage. False leaves them in the buffers of their stages, which the loss
        function of the pipeline takes, too: for models that are larger than a device.

    Returns:
      Tree of `s`, in the leaves' dtypes: sum w x / sum w over pairs and replicas, in at least
      float32, the same bits on all devices. Leaves of other dtypes (counters and PRNG keys in model
      state) are replica 0's.

    Raises:
      ValueError: unknown axis, leaves without the leading axis (all named), or shares that are no
        such pairs.

    Communication: one all-reduce of the tree over `axis_name` per call (the compiler may merge the
      leaves); where replicas weigh one of the weights too, 4 bytes, 8 for float64.
    """
    replicas = check_stacked("consensus", params, mesh, axis_name)
    pairs = [(1.0, None)] if shares is None else _checked(shares, params, replicas)
    values = tuple(params if x is None else x for _, x in pairs)
    weights = None
    if len(pairs) > 1 or np.ndim(pairs[0][0]):
        weights = tuple(w if np.ndim(w) else np.full(replicas, w) for w, _ in pairs)
    placed = on_mesh((weights, values), mesh, axis_name)
    mean = _consensus_fn(mesh, axis_name, model_axes(placed, mesh, axis_name))(*placed)
    return in_model_form(mean) if whole else mean


@functools.lru_cache(maxsize=64)
def _consensus_fn(mesh: AnyMesh, axis_name: AxisName, automatic: frozenset[str]):
    is_alone = math.prod(mesh.shape[name] for name in axis_names(axis_name)) == 1

    def total(x: jax.Array) -> jax.Array:
        return x if is_alone else lax.psum(x, axis_name)

    def first(x: jax.Array) -> jax.Array:
        return x if is_alone else from_first(x, axis_name)

    def plain(x: jax.Array) -> jax.Array:
        if is_alone or not jnp.issubdtype(x.dtype, jnp.floating):
            return first(x)
        wide = x.astype(at_least_float32(x.dtype))
        return (total(wide) / lax.axis_size(axis_name)).astype(x.dtype)

    def per_replica(weights: tuple[jax.Array, ...] | None, values: tuple[PyTree, ...]) -> PyTree:
        if weights is None:
            return jax.tree.map(plain, values[0])

        @functools.cache
        def of_all(dtype: Any) -> jax.Array:
            return total(functools.reduce(jnp.add, [w.astype(dtype) for w in weights]))

        def weighted(*parts: jax.Array) -> jax.Array:
            own = parts[0]
            if not jnp.issubdtype(own.dtype, jnp.floating):
                return first(own)
            wide = at_least_float32(own.dtype)
            terms = zip(weights, parts, strict=True)
            masses = [w.astype(wide) * x.astype(wide) for w, x in terms]
            return (total(functools.reduce(jnp.add, masses)) / of_all(wide)).astype(own.dtype)

        return jax.tree.map(weighted, *values)

    if is_alone:
        # XLA refuses a sum over a manual axis of size 1 where leaves lie over automatic ones.
        return jax.jit(lambda *stacked: per_replica(*jax.tree.map(lambda x: x[0], stacked)))
    return jax.jit(
        map_replicas(
            per_replica,
            mesh=mesh,
            axis_name=axis_name,
            in_roles=("stacked", "stacked"),
            out_roles="shared",
            automatic=automatic,
        )
    )


def _checked(shares: Shares, params: PyTree, replicas: int) -> list[tuple[Any, PyTree | None]]:
    """`shares` as a list of pairs; `ValueError` for what is none."""

    def refused(what: str) -> ValueError:
        return ValueError(
            f"consensus: `shares` must be pairs of weights of shape ({replicas},), or one number, "
            "and of parameters like `params`, or None, as `sync.shares(state.opt_state[-1])` gives "
            f"them; got {what}."
        )

    if not isinstance(shares, Sequence) or not shares:
        raise refused(f"{shares!r}")
    for number, pair in enumerate(shares):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise refused(f"a {type(pair).__name__} as number {number}")
        weight, values = pair
        if np.shape(weight) not in ((), (replicas,)):
            raise refused(f"weights of shape {np.shape(weight)} as number {number}")
        if values is not None and _shapes(values) != _shapes(params):
            raise refused(f"parameters of other names or shapes as number {number}")
    return list(shares)


def _shapes(tree: PyTree) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *map(np.shape, leaves)
