"""Stacked replicas as one model: whether they are equal, by fingerprints; and their mean."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.checks import as_number, checks_flags
from .._support.types import AxisName, PyTree, axis_names
from ..tree import at_least_float32, form_matcher, in_model_form, leaf_names
from ._axes import axis_size, broadcast_from_first, sum_over
from ._meshes import AnyMesh, map_replicas, model_axes, placement
from ._replicas import check_replica_axis, shard_replicas

_SEEDS = (0x9E3779B9, 0x7F4A7C15)


def bit_words(x: Any, numpy: Any = jnp) -> Any:
    """Return the bits of `x`, of any dtype, as uint32 of the shape of `x` and an axis of words.

    Args:
      x: an array of jax, or of the host.
      numpy: `jax.numpy`, or NumPy for arrays of the host.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = bit_words(x.real, numpy), bit_words(x.imag, numpy)
        return numpy.concatenate(parts, -1)
    if x.dtype != jnp.bool_:
        kind = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
        bits = kind(x.dtype).bits
        x = x.astype(numpy.float32) if bits < 8 else x  # float32 holds all values of these
        words = {8: numpy.uint8, 16: numpy.uint16}.get(bits, numpy.uint32)
        return x[..., None].view(words).astype(numpy.uint32)
    return x[..., None].astype(numpy.uint32)


def fingerprint(x: Any, numpy: Any = jnp, first: int = 0) -> Any:
    """Return a (2,) uint32 fingerprint of `x`, equal for equal bits.

    It is the sum over all words of a hash of word and position, with two seeds. At one position the
    hash is one-to-one, so arrays that differ in one word always differ in both sums. Arrays that
    differ in more words agree in both sums with a chance of about 2**-64. It does not depend on
    layouts, and sums of the parts of an array are that of the array.

    Args:
      x: an array of jax, or of the host.
      numpy: `jax.numpy`, or NumPy for arrays of the host.
      first: index of the first element, where `x` is a part of a flat array.

    Communication: none; for an array sharded over automatic axes, an all-reduce of 8 bytes there.
    """
    words = bit_words(x, numpy)
    uint = numpy.uint32
    position = numpy.full((1,) * words.ndim, first * words.shape[-1] % 2**32, uint)
    for axis, size in enumerate(words.shape):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        offset = numpy.arange(size, dtype=uint) * uint(stride)
        position = position + offset.reshape([size if i == axis else 1 for i in range(words.ndim)])
    sums = [numpy.sum(_hash(words ^ _hash(position + uint(seed), uint), uint)) for seed in _SEEDS]
    return numpy.stack(sums).astype(uint)


def _hash(x: Any, uint: Any) -> Any:
    """Return a hash of uint32 that is one-to-one (the last steps of MurmurHash3)."""
    x = (x ^ (x >> uint(16))) * uint(0x85EBCA6B)
    x = (x ^ (x >> uint(13))) * uint(0xC2B2AE35)
    return x ^ (x >> uint(16))


class Divergence(NamedTuple):
    """One leaf of one replica that differs from replica 0's.

    Attributes:
      leaf: name of the leaf.
      replica: number of the replica.
      difference: largest absolute difference; inf if a NaN or an infinity differs from the value in
        replica 0, 0 if only signs of zeros or bits of NaNs differ.
      elements: number of elements whose bits differ.
      size: number of elements of the leaf.
      device: position inside the replica, along the inner axes of the mesh; 0 without any.
    """

    leaf: str
    replica: int
    difference: float
    elements: int
    size: int
    device: int

    def __str__(self) -> str:
        inside = f" (device {self.device})" if self.device else ""
        many = f"{self.elements} of {self.size} elements"
        return f"replica {self.replica}{inside} by {self.difference:.6g} in {many}"


class SyncReport(NamedTuple):
    """The result of `js.check_in_sync` if all differences are within the tolerance.

    Attributes:
      num_leaves: number of leaves that were compared.
      num_replicas: number of replicas that were compared.
      divergences: the differences, all within the tolerance; empty if all bits are equal.
    """

    num_leaves: int
    num_replicas: int
    divergences: tuple[Divergence, ...]


