"""64 bits that stand for the bits of an array."""

import math

import jax
import jax.numpy as jnp
from jax import lax

FINGERPRINT_SEEDS = (0x9E3779B9, 0x7F4A7C15)


def bit_words(x: jax.Array) -> jax.Array:
    """The bits of `x` as uint32, of its shape or with trailing axes; any dtype."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x).astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([bit_words(x.real), bit_words(x.imag)], -1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    kind = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    bits = kind(x.dtype).bits
    if bits < 8:  # float32 holds all values of these
        return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    words = {8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
    return lax.bitcast_convert_type(x, words).astype(jnp.uint32)


def fingerprint(x: jax.Array) -> jax.Array:
    """(2,) uint32; equal for equal bits.

    The sum over all words of a hash of word and position. For one position the hash is one-to-one,
    so arrays that differ in one word always differ in both sums; for others the chance that both
    agree is about 2**-64.

    Communication: none; of an array sharded over automatic axes, an all-reduce of 8 bytes there.
    """
    words = bit_words(x)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        place += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride)
    sums = [jnp.sum(_hash(words ^ _hash(place + jnp.uint32(seed)))) for seed in FINGERPRINT_SEEDS]
    return jnp.stack(sums).astype(jnp.uint32)


def _hash(x: jax.Array) -> jax.Array:
    """A one-to-one function of uint32 (the last steps of MurmurHash3)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
