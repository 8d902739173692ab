"""Updates that land on given parameters.

A parameter transform reads `y = params + updates`, decides which values the parameters shall
have, and returns the update that lands there. Half-precision leaves get float32 updates:
`params + update` is then rounded once, by `optax.apply_updates`, onto the wanted value.
"""

import jax

from .._typing import PyTree
from ._leaves import at_least_float32
from ._primitives import added, cast, subtracted


def _wide(x: jax.Array) -> jax.Array:
    """`x` in at least float32."""
    return cast(x, at_least_float32(x.dtype))


def landing(params: PyTree, updates: PyTree) -> PyTree:
    """`params + updates` leaf by leaf, in at least float32 and not rounded to the leaf's dtype."""
    return jax.tree.map(lambda p, u: added(_wide(p), _wide(u)), params, updates)


def widen_updates(updates: PyTree) -> PyTree:
    """`updates` with half-precision leaves as float32; others unchanged."""
    return jax.tree.map(_wide, updates)


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
