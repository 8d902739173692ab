"""Computations that give the same bits in whatever program they stand."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .._support.types import PyTree
from ..mesh import match_varying


def isolated(fn: Callable[..., PyTree], known: jax.Array, *operands: PyTree) -> PyTree:
    """`fn(*operands)`, on CPU compiled by itself.

    Compilers join operations with those before and behind them, and where they multiply and add in
    one instruction is then another place, and the last bit another. What stands in a conditional is
    not joined with anything outside. A barrier is forgotten too soon (jax 0.10); and on devices
    where work and exchanges overlap a conditional would keep them apart, so there is none.

    Args:
      fn: function of the operands.
      known: some array, whatever it holds.
      *operands: of `fn`.

    Communication: that of `fn`.
    """
    if jax.default_backend() != "cpu":
        return fn(*operands)
    shapes = jax.eval_shape(fn, *operands)

    def never(*operands: PyTree) -> PyTree:
        del operands
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return match_varying(zeros, shapes)

    return lax.cond(unseen_zero(known) == 0, fn, never, *operands)


def unseen_zero(x: jax.Array) -> jax.Array:
    """() int32: 0, computed from the bits of `x` in a way that no compiler sees through.

    Communication: none.
    """
    if not x.size:
        return jnp.zeros([], jnp.int32)
    bits = 8 * x.dtype.itemsize
    words = lax.bitcast_convert_type(x.reshape(-1)[-1], jnp.dtype(f"uint{bits}"))
    high = lax.shift_right_logical(words, jnp.full_like(words, bits - 1))
    return lax.shift_right_logical(high, jnp.ones_like(high)).astype(jnp.int32)
