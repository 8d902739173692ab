"""Arithmetic of leaves, by a primitive each, and updates that land on given parameters.

While a program is traced `jax.numpy` takes two to four times as long for the same equation: it
looks for promotion, broadcasting and NumPy's other rules, which leaves of one shape and dtype do
not need. NumPy arrays stay NumPy arrays.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from .._support.types import PyTree
from ._leaves import at_least_float32


def cast(x: Any, dtype: Any) -> Any:
    """`x.astype(dtype)`."""
    if not isinstance(x, jax.Array):
        return x.astype(dtype)
    if x.dtype == dtype and not jax.typeof(x).weak_type:
        return x
    return lax.convert_element_type(x, dtype)


def added(x: Any, y: Any) -> Any:
    """`x + y`."""
    return lax.add(x, y) if _are_alike(x, y) else x + y


def subtracted(x: Any, y: Any) -> Any:
    """`x - y`."""
    return lax.sub(x, y) if _are_alike(x, y) else x - y


def by_dtype(scalar: jax.Array) -> Callable[[Any], jax.Array]:
    """`scalar` in a given dtype, cast once for each."""
    return functools.cache(lambda dtype: cast(scalar, dtype))


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """`x.reshape(shape)`, for sizes that are all given."""
    return lax.reshape(x, shape) if isinstance(x, jax.Array) else x.reshape(shape)


_FEW = 32  # parts that the compiler may make a kernel of each


def split(flat: Any, sizes: Sequence[int]) -> list[Any]:
    """Parts of these sizes, one behind the other; what is left at the end is dropped."""
    if not isinstance(flat, jax.Array):
        ends = itertools.accumulate(sizes)
        return [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    if len(sizes) > _FEW and _compiles_each_offset(flat):
        return _split_at_unknown(flat, tuple(sizes))
    return _split_at_constants(flat, sizes)


def _split_at_constants(flat: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    rest = flat.size - sum(sizes)
    if len(sizes) == 1 and not rest:
        return [flat]
    # One equation, which becomes a slice per part when it is lowered.
    return list(lax.split(flat, (*sizes, rest) if rest else sizes))[: len(sizes)]


def _compiles_each_offset(flat: jax.Array) -> bool:
    """Whether a slice at a constant would be a kernel of its own, as in XLA's compiler for CPUs."""
    mesh = jax.sharding.get_abstract_mesh()
    device = mesh.abstract_device
    # On one device nothing is exchanged: slices of a concatenation are its operands again.
    several = bool(mesh.manual_axes) and mesh.size > 1
    return several and device is not None and device.platform == "cpu" and flat.size < 2**31


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _split_at_unknown(flat: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Parts at offsets that the compiler does not know, so that parts of one size share a kernel.

    Compiled 15 ms apiece, the slices of 250 leaves at constants would take longer than all the
    rest. A barrier is forgotten too soon (jax 0.10), and an offset that is read from an array is
    read at a constant; what a conditional returns stays an operand of each slice.
    """
    ends = itertools.accumulate(sizes)
    starts = [np.int32(end - size) for end, size in zip(ends, sizes, strict=True)]
    place = lax.axis_index(jax.sharding.get_abstract_mesh().manual_axes)
    offsets = lax.cond(place >= 0, lambda: starts, lambda: [np.int32(0) for _ in starts])
    return [
        lax.dynamic_slice(flat, (offset,), (size,), allow_negative_indices=False)
        for offset, size in zip(offsets, sizes, strict=True)
    ]


@_split_at_unknown.defjvp
def _parts_of_tangent(
    sizes: tuple[int, ...], primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    # Backwards it is one concatenation; of a slice at an offset it would be a whole buffer.
    return _split_at_unknown(*primals, sizes), _split_at_constants(*tangents, sizes)


def zeros_like(x: Any) -> jax.Array:
    """`jnp.zeros_like(x)` of an array or type; traced, it is equal over all mapped axes by type."""
    if isinstance(x, core.Tracer):
        x = jax.typeof(x)
    elif not isinstance(x, jax.ShapeDtypeStruct):
        return jnp.zeros_like(x)
    return lax.broadcast(np.zeros([], x.dtype), x.shape, out_sharding=x.sharding)


def kept_if(keep: jax.Array, x: jax.Array) -> jax.Array:
    """`x` where the () bool `keep` is True, else zeros."""
    return lax.select(keep, x, zeros_like(x))


def _are_alike(x: Any, y: Any) -> bool:
    if not (isinstance(x, jax.Array) and isinstance(y, jax.Array)):
        return False
    return x.shape == y.shape and x.dtype == y.dtype


# A parameter transform reads `y = params + updates`, decides which values the parameters shall
# have, and returns the update that lands there. Half-precision leaves get float32 updates:
# `params + update` is then rounded once, by `optax.apply_updates`, onto the wanted value.


def _wide(x: jax.Array) -> jax.Array:
    """`x` in at least float32."""
    return cast(x, at_least_float32(x.dtype))


@jax.jit
def landing(params: PyTree, updates: PyTree) -> PyTree:
    """`params + updates` leaf by leaf, in at least float32 and not rounded to the leaf's dtype."""
    return jax.tree.map(lambda p, u: added(_wide(p), _wide(u)), params, updates)


def widen_updates(updates: PyTree) -> PyTree:
    """`updates` with half-precision leaves as float32; others unchanged."""
    return jax.tree.map(_wide, updates)


@jax.jit
def updates_to(params: PyTree, target: PyTree) -> PyTree:
    """The updates that land on `target`: `target - params` in at least float32.

    `params + (target - params)` is `target` up to 1 ulp of the larger operand in float32; leaves
    in half precision land exactly where `params` is not over 2**12 times `target`.
    """
    return jax.tree.map(lambda p, t: subtracted(_wide(t), _wide(p)), params, target)


def apply_exactly(params: PyTree, updates: PyTree) -> PyTree:
    """`params + updates` as the leaves' dtypes hold it, where large values may overflow.

    `optax.apply_updates` with explicit promotion, so strict dtype promotion holds too.
    """
    return jax.tree.map(lambda p, y: cast(y, p.dtype), params, landing(params, updates))
