"""The mean of stacked replicas as one copy: `consensus`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.checks import checks_flags
from .._support.types import AxisName, PyTree
from ..tree import at_least_float32, form_matcher, in_model_form, leaf_names
from ._axes import axis_size, broadcast_from_first, sum_over
from ._meshes import AnyMesh, map_replicas, model_axes
from ._replicas import check_replica_axis, shard_replicas

Shares = Sequence[tuple[Any, PyTree | None]]
"""Pairs of weights (replicas,) and stacked parameters, or None for `params`; see `consensus`."""


@checks_flags("consensus")
def consensus(
    params: PyTree,
    *,
    mesh: AnyMesh | None = None,
    axis_name: AxisName = "replica",
    shares: Shares | None = None,
    whole: bool = True,
) -> PyTree:
    """Return the mean over replicas as one exact copy: the model to evaluate, export or save.

    For the state of a training step call `step.consensus(state)`, which knows the weights: gossip
    (`js.sgp`) converges to a weighted mean that also counts messages in flight. In your own loop
    take the weights from the state of the transform, `shares=sync.shares(sync_state)`; for
    transforms other than gossip these weigh all replicas equally.

    Args:
      params: stacked tree, leaves `(replicas, *s)`.
      mesh: mesh with `axis_name`, or a `VirtualMesh`. None (the default) is for arrays that hold
        one replica on each of their devices, as `jax.pmap` returns them, with several processes on
        all devices of each: the mean is over all replicas of all processes.
      axis_name: the replica axis, or several; ignored without `mesh`.
      shares: the terms of the mean: pairs (w, x), where w is an array (replicas,) of weights, or
        one number for all replicas, and x is a stacked tree like `params`, or None for `params`.
        The default, None, weighs all replicas equally.
      whole: whether to return parameters that are in the stages of a pipeline as the model's tree,
        whole on every stage. False leaves them in the buffers of their stages, for models that are
        larger than a device; the loss function of the pipeline takes these buffers, too.

    Returns:
      Tree of `s`, in the leaves' dtypes: sum w x / sum w over pairs and replicas, in at least
      float32, the same bits on all devices. Leaves of other dtypes (counters and PRNG keys in model
      state) are replica 0's.

    Raises:
      ValueError: unknown axis, leaves without the leading axis (all named), shares that are no
        such pairs, or without `mesh` leaves that do not hold one replica on each device (named).

    Communication: one all-reduce of the tree over `axis_name` per call (the compiler may merge the
      leaves), and with weights one of their sum, 4 bytes (8 for float64).
    """
    if mesh is None:
        if not jax.tree.leaves(params):
            return params
        mesh, axis_name, make_global = _infer_mesh(params)
        params = jax.tree.map(make_global, params)
        if shares is not None:
            shares = jax.tree.map(make_global, shares)
    replicas = check_replica_axis("consensus", params, mesh, axis_name)
    pairs = [(1.0, None)] if shares is None else _check_shares(shares, params, replicas)
    values = tuple(params if x is None else x for _, x in pairs)
    weights = None
    if len(pairs) > 1 or np.ndim(pairs[0][0]):
        weights = tuple(w if np.ndim(w) else np.full(replicas, w) for w, _ in pairs)
    placed = shard_replicas((weights, values), mesh, axis_name)
    mean = _consensus_fn(mesh, axis_name, model_axes(placed, mesh, axis_name))(*placed)
    return in_model_form(mean) if whole else mean


def _infer_mesh(params: PyTree) -> tuple[Mesh, str, Callable[[Any], Any]]:
    """Return a mesh and an axis for arrays that hold one replica on each device.

    `jax.pmap` over several processes returns to each of them an array of its own replicas. The
    function that is returned, too, makes it a part of an array over all devices.
    """
    own = [_replica_devices(x) for x in jax.tree.leaves(params)]
    devices = next(filter(None, own), None)
    names = zip(leaf_names(params), own, strict=True)
    wrong = [name for name, its in names if its is None or its != devices]
    if devices is None or wrong:  # the first is so only if all are wrong
        raise ValueError(
            "consensus: `mesh` must be given unless every leaf holds one replica on each of the "
            f"same devices, as jax.pmap returns it. Not so: {', '.join(wrong)}. "
            'For jax.vmap it is js.virtual_mesh({"replica": number of replicas}).'
        )
    is_local = all(d.process_index == jax.process_index() for d in devices)
    if jax.process_count() == 1 or not is_local:
        return Mesh(np.array(devices), "replica"), "replica", lambda x: x
    if set(devices) != set(jax.local_devices()):
        raise ValueError(
            "consensus: `mesh` must be given with several processes unless the replicas of each "
            f"are on all of its devices; process {jax.process_index()} has {len(devices)} on "
            f"{len(jax.local_devices())}."
        )
    mesh = Mesh(np.array(jax.devices()), "replica")
    sharding = NamedSharding(mesh, P("replica"))

    def make_global(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.ndim == 0:  # one weight for all replicas
            return x
        shape = (mesh.size, *x.shape[1:])
        parts = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    return mesh, "replica", make_global


def _replica_devices(x: Any) -> tuple[Any, ...] | None:
    """Return the device of each entry of a stacked array; None if not every device holds one."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or x.ndim == 0:
        return None
    entries = {
        index[0].start or 0: device
        for device, index in x.sharding.devices_indices_map(x.shape).items()
    }
    is_one_each = len(entries) == x.shape[0] == len(x.sharding.device_set)
    return tuple(entries[i] for i in sorted(entries)) if is_one_each else None


@functools.lru_cache(maxsize=64)
def _consensus_fn(mesh: AnyMesh, axis_name: AxisName, automatic: frozenset[str]):
    def per_replica(weights: tuple[jax.Array, ...] | None, values: tuple[PyTree, ...]) -> PyTree:
        @functools.cache
        def sum_of_weights(dtype: Any) -> Any:
            if weights is None:
                return axis_size(axis_name)
            total = functools.reduce(jnp.add, [w.astype(dtype) for w in weights])
            return sum_over(total, axis_name)

        def mean(*leaves: jax.Array) -> jax.Array:
            dtype = leaves[0].dtype
            if not jnp.issubdtype(dtype, jnp.floating):
                return broadcast_from_first(leaves[0], axis_name)
            wide = at_least_float32(dtype)
            terms = [x.astype(wide) for x in leaves]
            if weights is not None:
                terms = [w.astype(wide) * x for w, x in zip(weights, terms, strict=True)]
            total = sum_over(functools.reduce(jnp.add, terms), axis_name)
            return (total / sum_of_weights(wide)).astype(dtype)

        return jax.tree.map(mean, *values)

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


def _check_shares(shares: Shares, params: PyTree, replicas: int) -> list[tuple[Any, PyTree | None]]:
    """Return `shares` as a list of pairs; raise `ValueError` for an entry that is no such pair."""

    def error(got: str) -> ValueError:
        return ValueError(
            f"consensus: `shares` must be pairs of weights of shape ({replicas},), or one number, "
            "and of parameters like `params`, or None, as `sync.shares(state.exchange)` gives "
            f"them; got {got}."
        )

    if not isinstance(shares, Sequence) or not shares:
        raise error(f"{shares!r}")
    for number, pair in enumerate(shares):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise error(f"a {type(pair).__name__} as number {number}")
        weight, values = pair
        if np.shape(weight) not in ((), (replicas,)):
            raise error(f"weights of shape {np.shape(weight)} as number {number}")
        if values is not None and not form_matcher(params)(values):
            raise error(f"parameters of other names or shapes as number {number}")
    return list(shares)