class OutOfSyncError(ValueError):
    """Raised by `js.check_in_sync` if replicas hold different values.

    Attributes:
      divergences: a `Divergence` for every leaf and replica beyond the tolerance.
      tolerance: the largest difference that was accepted.
    """

    def __init__(self, divergences: tuple[Divergence, ...], tolerance: float) -> None:
        self.divergences, self.tolerance = divergences, tolerance
        by_leaf: dict[str, list[str]] = {}
        for divergence in divergences:
            by_leaf.setdefault(divergence.leaf, []).append(str(divergence))
        listed = "; ".join(f"{leaf}: {', '.join(lines)}" for leaf, lines in by_leaf.items())
        within = f" by more than {tolerance:g}" if tolerance else ""
        super().__init__(
            f"check_in_sync: {len(by_leaf)} leaves differ from replica 0{within} (largest absolute "
            f"difference): {listed}."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle rebuilds an exception from `args` by default, and these hold only the message.
        return type(self), (self.divergences, self.tolerance), self.__dict__


def check_in_sync(
    params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
    tolerance: float = 0.0,
) -> SyncReport:
    """Check that all replicas hold the same values; name the leaves and replicas that do not.

    Use it for `state.params`, or any other stacked tree, when replicas should be equal: after a
    synchronisation, or under plain data parallelism. With several processes all must call it, and
    all get the same report or error.

    Without a tolerance bits are compared, so equal NaNs are equal and 0.0 and -0.0 are not. The
    comparison uses fingerprints of 64 bits: a difference in a single element is always found, and
    others are missed with a chance of about 2**-64.

    Args:
      params: stacked tree, leaves `(replicas, *s)` of any dtypes.
      mesh: mesh with `axis_name`, or a `VirtualMesh`. The copies that devices along its other axes
        hold are compared too, except along axes over which some leaf is sharded.
      axis_name: the replica axis, or several.
      tolerance: largest absolute difference to replica 0 that is accepted, in floating leaves;
        others must be equal. NaN is accepted where replica 0 has one.

    Returns:
      A `SyncReport` with the differences within the tolerance.

    Raises:
      OutOfSyncError: (a `ValueError`) values differ; lists every leaf and replica, with the largest
        difference.
      ValueError: leaves without the leading axis, or a negative tolerance.

    Example:
      >>> import jax.numpy as jnp, jaxslowmo as js
      >>> params = {"w": jnp.ones((2, 3)).at[1, 2].set(1.5)}
      >>> check_in_sync(params, mesh=js.virtual_mesh({"replica": 2}), tolerance=1.0).divergences[0]
      Divergence(leaf='w', replica=1, difference=0.5, elements=1, size=3, device=0)

    Communication: one all-reduce of 8 bytes per leaf and device over all devices that are compared.
      If fingerprints differ, also one all-reduce of each such leaf (replica 0's values) and one of
      8 bytes per such leaf and device.
    """
    number = as_number(tolerance)
    if number is None or number < 0:
        raise ValueError(
            f"check_in_sync: `tolerance` must be a finite number >= 0, got {tolerance!r}."
        )
    replicas = check_replica_axis("check_in_sync", params, mesh, axis_name)
    names, leaves = leaf_names(params), jax.tree.leaves(params)
    if not leaves:
        return SyncReport(0, replicas, ())
    placed = shard_replicas(leaves, mesh, axis_name)
    automatic = model_axes(placed, mesh, axis_name)
    prints = jax.device_get(comparison_program(fingerprints, mesh, axis_name, automatic)(placed))
    differ = np.any(prints != prints[0], axis=-1)  # (devices, leaves)
    suspects = np.flatnonzero(differ.any(0)).tolist()
    if not suspects:
        return SyncReport(len(names), replicas, ())
    compared = comparison_program(leaf_differences, mesh, axis_name, automatic)
    results = compared([placed[i] for i in suspects])
    largest, counts = jax.device_get(results)
    devices_each = len(prints) // replicas
    divergences = tuple(
        Divergence(
            leaf=names[i],
            replica=position // devices_each,
            difference=float(largest[position, column]),
            elements=int(counts[position, column]),
            size=math.prod(placed[i].shape[1:]),
            device=position % devices_each,
        )
        for column, i in enumerate(suspects)
        for position in np.flatnonzero(differ[:, i]).tolist()
    )
    kinds = zip(names, leaves, strict=True)
    exact = {name for name, x in kinds if not jnp.issubdtype(x.dtype, jnp.floating)}
    limit = number or -1.0  # without a tolerance bits are compared
    if beyond := tuple(d for d in divergences if d.leaf in exact or d.difference > limit):
        raise OutOfSyncError(beyond, tolerance)
    return SyncReport(len(names), replicas, divergences)


def _all_gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Gather `x` of every position along `axes` to all, as `(positions, *x.shape)`."""
    every = jnp.zeros((lax.axis_size(axes), *x.shape), x.dtype)
    return lax.psum(every.at[lax.axis_index(axes)].set(x), axes)


def fingerprints(leaves: list[jax.Array], axes: tuple[str, ...]) -> jax.Array:
    """Return the fingerprints of all leaves of each position along `axes`, on all of them."""
    return _all_gather(jnp.stack([fingerprint(x) for x in leaves]), axes)


def leaf_differences(leaves: list[jax.Array], axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Return for all positions along `axes` and leaves how far and how often they differ.

    The first is the largest absolute difference from the first position, the second the number of
    elements whose bits differ; both `(positions, leaves)`.
    """

    def one(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = _broadcast_bits(x, axes)
        words, first_words = bit_words(x), bit_words(first)
        unequal = words != first_words
        unequal = jnp.any(unequal, axis=tuple(range(x.ndim, words.ndim)))
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            errors = jnp.where(unequal, jnp.inf, 0.0)
        else:
            errors = _absolute_differences(x, first)
        return jnp.max(errors, initial=0.0).astype(jnp.float32), jnp.sum(unequal, dtype=jnp.int32)

    largest, counts = zip(*map(one, leaves), strict=True)
    return _all_gather(jnp.stack(largest), axes), _all_gather(jnp.stack(counts), axes)


def _broadcast_bits(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return what `broadcast_from_first` does, with signs of zeros and bits of NaNs."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(_broadcast_bits(x.real, axes), _broadcast_bits(x.imag, axes))
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.finfo(x.dtype).bits < 8:
        return broadcast_from_first(x, axes)
    bits = lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    return lax.bitcast_convert_type(broadcast_from_first(bits, axes), x.dtype)


def _absolute_differences(x: jax.Array, first: jax.Array) -> jax.Array:
    """Return |x - first| by element: 0 for two NaNs, inf where the difference is NaN."""
    wide = at_least_float32(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.float32
    same = (x == first) | ((x != x) & (first != first))
    difference = jnp.abs(x.astype(wide) - first.astype(wide))
    difference = jnp.where(difference == difference, difference, jnp.inf)
    return jnp.where(same, jnp.zeros_like(difference), difference)


@functools.lru_cache(maxsize=64)
def comparison_program(
    compare: Callable[[list[jax.Array], tuple[str, ...]], Any],
    mesh: AnyMesh,
    axis_name: AxisName,
    automatic: frozenset[str],
) -> Any:
    """Return the program of `compare(leaves, axes)`, `fingerprints` or `leaf_differences`.

    `axes` are those of the replicas, then those inside a replica along which devices hold copies.
    """
    replicas = axis_names(axis_name)
    inner = (a for a in mesh.axis_names if a not in replicas and a not in automatic)
    axes = (*replicas, *inner)
    mapped = map_replicas(
        lambda leaves: compare(leaves, axes),
        mesh=mesh,
        axis_name=axis_name,
        in_roles=("stacked",),
        out_roles="shared",
        automatic=automatic,
    )
    # The results must be whole on every device, along automatic axes too: each process reads them.
    return jax.jit(mapped, out_shardings=placement(mesh, P()))


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
            "consensus: `mesh` must be given unless each leaf holds one replica on each of "
            f"the same devices, as jax.pmap returns it; not so {', '.join(wrong)}."
        )
    is_local = all(d.process_index == jax.process_index() for d in devices)
    if jax.process_count() == 1 or not is_local:
        return Mesh(np.array(devices), "replica"), "replica", lambda x: x
    if set(devices) != set(jax.local_devices()):
        raise ValueError(
            "consensus: `mesh` must be given unless replicas are on all devices of each process, "
            f"got {len(devices)} on {len(jax.local_devices())} of process {jax.process_index()}."
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

    def is_share(x: Any) -> bool:
        if not isinstance(x, tuple) or len(x) != 2 or np.shape(x[0]) not in ((), (replicas,)):
            return False
        return x[1] is None or form_matcher(params)(x[1])

    is_sequence = isinstance(shares, Sequence) and len(shares) > 0
    wrong = [i for i, x in enumerate(shares) if not is_share(x)] if is_sequence else []
    if wrong or not is_sequence:
        got = (
            f"as number {wrong[0]} {jax.tree.map(np.shape, shares[wrong[0]])}" if wrong else shares
        )
        raise ValueError(
            f"consensus: `shares` must be pairs of weights, a number or ({replicas},), and of "
            f"parameters like `params`, or None, as `sync.shares(...)` gives them; got {got}."
        )
    return list(shares)
