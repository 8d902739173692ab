"""`check_in_sync`: whether all replicas hold the same values, by fingerprints of their bits."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .._support.checks import as_number
from .._support.types import AxisName, PyTree, axis_names
from ..tree import at_least_float32, leaf_names
from ._axes import broadcast_from_first
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
